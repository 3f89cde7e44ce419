"""The ledger keeps the last events and counts all of them."""

from __future__ import annotations

import threading

import pytest

from streamshim import ledger
from streamshim.callsite import Site
from streamshim.ledger import KEPT, Event


def event(kind="rescued launch", what="kernel"):
    return Event(kind, what, Site("f.py", 1, "f"), 0x10, 0x20, 7)


def test_events_come_back_in_order():
    first, second = event(what="a"), event(what="b")
    ledger.add(first)
    ledger.add(second)
    assert ledger.events() == [first, second]


def test_counts_are_by_kind():
    for kind in ("rescued launch", "refused launch", "rescued launch"):
        ledger.add(event(kind))
    assert ledger.counts() == {"rescued launch": 2, "refused launch": 1}


def test_only_the_last_are_kept_and_all_are_counted():
    for i in range(KEPT + 10):
        ledger.add(event(what=str(i)))
    assert len(ledger.events()) == KEPT
    assert ledger.events()[0].what == "10"
    assert ledger.counts() == {"rescued launch": KEPT + 10}


def test_clear_forgets_everything():
    ledger.add(event())
    ledger.clear()
    assert (ledger.events(), ledger.counts()) == ([], {})


def test_what_is_handed_out_is_a_copy():
    ledger.add(event())
    ledger.events().clear()
    ledger.counts()["rescued launch"] = 99
    assert (len(ledger.events()), ledger.counts()) == (1, {"rescued launch": 1})


def test_events_cannot_be_changed():
    with pytest.raises(AttributeError):
        event().what = "another"


def test_it_can_be_read_while_others_write():
    stop = threading.Event()

    def write():
        while not stop.is_set():
            ledger.add(event())

    writers = [threading.Thread(target=write) for _ in range(4)]
    for writer in writers:
        writer.start()
    try:
        for _ in range(300):
            assert all(isinstance(e, Event) for e in ledger.events())
            assert set(ledger.counts()) <= {"rescued launch"}
    finally:
        stop.set()
        for writer in writers:
            writer.join()
