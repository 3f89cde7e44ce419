"""Waiting calls of CuPy, Numba, Warp, Triton and Inductor: stand-ins of the same shape, patched when imported."""

from __future__ import annotations

import importlib
import sys
from types import ModuleType, SimpleNamespace

import pytest

import streamshim
from streamshim import HostSyncError, guards
from streamshim.guards import libraries
from streamshim.guards.libraries import CALLS
from streamshim.runtime import CaptureState

STREAM, SIDE = 0x7F0010, 0x7F0020
#: cuda:0, cuda:1 and cpu, as Warp has them.
WARP_DEVICES = [
    SimpleNamespace(is_cuda=ordinal >= 0, ordinal=ordinal, stream=SimpleNamespace(cuda_stream=SIDE))
    for ordinal in (0, 1, -1)
]


def stand_in(name):
    """A module with all that the table names; each call returns its own name."""
    module = ModuleType(name)
    module.runtime = SimpleNamespace(get_device=lambda device: device if device in WARP_DEVICES else WARP_DEVICES[0])
    for call in CALLS[name]:
        function = _named(call.name, name)
        if not call.owner:
            setattr(module, call.name, function)
            continue
        owner = vars(module).setdefault(call.owner, type(call.owner, (), {"__module__": name, "ptr": SIDE}))
        setattr(owner, call.name, property(function) if call.getter else function)
        owner.handle = SIDE
    return module


def _named(name, module):
    def function(*args, **kwargs):
        return name

    function.__module__ = module
    return function


@pytest.fixture
def modules(monkeypatch, cuda, capturing):
    """All of them, imported already; torch's current stream captures in a thread_local capture."""
    made = {name: stand_in(name) for name in CALLS if not name.startswith("torch.")}
    for name, module in made.items():
        monkeypatch.setitem(sys.modules, name, module)
    made["cupy.cuda.stream"].get_current_stream = lambda: made["cupy.cuda.stream"]._BaseStream()
    capturing("thread_local")
    return made


def calls(modules):
    """Every call of the table as a function without arguments."""
    for name, module in modules.items():
        for call in CALLS[name]:
            if not call.owner:
                argument = (SIDE,) if call.target is not None else ()
                yield call, lambda m=module, c=call, a=argument: getattr(m, c.name)(*a)
            elif call.getter:
                yield call, lambda m=module, c=call: getattr(getattr(m, c.owner)(), c.name)
            else:
                yield call, lambda m=module, c=call: getattr(getattr(m, c.owner), c.name)(getattr(m, c.owner)())


def test_each_is_refused_in_a_capture_and_named(modules, cuda):
    streamshim.install()
    seen = 0
    for call, do in calls(modules):
        with pytest.raises(HostSyncError) as error:
            do()
        assert error.value.report.operation == call.operation.words
        assert error.value.report.site.file.endswith("test_libraries.py")
        seen += 1
    assert seen == sum(len(CALLS[name]) for name in modules)
    cuda.captures.clear()
    assert [do() for _, do in calls(modules)] == [call.name for call, _ in calls(modules)]


def test_in_a_relaxed_capture_what_waits_for_something_else_passes(modules, cuda, capturing):
    capturing("relaxed")
    streamshim.install()
    for call, do in calls(modules):
        if call.operation.kind.name == "DEVICE":
            with pytest.raises(HostSyncError):
                do()
        else:
            assert do() == call.name
    # The same stream captures: then it is waited for.
    modules["cupy.cuda.stream"]._BaseStream.ptr = STREAM
    modules["numba.cuda.cudadrv.driver"].Stream.handle = STREAM
    for owner in (modules["cupy.cuda.stream"]._BaseStream, modules["numba.cuda.cudadrv.driver"].Stream):
        with pytest.raises(HostSyncError):
            owner().synchronize()


def test_warp_waits_for_the_device_that_it_is_told(modules, cuda):
    streamshim.install()
    cuda.current = SIDE  # on every device
    warp = modules["warp._src.context"]
    other, host = WARP_DEVICES[1:]
    assert warp.synchronize_device(other) == "synchronize_device"
    assert warp.synchronize_device(host) == "synchronize_device"
    assert warp.synchronize_stream(host) == "synchronize_stream"
    with pytest.raises(HostSyncError):
        warp.synchronize_device()


def test_warp_waits_for_the_stream_of_a_device(modules, capturing, monkeypatch):
    capturing("relaxed")
    streamshim.install()
    warp = modules["warp._src.context"]
    assert warp.synchronize_stream(WARP_DEVICES[0]) == "synchronize_stream"
    monkeypatch.setattr(WARP_DEVICES[0].stream, "cuda_stream", STREAM)
    for argument in ((), (WARP_DEVICES[0],), (SimpleNamespace(cuda_stream=STREAM),)):
        with pytest.raises(HostSyncError):
            warp.synchronize_stream(*argument)


