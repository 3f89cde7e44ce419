"""Is a call right when it is replayed from a CUDA graph? The question that the first run of a graph cannot answer.

A kernel that went missing from a graph has run while it was captured, so its output is right until the input changes.
So inputs are changed and outputs poisoned before each replay, and the result is compared with an eager call.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

Function = Callable[..., Any]


@dataclass(frozen=True)
class GraphCheck:
    """What a check has found right.

    Attributes:
        output: the output of the last replay, as the function returned it while it was captured.
        rounds: how many times the inputs were changed and the graph was replayed.
    """

    output: Any
    rounds: int


class CudaGraphs:
    """How a call is captured, on the current device."""

    def warm_up(self, call: Callable[[], Any]) -> None:
        """Call it on a side stream, as one does before a capture."""
        side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            call()
        torch.cuda.current_stream().wait_stream(side)
        self.wait()

    def capture(self, call: Callable[[], Any]) -> tuple[Any, Callable[[], None]]:
        """Capture it; returns its output and the replay."""
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            output = call()
        self.wait()
        return output, graph.replay

    def wait(self) -> None:
        """Wait for the whole device: a kernel that is not bound is on a stream that nobody waits for."""
        torch.cuda.synchronize()


def check(
    function: Function,
    *inputs: Any,
    change: Callable[[torch.Tensor], torch.Tensor] | None = None,
    rounds: int = 2,
    rtol: float | None = None,
    atol: float | None = None,
    graphs: Any = None,
) -> GraphCheck:
    """Capture ``function(*inputs)``, and compare replays over changed inputs with eager calls.

    The function may return tensors (also in tuples, lists and dicts), write into its inputs, or both. It is called with
    copies: the given inputs stay as they are.

    Args:
        function: called with ``inputs``.
        inputs: CUDA tensors are what changes; anything else is passed on.
        change: gives a tensor of the same shape and type with other values; without it, floating-point tensors get new
            normal values and all others have their elements rolled by one, so that indices stay within bounds.
        rounds: how many times the inputs are changed and the graph is replayed.
        rtol, atol: tolerances, as for `torch.testing.assert_close`.
        graphs: how calls are captured; `CudaGraphs` if None.

    Returns:
        The `GraphCheck`.

    Raises:
        AssertionError: if a replay does not give what an eager call gives; the text names the tensor, and says whether
            nothing in the graph writes it.
        ValueError: if there is no tensor to compare, or ``rounds`` is less than 1.
    """
    if rounds < 1:
        raise ValueError(f"rounds is {rounds}; it must be at least 1")
    how = graphs or CudaGraphs()
    static = [_copy(value) for value in inputs]
    how.warm_up(lambda: function(*map(_copy, inputs)))
    output, replay = how.capture(lambda: function(*static))
    own = {tensor.data_ptr() for _, tensor in _tensors(static, "")}
    outputs = [(name, tensor) for name, tensor in _tensors(output, "output") if tensor.data_ptr() not in own]
    if not own and not outputs:
        raise ValueError("there is no tensor to compare: neither among the inputs nor in what the function returns")
    for number in range(1, rounds + 1):
        new = [(change or _other_values)(v) if isinstance(v, torch.Tensor) else v for v in inputs]
        right_inputs = [_copy(value) for value in new]
        right = dict(_tensors(function(*right_inputs), "output"))
        how.wait()
        for (_, mine), (_, value) in zip(_tensors(static, ""), _tensors(new, ""), strict=True):
            mine.copy_(value)
        for _, tensor in outputs:
            _poison(tensor)
        how.wait()
        replay()
        how.wait()
        close = functools.partial(_compare, number=number, rtol=rtol, atol=atol)
        for name, got in outputs:
            close(name, got, right[name], untouched=bool(_is_poison(got).all()))
        for (name, got), (_, expected), (_, before) in zip(
            _tensors(static, "input"), _tensors(right_inputs, "input"), _tensors(new, "input"), strict=True
        ):
            close(name, got, expected, untouched=torch.equal(got, before))
    return GraphCheck(output, rounds)


def _compare(
    name: str,
    got: torch.Tensor,
    expected: torch.Tensor,
    untouched: bool,
    number: int,
    rtol: float | None,
    atol: float | None,
) -> None:
    try:
        torch.testing.assert_close(got, expected, rtol=rtol, atol=atol, equal_nan=True)
    except AssertionError as error:
        why = (
            "\nNothing in the graph writes it: its kernel was launched on a stream outside the capture, so it "
            "ran once, while the graph was captured."
        )
        raise AssertionError(
            f"{name} is wrong in replay {number} of the CUDA graph.{why if untouched else ''}\n{error}"
        ) from None


def _copy(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, torch.Tensor) else value


def _other_values(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.is_floating_point() or tensor.is_complex():
        return torch.randn_like(tensor)
    return tensor.roll(1)


def _poison(tensor: torch.Tensor) -> None:
    if tensor.is_floating_point() or tensor.is_complex():
        tensor.fill_(float("nan"))
    elif tensor.dtype is not torch.bool:
        tensor.fill_(torch.iinfo(tensor.dtype).max)


def _is_poison(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.is_floating_point() or tensor.is_complex():
        return tensor.isnan()
    if tensor.dtype is torch.bool:
        return torch.zeros_like(tensor)
    return tensor == torch.iinfo(tensor.dtype).max


def _tensors(value: Any, name: str) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors in a value, each with its name."""
    if isinstance(value, torch.Tensor):
        yield name, value
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from _tensors(item, f"{name}[{key!r}]")
    elif isinstance(value, Sequence) and not isinstance(value, str):
        for index, item in enumerate(value):
            yield from _tensors(item, f"{name}[{index}]")
