"""cvt against Python's integers, rational rounding and ml_dtypes."""
from __future__ import annotations

import itertools
import math

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, strategies as st

from tests.sim.arrays import halves, packed, place, registers
from tests.sim.exact import combine
from tests.sim.halves_test import ALL_BITS, numbers
from tests.sim.integers_test import number, run
from tiletrace.lowering.ptx import isa
from tiletrace.sim import numerics
from tiletrace.sim.storage import width

INTEGERS = ("u8", "s8", "u16", "s16", "u32", "s32", "u64", "s64")
FLOATS = ("f16", "bf16", "f32", "f64")
ROUND = {"rni": round, "rzi": math.trunc, "rmi": math.floor, "rpi": math.ceil}
E4M3, E5M2 = ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2


def legal(to: str, source: str) -> list[dict[str, str]]:
  """The modifiers with which the ISA has this pair."""
  every = [dict(rnd=rnd, sat=sat, to=to, source=source) for rnd in isa.CVT.mods["rnd"] for sat in ("", "sat")]
  return [m for m in every if isa.CVT.is_legal(m)]


def source_registers(type_: str, n: int = 300) -> np.ndarray:
  if type_ in ("f16", "bf16"):
    return halves(n, 7)
  if type_ in ("f32", "f64"):
    x = registers(type_, n, 8)
    edges = [float(s * (1 << k) + d) for k in (7, 8, 15, 16, 31, 32, 52) for s in (1, -1)
             for d in (-1, -0.5, 0, 0.5, 1)]
    return place(x, np.array([*edges, 2.5, 3.5, -0.5, 2.0**63, 2.0**64, -(2.0**63), 255.5]).astype(x.dtype),
                 np.random.default_rng(1))
  return registers(f"b{max(16, width(type_))}", n, 9)


def values(bits: np.ndarray, type_: str) -> list:
  """Python numbers in registers of a type."""
  if type_ in ("f16", "bf16"):
    return numbers(bits, type_).tolist()
  return bits.tolist() if type_[0] == "f" else [number(x, type_) for x in bits.tolist()]


def bounds(type_: str) -> tuple[int, int]:
  bits = width(type_)
  return (-(1 << bits - 1), (1 << bits - 1) - 1) if type_[0] == "s" else (0, (1 << bits) - 1)


def expected(x, mods: dict[str, str]):
  to, source, rnd = mods["to"], mods["source"], mods["rnd"]
  if to in INTEGERS:
    low, high = bounds(to)
    if source in INTEGERS:
      return max(low, min(high, x)) if mods["sat"] else number(x, to)
    if math.isnan(x):
      return 1 << width(to) - 1 if source == "f64" or width(to) == 64 else 0
    return max(low, min(high, (high if x > 0 else low) if math.isinf(x) else ROUND[rnd](x)))
  if rnd.endswith("i"):
    return x if not math.isfinite(x) else float(ROUND[rnd](x))
  if isinstance(x, float) and not math.isfinite(x):
    return x
  return combine(lambda v: v, to, rnd or "rn", x)


PAIRS = [(to, source) for to, source in itertools.product(INTEGERS + FLOATS, repeat=2) if legal(to, source)]


@pytest.mark.parametrize(("to", "source"), PAIRS, ids=lambda x: x)
def test_cvt_between_any_two_types(to, source):
  a = source_registers(source)
  for mods in legal(to, source):
    got = run(isa.CVT.form(**mods), a)
    assert got.dtype == np.dtype({"f32": np.float32, "f64": np.float64}.get(to, f"u{max(16, width(to)) // 8}"))
    want = [expected(x, mods) for x in values(a, source)]
    if to in INTEGERS:
      bits = max(16, width(to))
      assert got.tolist() == [number(int(x), to) & (1 << bits) - 1 for x in want], mods
    else:
      assert np.array_equal(np.array(values(got, to)), np.array(want, np.float64), equal_nan=True), mods


def test_a_wider_register_gives_its_low_byte():
  assert run(isa.CVT.form(to="s32", source="s8"), np.array([0x1280, 0x127F], np.uint16)).tolist() == [0xFFFF_FF80, 127]


def test_rounding_to_an_integer_keeps_the_sign_of_zero():
  a = np.array([-0.3, 0.3, -0.0], np.float32)
  assert np.signbit(run(isa.CVT.form(rnd="rni", to="f32", source="f32"), a)).tolist() == [True, False, True]


@pytest.mark.parametrize("to", ["f16x2", "bf16x2"])
@pytest.mark.parametrize("rnd", ["rn", "rz"])
@pytest.mark.parametrize("relu", ["", "relu"])
@pytest.mark.parametrize("special", [True, False], ids=["with NaN", "without"])
def test_pairs_are_packed_with_the_first_operand_high(to, rnd, relu, special):
  a, b = (registers("f32", 600, i, special=special) for i in range(2))
  if not special:
    a, b = np.nan_to_num(a, nan=1.5), np.nan_to_num(b, nan=-1.5)
  got = run(isa.CVT_PACK.form(rnd=rnd, relu=relu, to=to), a, b).view(np.uint16)
  element = to.removesuffix("x2")
  for x, half in ((b, got[0::2]), (a, got[1::2])):
    want = np.array([combine(lambda v: v, element, rnd, v) for v in x.tolist()])
    want = np.where(want < 0, 0, want) if relu else want
    assert np.array_equal(numbers(half, element), want, equal_nan=True)
    assert (half[np.isnan(x)] == 0x7FFF).all() and (not relu or (half < 0x8000).all())


