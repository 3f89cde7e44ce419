"""Counters on the device, and where their memory comes from.

A CUDA graph writes to fixed addresses, so memory that is to count its replays must be there before the capture, be set
to zero outside it, and stay. Memory made inside a capture does neither: it belongs to the graph's private pool, and
the fill that zeroes it is a node of the graph, which would zero it again at each replay. So each device has an `Arena`
of slots that is made outside captures, ahead of need: at the first eager call, or before a capture begins, where
streamshim is installed (`capture.before_begin`).

It is made in a thread of its own, for two reasons. torch directs allocations into a graph's pool by stream or by
thread, also outside captures (the warm-up of cudagraph trees, `torch.cuda.use_mem_pool`), and trees free what is left
alive there; a new thread is in nobody's pool. And no mode of the caller's (fake tensors, inference mode, a default
device, deterministic filling) reaches it.

**One slot for each captured call**, and for eager calls one for each stream. A graph never runs twice at the same time,
and work on one stream is in order, so two runs never write to the same slot at once: nothing is lost by replays on
other streams, and no atomic operation is needed. It also tells which call of which capture was wrong. Slots are not
given back: a graph that is captured again and again takes 64 bytes for each output and captured call.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeVar

import torch

from .. import capture, fork, runtime
from ..errors import ValidationError
from .compare import Comparison

#: The columns of a slot.
RUNS, CHECKED, MISMATCHES, BAD_ELEMENTS, FIRST_RUN, FIRST_INDEX = range(6)
MAX_ABS, MAX_REL = range(2)
#: How many slots are made at once, and how many must be free before a capture begins.
CHUNK, RESERVE = 8192, 4096

_T = TypeVar("_T", bound=Sequence[torch.Tensor])


class Slot(NamedTuple):
    """The counters of one output of one captured call, or of the eager calls on one stream.

    Attributes:
        ints: six int64: the columns above. FIRST_RUN is the number of the first bad run, from 1; 0 if there is none.
        floats: two float64: the columns above.
        device: the arena's.
        place: the arena's chunk, and the row in it.
    """

    ints: torch.Tensor
    floats: torch.Tensor
    device: torch.device
    place: tuple[int, int]


class Position(NamedTuple):
    """Where a call is made.

    Attributes:
        stream: the handle of torch's current stream; 0 for the CPU.
        capture: the driver's id of the capture that it is part of; 0 if there is none.
    """

    stream: int
    capture: int


NOWHERE = Position(0, 0)


def position(device: torch.device) -> Position:
    """The current stream of a device and its capture, asked without any wait."""
    asked = runtime.found() if device.type == "cuda" else None
    if asked is None:
        return NOWHERE
    handle = asked.current_handle(asked.current_device() if device.index is None else device.index)
    return Position(handle, asked.capture_state(handle).id)


class Arena:
    """The slots of one device."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.chunks: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._used = 0
        self._lock = fork.Lock()

    @property
    def free(self) -> int:
        """How many slots can be taken before another chunk is needed."""
        return len(self.chunks) * CHUNK - self._used

    def prepare(self, slots: int) -> None:
        """Have at least this many slots free; not inside a capture."""
        with self._lock:
            while self.free < slots:
                self.chunks.append(outside_pools(self._make))

    def take(self, number: int, is_capturing: bool) -> list[Slot]:
        """Take new slots.

        Raises:
            ValidationError: if there are not enough, and a capture keeps them from being made.
        """
        with self._lock:
            # Making more waits for the device, which the captures of other threads may not survive: not before it must.
            if not is_capturing and (self.free < number or (self.free < RESERVE and not capture.any_open())):
                self.prepare(max(number, RESERVE))
            if self.free < number:
                raise ValidationError(
                    f"There are no counters on {self.device} for a validated call inside a CUDA graph capture, and "
                    "they cannot be made there. Call the validated function once before the capture, with any shape, "
                    f"or call streamshim.install() first. ({self._used} of {len(self.chunks) * CHUNK} are in use.)"
                )
            first, self._used = self._used, self._used + number
        return [self._slot(*divmod(row, CHUNK)) for row in range(first, first + number)]

    def _slot(self, chunk: int, row: int) -> Slot:
        ints, floats = self.chunks[chunk]
        return Slot(ints[row], floats[row], self.device, (chunk, row))

    def _make(self) -> tuple[torch.Tensor, torch.Tensor]:
        ints = torch.zeros(CHUNK, 6, dtype=torch.int64, device=self.device)
        return ints, torch.zeros(CHUNK, 2, dtype=torch.float64, device=self.device)


def outside_pools(make: Callable[[], _T]) -> _T:
    """Call it in a thread of its own, and wait until the device has done what it began; see the module."""
    done: list[_T] = []
    failed: list[BaseException] = []

    def body() -> None:
        try:
            made = make()
            # Any stream may use it from now on, and a captured one cannot wait for what was begun outside.
            device = _cuda_device(made)
            if device is not None:
                torch.cuda.synchronize(device)
            done.append(made)
        except BaseException as error:  # noqa: BLE001, it is raised in the calling thread
            failed.append(error)

    thread = threading.Thread(target=body, name="streamshim-validation")
    thread.start()
    thread.join()
    if failed:
        raise failed[0]
    return done[0]


def _cuda_device(made: Sequence[torch.Tensor]) -> torch.device | None:
    return next((tensor.device for tensor in made if tensor.is_cuda), None)


_arenas: dict[torch.device, Arena] = {}
_making = fork.Lock()


def arena(device: torch.device) -> Arena:
    """The arena of a device; of the current one if it has no index."""
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    with _making:
        return _arenas.setdefault(device, Arena(device))


def arenas() -> list[Arena]:
    """The arenas that there are."""
    return list(_arenas.values())


def before_capture() -> None:
    """Have slots for the capture that is about to begin, on the current device and wherever there are some already.

    For `capture.before_begin`. While another thread captures nothing is made; what is left must do.
    """
    if capture.any_open():
        return
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        arena(torch.device("cuda", torch.cuda.current_device()))
    for known in arenas():
        known.prepare(RESERVE)


def forget() -> None:
    """Forget all arenas; what still has slots of them counts for nobody."""
    _arenas.clear()


def update(slot: Slot, found: Comparison | None, sample: int) -> torch.Tensor:
    """Count one run, on the device.

    Args:
        slot: where.
        found: the comparison; None if there was nothing to compare, which is right.
        sample: count the comparison at the runs 1, 1 + sample, 1 + 2 * sample, ... only.

    Returns:
        Whether the run was counted as bad: 0 or 1, int64 without dimensions.
    """
    before = slot.ints[RUNS]
    run = before + 1
    one = torch.ones_like(run)
    active = one if sample == 1 else (before % sample == 0).to(torch.int64)
    if found is None:
        zero = torch.zeros_like(run)
        slot.ints.add_(torch.stack([one, active, zero, zero, zero, zero]))
        return zero
    elements, errors = found.bad, found.errors
    if sample != 1:
        # Not a product: the errors may be infinite.
        elements, errors = elements * active, errors.masked_fill(active == 0, 0.0)
    bad = elements.clamp(max=1)
    is_first = bad * (slot.ints[FIRST_RUN] == 0)
    slot.ints.add_(torch.stack([one, active, bad, elements, is_first * run, is_first * found.index]))
    torch.maximum(slot.floats, errors, out=slot.floats)
    return bad
