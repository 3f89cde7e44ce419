"""CuTe DSL on a GPU: every form of launch, in a capture and in eager mode on a side stream."""

import ctypes
import gc
import threading
import weakref

import cuda.bindings.driver as cuda
import cute_kernels as kernels
import cutlass.cute as cute
import pytest
import torch
import tvm_ffi
from cutlass.base_dsl.dsl import BaseDSL
from cutlass.cute.runtime import from_dlpack, load_module, make_fake_stream
from harness import DELAY, RIGHT, N, captured, eager_rounds, fresh_stream, is_missing

import streamshim


class Protocol:
    def __init__(self, handle):
        self.handle = handle

    def __cuda_stream__(self):
        return (0, self.handle)


class Subclass(cuda.CUstream):
    pass


def current():
    return torch.cuda.current_stream().cuda_stream


def tvm(t):
    return tvm_ffi.from_dlpack(t)


def cute_ffi(t):
    return from_dlpack(t, enable_tvm_ffi=True).mark_layout_dynamic()


def cute_plain(t):
    return from_dlpack(t).mark_layout_dynamic()


def no_stream(options):
    def make():
        return kernels.compile_fake(kernels.no_stream, options=options)

    return make


def given(value, options=kernels.FFI, function=kernels.with_stream, compile_with=make_fake_stream):
    """A kernel with a stream parameter, called with what ``value()`` returns."""

    def make():
        compiled = kernels.compile_fake(function, compile_with(), options=options)
        return lambda x, out: compiled(x, out, value())

    return make


def converted(convert, function=kernels.with_stream):
    """A TVM-FFI kernel on its environment stream, called with converted tensors."""

    def make():
        streams = (kernels.env_stream(),) if function is kernels.with_stream else ()
        compiled = kernels.compile_fake(function, *streams)
        return lambda x, out: compiled(convert(x), convert(out))

    return make


def direct(function, *streams):
    return lambda: lambda x, out: function(cute_plain(x), cute_plain(out), *(s() for s in streams))


def bracket():
    return cute.compile[cute.EnableTVMFFI](kernels.no_stream, kernels.fake(), kernels.fake())


def real_tensor():
    example = from_dlpack(torch.zeros(N, device="cuda"))
    compiled = cute.compile(kernels.no_stream, example, example)
    return lambda x, out: compiled(from_dlpack(x), from_dlpack(out))


def omitted(options):
    return lambda: kernels.compile_fake(kernels.default_none, options=options)


def by_keyword():
    compiled = kernels.compile_fake(kernels.keyword_only, stream=make_fake_stream())
    return lambda x, out: compiled(x, out, stream=None)


def method():
    compiled = kernels.compile_fake(kernels.Layer(), make_fake_stream())
    return lambda x, out: compiled(x, out, None)


def first():
    compiled = cute.compile(
        kernels.stream_first, make_fake_stream(), kernels.fake(), kernels.fake(), options=kernels.FFI
    )
    return lambda x, out: compiled(0, x, out)


def named_tuple():
    params = kernels.NamedParams(kernels.fake(), make_fake_stream())
    compiled = cute.compile(kernels.in_named_tuple, kernels.fake(), params, options=kernels.FFI)
    return lambda x, out: compiled(x, kernels.NamedParams(out, cuda.CUstream(0)))


def data_class():
    params = kernels.DataParams(kernels.fake(), make_fake_stream())
    compiled = cute.compile(kernels.in_dataclass, kernels.fake(), params, options=kernels.FFI)
    return lambda x, out: compiled(x, kernels.DataParams(out, cuda.CUstream(0)))


def executor():
    compiled = kernels.compile_fake(kernels.with_stream, make_fake_stream(), options="").to(None)
    return lambda x, out: compiled(x, out, cuda.CUstream(0))


def two_steps():
    compiled = kernels.compile_fake(kernels.with_stream, make_fake_stream(), options="")

    def call(x, out):
        exe_args, keep = compiled.generate_execution_args(x, out, cuda.CUstream(0))
        compiled.to(None).run_compiled_program(exe_args)
        del keep

    return call


