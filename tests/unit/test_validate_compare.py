"""The comparison on the device, held to what `torch.testing.assert_close` says of the same tensors."""

from __future__ import annotations

import math
import random

import pytest
import torch
from device_tape import HostValueNeeded, Tape

from streamshim.validation.compare import DEFAULTS, Tolerance, compare, defaults

FLOATS = [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.complex64, torch.complex128]
EIGHT_BITS = [
    getattr(torch, name)
    for name in ("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu")
    if hasattr(torch, name)
]
INTEGERS = [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint16, torch.uint32, torch.uint64]
SHAPES = [(), (1,), (7,), (3, 5), (2, 1, 4), (2, 3, 2, 2)]
SPECIAL = [0.0, -0.0, math.inf, -math.inf, math.nan, 1e-30, 3e38]


def found(actual, expected, tolerance):
    """The comparison as numbers, made without a value on the host."""
    with Tape():
        result = compare(actual, expected, tolerance)
    return [result.bad.item(), result.index.item(), *result.errors.tolist()]


def is_close(actual, expected, tolerance):
    try:
        torch.testing.assert_close(
            actual, expected, rtol=tolerance.rtol, atol=tolerance.atol, equal_nan=tolerance.equal_nan
        )
    except AssertionError:
        return False
    return True


def random_pair(rng, dtype):
    """Two tensors of one shape: equal, nearly equal, or different in places, some of them not contiguous."""
    torch.manual_seed(rng.getrandbits(32))
    shape = rng.choice(SHAPES)
    expected = (torch.randn(shape, dtype=torch.float64) * 10 ** rng.uniform(-3, 3)).to(dtype)
    wide = expected.to(torch.complex128 if dtype.is_complex else torch.float64)
    noise = torch.randn(shape, dtype=torch.float64) * 10 ** rng.uniform(-9, 0)
    actual = (wide + noise * wide.abs() * rng.choice([0, 0, 1])).to(dtype)
    for tensor in (actual, expected):
        if rng.random() < 0.3:
            tensor.view(-1)[rng.randrange(tensor.numel())] = rng.choice(SPECIAL)
    if rng.random() < 0.3:
        value = rng.choice(SPECIAL)
        actual.view(-1)[0] = expected.view(-1)[0] = value
    if len(shape) > 1 and rng.random() < 0.5:
        actual, expected = actual.transpose(0, -1), expected.transpose(0, -1)
    return actual, expected


def random_tolerance(rng, dtype):
    rtol, atol = defaults(dtype)
    if rng.random() < 0.6:
        rtol, atol = rng.choice([0.0, 10 ** rng.uniform(-8, 0)]), rng.choice([0.0, 10 ** rng.uniform(-8, 0)])
    # torch.testing takes infinities as equal always.
    return Tolerance(rtol, atol, equal_nan=rng.random() < 0.5, equal_inf=True)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_floats_are_judged_as_assert_close_judges_them(dtype):
    rng, wide, verdicts = random.Random(7), {torch.float16: torch.float32, torch.bfloat16: torch.float32}, set()
    for _ in range(400):
        actual, expected = random_pair(rng, dtype)
        tolerance = random_tolerance(rng, dtype)
        # What torch compares in half precision is rounded once more before it is judged.
        target = wide.get(dtype, dtype)
        matches = torch.isclose(
            actual.to(target), expected.to(target), tolerance.rtol, tolerance.atol, tolerance.equal_nan
        )
        bad, index, _, _ = found(actual, expected, tolerance)
        verdict = is_close(actual.to(target), expected.to(target), tolerance)
        assert (bad == 0) == verdict, (actual, expected, tolerance)
        assert bad == (~matches).sum().item()
        if bad:
            assert index == (~matches).flatten().nonzero()[0].item()
        verdicts.add(verdict)
    assert verdicts == {True, False}


@pytest.mark.parametrize("dtype", [*INTEGERS, torch.bool], ids=str)
def test_integers_are_judged_as_assert_close_judges_them(dtype):
    rng, verdicts = random.Random(7), set()
    high = 2 if dtype is torch.bool else 100
    for _ in range(200):
        shape = rng.choice(SHAPES)
        torch.manual_seed(rng.getrandbits(32))
        wide = torch.randint(0, high, shape)
        other = torch.where(torch.rand(shape) < rng.choice([0, 0.2]), torch.randint(0, high, shape), wide)
        actual, expected = other.to(dtype), wide.to(dtype)
        tolerance = Tolerance(*rng.choice([(0.0, 0.0), (0.0, 0.0), (0.1, 2.0), (0.5, 0.0)]))
        if dtype is torch.bool:
            tolerance = Tolerance(0.0, 0.0)  # torch.testing compares these without a tolerance
        bad, index, max_abs, _ = found(actual, expected, tolerance)
        verdict = is_close(other if dtype is not torch.bool else actual, wide if high > 2 else expected, tolerance)
        assert (bad == 0) == verdict
        assert max_abs == ((other - wide).abs().max().item() if high > 2 else float((other != wide).any()))
        if bad and tolerance.rtol == 0:
            assert index == (other != wide).flatten().nonzero()[0].item()
        verdicts.add(verdict)
    assert verdicts == {True, False}


