"""The lint finds each fault, and nothing in a good module."""
from __future__ import annotations

import pytest

from tiletrace.lowering.ptx import Label, Module, Param, PtxError, Symbol, check, isa, lint


def good() -> Module:
  m = Module()
  m.dynamic_shared("smem", align=128)
  e = m.entry("fill", [Param("out", "u64"), Param("n", "u32")], 128, min_ctas=1)
  b = e.builder()
  out = b.new(isa.LD_PARAM, b.addr(e.param("out")), type="u64")
  n = b.new(isa.LD_PARAM, b.addr(e.param("n")), type="u32")
  i = b.special("tid.x")
  loop, done = b.label("loop"), b.label("done")
  b.place(loop)
  p = b.new(isa.SETP, i, n, cmp="ge", type="u32")
  b(isa.BRA, done, pred=p)
  b(isa.ST_GLOBAL, b.addr(b.new(isa.MAD_WIDE, i, 4, out, type="u32")), 1.0, type="f32")
  b(isa.ADD, i, i, 128, type="u32")
  b(isa.BRA, loop)
  b.place(done)
  b(isa.RET)
  return m


def kinds(m: Module) -> list[str]:
  return [f.kind for f in lint(m)]


def test_a_good_module_has_no_findings():
  assert lint(good()) == []
  check(good())


def test_a_register_that_no_path_writes_is_found_with_its_location():
  m = good()
  b = m.entries[0].builder()
  b.place(b.label("tail"))
  with b.at("kernel.py:7"):
    b(isa.ST_SHARED, b.addr(Symbol("smem", "shared")), b.reg("b32"), type="b32")
  b(isa.RET)
  assert kinds(m) == ["unreachable"]
  m.entries[0].body.insert(0, m.entries[0].body[-2])
  [undefined, _] = lint(m)
  assert str(undefined) == "undefined: %r2 is not written before: st.shared.b32 [smem], %r2; (from kernel.py:7)"
  with pytest.raises(PtxError, match="undefined: %r2"):
    check(m)


@pytest.mark.parametrize("back_edge, found", [(False, ["undefined"]), (True, [])])
def test_a_guarded_write_in_an_earlier_iteration_is_enough(back_edge, found):
  m = Module()
  b = m.entry("k", [], 32).builder()
  p = b.new(isa.SETP, b.special("tid.x"), 7, cmp="eq", type="u32")
  x, loop = b.reg("b32"), b.label("loop")
  b.place(loop)
  b(isa.SETP, p, x, 1, cmp="eq", type="s32")
  b(isa.MOV, x, 1, type="b32", pred=p)
  if back_edge:
    b(isa.BRA, loop, pred=p)
  b(isa.RET)
  assert kinds(m) == found


def test_an_accumulator_needs_no_write_where_scale_d_may_be_false():
  def found(scale_d):
    m = Module()
    b = m.entry("k", [], 128).builder()
    d = b.new(isa.MOV, 0, type="b64")
    p = b.new(isa.MOV_PRED, 0)
    b(isa.WGMMA_SS, b.regs("f32", 4), d, d, p if scale_d is None else scale_d, 1, 1, 0, 0, shape="m64n8k16", d="f32",
      a="f16", b="f16")
    b(isa.RET)
    return [k for k in kinds(m) if k != "unused"]

  assert found(None) == found(0) == []
  assert found(1) == ["undefined"] * 4


def test_an_unused_result_is_a_warning():
  m = good()
  b = m.entries[0].builder()
  b.new(isa.MOV, 1, type="b32")
  m.entries[0].body.insert(0, m.entries[0].body.pop())
  [finding] = lint(m)
  assert (finding.kind, finding.warning) == ("unused", True)
  check(m)


def test_labels_are_placed_exactly_once():
  m = good()
  b = m.entries[0].builder()
  b(isa.BRA, b.label("nowhere"))
  assert kinds(m) == ["label"]
  label = b.label("twice")
  b.place(label)
  b.place(label)
  m.entries[0].body.append(Label("$twice_3"))
  assert kinds(m) == ["label", "label", "label"]


def test_names_are_unique_and_identifiers():
  m = good()
  m.entry("fill", [Param("a", "u64"), Param("a", "u64")], 32).builder()(isa.RET)
  m.entry("2nd", [], 32).builder()(isa.RET)
  assert kinds(m) == ["name"] * 3


def test_symbols_are_declared():
  m = good()
  b = m.entries[0].builder()
  b.new(isa.MOV_SYMBOL, Symbol("other", "shared"), type="u32")
  m.entries[0].body.insert(0, m.entries[0].body.pop())
  assert kinds(m) == ["symbol", "unused"]


@pytest.mark.parametrize("target, found", [("sm_90a", []), ("sm_90", ["target"]), ("sm_100a", ["target"])])
def test_architecture_specific_instructions_need_that_target(target, found):
  m = Module(target=target)
  b = m.entry("k", [], 128, min_ctas=1).builder()
  b(isa.SETMAXNREG, 24, dir="dec")
  b(isa.RET)
  assert kinds(m) == found


def test_instructions_need_a_target_at_their_floor_or_above():
  for target, found in [("sm_80", ["target"]), ("sm_90", []), ("sm_100", [])]:
    m = Module(target=target)
    b = m.entry("k", [], 128).builder()
    b(isa.FENCE_MBARRIER_INIT)
    b(isa.RET)
    assert kinds(m) == found


def test_control_must_not_run_off_the_end():
  m = good()
  b = m.entries[0].builder()
  m.entries[0].body.pop()
  b(isa.RET, pred=m.entries[0].registers["pred"][0])
  assert kinds(m) == ["end"]


def test_setmaxnreg_needs_a_fixed_number_of_registers_at_entry():
  m = Module()
  b = m.entry("k", [], 128).builder()
  b(isa.SETMAXNREG, 24, dir="dec")
  b(isa.RET)
  assert kinds(m) == ["setmaxnreg"]


def test_a_register_of_another_entry_is_found():
  m = good()
  stranger = m.entries[0].registers["b32"][0]
  b = m.entry("other", [], 32).builder()
  b.new(isa.ADD, stranger, 1, type="s32")
  b(isa.RET)
  assert [str(f) for f in lint(m) if not f.warning] == [
      f"undefined: {stranger} belongs to another entry: add.s32 %r0, {stranger}, 1;"]
