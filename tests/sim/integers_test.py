"""Integer units against Python's integers."""
from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from tests.sim.arrays import registers
from tiletrace.lowering.ptx import isa
from tiletrace.lowering.ptx.instr import Form
from tiletrace.sim import numerics
from tiletrace.sim.storage import width

TYPES = ("u16", "s16", "u32", "s32", "u64", "s64")


def number(x: int, type_: str) -> int:
  """The register's bits as a number of the type."""
  bits = width(type_)
  x &= (1 << bits) - 1
  return x - (1 << bits) if type_[0] == "s" and x >> bits - 1 else x


def run(form: Form, *args: np.ndarray) -> np.ndarray:
  unit = numerics.unit(form)
  assert unit is not None
  with np.errstate(all="ignore"):
    return unit(*args)


def check(form: Form, want: Callable[..., int], types: list[str], to: str, n: int = 300, args=None) -> None:
  args = args or [registers(f"b{width(t)}", n, i) for i, t in enumerate(types)]
  got = run(form, *args)
  assert got.dtype == np.dtype(f"u{width(to) // 8}")
  for i, operands in enumerate(zip(*map(np.ndarray.tolist, args))):
    expected = want(*map(number, operands, types)) & (1 << width(to)) - 1
    assert int(got[i]) == expected, (form, [hex(x) for x in operands], hex(int(got[i])), hex(expected))


@pytest.mark.parametrize("type_", TYPES)
@pytest.mark.parametrize(("row", "want"), [
    (isa.ADD, lambda a, b: a + b), (isa.SUB, lambda a, b: a - b), (isa.MUL_LO, lambda a, b: a * b),
    (isa.MIN, min), (isa.MAX, max)], ids=["add", "sub", "mul.lo", "min", "max"])
def test_two_operands_wrap_around(row, want, type_):
  check(row.form(type=type_), want, [type_] * 2, type_)


@pytest.mark.parametrize("type_", TYPES)
def test_products_have_their_upper_halves(type_):
  bits = width(type_)
  check(isa.MUL_HI.form(type=type_), lambda a, b: a * b >> bits, [type_] * 2, type_)
  check(isa.MAD_HI.form(type=type_), lambda a, b, c: (a * b >> bits) + c, [type_] * 3, type_)
  check(isa.MAD_LO.form(type=type_), lambda a, b, c: a * b + c, [type_] * 3, type_)


@pytest.mark.parametrize("type_", TYPES[:4])
def test_wide_products_are_whole(type_):
  wide = f"{type_[0]}{2 * width(type_)}"
  check(isa.MUL_WIDE.form(type=type_), lambda a, b: a * b, [type_] * 2, wide)
  check(isa.MAD_WIDE.form(type=type_), lambda a, b, c: a * b + c, [type_, type_, wide], wide)


@pytest.mark.parametrize("type_", TYPES)
def test_quotients_round_towards_zero_and_remainders_have_the_sign_of_the_dividend(type_):
  def quotient(a: int, b: int) -> int:
    return -1 if b == 0 else abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1)

  check(isa.DIV.form(type=type_), quotient, [type_] * 2, type_)
  check(isa.REM.form(type=type_), lambda a, b: -1 if b == 0 else a - b * quotient(a, b), [type_] * 2, type_)


@pytest.mark.parametrize("type_", ["s16", "s32", "s64"])
def test_abs_and_neg(type_):
  check(isa.ABS.form(type=type_), lambda a: abs(a), [type_], type_)
  check(isa.NEG.form(type=type_), lambda a: -a, [type_], type_)


def test_saturating_sums_stay_in_range():
  def clamp(x: int) -> int:
    return max(-2**31, min(2**31 - 1, x))

  check(isa.ADD_SAT.form(), lambda a, b: clamp(a + b), ["s32"] * 2, "s32")
  check(isa.SUB_SAT.form(), lambda a, b: clamp(a - b), ["s32"] * 2, "s32")


@pytest.mark.parametrize("a_type", ["u32", "s32"])
@pytest.mark.parametrize("b_type", ["u32", "s32"])
def test_dp4a_adds_four_products_of_bytes(a_type, b_type):
  def want(a: int, b: int, c: int) -> int:
    return c + sum(x * y for x, y in zip([number(a >> 8 * i & 255, f"{a_type[0]}8") for i in range(4)],
                            [number(b >> 8 * i & 255, f"{b_type[0]}8") for i in range(4)]))

  check(isa.DP4A.form(a=a_type, b=b_type), want, ["u32", "u32", "s32"], "s32")


def test_a_literal_is_an_array_of_one():
  a = registers("b32", 100, 5)
  assert np.array_equal(run(isa.ADD.form(type="u32"), a, np.array([7], np.uint32)), a + np.uint32(7))
  assert np.array_equal(run(isa.DP4A.form(a="u32", b="u32"), a, np.array([1], np.uint32), np.array([0], np.uint32)),
                        a & 255)
