"""Comparing two tensors with operations of the device only: nothing here waits for a value.

The rule is that of `torch.isclose`: ``|actual - expected| <= atol + rtol * |expected|``. Half precision and 8-bit
floats are compared in float32, where the tolerance decides and not the rounding of a difference.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

#: rtol and atol where nobody says them: those of `torch.testing.assert_close`, which has (0, 0) for all other types.
DEFAULTS: dict[torch.dtype, tuple[float, float]] = {
    torch.float16: (1e-3, 1e-5),
    torch.bfloat16: (1.6e-2, 1e-5),
    torch.float32: (1.3e-6, 1e-5),
    torch.float64: (1e-7, 1e-7),
    torch.complex32: (1e-3, 1e-5),
    torch.complex64: (1.3e-6, 1e-5),
    torch.complex128: (1e-7, 1e-7),
}
#: Types that are compared in a wider one, since torch has little arithmetic for them. All others as they are.
_WIDER: dict[torch.dtype, torch.dtype] = {
    torch.float16: torch.float32,
    torch.bfloat16: torch.float32,
    torch.complex32: torch.complex64,
    torch.bool: torch.int64,
    # torch has no comparison of these on CUDA. The sign does not matter to equality.
    torch.uint16: torch.int64,
    torch.uint32: torch.int64,
}


@dataclass(frozen=True)
class Tolerance:
    """What counts as equal.

    Attributes:
        rtol, atol: as for `torch.isclose`.
        equal_nan: whether NaN equals NaN.
        equal_inf: whether an infinity equals the same infinity.
    """

    rtol: float
    atol: float
    equal_nan: bool = False
    equal_inf: bool = False


@dataclass(frozen=True)
class Comparison:
    """The outcome for one pair of tensors; every attribute is a tensor without dimensions on their device.

    Attributes:
        bad: how many elements differ (int64).
        index: where the first of them is, in row-major order (int64); 0 if there is none.
        max_abs: the greatest absolute difference, inf where one side is not finite and the other differs (float64).
        max_rel: the greatest difference relative to the reference, without elements whose reference is 0 (float64).
    """

    bad: torch.Tensor
    index: torch.Tensor
    max_abs: torch.Tensor
    max_rel: torch.Tensor


def defaults(dtype: torch.dtype) -> tuple[float, float]:
    """rtol and atol of `torch.testing` for a type."""
    return DEFAULTS.get(dtype, (0.0, 0.0))


def compare(actual: torch.Tensor, expected: torch.Tensor, tolerance: Tolerance) -> Comparison | None:
    """Compare two strided tensors of the same shape, type and device; None if they have no elements.

    Types that torch cannot convert (``float4_e2m1fn_x2``, ``bits8``, ...) are compared byte by byte, and the index is
    that of a byte then.
    """
    if actual.numel() == 0:
        return None
    actual, expected = _comparable(actual), _comparable(expected)
    if actual.is_floating_point() or actual.is_complex():
        bad, error, relative = _inexact(actual, expected, tolerance)
    else:
        bad, error, relative = _exact(actual, expected, tolerance)
    return Comparison(
        bad.sum(dtype=torch.int64),
        bad.flatten().to(torch.uint8).argmax(),
        error.amax().to(torch.float64),
        relative.amax().to(torch.float64),
    )


def _comparable(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.detach().resolve_conj().resolve_neg()
    dtype = tensor.dtype
    if dtype in _WIDER:
        return tensor.to(_WIDER[dtype])
    if dtype.is_floating_point and dtype.itemsize == 1 and not _is_packed(dtype):
        return tensor.to(torch.float32)
    if _is_packed(dtype):
        # A tensor without dimensions cannot be viewed as another type of another size; these types have one byte.
        return tensor.view(torch.uint8).to(torch.int64)
    return tensor


def _is_packed(dtype: torch.dtype) -> bool:
    name = str(dtype)
    return "float4" in name or "bits" in name


def _inexact(
    actual: torch.Tensor, expected: torch.Tensor, tolerance: Tolerance
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    raw, magnitude = (actual - expected).abs(), expected.abs()
    finite = raw.isfinite()
    close = finite & (raw <= tolerance.atol + tolerance.rtol * magnitude)
    if tolerance.equal_inf:
        close = close | (actual == expected)
    if tolerance.equal_nan:
        close = close | (actual.isnan() & expected.isnan())
    zero, bad = torch.zeros_like(raw), ~close
    # What is not finite has no size of error: none if it counts as equal, and else more than any. It is filled in by a
    # kernel, and not made from a number on the host, whose copy a capture might refuse.
    other = zero.masked_fill(bad, torch.inf)
    relative = torch.where(magnitude > 0, raw / magnitude, zero)
    return bad, torch.where(finite, raw, other), torch.where(finite, relative, other)


def _exact(
    actual: torch.Tensor, expected: torch.Tensor, tolerance: Tolerance
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    if actual.dtype is torch.uint64:
        differs = actual.view(torch.int64) != expected.view(torch.int64)
    else:
        differs = actual != expected
    raw, magnitude = actual.to(torch.float64), expected.to(torch.float64)
    raw, magnitude = (raw - magnitude).abs(), magnitude.abs()
    zero = torch.zeros_like(raw)
    # float64 cannot tell all 64-bit integers apart, but two that differ do so by 1 at least.
    error = torch.where(differs, raw.clamp(min=1.0), zero)
    relative = torch.where(magnitude > 0, error / magnitude, zero)
    if tolerance.rtol == 0 and tolerance.atol == 0:
        return differs, error, relative
    return differs & (error > tolerance.atol + tolerance.rtol * magnitude), error, relative
