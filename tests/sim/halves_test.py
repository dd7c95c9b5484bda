"""f16 and bf16 units against rational arithmetic; ml_dtypes reads and writes the bits."""
from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from tests.sim.arrays import halves, packed, registers
from tests.sim.exact import combine
from tests.sim.floats_test import OPERATIONS
from tests.sim.integers_test import run
from tiletrace.lowering.ptx import isa
from tiletrace.sim.halves import decode, encode

DTYPES = {"f16": np.dtype(np.float16), "bf16": np.dtype(ml_dtypes.bfloat16)}
ALL_BITS = np.arange(1 << 16, dtype=np.uint16)


def numbers(bits: np.ndarray, type_: str) -> np.ndarray:
  with np.errstate(invalid="ignore"):         # a signalling NaN
    return bits.view(np.uint16).view(DTYPES[type_.removesuffix("x2")]).astype(np.float64)


def operands(type_: str, n: int, seed: int) -> np.ndarray:
  return packed(n, seed) if type_.endswith("x2") else halves(2 * n, seed)


@pytest.mark.parametrize("type_", DTYPES)
def test_every_half_is_read_and_written_back(type_):
  with np.errstate(invalid="ignore"):
    assert np.array_equal(decode(ALL_BITS, type_).astype(np.float64), numbers(ALL_BITS, type_), equal_nan=True)
    back = encode(decode(ALL_BITS, type_), type_)
  nan = np.isnan(numbers(ALL_BITS, type_))
  assert np.array_equal(back, np.where(nan, np.uint16(0x7FFF), ALL_BITS))


@pytest.mark.parametrize("type_", DTYPES)
def test_f32_is_rounded_as_ml_dtypes_rounds(type_):
  x = registers("f32", 5000, 3)
  with np.errstate(all="ignore"):
    want = np.where(np.isnan(x), np.uint16(0x7FFF), x.astype(DTYPES[type_]).view(np.uint16))
    assert np.array_equal(encode(x, type_), want)


@pytest.mark.parametrize("type_", DTYPES)
@pytest.mark.parametrize("mode", ["rn", "rz", "rm", "rp"])
def test_float64_is_rounded_once_in_every_mode(type_, mode):
  x = registers("f64", 500, 3)
  x = np.concatenate([x, registers("f32", 500, 4).astype(np.float64) * (1 + 2.0**-40)])
  with np.errstate(all="ignore"):
    got = numbers(encode(x, type_, mode), type_)
    want = [combine(lambda v: v, type_, mode, v) for v in x.tolist()]
  assert np.array_equal(got, np.array(want), equal_nan=True)


@pytest.mark.parametrize("type_", ["f16", "f16x2", "bf16", "bf16x2"])
@pytest.mark.parametrize("row", OPERATIONS, ids=["add", "sub", "mul", "fma"])
def test_arithmetic_rounds_once(row, type_):
  element = type_.removesuffix("x2")
  for seed in range(3):
    args = [operands(type_, 200, 10 * seed + i) for i in range(3 if row is isa.FMA else 2)]
    got = run(row.form(type=type_, rnd="rn"), *args)
    assert got.dtype == args[0].dtype
    with np.errstate(all="ignore"):
      want = [combine(OPERATIONS[row], element, "rn", *map(float, x)) for x in zip(*[numbers(a, type_) for a in args])]
    assert np.array_equal(numbers(got, type_), np.array(want), equal_nan=True)
    assert (got.view(np.uint16)[np.isnan(want)] == 0x7FFF).all()


def test_fma_with_relu_clamps_and_keeps_nan():
  a, b, c = (packed(300, i) for i in range(3))
  for type_ in ("f16x2", "bf16x2"):
    plain = run(isa.FMA.form(type=type_, rnd="rn"), a, b, c)
    got = run(isa.FMA.form(type=type_, rnd="rn", relu="relu"), a, b, c)
    want = np.where(plain.view(np.uint16) > 0x7FFF, 0, plain.view(np.uint16))
    assert np.array_equal(got.view(np.uint16), want)


@pytest.mark.parametrize("row", [isa.ADD, isa.MUL], ids=["add", "mul"])
def test_ftz_flushes_subnormal_f16(row):
  a, b = halves(500, 1), halves(500, 2)
  flushed = [np.where(x & 0x7C00 == 0, x & 0x8000, x).astype(np.uint16) for x in (a, b)]
  want = run(row.form(type="f16", rnd="rn"), *flushed)
  want = np.where(want & 0x7C00 == 0, want & 0x8000, want)
  assert np.array_equal(run(row.form(type="f16", rnd="rn", ftz="ftz"), a, b), want)


@pytest.mark.parametrize("type_", ["f16", "f16x2", "bf16", "bf16x2"])
@pytest.mark.parametrize("nan", [{}, {"nan": "NaN"}])
def test_min_and_max(type_, nan):
  args = [operands(type_, 300, i) for i in range(2)]
  for x, zero in zip(args, (0, 0x8000)):
    x.view(np.uint16)[:3] = [zero, 0x8000, 0]
  a, b = (numbers(x, type_) for x in args)
  choose = (np.minimum, np.maximum) if nan else (np.fmin, np.fmax)
  for row, f in zip((isa.MIN, isa.MAX), choose):
    got = numbers(run(row.form(type=type_, **nan), *args), type_)
    assert np.array_equal(got, f(a, b), equal_nan=True)
    zeros = (a == 0) & (b == 0)
    either = np.signbit(a) | np.signbit(b) if row is isa.MIN else np.signbit(a) & np.signbit(b)
    assert zeros[0] and np.array_equal(np.signbit(got[zeros]), either[zeros])


@pytest.mark.parametrize("type_", ["f16", "f16x2", "bf16", "bf16x2"])
def test_signs(type_):
  a = operands(type_, 100, 1)
  assert np.array_equal(run(isa.NEG.form(type=type_), a).view(np.uint16), a.view(np.uint16) ^ 0x8000)
  assert np.array_equal(run(isa.ABS.form(type=type_), a).view(np.uint16), a.view(np.uint16) & 0x7FFF)


def test_functions_of_halves_are_correctly_rounded():
  x = np.random.default_rng(1).uniform(-8, 8, 400)
  for type_ in ("f16", "bf16"):
    bits = x.astype(DTYPES[type_]).view(np.uint16)
    wide = numbers(bits, type_)
    exponential = isa.EX2_F16 if type_ == "f16" else isa.EX2_BF16
    for row, f in ((isa.TANH, np.tanh), (exponential, np.exp2)):
      want = f(wide).astype(DTYPES[type_]).view(np.uint16)
      assert np.array_equal(run(row.form(type=type_), bits), want)
      both = run(row.form(type=type_ + "x2"), bits.view(np.uint32))
      assert np.array_equal(both.view(np.uint16), want)


def test_a_packed_literal_is_an_array_of_one():
  a = packed(100, 1)
  one = np.array([0x3C00_3C00], np.uint32)
  got = run(isa.MUL.form(type="f16x2", rnd="rn"), a, one)
  assert np.array_equal(numbers(got, "f16"), numbers(a, "f16"), equal_nan=True)
