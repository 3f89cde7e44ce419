"""The binder of cuda.bindings: the whole table, keywords and counts, the config, and copies in other modules."""

from __future__ import annotations

import ctypes
import importlib
import inspect
import sys
from types import ModuleType, SimpleNamespace

import pytest

pytest.importorskip("cuda.bindings", reason="cuda-bindings is not installed")

from cuda.bindings import driver
from cuda_recorders import Protocol, Recorder

import streamshim
from streamshim import WrongStreamError
from streamshim.binders import cuda_bindings, cuda_waits
from streamshim.binders.cuda_functions import BY_CONFIG, TABLES
from streamshim.runtime import CaptureState

CURRENT, STALE = 0x7F00, 0x7E00
#: All that the installed version has, and whose stream is an argument.
ALL = [
    (module, name)
    for module, table in TABLES.items()
    for name in table
    if name != BY_CONFIG and hasattr(importlib.import_module(module), name)
]
NEVER = [
    "cuEventRecord", "cuEventRecordWithFlags", "cuStreamWaitEvent", "cuStreamWaitValue32", "cuStreamWaitValue64",
    "cuStreamWriteValue32", "cuStreamWriteValue64", "cuStreamBatchMemOp", "cuStreamAttachMemAsync",
    "cuSignalExternalSemaphoresAsync", "cuWaitExternalSemaphoresAsync", "cudaEventRecord", "cudaEventRecordWithFlags",
    "cudaStreamWaitEvent", "cudaStreamAttachMemAsync", "cudaSignalExternalSemaphoresAsync",
    "cudaWaitExternalSemaphoresAsync",
]  # fmt: skip


@pytest.fixture(autouse=True)
def current(cuda):
    """torch's current stream."""
    cuda.current = CURRENT
    return cuda


@pytest.fixture
def kernel(monkeypatch) -> Recorder:
    """``cuLaunchKernel``."""
    return Recorder(monkeypatch, driver, "cuLaunchKernel")


@pytest.fixture
def kernel_ex(monkeypatch) -> Recorder:
    """``cuLaunchKernelEx``."""
    return Recorder(monkeypatch, driver, "cuLaunchKernelEx")


def install(mode: str = "bind") -> None:
    streamshim.install(mode, only=["cuda_bindings"])


def notes() -> list[str]:
    (mine,) = [b for b in streamshim.status().binders if b.name == "cuda_bindings"]
    return mine.notes


# The table


@pytest.mark.parametrize(("module", "name"), ALL, ids=lambda value: value.rpartition(".")[2])
def test_each_function_of_the_table_is_bound(module, name, monkeypatch):
    function = TABLES[module][name]
    module = importlib.import_module(module)
    recorder = Recorder(monkeypatch, module, name)
    install()
    arguments = [object() for _ in range(function.count)]
    arguments[function.place] = 0
    assert recorder(*arguments) is recorder.result
    assert int(recorder.last[function.place]) == CURRENT
    assert [a is b for a, b in zip(recorder.last, arguments, strict=True)].count(False) == 1

    names = list(inspect.signature(recorder.function).parameters)
    recorder(**dict(zip(names, arguments, strict=True)))
    args, kwargs = recorder.calls[-1]
    arrived = {**dict(zip(names, args, strict=False)), **kwargs}
    assert list(arrived) == names
    assert int(arrived[function.argument]) == CURRENT


@pytest.mark.parametrize("module", TABLES)
def test_the_table_is_what_the_installed_version_says(module):
    for name, function in TABLES[module].items():
        original = getattr(importlib.import_module(module), name, None)
        if original is not None:
            parameters = list(inspect.signature(original).parameters)
            assert (parameters[function.place], len(parameters)) == (function.argument, function.count)


def test_what_orders_streams_is_never_touched():
    modules = [importlib.import_module(module) for module in TABLES]
    before = [dict(vars(module)) for module in modules]
    install()
    for module, old in zip(modules, before, strict=True):
        changed = {name for name, value in vars(module).items() if value is not old[name]}
        assert changed == {*TABLES[module.__name__], *cuda_waits.names(module.__name__)} & set(old)
        assert not changed & set(NEVER)


def test_a_function_that_this_version_lacks_is_left_out(monkeypatch):
    monkeypatch.delattr(driver, "cuMemcpyBatchAsync")
    install("strict")
    (mine,) = [b for b in streamshim.status().binders if b.name == "cuda_bindings"]
    assert mine.state == "bound"
    assert "cuda.bindings.driver.cuMemcpyBatchAsync" not in mine.patched


