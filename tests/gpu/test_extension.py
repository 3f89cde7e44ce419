"""A real C++ extension of torch's (bug reports 16 to 24): its guilty launches are found, and moved where wanted."""

import os
from pathlib import Path

import pytest
import torch
from harness import RIGHT, N, captured, is_missing
from test_watch import capture_of, escapes_of, innocent

import streamshim


@pytest.fixture(scope="module")
def extension(tmp_path_factory):
    """Compiled here; the first test that needs it takes a minute."""
    from torch.utils import cpp_extension

    major, minor = torch.cuda.get_device_capability()
    before = os.environ.get("TORCH_CUDA_ARCH_LIST")
    os.environ["TORCH_CUDA_ARCH_LIST"] = f"{major}.{minor}"
    try:
        return cpp_extension.load(
            "streamshim_test_extension",
            [str(Path(__file__).with_name("extension.cu"))],
            build_directory=str(tmp_path_factory.mktemp("extension")),
        )
    finally:
        del os.environ["TORCH_CUDA_ARCH_LIST"]
        if before is not None:
            os.environ["TORCH_CUDA_ARCH_LIST"] = before


def calls_of(extension):
    """The functions of the extension, each called at a line of its own."""

    def right(x, out):
        extension.right(x, out)

    def no_stream(x, out):
        extension.no_stream(x, out)

    def forgets_once(x, out):
        extension.forgets_once(x, out)

    def pool_stream(x, out):
        extension.pool_stream(x, out)

    def own_stream(x, out):
        extension.own_stream(x, out)

    return [right, no_stream, forgets_once, pool_stream, own_stream]


@pytest.mark.timeout(300)
def test_without_the_shim_the_kernel_is_missing_from_the_graph(extension):
    assert captured(extension.right) == RIGHT
    assert is_missing(captured(extension.no_stream))


@pytest.mark.timeout(300)
@pytest.mark.parametrize("mode", ["strict", "check"])
def test_findings_are_exactly_the_guilty_ones(extension, mode):
    calls = calls_of(extension)
    with streamshim.install(mode):
        found = escapes_of(*innocent(), *calls)
        assert [(one.site.function, one.count) for one in found] == [
            ("no_stream", 1), ("forgets_once", 1), ("pool_stream", 1), ("own_stream", 1),
        ]  # fmt: skip
        lines = {call.__name__: call.__code__.co_firstlineno + 1 for call in calls}
        for one in found:
            assert one.site.file.endswith("test_extension.py")
            assert one.site.line == lines[one.site.function]
            kernel = "prepare" if one.site.function == "forgets_once" else "add_one"
            assert kernel in one.what
            assert one.given.startswith("0x") is (one.site.function in ("pool_stream", "own_stream"))
        capture_of(*innocent(), calls[0])


@pytest.mark.timeout(300)
@pytest.mark.parametrize("mode", ["bind", "strict"])
@pytest.mark.parametrize("name", ["no_stream", "forgets_once"])
def test_what_takes_no_stream_is_moved_if_that_is_wanted(extension, mode, name):
    with streamshim.install(mode, redirect=True):
        assert captured(getattr(extension, name)) == RIGHT
        assert streamshim.status().events["moved launch"] > 0


def captured_on_a_blocking_stream(call):
    """As `captured`, on a stream that the NULL stream waits for; CUDA refuses a launch on NULL there (906)."""
    from cuda.bindings import runtime

    error, handle = runtime.cudaStreamCreate()
    assert int(error) == 0
    x, out = torch.zeros(N, device="cuda"), torch.full((N,), -1.0, device="cuda")
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.stream(torch.cuda.current_stream()):
        with torch.cuda.graph(graph, stream=torch.cuda.ExternalStream(int(handle))):
            torch.zeros(N, device="cuda")
            call(x, out)
    seen = [out.tolist()[-1]]
    for value in (41.0, 7.0):
        x.fill_(value)
        out.fill_(float("nan"))
        graph.replay()
        torch.cuda.synchronize()
        seen.append(out.tolist()[-1])
    return tuple(seen)


@pytest.mark.timeout(300)
def test_a_launch_on_null_that_ends_a_capture_is_named_and_can_be_moved(extension):
    with streamshim.install("strict"):
        with pytest.raises(streamshim.CaptureInvalidatedError, match="906") as lost:
            captured_on_a_blocking_stream(extension.no_stream)
        assert "add_one" in str(lost.value)
        assert "test_extension.py" in str(lost.value)
        torch.cuda.synchronize()
    with streamshim.install("strict", redirect=True):
        assert captured_on_a_blocking_stream(extension.no_stream) == RIGHT


@pytest.mark.timeout(300)
def test_a_wait_inside_the_extension_is_named(extension):
    with streamshim.install("strict"):
        with pytest.raises(streamshim.CaptureInvalidatedError) as lost:
            capture_of(extension.waits)
        text = " ".join(str(lost.value).split())
        assert "cuStreamSynchronize in thread MainThread, at" in text
        assert "test_watch.py" in text
        capture_of(*innocent())


@pytest.mark.timeout(300)
def test_in_bind_mode_it_is_a_warning(extension):
    with streamshim.install("bind", watch=True):
        with pytest.warns(streamshim.EscapedLaunchWarning, match="add_one"):
            capture_of(extension.no_stream)


@pytest.mark.timeout(300)
def test_without_the_watch_nothing_is_said(extension):
    """The launch is silently missing, and so it is known that it is the watch that finds it."""
    with streamshim.install("strict", watch=False):
        assert is_missing(captured(extension.no_stream))
