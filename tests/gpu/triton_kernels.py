"""A Triton kernel that has never been called, and one that has to be autotuned."""

import triton
import triton.language as tl


def _add_one(x, out, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + at, tl.load(x + at, mask=at < n) + 1, mask=at < n)


def fresh():
    """A kernel that is compiled and loaded at its first call."""
    return triton.jit(_add_one)


def tuned():
    """A kernel whose block size is chosen at its first call, by timing."""
    configs = [triton.Config({"BLOCK": 32}), triton.Config({"BLOCK": 64})]
    return triton.autotune(configs=configs, key=["n"])(triton.jit(_add_one))