def test_another_version_may_have_the_stream_elsewhere(monkeypatch):
    calls = []

    def cuMemcpyAsync(hStream, dst, src, ByteCount, flags):
        calls.append((hStream, dst, src, ByteCount, flags))

    monkeypatch.setattr(driver, "cuMemcpyAsync", cuMemcpyAsync)
    install()
    driver.cuMemcpyAsync(0, 1, 2, 3, 4)
    ((stream, *rest),) = calls
    assert (int(stream), rest) == (CURRENT, [1, 2, 3, 4])


def test_an_unknown_shape_takes_the_binder_off(monkeypatch):
    monkeypatch.setattr(driver, "cuMemcpyAsync", lambda everything: None)
    before = dict(vars(driver))
    with pytest.raises(streamshim.BinderError, match="cuMemcpyAsync has no parameter 'hStream'"):
        install()
    assert all(vars(driver)[name] is value for name, value in before.items())


def test_a_wrapper_that_tells_nothing_is_taken_by_the_table(monkeypatch):
    calls = []
    monkeypatch.setattr(driver, "cuMemcpyAsync", lambda *args: calls.append(args))
    install()
    driver.cuMemcpyAsync(1, 2, 3, 0)
    assert int(calls[0][3]) == CURRENT


# Keywords and counts


def test_the_stream_by_keyword(kernel):
    install()
    kernel("f", 1, 2, 3, 4, 5, 6, 7, hStream=0, kernelParams="params", extra="extra")
    args, kwargs = kernel.calls[-1]
    assert [*args, *kwargs.values()][:8] == ["f", 1, 2, 3, 4, 5, 6, 7]
    assert int((*args, *kwargs.values())[8]) == CURRENT
    assert [*args, *kwargs.values()][9:] == ["params", "extra"]


def test_keywords_in_any_order(kernel):
    install()
    kernel(extra="extra", hStream=Protocol(0), kernelParams="params", sharedMemBytes=7, blockDimZ=6, blockDimY=5,
           blockDimX=4, gridDimZ=3, gridDimY=2, gridDimX=1, f="f")  # fmt: skip
    names = list(inspect.signature(kernel.function).parameters)
    args, kwargs = kernel.calls[-1]
    arrived = dict(zip(names, args, strict=False)) | kwargs
    assert int(arrived.pop("hStream")) == CURRENT
    assert [arrived[n] for n in names if n != "hStream"] == ["f", 1, 2, 3, 4, 5, 6, 7, "params", "extra"]


@pytest.mark.parametrize(
    ("args", "kwargs"),
    [
        ((), {}),
        (("f",), {}),
        (("f", 1, 1, 1, 1, 1, 1, 0, 0, 0), {}),
        (("f", 1, 1, 1, 1, 1, 1, 0, 0, 0, 0, 0), {}),
        (("f", 1), {"hStream": 0}),
        (("f", 1, 1, 1, 1, 1, 1, 0), {"stream": 0, "kernelParams": 0, "extra": 0}),
        ((), {"hStream": 0, "unknown": 1}),
        (("f", 1, 1, 1, 1, 1, 1, 0, 0, 0, 0), {"unknown": 1}),
    ],
)
def test_a_wrong_count_is_left_to_the_original(kernel, args, kwargs):
    install()
    assert kernel(*args, **kwargs) is kernel.result
    assert kernel.calls == [(args, kwargs)]


def test_the_original_complains_in_its_own_words():
    with pytest.raises(TypeError) as unpatched:
        driver.cuLaunchKernel(0, 1, 1)
    install()
    with pytest.raises(TypeError) as patched:
        driver.cuLaunchKernel(0, 1, 1)
    assert str(patched.value) == str(unpatched.value)


# The config of cuLaunchKernelEx


def make_config(stream: int = 0, attributes: int = 0):
    config = driver.CUlaunchConfig()
    for value, name in enumerate(("gridDimX", "gridDimY", "gridDimZ", "blockDimX", "blockDimY", "blockDimZ"), 2):
        setattr(config, name, value)
    config.sharedMemBytes, config.hStream = 99, stream
    made = []
    for i in range(attributes):
        made.append(driver.CUlaunchAttribute())
        made[-1].id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
        made[-1].value.clusterDim.x, made[-1].value.clusterDim.y = i + 2, i + 3
    config.attrs, config.numAttrs = made, attributes
    return config