@pytest.mark.parametrize("dtype", [*INTEGERS, torch.bool, torch.float32, torch.float16], ids=str)
def test_what_is_equal_is_so_under_any_tolerance(dtype):
    """Infinity times a reference of 0 is no number."""
    zero, one = torch.zeros(2, dtype=dtype), torch.ones(2, dtype=dtype)
    for tolerance in (Tolerance(math.inf, 0.0), Tolerance(math.inf, math.inf), Tolerance(0.0, math.inf)):
        assert found(zero, zero, tolerance)[0] == 0
        assert found(one, one, tolerance)[0] == 0
        assert found(zero, one, tolerance)[0] == 0


@pytest.mark.parametrize("dtype", EIGHT_BITS, ids=str)
def test_8_bit_floats_are_compared_in_float32(dtype):
    expected = torch.tensor([1.0, 2.0, 4.0, 8.0]).to(dtype)
    actual = torch.tensor([1.0, 2.0, 8.0, 8.0]).to(dtype)
    assert found(actual, expected, Tolerance(0.0, 0.0)) == [1, 2, 4.0, 1.0]
    assert found(actual, expected, Tolerance(1.0, 0.0)) == [0, 0, 4.0, 1.0]


@pytest.mark.skipif(not hasattr(torch, "float4_e2m1fn_x2"), reason="this torch has no float4")
def test_what_torch_cannot_convert_is_compared_by_bytes():
    actual, expected = (torch.tensor(v, dtype=torch.uint8).view(torch.float4_e2m1fn_x2) for v in ([1, 2, 3], [1, 2, 4]))
    assert found(actual, expected, Tolerance(0.0, 0.0))[:2] == [1, 2]


def test_64_bit_integers_that_float64_cannot_tell_apart_differ_by_one():
    actual, expected = torch.tensor([2**60, 2**62 + 1]), torch.tensor([2**60, 2**62])
    assert found(actual, expected, Tolerance(0.0, 0.0))[:3] == [1, 1, 1.0]
    assert found(actual, expected, Tolerance(0.0, 0.5))[0] == 1
    assert found(actual, expected, Tolerance(0.0, 1.0))[0] == 0


NAN, INF = math.nan, math.inf


@pytest.mark.parametrize(
    ("actual", "expected", "nan", "inf", "bad", "error"),
    [
        (NAN, NAN, False, False, 1, INF),
        (NAN, NAN, True, False, 0, 0.0),
        (NAN, 1.0, True, True, 1, INF),
        (1.0, NAN, True, True, 1, INF),
        (INF, INF, False, False, 1, INF),
        (INF, INF, False, True, 0, 0.0),
        (INF, -INF, True, True, 1, INF),
        (1.0, INF, True, True, 1, INF),
        (INF, 1.0, True, True, 1, INF),
    ],
)
def test_nan_and_inf_are_equal_only_when_asked(actual, expected, nan, inf, bad, error):
    got = found(torch.tensor([actual]), torch.tensor([expected]), Tolerance(1e-3, 1e-3, nan, inf))
    assert got == [bad, 0, error, error]


def test_errors_are_those_of_all_elements_also_within_the_tolerance():
    actual, expected = torch.tensor([1.5, 0.25, 2.0]), torch.tensor([1.0, 0.0, 2.0])
    # The element whose reference is 0 has no relative error.
    assert found(actual, expected, Tolerance(0.0, 1.0)) == [0, 0, 0.5, 0.5]


def test_a_tensor_without_elements_has_nothing_to_compare():
    assert compare(torch.empty(0, 3), torch.empty(0, 3), Tolerance(0.0, 0.0)) is None


def test_defaults_are_those_of_torch_testing():
    assert torch.testing._comparison._DTYPE_PRECISIONS.items() >= DEFAULTS.items()
    for dtype in (torch.bool, torch.int32, *EIGHT_BITS):
        assert defaults(dtype) == (0.0, 0.0)


def test_the_tape_refuses_what_a_capture_would():
    x = torch.ones(3)
    refused = [
        lambda: x.sum().item(),
        lambda: bool(x.any()),
        lambda: x.nonzero(),
        lambda: x[x > 0],
        lambda: torch.equal(x, x),
        lambda: torch.allclose(x, x),
        lambda: x.unique(),
    ]
    for call in refused:
        with Tape(), pytest.raises(HostValueNeeded):
            call()