#: Wrong without the shim, in every row of the measured table: the kernel runs at capture and is not in the graph.
BROKEN = {
    "no stream, TVM-FFI": no_stream(kernels.FFI),
    "no stream, plain": no_stream(""),
    "no stream, plain, real tensors": real_tensor,
    "no stream, cute.compile[...]": bracket,
    "no stream, called directly": direct(kernels.no_stream),
    "CUstream(0), TVM-FFI": given(lambda: cuda.CUstream(0)),
    "CUstream(0), plain": given(lambda: cuda.CUstream(0), ""),
    "None, TVM-FFI": given(lambda: None),
    "int 0, TVM-FFI": given(lambda: 0),
    "legacy handle, TVM-FFI": given(lambda: 1),
    "c_void_p(0), TVM-FFI": given(lambda: ctypes.c_void_p(0)),
    "environment stream, tvm_ffi tensors": converted(tvm),
    "environment stream, cute tensors": converted(cute_ffi),
    "no stream, tvm_ffi tensors": converted(tvm, kernels.no_stream),
    "stream first": first,
    "unannotated, in a method": method,
    "keyword-only": by_keyword,
    "in a NamedTuple": named_tuple,
    "in a dataclass": data_class,
    "executor from to()": executor,
    "generated arguments": two_steps,
}

#: Refused, misread or a crash without the shim.
UNUSABLE = {
    "None, plain": given(lambda: None, ""),
    "int 0, plain": given(lambda: 0, ""),
    "fake stream, TVM-FFI": given(make_fake_stream),
    "fake stream, plain": given(make_fake_stream, ""),
    "torch stream, plain": given(torch.cuda.current_stream, ""),
    "int handle, plain": given(current, ""),
    "__cuda_stream__, plain": given(lambda: Protocol(current()), ""),
    "CUstream subclass, plain": given(lambda: Subclass(current()), ""),
    "omitted default, TVM-FFI": omitted(kernels.FFI),
    "omitted default, plain": omitted(""),
    "None, called directly": direct(kernels.with_stream, lambda: None),
    "omitted default, called directly": direct(kernels.default_none),
    "torch stream, called directly": direct(kernels.with_stream, torch.cuda.current_stream),
}

#: Right with and without the shim: the shim must not spoil them.
SOUND = {
    "current stream, TVM-FFI": given(lambda: cuda.CUstream(current())),
    "current stream, plain": given(lambda: cuda.CUstream(current()), ""),
    "current torch stream, TVM-FFI": given(torch.cuda.current_stream),
    "current int handle, TVM-FFI": given(current),
    "environment stream, torch tensors": converted(lambda t: t),
    "current stream, called directly": direct(kernels.with_stream, lambda: cuda.CUstream(current())),
}


@pytest.mark.parametrize("make", BROKEN.values(), ids=BROKEN)
def test_without_the_shim_the_kernel_is_missing_from_the_graph(make):
    assert is_missing(captured(make()))


@pytest.mark.parametrize("make", (BROKEN | UNUSABLE | SOUND).values(), ids=BROKEN | UNUSABLE | SOUND)
def test_with_the_shim_the_kernel_is_in_the_graph(shim, make):
    assert captured(make()) == RIGHT


@pytest.mark.parametrize("make", (BROKEN | UNUSABLE | SOUND).values(), ids=BROKEN | UNUSABLE | SOUND)
def test_eager_on_a_side_stream_waits_for_its_input(shim, make):
    assert eager_rounds(make(), rounds=20) == 20


@pytest.mark.parametrize("name", ["no stream, TVM-FFI", "no stream, plain", "None, TVM-FFI", "None, plain"])
def test_b10_two_hundred_of_two_hundred_rounds_are_right(shim, name):
    before = (current(), torch.cuda.current_device())
    assert eager_rounds((BROKEN | UNUSABLE)[name]()) == 200
    assert (current(), torch.cuda.current_device()) == before


def test_b10_without_the_shim_rounds_are_wrong():
    assert eager_rounds(no_stream(kernels.FFI)(), rounds=20) < 20


def test_the_first_launch_may_be_inside_the_capture(shim):
    for options in (kernels.FFI, ""):
        assert captured(kernels.compile_fake(kernels.no_stream, options=options), warm_up=False) == RIGHT


@pytest.mark.parametrize("options", [kernels.FFI, ""], ids=["ffi", "plain"])
def test_a_stream_forwarded_in_part_carries_both_launches(shim, options):
    compiled = kernels.compile_fake(kernels.forwards_in_part, make_fake_stream(), options=options, tensors=3)
    middle = torch.zeros(N, device="cuda")

    def call(x, out):
        middle.fill_(float("nan"))
        compiled(x, middle, out, cuda.CUstream(0))

    assert captured(call) == (-1.0, 43.0, 9.0)
    assert eager_rounds(call, rounds=20, add=2.0) == 20


