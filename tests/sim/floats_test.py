"""f32 and f64 units against rational arithmetic."""
from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, strategies as st

from tests.sim.arrays import registers
from tests.sim.exact import combine
from tests.sim.integers_test import run
from tiletrace.lowering.ptx import isa
from tiletrace.sim.rounding import flush

MODES = ("rn", "rz", "rm", "rp")
OPERATIONS = {isa.ADD: lambda a, b: a + b, isa.SUB: lambda a, b: a - b, isa.MUL: lambda a, b: a * b,
              isa.FMA: lambda a, b, c: a * b + c}


def bits(x: np.ndarray) -> np.ndarray:
  return x.view(f"u{x.itemsize}")


def check(form, f, mode, args):
  """Bit for bit, but for the sign of exact zeros, which its own test has."""
  type_ = form.mods["type"]
  got = run(form, *args)
  want = np.array([combine(f, type_, mode, *map(float, operands)) for operands in zip(*args)], got.dtype)
  same = (bits(got) == bits(want)) | ((got == 0) & (want == 0)) | (np.isnan(got) & np.isnan(want))
  assert same.all(), [(x[~same][:3], hex(int(bits(x)[~same][0]))) for x in (*args, got, want)]
  if type_ == "f32":
    assert (bits(got)[np.isnan(got)] == 0x7FFF_FFFF).all()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("row", OPERATIONS, ids=["add", "sub", "mul", "fma"])
@pytest.mark.parametrize("type_", ["f32", "f64"])
def test_arithmetic_rounds_once_in_every_mode(row, mode, type_):
  count = 3 if row is isa.FMA else 2
  for seed in range(3):
    args = [registers(type_, 400 if type_ == "f32" else 100, 10 * seed + i) for i in range(count)]
    with np.errstate(all="ignore"):
      check(row.form(type=type_, rnd=mode), OPERATIONS[row], mode, args)


@pytest.mark.parametrize("mode", MODES)
def test_fma_rounds_once_where_the_float64_sum_is_halfway_between_two_numbers(mode):
  """1 + 2**-24 is halfway; what is left of the product decides, far below float64's last bit or in a subnormal."""
  half, tiny, least = 2.0**-24, 2.0**-60, 2.0**-149
  cases = [(s * 1.0 * a, b, c) for s in (1, -1) for a, b, c in (
      (1 + 2.0**-23, 2.0**-24, 1.0), (half, 1.0, 1 - 2.0**-24), (tiny, tiny, 1 + 2.0**-23), (half, 1 - 2.0**-24, 1.0),
      (2.0**-75, 2.0**-75, least), (2.0**-75, 1.5 * 2.0**-75, least), (2.0**-75, 2.0**-75, 3 * least),
      (2.0**-80, 2.0**-70 * (1 + 2.0**-23), 2.0**-130), (2.0**64, 2.0**64, -2.0**127), (-2.0**-75, 2.0**-75, 0.0))]
  args = [np.array(x, np.float32) for x in zip(*cases)]
  check(isa.FMA.form(type="f32", rnd=mode), OPERATIONS[isa.FMA], mode, args)


floats = st.floats(width=32, allow_nan=False)


@given(floats, floats, floats)
def test_fma_of_any_three_numbers(a, b, c):
  args = [np.array([x], np.float32) for x in (a, b, c)]
  check(isa.FMA.form(type="f32", rnd="rn"), OPERATIONS[isa.FMA], "rn", args)


@pytest.mark.parametrize("type_", ["f32", "f64"])
@pytest.mark.parametrize("mode", MODES)
def test_a_zero_sum_is_negative_only_when_rounding_down_or_of_negative_zeros(mode, type_):
  a, b = (np.array(x, type_.replace("f32", "f4").replace("f64", "f8")) for x in
          ([1, -1, 0.0, -0.0, 0.0, -0.0], [-1, 1, 0.0, -0.0, -0.0, 0.0]))
  down = mode == "rm"
  want = [down, down, False, True, down, down]
  assert np.signbit(run(isa.ADD.form(type=type_, rnd=mode), a, b)).tolist() == want
  assert np.signbit(run(isa.SUB.form(type=type_, rnd=mode), a, -b)).tolist() == want
  one = np.ones_like(a)
  assert np.signbit(run(isa.FMA.form(type=type_, rnd=mode), a, one, b)).tolist() == want


