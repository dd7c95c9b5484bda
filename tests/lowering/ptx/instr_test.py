"""Instructions: operand checks, literals, text."""
from __future__ import annotations

import numpy as np
import pytest

from tiletrace.lowering.ptx import Module, Param, PtxError, isa
from tiletrace.lowering.ptx.instr import row
from tiletrace.lowering.ptx.registers import float_literal, int_literal


@pytest.fixture
def b():
  return Module().entry("k", [Param("x", "u64")], 128).builder()


def last(b):
  return b.entry.body[-1].text()


def test_text_spells_modifiers_in_print_order(b):
  b(isa.LD_GLOBAL, b.regs("b32", 4), b.addr(b.reg("b64"), 32), type="b32", vec="v4", nc="nc", l1="L1::no_allocate")
  assert last(b) == "ld.global.nc.L1::no_allocate.v4.b32 {%r0, %r1, %r2, %r3}, [%rd0+32];"


def test_text_of_each_operand_syntax(b):
  smem, bar, tm, p, x, y = b.reg("b32"), b.reg("b32"), b.reg("b64"), b.reg("pred"), b.reg("b32"), b.reg("b32")
  b(isa.TMA_LOAD, b.addr(smem), tm, [x, 64], b.addr(bar, 8), dim="2d", pred=p)
  assert last(b) == ("@%p0 cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
                     "[%r0], [%rd0, {%r2, 64}], [%r1+8];")
  b(isa.TMA_STORE, tm, [x], b.addr(smem, -16), dim="1d")
  assert last(b).endswith("bulk_group [%rd0, {%r2}], [%r0+-16];")
  b(isa.MBARRIER_ARRIVE, b.addr(bar), pred=p, negate=True)
  assert last(b) == "@!%p0 mbarrier.arrive.shared::cta.b64 _, [%r1];"
  b(isa.ELECT, p, 0xFFFFFFFF)
  assert last(b) == "elect.sync _|%p0, 0xffffffff;"
  b(isa.SHFL_P, x, p, y, 16, 31, -1, mode="bfly")
  assert last(b) == "shfl.sync.bfly.b32 %r2|%p0, %r3, 16, 31, -1;"
  b(isa.SETMAXNREG, 240, dir="inc")
  assert last(b) == "setmaxnreg.inc.sync.aligned.u32 240;"
  b(isa.FENCE_PROXY_ASYNC, space="shared::cta")
  assert last(b) == "fence.proxy.async.shared::cta;"


def test_float_literals_have_the_bits_of_ieee_754():
  rng = np.random.default_rng(0)
  values = np.concatenate([rng.standard_normal(200) * 10.0 ** rng.integers(-30, 30, 200),
                           [0.0, -0.0, np.inf, -np.inf]]).astype(np.float32)
  for v in values:
    assert float_literal(float(v)) == f"0f{v.view(np.uint32):08X}"
    assert float_literal(float(v), "f64") == f"0d{np.float64(v).view(np.uint64):016X}"
  assert float_literal(1.0) == "0f3F800000"
  assert [int_literal(v) for v in (-5, 4096, 1 << 31, 1 << 62)] == ["-5", "4096", "0x80000000", "0x4000000000000000"]


def test_literals_take_the_form_of_the_operand_type(b):
  assert str(b.new(isa.MOV, 1, type="f32")) == "%f0"
  assert last(b) == "mov.f32 %f0, 0f3F800000;"
  b.new(isa.MOV, 1.0, type="f64")
  assert last(b) == "mov.f64 %fd0, 0d3FF0000000000000;"
  b.new(isa.MOV, -1.0, type="b32")
  assert last(b) == "mov.b32 %r0, 0fBF800000;"


def test_a_predicate_is_0_or_1(b):
  b.new(isa.MOV_PRED, 1)
  with pytest.raises(PtxError, match="a is a pred"):
    b.new(isa.MOV_PRED, 2)


@pytest.mark.parametrize("value, type_", [(1 << 32, "u32"), (-(1 << 31) - 1, "s32"), (1.5, "u32"), (1 << 64, "b64"),
                                          (True, "b32")])
def test_literals_that_the_type_cannot_hold_are_refused(b, value, type_):
  with pytest.raises(PtxError, match=f"a is a {type_}"):
    b.new(isa.MOV, value, type=type_)


def test_wrong_register_classes_are_refused(b):
  r, f, d, h, p = (b.reg(cls) for cls in ("b32", "f32", "b64", "b16", "pred"))
  for operands, mods in [((f, r, r), {"type": "s32"}), ((r, d, r), {"type": "s32"}), ((p, h, h), {"type": "f16"}),
                         ((d, d, r), {"type": "f64"})]:
    with pytest.raises(PtxError, match="of class"):
      b(isa.ADD, *operands, **mods)
  with pytest.raises(PtxError, match="base of class"):
    b(isa.LD_GLOBAL, r, b.addr(r), type="b32")
  with pytest.raises(PtxError, match="guard"):
    b(isa.RET, pred=r)
  b(isa.ADD, f, r, 1.0, type="f32")     # bit-size registers hold any type of their size
  b(isa.LD_GLOBAL, r, b.addr(d), type="u8")   # and loads may widen


def test_wrong_counts_are_refused(b):
  r = b.reg("b32")
  with pytest.raises(PtxError, match=r"takes \(d, a, b\), got 2"):
    b(isa.ADD, r, r, type="s32")
  with pytest.raises(PtxError, match="takes 2 sources, got 1"):
    b.new(isa.ADD, r, type="s32")
  with pytest.raises(PtxError, match="vector of 4"):
    b(isa.LDMATRIX, [r, r], b.addr(r), num="x4")
  with pytest.raises(PtxError, match="n must be in"):
    b(isa.WGMMA_WAIT, 8)
  with pytest.raises(PtxError, match="n must be in"):
    b(isa.SETMAXNREG, 100, dir="dec")
  with pytest.raises(PtxError, match="has no destination"):
    b.new(isa.RET)


def test_missing_and_unknown_modifiers_are_refused(b):
  r = b.reg("b32")
  with pytest.raises(PtxError, match="type must be one of"):
    b(isa.ADD, r, r, r)
  with pytest.raises(PtxError, match=r"type must be one of .* got 's33'"):
    b(isa.ADD, r, r, r, type="s33")


def test_a_form_is_made_once_whatever_the_order_of_the_modifiers():
  assert isa.LD_SHARED.form(vec="v2", type="b32") is isa.LD_SHARED.form(type="b32", vec="v2")
  assert isa.LD_SHARED.form(type="b32") is isa.LD_SHARED.form(type="b32", vec="")


def test_reads_and_writes(b):
  acc, d, p, a, base = b.regs("f32", 4), b.reg("b64"), b.reg("pred"), b.regs("b32", 4), b.reg("b32")
  b(isa.WGMMA_RS, acc, a, d, p, 1, 1, 0, shape="m64n8k16", d="f32", a="bf16", b="bf16")
  inst = b.entry.body[-1]
  assert inst.writes() == acc
  assert inst.reads() == [*acc, *a, d, p]
  b(isa.ST_SHARED, b.addr(base), a, type="b32", vec="v4", pred=p)
  inst = b.entry.body[-1]
  assert inst.writes() == []
  assert inst.reads() == [p, base, *a]


def test_a_row_whose_template_and_choices_differ_is_a_fault():
  with pytest.raises(AssertionError, match="differ"):
    row("foo.{type}", "a:u32", "9.7.1", kind="a b")
