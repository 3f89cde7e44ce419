"""The demo's result as a person reads it."""

from __future__ import annotations

import textwrap
from typing import Any

from .model import CHANNELS, TOKENS, VOCABULARY

_WIDTH = 118


def render(result: dict[str, Any]) -> str:
    """The text for what `demo.run` prints with ``--json``."""
    return "\n".join([*_head(result), *_acts(result), *_ir(result["ir"]), *_verdict(result)])


def _head(result: dict[str, Any]) -> list[str]:
    versions = ", ".join(f"{name} {version or '(not installed)'}" for name, version in result["versions"].items())
    if result["backend"] == "cuda":
        where = "on the GPU, with a CuTe DSL kernel"
        rest = "the rest is torch."
    else:
        where = f"on the SIMULATOR, because {result['why_simulator']}"
        rest = "the rest is what torch would do. Streams, captures and graphs are a model of CUDA's."
    return [
        f"streamshim demo, {where}",
        f"({versions})",
        "",
        *_paragraph(
            f"A small language model writes {TOKENS} tokens, greedily (vocabulary {VOCABULARY}, {CHANNELS} channels, "
            "random weights). Its state-space layer, h = a*h + b*x and y = c*h, is a custom kernel that takes no "
            f"stream; {rest} With graphs on, the first token's step runs eagerly, as an engine reads its prompt, and "
            "every later token is a replay of one captured step. Before each step the demo fills y with NaN, where a "
            "real program would find old values: NaN logits give token 0, which is never right, so a kernel that does "
            "not run shows."
        ),
    ]


def _acts(result: dict[str, Any]) -> list[str]:
    off, bare, shimmed, strict = result["acts"]
    lines = [
        *_act(1, "CUDA graphs off", off, "the reference"),
        *_act(2, "CUDA graphs on, without streamshim", bare, _score(bare) + ("; no error, no warning" * bare["ok"])),
        *_paragraph(_seen(bare), "   "),
        *_act(3, "CUDA graphs on, after streamshim.install()", shimmed, _score(shimmed)),
        *_paragraph(_seen(shimmed), "   "),
    ]
    title = 'streamshim.install("strict"), and a layer that keeps the stream of its first call, the warm-up\'s'
    if strict["refusal"] is None:
        return [*lines, *_act(4, title, strict, f"NOT refused, {_score(strict)}")]
    return [
        *lines,
        "",
        f"4. {title}: refused",
        *(f"   | {line}".rstrip() for line in strict["refusal"]["text"].splitlines()),
        *_paragraph(
            "The capture is still valid. The layer repeats the launch on the current stream, the graph is finished and "
            f"replayed: {_score(strict)}.",
            "   ",
        ),
        _tokens(strict),
    ]


def _act(number: int, title: str, act: dict[str, Any], score: str) -> list[str]:
    return ["", f"{number}. {title}: {score}", _tokens(act)]


def _tokens(act: dict[str, Any]) -> str:
    cells = (f"[{token:2d}]" if i in act["wrong_at"] else f" {token:2d} " for i, token in enumerate(act["tokens"]))
    return ("   " + " ".join(cells)).rstrip()


def _score(act: dict[str, Any]) -> str:
    return f"{act['wrong']} of {len(act['tokens'])} tokens wrong [in brackets]" if act["wrong"] else "all tokens right"


def _seen(act: dict[str, Any]) -> str:
    """What was seen of the kernel, and what it means."""
    capturing, replay = act["ran_while_capturing"], act["ran_in_replay"]
    if capturing and not replay:
        return (
            "Seen: the kernel ran once while the graph was being captured, and does not run in a replay. It went to "
            "the NULL stream, which is not being captured, so it was executed at once and is not in the graph."
        )
    if replay and not capturing:
        return "Seen: the kernel did not run while the graph was being captured, and runs in each replay, as it should."
    words = {True: "ran", False: "did not run"}
    return f"Seen: the kernel {words[capturing]} while the graph was being captured, and {words[replay]} in a replay."


def _ir(lines: dict[str, Any] | None) -> list[str]:
    if lines is None:
        return []
    if lines["skipped"]:
        return ["", f"No look into a real CuTe kernel: {lines['skipped']}"]
    return [
        "",
        f"A real CuTe kernel without a stream, compiled here by {lines['package']}. Its launch takes the stream",
        "   without streamshim from a constant, 0, which is the NULL stream:",
        *(f"      {line}"[:_WIDTH] for line in lines["before"]),
        "   with streamshim from TVM-FFI, which is told torch's current stream at each call:",
        *(f"      {line}"[:_WIDTH] for line in lines["after"]),
    ]


def _verdict(result: dict[str, Any]) -> list[str]:
    if result["ok"]:
        return [
            "",
            "Result: OK. With streamshim the tokens with CUDA graphs are those without, and the escape was refused.",
        ]
    return ["", "Result: NOT as it should be.", *(f"   {problem}" for problem in result["problems"])]


def _paragraph(words: str, indent: str = "") -> list[str]:
    return textwrap.wrap(words, _WIDTH, initial_indent=indent, subsequent_indent=indent, break_long_words=False)
