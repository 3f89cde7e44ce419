"""What streamshim adds to a call, counted in bytecodes and Python calls: the same on every machine, however busy.

Times are for ``make bench``. Here a limit on bytecodes is what CPython 3.11 needs and about a third more: from 3.10 to
3.13 the same code differs by a tenth, and a change that goes the long way (another layer, arguments packed once more)
is a Python call more and dozens of bytecodes. Calls have no margin.
"""

from __future__ import annotations

import pytest

pytest.importorskip("cutlass", reason="nvidia-cutlass-dsl is not installed")
pytest.importorskip("tvm_ffi", reason="apache-tvm-ffi is not installed")

import torch
from bytecodes import count, warm_count

import streamshim
from benchmarks import launches
from benchmarks.machine import Machine
from benchmarks.measuring import Variant, installed
from streamshim import gate, runtime

#: (form, variant): Python calls and bytecodes that may be added to the variant of the same form without streamshim.
LIMITS = {
    ("CuTe TVM-FFI, no stream", "shim"): (0, 20),
    ("CuTe TVM-FFI, no stream", "shim, environment stream"): (0, 20),
    ("CuTe TVM-FFI, stream argument", "shim"): (0, 75),
    ("CuTe TVM-FFI, stream argument", "shim, None"): (0, 100),
    ("CuTe plain, stream argument", "shim"): (4, 280),
    ("CuTe plain, stream argument", "shim, None"): (5, 300),
    ("ctypes", "shim"): (1, 50),
    ("ctypes", "shim, None"): (1, 40),
    ("ctypes", "shim, left out"): (1, 48),
    ("TVM-FFI function, torch tensors", "shim"): (0, 0),
    ("TVM-FFI function, addresses", "shim"): (0, 0),
    ("cuLaunchKernel", "shim"): (1, 85),
    ("cuLaunchKernel", "shim, 0"): (2, 115),
}


@pytest.fixture(scope="module")
def forms():
    """The forms of launch, over functions that launch nothing."""
    if torch.cuda.is_available():
        pytest.skip("the stand-ins are for machines without a GPU")
    previous = runtime._holder._runtime
    machine = Machine(gpu=False)
    yield {form.name: {v.name: v for v in form.variants} for form in launches.forms(machine)}
    streamshim.uninstall()
    streamshim.unbind(machine.bound)
    runtime.use(previous)
    gate.connect(previous)


def cost(variant: Variant) -> tuple[int, int]:
    """Of the variant's statement, once everything is warm."""
    call = eval(f"lambda: {variant.statement}", dict(variant.names))
    with installed(variant.state):
        return warm_count(call)


@pytest.mark.parametrize(("form", "variant"), LIMITS, ids=[f"{form}, {variant}" for form, variant in LIMITS])
def test_what_is_added_to_a_launch(forms, form, variant):
    if form not in forms:
        pytest.skip("the installed CuTe DSL cannot make this form")
    variants = forms[form]
    calls, codes = cost(variants[variant])
    bare_calls, bare_codes = cost(variants["bare"] if "bare" in variants else variants["native"])
    most_calls, most_codes = LIMITS[form, variant]
    assert calls - bare_calls <= most_calls
    assert codes - bare_codes <= most_codes


def test_strict_adds_nothing_outside_a_capture(forms):
    for variants in forms.values():
        assert cost(variants["strict"]) == cost(variants["shim"])


def test_the_count_sees_what_is_added():
    """So that the limits are about something."""
    assert count(lambda: None) < count(lambda: (lambda: 1 + 1)())
