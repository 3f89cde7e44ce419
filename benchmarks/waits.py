"""Group "guards outside captures": the waiting calls that are patched while streamshim is installed."""

from __future__ import annotations

import torch

from .machine import Machine
from .measuring import BIND, OFF, Form, Result, Variant, measure

GROUP = "guards outside captures"


def run(machine: Machine, rounds: int) -> list[Result]:
    """Each call with nothing to wait for, which is when its own cost shows."""
    if not machine.gpu:
        machine.missing[GROUP] = "needs a GPU"
        return []
    event = torch.cuda.Event()
    event.record()
    machine.settle()
    names = {"torch": torch, "event": event, "stream": machine.side}
    calls = {
        "torch.cuda.synchronize": "torch.cuda.synchronize()",
        "Event.query": "event.query()",
        "Event.synchronize": "event.synchronize()",
        "Stream.synchronize": "stream.synchronize()",
        "Stream.query": "stream.query()",
    }
    forms = [
        Form(GROUP, name, (Variant("bare", OFF, call, names), Variant("shim", BIND, call, names)))
        for name, call in calls.items()
    ]
    return measure(forms, rounds, machine.settle)
