"""Modules: declarations, the order of things, comments, locations."""
from __future__ import annotations

import doctest
import sys

import pytest

from tiletrace.core.source import user_loc
from tiletrace.lowering.assemble import AssembleOptions, assemble
from tiletrace.lowering.ptx import Module, Param, PtxError, instr, isa, module, registers


def small() -> Module:
  m = Module(target="sm_90a", version="8.6")
  m.dynamic_shared("smem", align=1024)
  m.static_shared("slots", 64, align=16)
  e = m.entry("small", [Param("a", "u64"), Param("tma_a", "tensormap"), Param("n", "u32")], 256, min_ctas=1,
              cluster=(2, 1))
  b = e.builder()
  b.section("start")
  x = b.new(isa.LD_PARAM, b.addr(e.param("n")), type="u32")
  b.comment("twice")
  b(isa.ADD, x, x, x, type="u32")
  b.pragma("nounroll")
  loop = b.label("loop")
  b.place(loop)
  p = b.new(isa.SETP, x, 7, cmp="lt", type="u32")
  b(isa.BRA, loop, pred=p)
  b(isa.RET)
  return m


SMALL = """\
.version 8.6
.target sm_90a
.address_size 64
.extern .shared .align 1024 .b8 smem[];
.shared .align 16 .b8 slots[64];

.visible .entry small(
  .param .u64 a,
  .param .align 64 .b8 tma_a[128],
  .param .u32 n
)
.reqntid 256, 1, 1
.minnctapersm 1
.explicitcluster
.reqnctapercluster 2, 1, 1
{
  .reg .pred %p<1>;
  .reg .b32 %r<1>;
  ld.param.u32 %r0, [n];
  add.u32 %r0, %r0, %r0;
  .pragma "nounroll";
$loop_0:
  setp.lt.u32 %p0, %r0, 7;
  @%p0 bra $loop_0;
  ret;
}
"""


def test_render_is_exactly_this_text():
  assert small().render() == SMALL


def test_comments_and_sections_appear_with_debug_only():
  debug = small().render(debug=True).splitlines()
  assert [line.strip() for line in debug if "//" in line] == ["// ---- start", "// twice"]
  assert [line for line in debug if "//" not in line] == SMALL.splitlines()


@pytest.mark.parametrize("text", [{"debug": True}, {"debug": False}])
def test_ptxas_takes_the_text(text):
  assert assemble(small().render(**text), "sm_90a").entry == "small"


def test_static_shared_variables_count_as_shared_memory():
  m = Module()
  slots = m.static_shared("slots", 640, align=16)
  b = m.entry("k", [], 32).builder()
  b(isa.ST_SHARED, b.addr(slots, 8), b.special("laneid"), type="b32")
  b(isa.RET)
  assert assemble(m.render(), "sm_90a").smem == 640


@pytest.mark.parametrize(("row", "bound", "swapped"), [(isa.MIN, 1, 1), (isa.MIN, -3, 0), (isa.MAX, 3, 3)])
def test_a_maximum_with_0_comes_before_the_bound_that_it_follows(row, bound, swapped):
  """ptxas 13.0 made max(min(x, 1), 0), compared with 1, into a VIMNMX.RELU whose predicate is wrong on an H200."""
  e = Module().entry("k", [], 32)
  b = e.builder()
  x = b.special("tid.x")
  limited = b.new(row, x, bound, type="s32")
  b.new(isa.MAX, limited, 0, type="s32")
  first, second = list(e.instructions())[-2:]
  assert first.text() == f"max.s32 {first.operands[0]}, {x}, 0;"
  assert second.text().startswith(row.opcode) and second.operands[1:] == (first.operands[0], swapped)


def test_a_maximum_with_0_stays_where_nothing_is_known_of_its_operand():
  e = Module().entry("k", [], 32)
  b = e.builder()
  x, y = b.special("tid.x"), b.special("ctaid.x")
  limited = b.new(isa.MIN, x, y, type="s32")
  b.new(isa.MAX, limited, 0, type="s32")
  narrow = b.new(isa.MIN, x, 1, type="s32")
  b(isa.MOV, x, 7, type="b32")                             # min(x, 1) is of what x was
  b.new(isa.MAX, narrow, 0, type="s32")
  texts = [i.text() for i in e.instructions()]
  assert [t for t in texts if t.startswith("max")] == [f"max.s32 %r3, {limited}, 0;", f"max.s32 %r5, {narrow}, 0;"]


def test_registers_are_numbered_by_class_in_order_of_creation():
  b = Module().entry("k", [], 32).builder()
  made = [b.reg(cls) for cls in ("b32", "f32", "b32", "pred", "b64", "b16", "f64", "b32")]
  assert list(map(repr, made)) == ["%r0", "%f0", "%r1", "%p0", "%rd0", "%h0", "%fd0", "%r2"]


def test_new_returns_a_register_a_list_or_a_tuple_by_the_destinations():
  b = Module().entry("k", [], 32).builder()
  base = b.reg("b32")
  assert b.new(isa.ADD, base, 1, type="s32").cls == "b32"
  assert [r.cls for r in b.new(isa.LD_SHARED, b.addr(base), type="f32", vec="v4")] == ["f32"] * 4
  d, p = b.new(isa.SHFL_P, base, 1, 31, -1, mode="bfly")
  assert (d.cls, p.cls) == ("b32", "pred")
  assert b.new(isa.MUL_WIDE, base, 4, type="u32").cls == "b64"
  assert b.special("clock64").cls == "b64"


def test_each_instruction_carries_the_location_it_was_built_under():
  m = Module()
  e = m.entry("k", [], 32)
  b = e.builder()
  with b.at("outer"):
    b(isa.BAR_SYNC_ALL, 0)
    with b.at("inner"):
      b(isa.BAR_SYNC_ALL, 0)
    b(isa.BAR_SYNC_ALL, 0)
  b(isa.RET)
  assert [i.loc for i in e.instructions()] == ["outer", "inner", "outer", None]
  lines = m.lines()
  assert [loc for line, loc in lines if "bar.sync" in line] == ["outer", "inner", "outer"]
  assert m.render() == "\n".join(line for line, _ in lines) + "\n"


def test_line_tables_name_the_python_file_and_line():
  m = Module()
  b = m.entry("k", [], 32).builder()
  loc = user_loc()
  with b.at(loc):
    b(isa.BAR_SYNC_ALL, 0)
    b(isa.BAR_SYNC_ALL, 0)
  b(isa.RET)
  text = m.render(lineinfo=True)
  assert f'.file 1 "{__file__}"' in text
  assert text.count(f".loc 1 {loc.line} ") == 1
  assert ".loc" not in m.render()
  image = assemble(text, "sm_90a", AssembleOptions(lineinfo=True)).image
  assert b"module_test.py" in image
  assert b"module_test.py" not in assemble(m.render(), "sm_90a").image


def test_an_unknown_parameter_is_a_fault():
  with pytest.raises(PtxError, match="no parameter 'z'"):
    small().entries[0].param("z")


@pytest.mark.parametrize("subject", [module, instr, registers], ids=lambda m: m.__name__)
def test_examples_in_docstrings_hold(subject):
  result = doctest.testmod(subject)
  assert result.failed == 0, sys.stderr
