"""CuTe DSL (nvidia-cutlass-dsl): every kernel that it compiles or calls follows torch's current stream."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from types import MappingProxyType, ModuleType

from ...patching import Patch
from . import plain_calls, plans, tracing, tvm_ffi_calls


class CuteBinder:
    """The binder of CuTe DSL.

    What it patches, and why (all probed before they are applied; versions below):

    ============================================================  ====================================================
    ``CutlassBaseDSL.cuda_launch_func``                            a launch without a stream is traced as constant NULL
    ``BaseDSL._func``                                              streams given as None, int or torch stream reach the
                                                                   DSL as what it knows; marks what is being traced
    ``BaseDSL.mangle_name``                                        the stream's value leaks into the cache's key
    ``JitCompiledFunction.__init__``                               the only place that knows which argument is a stream
    ``ExecutionArgs.generate_execution_args``, ``JitExecutor.run_compiled_program``
                                                                   plain calls: NULL, stale and misread streams
    ``TVMFFIJitCompiledFunction(WithKwargs).__call__``             TVM-FFI calls with a stream argument, or without a
                                                                   torch tensor
    ============================================================  ====================================================

    It ends when the DSL takes the environment stream for launches without one, and converts stream arguments itself.
    """

    name = "cute"
    packages: Mapping[str, str] = MappingProxyType(
        {"nvidia-cutlass-dsl": ">=4.4,<4.9", "apache-tvm-ffi": ">=0.1.9,<0.2"}
    )

    def patches(self, module: ModuleType) -> list[Patch]:
        """The patches on classes of the module, and of ``cutlass.base_dsl``, which it has imported."""
        if module.__name__.endswith("tvm_ffi_provider"):
            return [
                Patch(module.TVMFFIJitCompiledFunctionWithKwargs, "__call__", tvm_ffi_calls.call_with_wrapper),
                Patch(module.TVMFFIJitCompiledFunction, "__call__", tvm_ffi_calls.call_bare),
            ]
        from cutlass.base_dsl import dsl, jit_executor
        from cutlass.cutlass_dsl import cutlass as cutlass_dsl

        return [
            Patch(cutlass_dsl.CutlassBaseDSL, "cuda_launch_func", tracing.launch_on_torch_stream, static=True),
            Patch(dsl.BaseDSL, "_func", tracing.trace_function),
            Patch(dsl.BaseDSL, "mangle_name", tracing.mangle_without_handles),
            Patch(jit_executor.JitCompiledFunction, "__init__", plans.plan_after_compile),
            Patch(jit_executor.ExecutionArgs, "generate_execution_args", plain_calls.normalise_arguments),
            Patch(jit_executor.JitExecutor, "run_compiled_program", plain_calls.run_on_torch_stream),
        ]

    def applied(self, module: ModuleType) -> None:
        """Give a plan to what was compiled before."""
        if not module.__name__.endswith("tvm_ffi_provider"):
            from cutlass.base_dsl.jit_executor import JitCompiledFunction

            plans.plan_what_exists(JitCompiledFunction)

    def removed(self) -> None:
        """Nothing but patches was put in place."""

    def notes(self) -> list[str]:
        """What a user should know."""
        if importlib.util.find_spec("tvm_ffi") is not None:
            return []
        return ["apache-tvm-ffi is not installed: kernels without a stream parameter cannot follow torch"]


binder = CuteBinder()
