"""TVM-FFI's environment stream under the shim: a real function reports it, against the simulator's streams."""

import threading

import pytest
import torch
import tvm_ffi
from tvm_ffi.core import _env_get_current_stream, _env_set_current_stream

import streamshim
from streamshim.runtime.simulated import Simulator

CUDA = 2


@tvm_ffi.register_global_func("streamshim_test.environment_streams", override=True)
def _report(*args):
    return tuple(_env_get_current_stream(CUDA, device) for device in range(2))


#: Fetched before any `install`.
FETCHED = tvm_ffi.get_global_func("streamshim_test.environment_streams")


def streams(*args):
    """The environment streams of both devices, as a TVM-FFI function called with these arguments sees them."""
    return tuple(FETCHED(*args))


class TorchSwitch:
    """Stands for what torch without CUDA lacks: the C function that switches the stream, here the simulator's."""

    def __init__(self, sim):
        self.sim = sim
        self.by_id = {}

    def __call__(self, stream_id, device_index, device_type):
        self.sim._thread.current[device_index] = self.by_id.get(stream_id, self.sim._legacy[device_index])

    def switch(self, stream):
        """What ``torch.cuda.set_stream(stream)`` does; None is the default stream of device 0."""
        self.by_id[id(stream)] = stream if stream is not None else self.sim._legacy[0]
        device = stream.device if stream is not None else 0
        torch._C._cuda_setStream(stream_id=id(stream), device_index=device, device_type=1)


@pytest.fixture
def sim():
    from streamshim import gate, runtime

    simulated = Simulator(devices=2)
    previous = runtime.use(simulated)
    gate.connect(simulated)
    yield simulated
    runtime.use(previous)
    gate.connect(None)


@pytest.fixture
def torch_switch(sim, monkeypatch):
    switch = TorchSwitch(sim)
    monkeypatch.setattr(torch._C, "_cuda_setStream", switch, raising=False)
    yield switch
    streamshim.uninstall()


@pytest.fixture
def shim(torch_switch):
    with streamshim.install("bind") as installation:
        yield installation


def tensor():
    return torch.zeros(4)


ARGUMENTS = {
    "nothing": (),
    "ints and a pointer": (1, 2**40),
    "a string and None": ("x", None),
    "a CPU tensor": (tensor(),),
    "a tvm_ffi tensor": (tvm_ffi.from_dlpack(tensor()),),
    "a list of tensors": ([tensor(), tensor()],),
    "a DLPack producer": (type("Producer", (), {
        "__dlpack__": lambda self, **kw: tensor().__dlpack__(), "__dlpack_device__": lambda self: (1, 0)})(),),
}  # fmt: skip


@pytest.mark.parametrize("args", ARGUMENTS.values(), ids=ARGUMENTS)
def test_a_function_fetched_before_install_sees_torchs_stream(shim, sim, torch_switch, args):
    side, other = sim.new_stream(0), sim.new_stream(1)
    assert streams(*args) == (0, 0)
    torch_switch.switch(side)
    assert streams(*args) == (side.cuda_stream, 0)
    torch_switch.switch(other)
    assert streams(*args) == (side.cuda_stream, other.cuda_stream)
    torch_switch.switch(None)
    assert streams(*args) == (0, other.cuda_stream)


def test_a_stream_that_is_current_at_install_is_seen(sim, torch_switch, monkeypatch):
    side = sim.new_stream(0)
    torch_switch.switch(side)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    assert streams() == (0, 0)
    with streamshim.install("bind"):
        assert streams() == (side.cuda_stream, 0)
    assert streams() == (0, 0), "what was written is taken back"


def test_functions_keep_their_identity(shim, sim, torch_switch):
    again = tvm_ffi.get_global_func("streamshim_test.environment_streams")
    assert isinstance(again, tvm_ffi.Function)
    assert type(again) is type(FETCHED)
    call = tvm_ffi.convert(lambda function: tuple(function()))
    torch_switch.switch(side := sim.new_stream(0))
    assert tuple(call(again)) == (side.cuda_stream, 0)


def test_the_stream_is_the_same_after_a_call_that_raises(shim, sim, torch_switch):
    def fails():
        raise KeyError("in the callback")

    torch_switch.switch(side := sim.new_stream(0))
    with pytest.raises(Exception, match="in the callback"):
        tvm_ffi.convert(fails)()
    assert streams() == (side.cuda_stream, 0)