def test_cupy_waits_only_for_a_copy_that_blocks(modules, capturing):
    streamshim.install()
    array = modules["cupy"].ndarray()
    assert array.get(blocking=False) == "get"
    assert array.get(None, "C", None, False) == "get"
    capturing("relaxed")
    modules["cupy.cuda.stream"]._BaseStream.ptr = STREAM
    assert array.get(stream=SimpleNamespace(ptr=SIDE)) == "get"
    with pytest.raises(HostSyncError, match="of a CuPy array"):
        array.get()


def test_the_line_is_the_users_where_the_library_waits_for_them(modules):
    """``numba.cuda.synchronize()`` is a function of ``numba.cuda.api`` that calls the context's method."""
    streamshim.install()
    api = {"__name__": "numba.cuda.api", "context": modules["numba.cuda.cudadrv.driver"].Context()}
    exec(compile("def synchronize():\n    return context.synchronize()", "<api.py>", "exec"), api)
    with pytest.raises(HostSyncError) as error:
        api["synchronize"]()
    assert error.value.report.site.file.endswith("test_libraries.py")


def test_everything_is_put_back(modules):
    before = {
        name: {c: dict(vars(getattr(m, c.owner) if c.owner else m)) for c in CALLS[name]} for name, m in modules.items()
    }
    streamshim.install()
    streamshim.uninstall()
    after = {
        name: {c: dict(vars(getattr(m, c.owner) if c.owner else m)) for c in CALLS[name]} for name, m in modules.items()
    }
    assert before == after


def test_a_function_that_was_copied_by_name_is_found(modules, monkeypatch, cuda):
    package = ModuleType("warp")
    package.synchronize = original = modules["warp._src.context"].synchronize
    monkeypatch.setitem(sys.modules, "warp", package)
    streamshim.install()
    with pytest.raises(HostSyncError, match=r"warp\.synchronize\(\)"):
        package.synchronize()
    streamshim.uninstall()
    assert package.synchronize is original


def test_what_a_version_does_not_have_is_left_out(monkeypatch, cuda):
    module = stand_in("cupy.cuda.stream")
    del module.Event.done
    monkeypatch.setitem(sys.modules, "cupy.cuda.stream", module)
    streamshim.install("strict")
    assert streamshim.status().guards_off == ""
    assert not hasattr(module.Event, "done")


def test_a_version_of_another_shape_is_told_in_strict_mode(monkeypatch, cuda):
    module = stand_in("cupy.cuda.stream")
    module.Event.done = lambda self: True
    monkeypatch.setitem(sys.modules, "cupy.cuda.stream", module)
    with pytest.raises(streamshim.BinderError) as error:
        streamshim.install("strict")
    text = str(error.value)
    assert text.startswith("Calls that captures are guarded by could not be patched")
    assert "cupy.cuda.stream.Event.done is no property" in text
    assert "launches" not in text
    assert "skip=" not in text
    streamshim.install("bind")
    assert module.Event().done() is True


def test_a_module_that_only_names_another_ones_functions_is_left_alone(monkeypatch, cuda):
    """``warp.context`` of newer versions holds what ``warp._src.context`` defines."""
    home = stand_in("warp._src.context")
    module = ModuleType("warp.context")
    module.synchronize = home.synchronize
    assert libraries.patches(module) == []


def test_numba_of_old_keeps_its_handles_in_ctypes_objects():
    import ctypes

    assert libraries._numba_stream(SimpleNamespace(handle=ctypes.c_void_p(STREAM))) == STREAM
    assert libraries._numba_stream(SimpleNamespace(handle=ctypes.c_void_p(0))) == 0
    assert libraries._numba_stream(SimpleNamespace(handle=STREAM)) == STREAM


def test_the_modules_that_are_waited_for_are_those_with_calls():
    """The names are apart from the calls, which are loaded with the first of these libraries."""
    assert tuple(CALLS) == guards.LIBRARIES


@pytest.mark.parametrize("name", ["triton.runtime.autotuner", "torch._inductor.runtime.triton_heuristics"])
def test_the_real_autotuners_have_these_methods(name):
    module = pytest.importorskip(name, reason=f"{name} is not here", exc_type=ImportError)
    assert [patch.probe() for patch in libraries.patches(module)] == [""]


@pytest.mark.parametrize("name", ["cupy", "numba.cuda.cudadrv.driver", "warp"])
def test_the_real_libraries_have_these_calls(name):
    pytest.importorskip(name, reason=f"{name} is not installed", exc_type=ImportError)
    top = name.partition(".")[0]
    for module in [m for m in CALLS if m.partition(".")[0].startswith(top) and m in sys.modules]:
        patches = libraries.patches(importlib.import_module(module))
        assert [patch.probe() for patch in patches] == [""] * len(patches)


def test_autotuning_is_told_beforehand(cuda, capturing):
    capturing("relaxed")
    tuner = stand_in("triton.runtime.autotuner").Autotuner
    make = libraries._maker(CALLS["triton.runtime.autotuner"][0])
    bench = make(tuner._bench)
    with pytest.raises(HostSyncError, match="Run it once before the capture"):
        bench(tuner())
    cuda.captures = {STREAM: CaptureState()}
    cuda.current = 0
    assert bench(tuner()) == "_bench"
