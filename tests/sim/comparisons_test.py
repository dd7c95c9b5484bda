"""setp, set and selp against comparisons of Python numbers."""
from __future__ import annotations

import math
import operator

import numpy as np
import pytest

from tests.sim.arrays import packed, registers
from tests.sim.conversions_test import source_registers, values
from tests.sim.halves_test import numbers
from tests.sim.integers_test import run
from tiletrace.lowering.ptx import isa
from tiletrace.sim.rounding import flush
from tiletrace.sim.storage import width

ORDERED = {name: getattr(operator, name) for name in ("eq", "ne", "lt", "le", "gt", "ge")}


def holds(name: str, a: float, b: float) -> bool:
  nan = math.isnan(a) or math.isnan(b)
  if name in ("num", "nan"):
    return nan == (name == "nan")
  return name.endswith("u") if nan else ORDERED[name.removesuffix("u")](a, b)


def legal(row, **mods):
  every = [{**mods, "cmp": cmp, "ftz": ""} for cmp in row.mods["cmp"]]
  return [m for m in every if row.is_legal({k: m.get(k, "") for k in row.mods})]


@pytest.mark.parametrize("type_", isa.SETP.mods["type"])
def test_setp_compares_numbers_of_the_type(type_):
  a = source_registers(type_)
  b = a[np.random.default_rng(3).permutation(len(a))]
  b[::3] = a[::3]
  comparisons = legal(isa.SETP, type=type_)
  assert len(comparisons) == (14 if "f" in type_ else 2 if type_[0] == "b" else 6)
  for mods in comparisons:
    got = run(isa.SETP.form(**mods), a, b)
    assert got.dtype == bool
    assert got.tolist() == [holds(mods["cmp"], x, y) for x, y in zip(values(a, type_), values(b, type_))], mods


def test_setp_with_ftz_sees_subnormals_as_zeros():
  a, b = registers("f32", 300, 1), registers("f32", 300, 2)
  want = run(isa.SETP.form(cmp="gt", type="f32"), flush(a), flush(b))
  assert np.array_equal(run(isa.SETP.form(cmp="gt", type="f32", ftz="ftz"), a, b), want)


@pytest.mark.parametrize("combine", ["and", "or", "xor"])
def test_setp_combines_with_a_predicate(combine):
  a, b, c = registers("b32", 100, 1), registers("b32", 100, 2), registers("pred", 100, 3)
  got = run(isa.SETP_BOOL.form(cmp="lt", bool=combine, type="s32"), a, b, c)
  less = a.view(np.int32) < b.view(np.int32)
  assert np.array_equal(got, {"and": less & c, "or": less | c, "xor": less ^ c}[combine])


@pytest.mark.parametrize("type_", ["f16x2", "bf16x2"])
def test_packed_comparisons_give_the_low_half_first(type_):
  a, b = packed(200, 1), packed(200, 2)
  x, y = numbers(a, type_), numbers(b, type_)
  for cmp in ("lt", "neu"):
    want = np.array([holds(cmp, *v) for v in zip(x.tolist(), y.tolist())])
    low, high = run(isa.SETP_X2.form(cmp=cmp, type=type_), a, b)
    assert np.array_equal(low, want[0::2]) and np.array_equal(high, want[1::2])
    got = run(isa.SET_X2.form(cmp=cmp, to=type_, type=type_), a, b)
    assert np.array_equal(numbers(got, type_), want.astype(float))


@pytest.mark.parametrize("type_", ["u32", "s32", "f32"])
def test_set_gives_ones_or_one(type_):
  a, b = source_registers(type_), source_registers(type_)[::-1].copy()
  want = [holds("le", x, y) for x, y in zip(values(a, type_), values(b, type_))]
  assert run(isa.SET.form(cmp="le", to="f32", type=type_), a, b).tolist() == [float(x) for x in want]
  got = run(isa.SET.form(cmp="le", to="u32", type=type_), a, b)
  assert got.dtype == np.uint32 and got.tolist() == [0xFFFF_FFFF * x for x in want]


@pytest.mark.parametrize("type_", isa.SELP.mods["type"])
def test_selp_selects_by_lane(type_):
  cls = type_ if type_[0] == "f" else f"b{width(type_)}"
  a, b, c = registers(cls, 50, 1), registers(cls, 50, 2), registers("pred", 50, 3)
  got = run(isa.SELP.form(type=type_), a, b, c)
  assert got.dtype == a.dtype and np.array_equal(got, np.where(c, a, b), equal_nan=type_[0] == "f")
