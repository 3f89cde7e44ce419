"""The check behind the fixture `streamshim_graph`, over a model of graphs that runs on the CPU."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")
check = pytest.importorskip("streamshim.plugins.graph_check").check


class OnCpu:
    """Graphs whose replay calls the function again and writes its result where the captured one is.

    A kernel that is missing from the graph is what a function leaves out while ``replaying``.
    """

    def __init__(self):
        self.replaying = False
        self.calls = 0

    def warm_up(self, call):
        call()

    def capture(self, call):
        output = call()

        def replay():
            self.replaying = True
            again = call()
            self.replaying = False
            for place, value in zip(leaves(output), leaves(again), strict=True):
                if value is not place:
                    place.copy_(value)

        return output, replay

    def wait(self):
        pass


def leaves(value):
    if isinstance(value, torch.Tensor):
        return [value]
    return [leaf for item in (value or ()) for leaf in leaves(item)]


@pytest.fixture
def graphs():
    return OnCpu()


def test_a_right_function(graphs):
    x, count = torch.ones(5), torch.arange(5)

    def function(x, count, factor):
        x.mul_(2)
        return [x + 1, (count * factor,)]

    found = check(function, x, count, 3, graphs=graphs, rounds=3)
    assert found.rounds == 3
    assert x.tolist() == [1.0] * 5  # what the caller passed is as it was


def test_an_output_that_the_graph_does_not_write(graphs):
    buffer = torch.zeros(5)

    def function(x):
        return torch.full_like(x, float("nan")) if graphs.replaying else x + buffer

    with pytest.raises(AssertionError) as error:
        check(function, torch.ones(5), graphs=graphs)
    assert str(error.value).startswith("output is wrong in replay 1 of the CUDA graph.\nNothing in the graph writes it")


def test_an_input_that_the_graph_does_not_write(graphs):
    def function(x, out):
        if not graphs.replaying:
            out.copy_(x)

    with pytest.raises(AssertionError) as error:
        check(function, torch.ones(5), torch.zeros(5), graphs=graphs)
    assert str(error.value).startswith("input[1] is wrong in replay 1 of the CUDA graph.\nNothing in the graph writes")


def test_an_output_that_is_wrong_in_another_way(graphs):
    def function(x):
        return (x, x + 2 if graphs.replaying else x + 1)

    with pytest.raises(AssertionError) as error:
        check(function, torch.ones(5), graphs=graphs)
    assert str(error.value).startswith("output[1] is wrong in replay 1 of the CUDA graph.\nTensor-likes are not close")


def test_a_value_that_was_fixed_at_capture_shows_when_inputs_change(graphs):
    values = []

    def function(x):
        if not graphs.replaying:
            values.append(x.sum().item())
        return x * 0 + (values[1] if graphs.replaying else values[-1])  # the second call is the captured one

    with pytest.raises(AssertionError, match="output is wrong in replay 1 of the CUDA graph"):
        check(function, torch.ones(3), graphs=graphs)


def test_tolerances_and_changes(graphs):
    seen = []

    def change(tensor):
        seen.append(tensor)
        return tensor + 1

    def function(x):
        return x + (0.01 if graphs.replaying else 0)

    check(function, torch.ones(3), graphs=graphs, change=change, atol=0.1, rtol=0)
    assert len(seen) == 2
    with pytest.raises(AssertionError):
        check(function, torch.ones(3), graphs=graphs, atol=0.001, rtol=0)


def test_bad_arguments(graphs):
    with pytest.raises(ValueError, match="rounds is 0"):
        check(lambda x: x, torch.ones(3), graphs=graphs, rounds=0)
    with pytest.raises(ValueError, match="no tensor to compare"):
        check(lambda: None, graphs=graphs)