@pytest.mark.parametrize("row", OPERATIONS, ids=["add", "sub", "mul", "fma"])
def test_ftz_flushes_operands_and_results(row):
  args = [registers("f32", 500, i) for i in range(3 if row is isa.FMA else 2)]
  rnd = {"rnd": "rn"}
  with np.errstate(all="ignore"):
    want = flush(run(row.form(type="f32", **rnd), *[flush(x) for x in args]))
  assert np.array_equal(bits(run(row.form(type="f32", ftz="ftz", **rnd), *args)), bits(want))


def test_flushed_zeros_keep_their_sign():
  got = flush(np.array([1e-40, -1e-40, 2.0**-126, -np.inf, np.nan, -0.0], np.float32))
  assert got[:4].tolist() == [0, 0, 2.0**-126, -math.inf] and np.isnan(got[4])
  assert np.signbit(got[[0, 1, 5]]).tolist() == [False, True, True]


@pytest.mark.parametrize("nan", ["", "NaN"])
@pytest.mark.parametrize(("row", "type_"), [(r, t) for r in (isa.MIN, isa.MAX) for t in ("f32", "f64")])
def test_min_and_max_order_zeros_and_treat_nan(row, type_, nan):
  if nan and type_ == "f64":
    return
  a, b = registers(type_, 600, 1), registers(type_, 600, 2)
  a[:2], b[:2] = [np.nan, 0.0], [np.nan, -0.0]
  smaller = row is isa.MIN

  def want(x: float, y: float) -> float:
    if math.isnan(x) or math.isnan(y):
      return math.nan if nan or (math.isnan(x) and math.isnan(y)) else y if math.isnan(x) else x
    key = lambda v: (v, math.copysign(1, v))
    return min(x, y, key=key) if smaller else max(x, y, key=key)

  got = run(row.form(type=type_, **({"nan": nan} if nan else {})), a, b)
  expected = np.array([want(x, y) for x, y in zip(a.tolist(), b.tolist())], got.dtype)
  same = (bits(got) == bits(expected)) | (np.isnan(got) & np.isnan(expected))
  assert same.all(), (a[~same], b[~same], got[~same])
  assert np.isnan(got).any() and (got == 0).any()


def test_signs_move_without_rounding():
  a, b = registers("f32", 300, 1), registers("f32", 300, 2)
  assert np.array_equal(bits(run(isa.NEG.form(type="f32"), a)), bits(a) ^ 0x8000_0000)
  assert np.array_equal(bits(run(isa.ABS.form(type="f32"), a)), bits(a) & 0x7FFF_FFFF)
  want = bits(b) & 0x7FFF_FFFF | bits(a) & 0x8000_0000
  assert np.array_equal(bits(run(isa.COPYSIGN.form(type="f32"), a, b)), want)


def test_testp_classifies_by_the_bits():
  a = registers("f32", 600, 4)
  exponent, fraction = bits(a) >> 23 & 255, bits(a) & 0x7F_FFFF
  zero = (exponent == 0) & (fraction == 0)
  want = {"finite": exponent < 255, "infinite": (exponent == 255) & (fraction == 0),
          "notanumber": (exponent == 255) & (fraction > 0), "number": (exponent < 255) | (fraction == 0),
          "normal": ((exponent > 0) & (exponent < 255)) | zero, "subnormal": (exponent == 0) & ~zero}
  for op, expected in want.items():
    assert np.array_equal(run(isa.TESTP.form(type="f32", op=op), a), expected), op


