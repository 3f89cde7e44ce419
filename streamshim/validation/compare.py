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
    """The outcome for one pair of tensors, on their device; ``bad`` and ``index`` have no dimensions.

    Attributes:
        bad: how many elements differ (int64).
        index: where the first of them is, in row-major order (int64); 0 if there is none.
        errors: two numbers (float32 or float64): the greatest absolute difference, inf where one side is not finite
            and the other differs; and the greatest difference relative to the reference, without elements whose
            reference is 0.
    """

    bad: torch.Tensor
    index: torch.Tensor
    errors: torch.Tensor


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
    inexact = actual.is_floating_point() or actual.is_complex()
    # Each operation is a kernel of its own in a graph, where it costs more by being one than by what it does.
    good, error, magnitude = (_inexact if inexact else _exact)(actual, expected, tolerance)
    bad = torch.logical_not(good, out=torch.empty_like(good, dtype=torch.uint8))
    relative = (error / magnitude).masked_fill_(magnitude == 0, 0.0)
    return Comparison(bad.sum(dtype=torch.int64), bad.flatten().argmax(), torch.stack([error.amax(), relative.amax()]))


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
    """Which elements are equal; the absolute differences; and the magnitudes of the reference, all of them finite."""
    # What is not finite differs by more than anything, unless it counts as equal.
    error = (actual - expected).abs().nan_to_num_(torch.inf, torch.inf)
    if tolerance.equal_inf:
        error.masked_fill_(actual == expected, 0.0)
    if tolerance.equal_nan:
        error.masked_fill_(actual.isnan() & expected.isnan(), 0.0)
    magnitude = expected.abs().nan_to_num_(1.0)  # anything but 0, which would have no relative error
    return error <= (magnitude * tolerance.rtol + tolerance.atol).nan_to_num_(), error, magnitude


def _exact(
    actual: torch.Tensor, expected: torch.Tensor, tolerance: Tolerance
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """As `_inexact`, for integers."""
    if actual.dtype is torch.uint64:
        good = actual.view(torch.int64) == expected.view(torch.int64)
    else:
        good = actual == expected
    magnitude = expected.to(torch.float64)
    error = (actual.to(torch.float64) - magnitude).abs()
    magnitude = magnitude.abs()
    # float64 cannot tell all 64-bit integers apart, but two that differ do so by 1 at least.
    error = error.clamp_(min=1.0).masked_fill_(good, 0.0)
    if tolerance.rtol == 0 and tolerance.atol == 0:
        return good, error, magnitude
    return error <= (magnitude * tolerance.rtol + tolerance.atol).nan_to_num_(), error, magnitude