@given(st.floats(width=32, allow_nan=False), st.floats(width=32, allow_nan=False))
def test_bf16_pairs_of_any_numbers(a, b):
  got = run(isa.CVT_PACK.form(rnd="rn", to="bf16x2"), np.array([a], np.float32), np.array([b], np.float32))
  want = [combine(lambda v: v, "bf16", "rn", x) for x in (b, a)]
  assert numbers(got, "bf16").tolist() == want


@pytest.mark.parametrize("rnd", ["rna", "rn", "rz"])
def test_tf32_has_ten_fraction_bits(rnd):
  a = registers("f32", 1000, 5)
  got = run(isa.CVT_TF32.form(rnd=rnd), a)
  want = np.array([combine(lambda v: v, "tf32", rnd, v) for v in a.tolist()]).astype(np.float32)
  assert np.array_equal(got.view(np.float32), want, equal_nan=True)
  assert not (got[~np.isnan(want)] & 0x1FFF).any()


def saturated(x: np.ndarray, dtype: type) -> np.ndarray:
  """Rounded by ml_dtypes, too large numbers clamped first."""
  largest = np.float32(ml_dtypes.finfo(dtype).max)
  with np.errstate(invalid="ignore"):         # NaN
    return np.clip(x, -largest, largest).astype(dtype)


@pytest.mark.parametrize(("to", "dtype"), [("e4m3x2", E4M3), ("e5m2x2", E5M2)])
@pytest.mark.parametrize("relu", ["", "relu"])
def test_8_bit_floats_saturate_and_round_as_ml_dtypes_does(to, dtype, relu):
  rng = np.random.default_rng(2)
  a, b = (np.concatenate([registers("f32", 500, i), rng.normal(0, 2.0**rng.integers(-12, 10, 2000)).astype(np.float32)])
          for i in range(2))
  got = run(isa.CVT_F8_PACK.form(to=to, relu=relu), a, b)
  for x, byte in ((a, got >> 8), (b, got & 0xFF)):
    want = saturated(np.where(x < 0, np.float32(0), x) if relu else x, dtype)
    nan = np.isnan(x)
    assert np.array_equal(byte[~nan].astype(np.uint8).view(dtype).astype(np.float32), want[~nan].astype(np.float32))
    assert (byte[nan] == 0x7F).all()
    if not relu:
      assert np.array_equal(byte[~nan] >> 7, np.signbit(x[~nan]))


@pytest.mark.parametrize(("type_", "dtype"), [("e4m3x2", E4M3), ("e5m2x2", E5M2)])
def test_every_pair_of_8_bit_floats_is_widened_exactly_and_comes_back(type_, dtype):
  wide = run(isa.CVT_F8_TO_F16.form(source=type_), ALL_BITS)
  want = ALL_BITS.view(dtype).astype(np.float64)
  assert np.array_equal(numbers(wide, "f16"), want, equal_nan=True)
  back = run(isa.CVT_F8_FROM_F16.form(to=type_), wide).view(np.uint8)
  finite = np.isfinite(want)
  assert np.array_equal(back[finite], ALL_BITS.view(np.uint8)[finite])
  assert (back[np.isnan(want)] == 0x7F).all()
  assert (run(isa.CVT_F8_TO_F16.form(source=type_, relu="relu"), ALL_BITS).view(np.uint16)[want < 0] == 0).all()


@pytest.mark.parametrize(("type_", "dtype"), [("e4m3x2", E4M3), ("e5m2x2", E5M2)])
def test_pairs_of_f16_become_8_bit_floats(type_, dtype):
  a = packed(2000, 3)
  with np.errstate(invalid="ignore"):
    x = a.view(np.float16).astype(np.float32)
  got = run(isa.CVT_F8_FROM_F16.form(to=type_), a).view(np.uint8)
  nan = np.isnan(x)
  assert np.array_equal(got[~nan].view(dtype).astype(np.float32), saturated(x[~nan], dtype).astype(np.float32))


def test_every_row_of_arithmetic_has_a_unit_in_every_legal_form():
  families = [row for name, row in isa.ROWS.items() if row.section.split()[0].rstrip(",") in ("9.7.1", "9.7.3", "9.7.4",
                                                                                            "9.7.6", "9.7.8")]
  without = [row for row in families if row not in numerics.UNITS]
  assert not without
  for row in numerics.UNITS:
    for choice in itertools.product(*row.mods.values()):
      mods = dict(zip(row.mods, choice))
      if row.is_legal(mods):
        assert callable(numerics.unit(row.form(**mods)))
