"""``allow``: a region of one thread, as context manager and decorator."""

from __future__ import annotations

import threading

import pytest

from streamshim import allowance
from streamshim.allowance import allow, covers
from streamshim.callsite import Site

LINE = Site("model.py", 40, "forward")


def region():
    return allow("launch", reason="telemetry")


def test_a_region_covers_its_block_only():
    assert not covers("launch", LINE)
    with region() as entered:
        assert covers("launch", LINE)
        assert (entered.what, entered.reason) == ("launch", "telemetry")
    assert not covers("launch", LINE)


def test_a_region_ends_with_an_exception_too():
    with pytest.raises(KeyError), region():
        raise KeyError
    assert not covers("launch", LINE)


def test_regions_nest():
    with region():
        with region():
            assert covers("launch", LINE)
        assert covers("launch", LINE)
    assert not covers("launch", LINE)


def test_one_region_can_be_entered_again_and_inside_itself():
    again = region()
    with again:
        with again:
            assert covers("launch", LINE)
        assert covers("launch", LINE)
    assert not covers("launch", LINE)
    with again:
        assert covers("launch", LINE)


def test_a_decorated_function_is_covered_while_it_runs():
    @region()
    def telemetry(x, *, depth=0):
        """Its docstring."""
        return (x, covers("launch", LINE), telemetry(x, depth=depth - 1) if depth else None)

    assert telemetry(1, depth=1) == (1, True, (1, True, None))
    assert (telemetry.__name__, telemetry.__doc__) == ("telemetry", "Its docstring.")
    assert not covers("launch", LINE)


def test_a_decorated_function_that_raises_leaves_the_region():
    @region()
    def fails():
        raise KeyError

    with pytest.raises(KeyError):
        fails()
    assert not covers("launch", LINE)


def test_threads_do_not_see_each_other():
    inside, seen = threading.Barrier(2, timeout=10), {}

    def with_region():
        with region():
            inside.wait()
            seen["with"] = covers("launch", LINE)
            inside.wait()

    def without_region():
        inside.wait()
        seen["without"] = covers("launch", LINE)
        inside.wait()

    threads = [threading.Thread(target=f) for f in (with_region, without_region)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert seen == {"with": True, "without": False}


def test_a_thread_started_inside_is_not_covered():
    seen = []
    with region():
        thread = threading.Thread(target=lambda: seen.append(covers("launch", LINE)))
        thread.start()
        thread.join()
    assert seen == [False]


@pytest.mark.parametrize("what", ["launches", "", None, 1, ["launch"]], ids=repr)
def test_a_wrong_what_names_what_is_allowed(what):
    with pytest.raises(ValueError) as error:  # noqa: PT011 - the whole text is compared
        allow(what, reason="because")
    assert str(error.value) == f"what is {what!r}; allowed values: 'launch', 'sync'"


@pytest.mark.parametrize("reason", ["", "  \n", None, 1, True], ids=repr)
def test_a_reason_is_required(reason):
    with pytest.raises(ValueError) as error:  # noqa: PT011 - the whole text is compared
        allow("launch", reason=reason)
    assert str(error.value) == f"reason is {reason!r}; say in a few words why this is right"


def test_a_class_is_not_made_a_function():
    with pytest.raises(TypeError, match="Layer is a class; decorate its methods"):

        @allow("launch", reason="because")
        class Layer:
            pass


def test_a_reason_cannot_be_left_out():
    with pytest.raises(TypeError, match="reason"):
        allow("launch")


def test_first_only_lets_each_line_through_once():
    first, second = Site("lazy.py", 1, "build"), Site("lazy.py", 2, "build")
    for _ in range(2):
        with allow("sync", reason="lazy initialisation", first_only=True):
            seen = [covers("sync", first), covers("sync", first), covers("sync", second)]
    assert seen == [False, False, False]
    with allow("sync", reason="lazy initialisation", first_only=True), allow("sync", reason="always"):
        assert covers("sync", first)
    with allow("launch", reason="another kind", first_only=True):
        assert covers("launch", first)
        assert not covers("launch", first)


def test_kinds_do_not_cover_each_other():
    with allow("sync", reason="a test"):
        assert covers("sync", LINE)
        assert not covers("launch", LINE)


def test_a_region_that_is_open_across_an_installation_leaves_nothing_behind(monkeypatch):
    heard = []
    with allow("sync", reason="a test"):
        monkeypatch.setitem(allowance.on_change, "sync", heard.append)
    assert heard == []
    with allow("sync", reason="a test"):
        monkeypatch.delitem(allowance.on_change, "sync")
    assert heard == [True, False]


def test_a_line_that_another_region_let_through_is_still_new_to_first_only():
    site = Site("serve.py", 99, "warm")
    with allow("sync", reason="a test"):
        assert covers("sync", site)
    with allow("sync", reason="a test", first_only=True):
        assert covers("sync", site)
        assert not covers("sync", site)


def test_a_region_that_is_left_by_another_thread_is_left_on_the_one_that_entered(monkeypatch):
    """As when a generator is collected by another thread."""
    told = []
    monkeypatch.setitem(allowance.on_change, "sync", told.append)
    region = allow("sync", reason="a test")
    region.__enter__()
    thread = threading.Thread(target=region.__exit__, args=(None, None, None))
    thread.start()
    thread.join()
    assert not covers("sync")
    assert told == [True, False]


def test_a_decorated_function_in_two_threads_at_once():
    both = threading.Barrier(2)
    seen = []

    @allow("launch", reason="a test")
    def inside():
        both.wait(10)
        seen.append(covers("launch"))
        both.wait(10)

    def run():
        inside()
        seen.append(covers("launch"))

    threads = [threading.Thread(target=run) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert seen == [True, True, False, False]


async def coroutine():
    pass


def generator():
    yield


async def asynchronous_generator():
    yield


@pytest.mark.parametrize("function", [coroutine, generator, asynchronous_generator])
def test_what_runs_later_cannot_be_decorated(function):
    with pytest.raises(TypeError, match=f"{function.__name__} runs after its call has returned; use `with"):
        allow("sync", reason="a test")(function)