def test_b01_a_torch_operator_and_a_launch_without_a_stream_in_one_graph(shim):
    compiled = kernels.compile_fake(kernels.no_stream)
    doubled = torch.zeros(N, device="cuda")

    def call(x, out):
        torch.mul(x, 2.0, out=doubled)
        compiled(doubled, out)

    assert captured(call) == (-1.0, 83.0, 15.0)


@pytest.mark.parametrize("options", [kernels.FFI, ""], ids=["ffi", "plain"])
@pytest.mark.parametrize("mode", ["bind", "strict"])
def test_b02_a_stream_cached_in_the_warm_up(options, mode):
    kept = []

    def launch(x, out):
        if not kept:
            kept.append(cuda.CUstream(current()))
        compiled(x, out, kept[0])

    with streamshim.install(mode):
        compiled = kernels.compile_fake(kernels.with_stream, make_fake_stream(), options=options)
        side = fresh_stream()
        with torch.cuda.stream(side):
            launch(torch.zeros(N, device="cuda"), torch.zeros(N, device="cuda"))
        if mode == "bind":
            with pytest.warns(streamshim.RescuedLaunchWarning) as caught:
                assert captured(launch, warm_up=False) == RIGHT
            assert hex(side.cuda_stream) in str(caught[0].message)
            assert caught[0].filename.endswith("test_cute.py")
        else:
            with pytest.raises(streamshim.WrongStreamError, match=hex(side.cuda_stream)) as refused:
                captured(launch, warm_up=False)
            assert refused.value.report.site.file.endswith("test_cute.py")
        assert captured(kernels.compile_fake(kernels.no_stream)) == RIGHT


@pytest.mark.parametrize("mode", ["bind", "strict"])
def test_generated_arguments_kept_from_the_warm_up_follow_torch(mode):
    with streamshim.install(mode):
        compiled = kernels.compile_fake(kernels.with_stream, make_fake_stream(), options="")
        x, out = torch.zeros(N, device="cuda"), torch.zeros(N, device="cuda")
        exe_args, _ = compiled.generate_execution_args(x, out, cuda.CUstream(0))
        run = compiled.to(None).run_compiled_program

        def call(source, target):
            x.copy_(source)
            run(exe_args)
            target.copy_(out)

        assert captured(call) == RIGHT
        assert eager_rounds(call, rounds=20) == 20


def test_b03_the_environment_stream_is_back_after_every_call(shim):
    compiled = kernels.compile_fake(kernels.with_stream, kernels.env_stream())
    x, out = tvm(torch.zeros(N, device="cuda")), tvm(torch.zeros(N, device="cuda"))
    with torch.cuda.stream(torch.cuda.Stream()):
        before = tvm_ffi.core._env_get_current_stream(2, 0)
        compiled(x, out)
        assert tvm_ffi.core._env_get_current_stream(2, 0) == before
        with pytest.raises(Exception, match=r"(?i)mismatch|expected|type"):
            compiled(x, 7)
        assert tvm_ffi.core._env_get_current_stream(2, 0) == before


def test_a_users_raw_stream_block_counts_as_a_given_stream(shim):
    compiled = kernels.compile_fake(kernels.no_stream)
    side = fresh_stream()
    with tvm_ffi.use_raw_stream(tvm_ffi.device("cuda:0"), side.cuda_stream):
        with pytest.warns(streamshim.RescuedLaunchWarning, match="environment stream"):
            assert captured(lambda x, out: compiled(tvm(x), tvm(out)), warm_up=False) == RIGHT


@pytest.mark.parametrize("options", [kernels.FFI, ""], ids=["ffi", "plain"])
@pytest.mark.parametrize("function", ["no_stream", "with_stream"])
def test_an_exported_kernel_follows_torch_after_reloading(shim, options, function, tmp_path):
    streams = (make_fake_stream(),) if function == "with_stream" else ()
    compiled = kernels.compile_fake(getattr(kernels, function), *streams, options=options)
    path = tmp_path / "exported.o"
    if options:
        compiled.export_to_c(str(path), function_name="exported")
    else:
        compiled.export_to_c(str(tmp_path), "exported", function_prefix="exported")
    loaded = load_module(str(path), enable_tvm_ffi=bool(options))["exported"]
    given_streams = (cuda.CUstream(0),) if streams else ()

    def call(x, out):
        loaded(*((x, out) if options else (cute_plain(x), cute_plain(out))), *given_streams)

    assert captured(call) == RIGHT
    assert eager_rounds(call, rounds=20) == 20


