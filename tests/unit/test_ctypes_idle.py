"""ctypes: most processes bind nothing, and load no more of the binder than looks for patterns. In fresh processes."""

from __future__ import annotations

import pytest

HEAD = """
import ctypes, sys
import streamshim
library = ctypes.CDLL(None)
def state():
    loaded = "streamshim.binders.ctypes_.registry" in sys.modules
    return "loaded" if loaded else "not loaded", "bound" if "__call__" in vars(library._FuncPtr) else "not bound"
"""


def test_nothing_is_loaded_while_nothing_is_bound(run_python):
    code = """
streamshim.install()
assert hasattr(ctypes.CDLL.__init__, "__wrapped__")
ctypes.CDLL(None)
streamshim.status()
print(*state())
streamshim.uninstall()
print(*state(), hasattr(ctypes.CDLL.__init__, "__wrapped__"))
"""
    assert run_python(HEAD + code) == "not loaded not bound\nnot loaded not bound False\n"


@pytest.mark.parametrize("first", ["install", "bind"])
def test_the_first_binding_takes_effect_at_once(run_python, first):
    order = ["streamshim.install()", "streamshim.bind(library, {'abs': -1})"]
    code = """
print(*state())
streamshim.uninstall()
print(*state())
streamshim.install()
print(*state())
"""
    before = "\n".join(order if first == "install" else order[::-1])
    assert run_python(HEAD + before + code) == "loaded bound\nloaded not bound\nloaded bound\n"


def test_patterns_of_the_environment_are_known_from_the_beginning(run_python):
    code = """
name = next(line.split()[-1] for line in open("/proc/self/maps") if "/libc" in line and ".so" in line)
early = ctypes.CDLL(name)
streamshim.install()
late = ctypes.CDLL(name)
print(*("__call__" in vars(found._FuncPtr) for found in (early, late, library)))
"""
    assert run_python(HEAD + code, STREAMSHIM_CTYPES="libc*.so*:abs=-1") == "True True False\n"


def test_a_pattern_that_is_bound_later_sees_what_is_loaded_later(run_python):
    code = """
streamshim.install()
streamshim.bind("no-such-*.so", {"f": -1})
from streamshim.binders.ctypes_ import in_place, registry
registry.loaded = lambda library: print("looked")
ctypes.CDLL(None)
streamshim.unbind("no-such-*.so")
ctypes.CDLL(None)
print(in_place.patterns)
"""
    assert run_python(HEAD + code) == "looked\n()\n"
