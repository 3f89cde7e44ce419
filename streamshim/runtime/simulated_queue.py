"""Eager work in the simulator: one queue a stream, and the order in which they are drained.

Nothing runs when it is submitted. When a host waits for anything, whatever can run does, on all streams, in the order
of submission; delays end only then, and only if the host has to wait for what is behind them. So what is behind a
delay comes after everything that is not, and a race that is possible on a GPU is certain here.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, eq=False)
class Work:
    """What a stream executes, eagerly or as a node of a graph; a delay does nothing and takes long."""

    name: str
    run: Callable[[], object]
    is_delay: bool = False


@dataclass(eq=False)
class Entry:
    """A place in a queue: work, an event's record (without work), or a wait for such a place (``after``)."""

    queue: Queue
    order: int
    work: Work | None = None
    after: Entry | None = None
    done: bool = False

    @property
    def is_delay(self) -> bool:
        return self.work is not None and self.work.is_delay


class Queue:
    """The pending work of one stream.

    Args:
        device: the stream's device.
        legacy: the queue of that device's legacy stream, if this is a *blocking* stream.
    """

    def __init__(self, device: int, legacy: Queue | None = None) -> None:
        self.device = device
        self.legacy = legacy
        self.pending: deque[Entry] = deque()


class Timeline:
    """All queues of a simulator."""

    def __init__(self) -> None:
        self._queues: list[Queue] = []
        self._order = itertools.count()

    def new_queue(self, device: int, legacy: Queue | None = None) -> Queue:
        """A queue; see `Queue`."""
        self._queues.append(Queue(device, legacy))
        return self._queues[-1]

    def busy(self, device: int) -> bool:
        """Whether anything is pending on a device."""
        return any(queue.pending for queue in self._queues if queue.device == device)

    def add(self, queue: Queue, work: Work | None = None, after: Entry | None = None) -> Entry:
        """Put an entry at a queue's end."""
        queue.pending.append(Entry(queue, next(self._order), work, after))
        return queue.pending[-1]

    def run_until(self, finished: Callable[[], bool]) -> None:
        """Run until this is true. It never hangs: the oldest pending entry of all can always run, or is a delay."""
        self.run_without_delay()
        while not finished():
            # Time passes, and all delays that have begun are over.
            for entry in self._startable():
                self._finish(entry)
            self.run_without_delay()

    def run_without_delay(self) -> None:
        """Run what is not behind a delay."""
        while ready := [entry for entry in self._startable() if not entry.is_delay]:
            self._finish(min(ready, key=lambda entry: entry.order))

    def _startable(self) -> list[Entry]:
        heads = [queue.pending[0] for queue in self._queues if queue.pending]
        return [e for e in heads if (e.after is None or e.after.done) and not self._held_by_legacy(e)]

    def _held_by_legacy(self, entry: Entry) -> bool:
        """The legacy stream and the blocking streams of its device wait for each other's earlier work.

        https://docs.nvidia.com/cuda/cuda-driver-api/stream-sync-behavior.html; torch's streams are non-blocking.
        """
        blocking = [queue for queue in self._queues if queue.legacy is entry.queue]
        others = blocking if entry.queue.legacy is None else [entry.queue.legacy]
        return any(other.pending and other.pending[0].order < entry.order for other in others)

    def _finish(self, entry: Entry) -> None:
        entry.queue.pending.popleft()
        entry.done = True
        if entry.work is not None:
            entry.work.run()