def contents(config) -> dict[str, object]:
    """All that is in a config but its stream: fields, and attributes by value, as C sees them."""
    names = {n for n in dir(config) if not n.startswith("_") and not callable(getattr(config, n))}
    raw = cuda_bindings._ConfigLayout.from_address(int(config.getPtr()))
    size = ctypes.sizeof(ctypes.c_uint64) * 9  # an id, padding, and a union of 64 bytes
    return {
        **{name: getattr(config, name) for name in sorted(names - {"hStream", "attrs"})},
        "attributes": ctypes.string_at(raw.attrs, size * raw.numAttrs) if raw.attrs else b"",
        "seen": len(config.attrs),
    }


@pytest.mark.parametrize("attributes", [0, 1, 3])
def test_a_config_is_copied_whole_and_not_changed(kernel_ex, attributes):
    config = make_config(attributes=attributes)
    before = contents(config)
    install()
    kernel_ex(config, "f", "params", "extra")
    arrived, *rest = kernel_ex.last
    assert rest == ["f", "params", "extra"]
    assert arrived is not config
    assert type(arrived) is type(config)
    assert (int(arrived.hStream), int(config.hStream)) == (CURRENT, 0)
    assert contents(arrived) == before == contents(config)


def test_a_config_that_is_a_view_of_a_struct_keeps_its_attributes(kernel_ex):
    """Python sees no attributes there, but C does."""
    config = make_config(attributes=2)
    view = driver.CUlaunchConfig(_ptr=config.getPtr())
    install()
    kernel_ex(view, "f", 0, 0)
    arrived = contents(kernel_ex.last[0])
    assert arrived["attributes"] == contents(config)["attributes"] != b""
    assert int(config.hStream) == 0


def test_a_config_that_is_reused_is_read_at_each_call(kernel_ex, current):
    config = make_config()
    install()
    handles = []
    for handle in (0x100, 0x200, 0x300):
        current.current = handle
        kernel_ex(config, "f", 0, 0)
        handles.append(int(kernel_ex.last[0].hStream))
    config.hStream, config.gridDimX = driver.CUstream(STALE), 77
    kernel_ex(config, "f", 0, 0)
    assert handles == [0x100, 0x200, 0x300]
    assert kernel_ex.last[0] is config


def test_a_config_by_keyword(kernel_ex):
    install()
    kernel_ex(config=make_config(), f="f", kernelParams=0, extra=0)
    assert int(kernel_ex.calls[-1][1]["config"].hStream) == CURRENT


@pytest.mark.parametrize("arguments", [(None, "f", 0, 0), ("no config", "f", 0, 0), (make_config(),), ()], ids=len)
def test_what_is_no_config_is_left_to_the_original(kernel_ex, arguments):
    install()
    kernel_ex(*arguments)
    assert kernel_ex.last == arguments


def test_the_layout_of_a_config_is_looked_at_first(monkeypatch):
    cuda_bindings.check_layout(driver.CUlaunchConfig)
    wider = type("CUlaunchConfig", (driver.CUlaunchConfig,), {"priority": 0})
    with pytest.raises(LookupError, match=r"has the fields .*priority"):
        cuda_bindings.check_layout(wider)
    monkeypatch.setattr(driver, "CUlaunchConfig", wider)
    with pytest.raises(streamshim.BinderError, match="CUlaunchConfig has the fields"):
        install()


# What is refused


@pytest.mark.parametrize("attribute", ["cuFuncGetName", "cuKernelGetName"])
def test_a_refusal_names_the_kernel(kernel, kernel_ex, current, monkeypatch, attribute):
    kind = {"cuFuncGetName": driver.CUfunction, "cuKernelGetName": driver.CUkernel}[attribute]
    asked = []

    def answer(function):
        asked.append(function)
        return (driver.CUresult.CUDA_SUCCESS, b"add_one")

    monkeypatch.setattr(driver, attribute, answer)
    current.captures[CURRENT] = CaptureState(5)
    install("strict")
    kernel(kind(1), 1, 1, 1, 1, 1, 1, 0, 0, 0, 0)
    assert asked == []
    for call in (
        lambda: kernel(kind(1), 1, 1, 1, 1, 1, 1, 0, STALE, 0, 0),
        lambda: kernel(f=kind(1), gridDimX=1, gridDimY=1, gridDimZ=1, blockDimX=1, blockDimY=1, blockDimZ=1,
                       sharedMemBytes=0, hStream=STALE, kernelParams=0, extra=0),
        lambda: kernel_ex(make_config(STALE), kind(1), 0, 0),
    ):  # fmt: skip
        with pytest.raises(WrongStreamError, match=r"cuda\.bindings\.driver\.cuLaunchKernel.*, kernel 'add_one'"):
            call()
    assert len(kernel.calls) == 1
    assert kernel_ex.calls == []