def test_the_users_block_wins_and_torchs_stream_is_back_after_it(shim, sim, torch_switch):
    side, mine, later = sim.new_stream(0), sim.new_stream(0), sim.new_stream(0)
    torch_switch.switch(side)
    with tvm_ffi.use_raw_stream(tvm_ffi.device("cuda:0"), mine.cuda_stream):
        assert streams() == (mine.cuda_stream, 0)
        torch_switch.switch(later)
        assert streams() == (mine.cuda_stream, 0)
        with tvm_ffi.use_raw_stream(tvm_ffi.device("cuda:0"), 0x77):
            assert streams() == (0x77, 0)
        assert streams() == (mine.cuda_stream, 0)
        torch_switch.switch(other := sim.new_stream(1))
        assert streams() == (mine.cuda_stream, other.cuda_stream), "the block is one device's"
    assert streams() == (later.cuda_stream, other.cuda_stream)


def test_a_block_that_ends_by_an_exception_is_over(shim, sim, torch_switch):
    with pytest.raises(KeyError):
        with tvm_ffi.use_raw_stream(tvm_ffi.device("cuda:0"), 0x77):
            raise KeyError
    torch_switch.switch(side := sim.new_stream(0))
    assert streams() == (side.cuda_stream, 0)


def test_a_block_entered_before_install_ends_in_peace(sim, torch_switch):
    block = tvm_ffi.use_raw_stream(tvm_ffi.device("cuda:0"), 0x77)
    block.__enter__()
    with streamshim.install("bind"):
        block.__exit__(None, None, None)
        torch_switch.switch(side := sim.new_stream(0))
        assert streams() == (side.cuda_stream, 0)


def test_a_block_entered_before_uninstall_ends_in_peace(sim, torch_switch):
    block = tvm_ffi.use_raw_stream(tvm_ffi.device("cuda:0"), 0x77)
    with streamshim.install("bind"):
        block.__enter__()
    block.__exit__(None, None, None)
    assert streams() == (0, 0)
    with streamshim.install("bind"):
        torch_switch.switch(side := sim.new_stream(0))
        assert streams() == (side.cuda_stream, 0), "no block is thought to be open"


def test_threads_have_their_own(shim, sim, torch_switch):
    side = [sim.new_stream(0) for _ in range(4)]
    seen, barrier = {}, threading.Barrier(4)

    def work(i):
        torch_switch.switch(side[i])
        barrier.wait()
        seen[i] = streams()

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert seen == {i: (side[i].cuda_stream, 0) for i in range(4)}
    assert streams() == (0, 0)


def test_a_backward_on_another_thread_sees_the_stream_that_the_engine_set(shim, sim, torch_switch):
    """The engine switches in C++, which no patch sees; the simulator's switch is made behind our back here."""
    side, seen = sim.new_stream(0), []

    class Probe(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 2

        @staticmethod
        def backward(ctx, gradient):
            seen.append(streams())
            return gradient

    y = Probe.apply(torch.zeros(3, requires_grad=True))
    sim._thread.current[0] = side
    y.sum().backward()
    sim._thread.current[0] = sim._legacy[0]
    assert seen == [(side.cuda_stream, 0)]


@pytest.mark.parametrize("mode", ["check", "off"])
def test_nothing_is_written_where_nothing_is_bound(sim, torch_switch, mode):
    with streamshim.install(mode):
        torch_switch.switch(sim.new_stream(0))
        assert streams() == (0, 0)


def test_uninstall_leaves_what_the_user_has_set(sim, torch_switch):
    with streamshim.install("bind"):
        torch_switch.switch(sim.new_stream(0))
        _env_set_current_stream(CUDA, 0, 0x99)
    assert streams() == (0x99, 0)
    _env_set_current_stream(CUDA, 0, 0)


def test_the_torch_functions_are_back_after_uninstall(sim, torch_switch):
    from torch.autograd.function import BackwardCFunction

    before = BackwardCFunction.apply
    with streamshim.install("bind"):
        assert torch._C._cuda_setStream is not torch_switch
        assert BackwardCFunction.apply is not before
        (mine,) = [b for b in streamshim.status().binders if b.name == "tvm_ffi"]
        assert (mine.state, mine.reason) == ("bound", "")
        assert any(target.endswith("_cuda_setStream") for target in mine.patched)
    assert torch._C._cuda_setStream is torch_switch
    assert BackwardCFunction.apply is before