def test_many_streams_do_not_recompile(shim, monkeypatch):
    compiles = []
    original = BaseDSL.compile_and_cache
    monkeypatch.setattr(
        BaseDSL, "compile_and_cache", lambda self, *a, **k: compiles.append(1) or original(self, *a, **k)
    )
    # A length of its own, so that no other test has compiled it.
    x, out = (from_dlpack(torch.zeros(N + 1, device="cuda")) for _ in range(2))
    for _ in range(20):
        side = torch.cuda.Stream()
        with torch.cuda.stream(side):
            kernels.with_stream(x, out, cuda.CUstream(side.cuda_stream))
            kernels.with_stream(x, out, side)
            kernels.with_stream(x, out, None)
    torch.cuda.synchronize()
    assert len(compiles) == 1


def test_reduce_overhead_around_a_custom_operator(shim):
    compiled = kernels.compile_fake(kernels.no_stream)

    @torch.library.custom_op("streamshim_test::add_one", mutates_args=())
    def add_one(x: torch.Tensor) -> torch.Tensor:
        out = torch.empty_like(x)
        compiled(x, out)
        return out

    add_one.register_fake(lambda x: torch.empty_like(x))
    model = torch.compile(lambda x: add_one(x * 2) * 3, mode="reduce-overhead")
    for i in range(8):
        x = torch.full((N,), float(i), device="cuda")
        assert model(x).tolist() == [(i * 2 + 1) * 3.0] * N


def test_no_reference_to_an_argument_is_kept(shim):
    for options in (kernels.FFI, ""):
        compiled = kernels.compile_fake(kernels.with_stream, make_fake_stream(), options=options)
        x, out = torch.zeros(N, device="cuda"), torch.zeros(N, device="cuda")
        alive = [weakref.ref(x), weakref.ref(out)]
        compiled(x, out, None)
        torch.cuda.synchronize()
        del x, out
        gc.collect()
        assert [ref() for ref in alive] == [None, None]


def test_threads_launch_on_their_own_streams(shim):
    compiled = {options: kernels.compile_fake(kernels.no_stream, options=options) for options in (kernels.FFI, "")}
    wrong, barrier = [], threading.Barrier(4)

    def work(i):
        side = torch.cuda.Stream()
        with torch.cuda.stream(side):
            x, out = torch.zeros(N, device="cuda"), torch.zeros(N, device="cuda")
            barrier.wait()
            for round_ in range(30):
                for call in compiled.values():
                    out.fill_(float("nan"))
                    torch.cuda._sleep(DELAY // 20)
                    x.fill_(float(round_ * 10 + i))
                    call(x, out)
                    side.synchronize()
                    if out.tolist() != [round_ * 10 + i + 1.0] * N:
                        wrong.append((i, round_))

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_backward_on_the_autograd_thread_follows_the_forward_stream(shim):
    compiled = kernels.compile_fake(kernels.no_stream)
    side = torch.cuda.Stream()

    class AddOne(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 1.0

        @staticmethod
        def backward(ctx, gradient):
            out = torch.empty_like(gradient)
            # Not torch tensors, and the engine has set the stream in C++: nothing but the call itself can know it.
            compiled(tvm(gradient.contiguous()), tvm(out))
            return out

    x = torch.zeros(N, device="cuda", requires_grad=True)
    torch.cuda.synchronize()
    for _ in range(20):
        with torch.cuda.stream(side):
            y = AddOne.apply(x)
            gradient = torch.empty(N, device="cuda")
            torch.cuda._sleep(DELAY // 10)
            gradient.fill_(5.0)
            (result,) = torch.autograd.grad(y, x, gradient)
            side.synchronize()
            assert result.tolist() == [6.0] * N


def test_strict_refuses_and_the_capture_stays_valid():
    with streamshim.install("strict"):
        compiled = kernels.compile_fake(kernels.with_stream, make_fake_stream())
        stale = fresh_stream()

        def call(x, out):
            with pytest.raises(streamshim.WrongStreamError):
                compiled(x, out, stale)
            compiled(x, out, None)

        assert captured(call, warm_up=False) == RIGHT


def test_check_mode_tells_what_is_wrong_without_the_shim():
    with streamshim.install("check"):
        for make, wrong in ((no_stream(kernels.FFI), True), (given(lambda: None), True), (converted(tvm), True)):
            call = make()
            refused = []

            def attempt(x, out, call=call, refused=refused):
                try:
                    call(x, out)
                except streamshim.WrongStreamError as error:
                    refused.append(error)
                out.add_(0.0)

            captured(attempt)
            assert bool(refused) is wrong
            torch.cuda.synchronize()
        for name in ("environment stream, torch tensors", "current stream, TVM-FFI"):
            assert captured(SOUND[name]()) == RIGHT