def test_a_kernel_without_a_name_is_refused_all_the_same(kernel, current):
    """There is no driver here, so asking for the name fails."""
    current.captures[CURRENT] = CaptureState(5)
    install("strict")
    with pytest.raises(WrongStreamError) as caught:
        kernel(driver.CUfunction(1), 1, 1, 1, 1, 1, 1, 0, STALE, 0, 0)
    assert caught.value.report.launch == "cuda.bindings.driver.cuLaunchKernel, argument 'hStream'"
    assert caught.value.__suppress_context__


# Copies in other modules


@pytest.fixture
def user(monkeypatch) -> ModuleType:
    """A module of the user's, loaded and empty."""
    module = ModuleType("streamshim_unit_user")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    return module


def test_copies_made_before_install_are_replaced_and_put_back(kernel, kernel_ex, user):
    user.launch, user.again, user.ex = kernel.function, kernel.function, kernel_ex.function
    for _ in range(2):
        install()
        assert user.launch is user.again is driver.cuLaunchKernel
        user.launch("f", 1, 1, 1, 1, 1, 1, 0, 0, 0, 0)
        assert int(kernel.last[8]) == CURRENT
        (note,) = notes()
        assert note.startswith("cuda.bindings was imported before install(): 3 copies of its functions")
        assert note in str(streamshim.status())
        streamshim.uninstall()
        assert user.launch is user.again is kernel.function
        assert user.ex is kernel_ex.function
    assert notes() == []


def test_copies_made_after_install_are_put_back_too(kernel, user):
    install()
    user.launch = driver.cuLaunchKernel
    streamshim.uninstall()
    assert user.launch is kernel.function


def test_copies_that_cannot_be_found_stay_what_they_were(kernel, user):
    class Kernels:
        launch = staticmethod(kernel.function)

    user.Kernels, user.table, user.closure = Kernels, {"launch": kernel.function}, lambda: kernel.function
    install()
    assert Kernels.launch is user.table["launch"] is user.closure() is kernel.function
    assert "closures, class attributes and containers" in notes()[0]


def test_the_module_of_a_wrapper_below_goes_on_calling_its_own(kernel, user, monkeypatch):
    user.driver, user.original = driver, kernel.function
    exec("def wrapper(*args):\n    return original(*args)\n\ndriver.cuLaunchKernel = wrapper\n", vars(user))
    theirs = user.wrapper
    try:
        install()
        assert (user.wrapper, user.original) == (theirs, kernel.function)
        driver.cuLaunchKernel("f", 1, 1, 1, 1, 1, 1, 0, 0, 0, 0)
        assert int(kernel.last[8]) == CURRENT
        streamshim.uninstall()
        assert driver.cuLaunchKernel is theirs
    finally:
        driver.cuLaunchKernel = kernel.function


def test_strange_entries_of_sys_modules_do_no_harm(kernel, monkeypatch):
    class Lazy(ModuleType):
        def __getattribute__(self, name):
            raise AssertionError("a lazy module was loaded")

    monkeypatch.setitem(sys.modules, "streamshim_unit_none", None)
    monkeypatch.setitem(sys.modules, "streamshim_unit_object", SimpleNamespace(launch=kernel.function))
    monkeypatch.setitem(sys.modules, "streamshim_unit_lazy", Lazy("streamshim_unit_lazy"))
    install()
    streamshim.uninstall()


def test_installed_before_the_import_nobody_holds_a_copy(run_python):
    code = """
import streamshim
streamshim.install(only=["cuda_bindings"])
from cuda.bindings.driver import cuLaunchKernel
from cuda.bindings import driver
assert cuLaunchKernel is driver.cuLaunchKernel
assert cuLaunchKernel.__globals__["__name__"] == "streamshim.binders.cuda_bindings"
(mine,) = [b for b in streamshim.status().binders if b.name == "cuda_bindings"]
print(mine.state, mine.notes)
streamshim.uninstall()
assert cuLaunchKernel is driver.cuLaunchKernel
assert "cyfunction" in repr(cuLaunchKernel)
"""
    assert run_python(code) == "bound []\n"
