"""What error logs say around a CUDA graph capture: patterns, and what each of them means, comes from and needs.

Each wording was looked up in the source of the project that writes it (torch 2.13, vLLM 0.22, SGLang 0.5.11, CUDA 13).
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from ..guards.codes import CODES, Code

# Bare numbers mean something only where a line is about CUDA. Two patterns, each found in one pass: logs are long.
_NUMBER = re.compile(r"\b(?:error|code|status|CUresult)\W{0,10}(?:code)?\W{0,3}(90[0-8])\b", re.IGNORECASE)
_IS_ABOUT_CUDA = re.compile(r"(?i:cuda|cute|capture)|\bcu[A-Z_]")


@dataclass(frozen=True)
class Wording:
    """Something that a log can say.

    Attributes:
        key: a short name that stays the same, for ``--json``.
        pattern: finds it in one line.
        title: what it is called in the answer.
        meaning: what it means.
        cause: what usually causes it.
        remedy: what to do, one step each.
        is_consequence: whether something else in the log is its cause.
        number: the number of CUDA's error, for those that are one.
    """

    key: str
    pattern: re.Pattern[str]
    title: str
    meaning: str
    cause: str
    remedy: tuple[str, ...]
    is_consequence: bool = False
    number: int | None = None


def numbers_in(line: str) -> set[int]:
    """The capture errors that a line names by their number alone, as in ``CUDA error: 900``."""
    found = {int(number) for number in _NUMBER.findall(line)}
    return found if found and _IS_ABOUT_CUDA.search(line) else set()


_CAUSES = {
    900: "An .item(), .cpu() or print of a CUDA tensor, torch.cuda.synchronize(), an autotuner, a first use that loads "
    "a module, or a cudaMalloc inside a library.",
    901: "Whatever failed before it in the log; if nothing did, a call below Python, another thread, or an exception "
    "that somebody has swallowed.",
    902: "Two captures at the same time that share an event or a stream.",
    903: "A stream that was switched inside the block and not switched back.",
    904: "A side stream (or a library's own stream) that waited for the capturing stream and was never waited for.",
    905: "An event that was recorded before the capture began, waited for inside it.",
    906: "A backward pass whose nodes were made on the default stream (by a warm-up, say), which then waits for the "
    "capture; or a kernel without a stream while a stream captures that is not non-blocking.",
    907: "Event.query(), Event.synchronize() or elapsed_time() on an event that was recorded in the capture.",
    908: "capture_end in another thread than capture_begin.",
}


def _of_code(code: Code) -> Wording:
    names = rf"{code.symbol}\b|{code.driver_symbol}\b"
    return Wording(
        key=f"cuda-{code.number}",
        pattern=re.compile(f"{names}|{re.escape(code.text)}"),
        title=f"CUDA error {code.number}, {code.symbol}",
        meaning=code.meaning[0].upper() + code.meaning[1:] + ".",
        cause=_CAUSES[code.number],
        remedy=(code.remedy,),
        is_consequence=code.name == "Invalidated",
        number=code.number,
    )


def _say(
    key: str, pattern: str, title: str, meaning: str, cause: str, *remedy: str, is_consequence: bool = False
) -> Wording:
    return Wording(key, re.compile(pattern), title, meaning, cause, remedy, is_consequence)


_SHIM = (
    _say(
        "wrong-stream", r"Launch refused: (it|its stream) ", "streamshim: a launch was refused (WrongStreamError)",
        "A kernel was about to be launched on a stream that is not part of the capture. Nothing was launched.",
        "A stream that was taken before the capture and kept, a kernel that was compiled without streamshim, or a "
        "function that takes no stream.",
        "Read the rows below the message: they name the line, the stream that came and the one that should have.",
    ),
    _say(
        "rescued", r"A launch was moved onto the capturing stream", "streamshim: a launch was rescued",
        "A kernel was given a stream outside the capture, and was moved into it. The graph is right.",
        "A stream that was cached before the capture, most often by a warm-up.",
        "Take the stream at each call, or pass None. Strict mode makes an error of it.",
    ),
    _say(
        "escaped", r"Launches are missing from the CUDA graph", "streamshim: launches left a capture",
        "Launches were made below Python on a stream outside the capture: they ran once, and the graph lacks them.",
        "A C++ extension, a library or a helper kernel that launches on the NULL stream or on one of its own.",
        "Give it torch's current stream (in C++: at::cuda::getCurrentCUDAStream()); the message names the lines.",
    ),
    _say(
        "missing", r"The captured CUDA graph lacks launches", "streamshim: a graph lacks launches",
        "CUDA took launches into the capture, and the graph has fewer nodes than that.",
        "The launches were moved below Python (redirect), and the driver did not take that.",
        "Give the function a stream parameter, and do without redirect (STREAMSHIM_REDIRECT=0).",
    ),
    _say(
        "host-sync", r"Host sync refused .*CUDA graph capture", "streamshim: a host sync was refused",
        "A call was about to wait for the device, which would have lost the capture. The capture is still valid.",
        "A check of a value (.item(), if on a tensor), printing a tensor, or a synchronize call.",
        "Keep the value on the device, or do it before or after the capture; the message names the line.",
    ),
    _say(
        "lost", r"The CUDA graph capture was lost", "streamshim: a capture was lost (CaptureInvalidatedError)",
        "A call that streamshim could not refuse has ended the capture. The graph cannot be used.",
        "The row 'cause' below the message says what is known of it.",
        "Do what the message says; the first error is the one that counts.",
        is_consequence=True,
    ),
    _say(
        "not-active", r"streamshim: .* could not start it, so ", "streamshim was not active in a process",
        "Streamshim was asked for and could not be installed there.",
        "A setting that cannot be understood, or a broken installation; the rest of the line says which.",
        "Correct it, then run `streamshim doctor`.",
    ),
    _say(
        "binder", r"streamshim: binder \S+ is off|A binder could not be applied", "streamshim: a binder is off",
        "One library has a shape that streamshim does not know, so launches through it are not bound.",
        "A version outside the tested range, or another tool that replaced the same functions.",
        "Run `streamshim doctor` for versions and tested ranges; leave the binder out with install(skip=[...]).",
    ),
    _say(
        "guard", r"streamshim: guard of [^:]+ is off|Calls that captures are guarded by could not be patched",
        "streamshim: a guard is off",
        "Calls of one library that wait are not refused inside captures, and not named when they have broken one.",
        "A version of that library whose shape streamshim does not know.",
        "Take another version of it, or bind mode, which goes on without the guard.",
    ),
    _say(
        "compiled-in-capture", r"Compiled?InCapture(Error|Warning)", "streamshim: a kernel was compiled in a capture",
        "A kernel met a new signature while a capture was open.", "A shape that the warm-up did not run.",
        "Call the kernel once with these arguments before the capture.",
    ),
    _say(
        "no-cuda", r"NoCudaError|was built without CUDA, so there is no current stream", "streamshim: no CUDA here",
        "torch has no CUDA in this process, so there is no current stream to follow.",
        "A CPU build of torch, or no driver.", "Install a CUDA build of torch, or see whether the driver is there.",
    ),
)  # fmt: skip

_TORCH = (
    _say(
        "torch-sync", r"called a synchronizing CUDA operation", "torch's sync debug mode",
        "A torch operation needed a value on the host. In error mode (which streamshim sets while a global capture is "
        "open) it was refused before CUDA was touched.",
        "nonzero, a boolean mask as index, .item(), a copy to the host, repeat_interleave without output_size.",
        "Use a form with a fixed size (torch.where, masked_fill), or do it outside the capture.",
    ),
    _say(
        "torch-copy", r"Cannot copy between CPU and CUDA tensors during CUDA graph capture",
        "torch refused a copy between host and device in a capture",
        "Copies from or to pageable memory cannot be captured.",
        ".cpu(), .tolist(), torch.tensor(..., device='cuda') or .to('cuda') inside the captured code.",
        "Make the tensor on the device, keep it from before the capture, or copy through pinned memory with "
        "non_blocking=True.",
    ),
    _say(
        "torch-empty", r"The CUDA Graph is empty", "torch: the graph that was captured is empty",
        "Nothing that was launched inside the block became part of the graph; a replay does nothing.",
        "All kernels went to another stream or device than the capturing one: kernels that take no stream, or a "
        "current device that differs.",
        "Run with streamshim installed: it binds such launches, or names them.",
        "Make the tensors' device current around the capture.",
    ),
    _say(
        "torch-default-stream", r"CUDA graphs must be captured on a non-default stream",
        "torch: capture on the default stream", "capture_begin was called under the default stream.",
        "CUDAGraph.capture_begin without a stream of its own.",
        "Use torch.cuda.graph, or switch to a torch.cuda.Stream before.",
    ),
    _say(
        "torch-rng", r"Offset increment outside graph capture encountered unexpectedly",
        "torch: random numbers after a lost capture, or a generator that the capture does not know",
        "A generator is still set up for a capture.",
        "Most often an earlier capture in this process failed: see what else the log says.",
        "Solve the first error. Until then: restart the process; with streamshim installed, torch's default generator "
        "is put right when a capture is lost.", is_consequence=True,
    ),
    _say(
        "torch-seed", r"Cannot call CUDAGeneratorImpl::\w+ during CUDA graph capture",
        "torch: the seed was asked for in a capture", "Seeds and offsets live on the host and are fixed in a graph.",
        "manual_seed, initial_seed, or torch.compile tracing anew inside the capture.",
        "Seed before the capture; warm up so that nothing is compiled inside it.",
    ),
)  # fmt: skip

_ENGINES = (
    _say(
        "sglang-capture", r"Capture cuda graph failed:", "SGLang: capturing failed",
        "SGLang wraps whatever ended its capture in this text. What follows the colon is only the last error. Its "
        "'possible solutions' are about memory and torch.compile; the one without graphs would hide any other cause.",
        "The first error of the chain, some dozens of lines before; or, if it is alone, what follows the colon.",
        "Look at the first error in the log, not at this one.", is_consequence=True,
    ),
    _say(
        "vllm-late-capture", r"CUDA graph capturing detected at an inappropriate",
        "vLLM: a capture after start-up", "vLLM captures while it starts and forbids it afterwards.",
        "A batch shape that was not captured, or two engines in one process.",
        "Capture that shape at start-up (cudagraph_capture_sizes), or give each engine its own process.",
    ),
    _say(
        "vllm-addresses", r"Input addresses for cudagraphs are different",
        "vLLM: a graph is replayed with other inputs than it was captured with",
        "A captured graph reads fixed addresses.", "A tensor that is made anew for each call.",
        "Copy the values into the buffer that was captured.",
    ),
    _say(
        "vllm-core", r"Engine core initialization failed|EngineCore failed to start",
        "vLLM: the engine core did not start", "The process that runs the model has ended.",
        "The first error in that process's part of the log.",
        "Look at the first error in the log, not at this one.", is_consequence=True,
    ),
)  # fmt: skip

WORDINGS: tuple[Wording, ...] = (*map(_of_code, CODES), *_SHIM, *_TORCH, *_ENGINES)
