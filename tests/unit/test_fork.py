"""What a forked child has of its parent: the patches and the mode, but no open capture and no lock that is held."""

from __future__ import annotations

import pytest

#: Runs ``child()`` in a forked child, which must succeed, within 20 seconds.
FORK = """
import os, signal, sys, threading, time
def in_child(child):
    sys.stdout.flush()
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            child()
            status = 0
        finally:
            sys.stdout.flush()
            os._exit(status)
    for _ in range(2000):
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            break
        time.sleep(0.01)
    else:
        os.kill(pid, signal.SIGKILL)
        raise AssertionError("the child hangs")
    assert os.waitstatus_to_exitcode(status) == 0
"""

#: A capture is open in the parent, with guards that have patched and counted.
CAPTURING = """
import streamshim, torch
from streamshim import allowance, capture, gate, ledger
from streamshim.guards import sync_mode, torch_calls
from streamshim.capture import Window
from streamshim.callsite import Site
streamshim.install("strict")
site = Site("model.py", 7, "decode")
window = Window(5, 0x1000, 0, site, "MainThread", "thread_local")
capture._windows[5] = window
capture._captured_on[0x1000] = 5
for guard in capture.guards:
    guard.opened(window)
ledger.add(ledger.Event("refused sync", ".item()", site, 0, 0, 5))
item = torch.Tensor.item
assert hasattr(item, "__wrapped__")
"""


def test_captures_of_the_parent_are_not_open_in_the_child(run_python):
    pytest.importorskip("torch")
    code = """
def child():
    assert not capture.any_open() and not capture._captured_on
    assert not torch_calls._open and not hasattr(torch.Tensor.item, "__wrapped__")
    assert not sync_mode._armed_for
    assert streamshim.status().captures == [] and streamshim.status().events == {}
    assert streamshim.status().installed and streamshim.status().mode == "strict"
    print("the child is free")
in_child(child)
assert capture.any_open() and torch.Tensor.item is item and streamshim.status().events == {"refused sync": 1}
print("the parent still captures")
"""
    assert run_python(FORK + CAPTURING + code).splitlines() == ["the child is free", "the parent still captures"]


def test_no_lock_is_held_in_the_child(run_python):
    """Another thread of the parent holds every lock that there is, for good."""
    pytest.importorskip("torch")
    code = """
from streamshim import fork, imports, installer
held = threading.Event()
def hold():
    for lock in list(fork._locks):
        lock.__enter__()
    held.set()
    threading.Event().wait()
streamshim.status()  # loads the binders
from streamshim.binders.ctypes_ import shortcuts
assert shortcuts._lock in fork._locks
threading.Thread(target=hold, daemon=True).start()
held.wait()
assert len(fork._locks) >= 5
def child():
    streamshim.uninstall()
    streamshim.install("check")
    streamshim.status()
    imports.settle()
    print("nothing is locked")
in_child(child)
"""
    assert run_python(FORK + CAPTURING + code) == "nothing is locked\n"


def test_a_fork_while_this_very_thread_holds_a_lock(run_python):
    """A hook that runs under our lock imports a module that forks: both go on."""
    code = """
import streamshim
from streamshim import installer
with installer._lock:
    in_child(lambda: streamshim.install() and print("child"))
    streamshim.install()
streamshim.uninstall()
print("parent")
"""
    assert run_python(FORK + code).splitlines() == ["child", "parent"]


def test_a_child_that_forks_inside_our_block_leaves_it(run_python):
    code = """
from streamshim import fork
lock = fork.Lock()
pid = None
with lock:
    pid = os.fork()
with lock:
    pass
if pid == 0:
    os._exit(0)
assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
"""
    run_python(FORK + code)


def test_regions_of_other_threads_are_not_open_in_the_child(run_python):
    code = """
import streamshim
from streamshim.guards import sync_mode
streamshim.install()
entered = threading.Event()
def wait_in_region():
    with streamshim.allow("sync", reason="a test"):
        entered.set()
        threading.Event().wait()
threading.Thread(target=wait_in_region, daemon=True).start()
entered.wait()
with streamshim.allow("sync", reason="a test"):
    assert sync_mode._paused == 2
    in_child(lambda: print(sync_mode._paused))
"""
    assert run_python(FORK + code) == "1\n"


def test_a_fault_in_one_reset_keeps_no_other_from_running(run_python):
    code = """
import logging
from streamshim import fork
logging.disable()
fork.in_child(lambda: 1 / 0)
fork.in_child(lambda: print("the next one"))
in_child(lambda: None)
"""
    assert run_python(FORK + code) == "the next one\n"