@pytest.mark.parametrize("type_", ["f32", "f64"])
def test_quotients_and_roots_are_correctly_rounded(type_):
  a, b = registers(type_, 200, 1), registers(type_, 200, 2)
  b = np.where(b == 0, b.dtype.type(1.5), b)
  with np.errstate(all="ignore"):
    check(isa.DIV_RN.form(type=type_), lambda x, y: x / y, "rn", [a, b])
    check(isa.RCP_RN.form(type=type_), lambda x: 1 / x, "rn", [b])
    got = run(isa.SQRT_RN.form(type=type_), np.abs(a))
    assert np.array_equal(got, np.sqrt(np.abs(a).astype(np.float64)).astype(a.dtype), equal_nan=True)


# row, function, relative bound of the ISA, operands
APPROXIMATE = [
    (isa.RCP, lambda x: 1 / x, 2.0**-23, (-1e30, 1e30)), (isa.SQRT, np.sqrt, 2.0**-23, (0, 1e30)),
    (isa.RSQRT, lambda x: 1 / np.sqrt(x), 2.0**-22.9, (1e-30, 1e30)), (isa.EX2, np.exp2, 2.0**-22, (-126, 127)),
    (isa.LG2, np.log2, 2.0**-22, (2, 1e30)),
]


@pytest.mark.parametrize(("row", "f", "bound", "span"), APPROXIMATE, ids=lambda x: str(getattr(x, "opcode", "")))
def test_approximations_are_within_the_bounds_of_the_isa(row, f, bound, span):
  a = np.random.default_rng(1).uniform(span[0], span[1], 1000).astype(np.float32)
  np.testing.assert_allclose(run(row.form(), a).astype(np.float64), f(a.astype(np.float64)), rtol=bound)
  np.testing.assert_allclose(run(row.form(ftz="ftz"), a).astype(np.float64), f(a.astype(np.float64)), rtol=bound)


def test_sines_and_tanh_are_within_the_bounds_of_the_isa():
  a = np.random.default_rng(1).uniform(-2 * np.pi, 2 * np.pi, 1000).astype(np.float32)
  wide = a.astype(np.float64)
  np.testing.assert_allclose(run(isa.SIN.form(), a), np.sin(wide), rtol=0, atol=2.0**-20.5)
  np.testing.assert_allclose(run(isa.COS.form(), a), np.cos(wide), rtol=0, atol=2.0**-20.5)
  np.testing.assert_allclose(run(isa.TANH.form(type="f32"), a), np.tanh(wide), rtol=2.0**-11)


def test_edges_of_the_approximations():
  inf, nan = np.inf, np.nan
  for row, operands, want in [
      (isa.RCP, [0.0, -0.0, inf, -inf, nan], [inf, -inf, 0.0, -0.0, nan]),
      (isa.RSQRT, [0.0, -0.0, inf, -1], [inf, -inf, 0.0, nan]), (isa.SQRT, [-0.0, inf, -1], [-0.0, inf, nan]),
      (isa.EX2, [-inf, inf, -0.0, 200, -200], [0.0, inf, 1, inf, 0.0]), (isa.LG2, [0.0, inf, -1], [-inf, inf, nan]),
      (isa.SIN, [inf, -0.0], [nan, -0.0])]:
    got = run(row.form(), np.array(operands, np.float32))
    expected = np.array(want, np.float32)
    assert np.array_equal(got, expected, equal_nan=True), (row, got)
    assert np.array_equal(np.signbit(got[got == 0]), np.signbit(expected[expected == 0])), row


def test_approximate_division_gives_zero_above_its_range():
  a, b = (np.array(x, np.float32) for x in ([3, -3, np.inf, 2.0**127, 6], [2.0**127, 2.0**127, 2.0**127, 2.0**126, 3]))
  assert np.array_equal(run(isa.DIV_APPROX.form(mode="approx"), a, b), np.array([0, 0, np.nan, 2, 2], np.float32),
                        equal_nan=True)
  assert run(isa.DIV_APPROX.form(mode="full"), a, b)[0] == np.float32(3 * 2.0**-127)
