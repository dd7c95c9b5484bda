"""Every row of the instruction table, assembled by ptxas at the row's own arch floor."""
from __future__ import annotations

import itertools
import re
import subprocess

import pytest

from tiletrace.lowering.assemble import find_ptxas
from tiletrace.lowering.ptx import Inst, Label, Module, Symbol, isa
from tiletrace.lowering.ptx.instr import Form, Instr, PtxError, Slot
from tiletrace.lowering.ptx.module import Builder, Param
from tiletrace.lowering.ptx.registers import OperandLike

ARCHS = ("sm_80", "sm_89", "sm_90", "sm_90a")
MAX_FORMS = 400
VALUES = {"pred": 1, "f32": 0.5, "f64": -2.25}
NAMED = {"threads": 64, "size": 32, "parity": 1}


def forms(row: Instr) -> list[Form]:
  """Every legal combination; of a huge product, an even sample and the first with each choice of each modifier."""
  names = list(row.mods)
  every = [dict(zip(names, values)) for values in itertools.product(*row.mods.values())]
  legal = [m for m in every if row.is_legal(m)]
  chosen = legal[::max(1, len(legal) // MAX_FORMS)]
  for name in names:
    for value in row.mods[name]:
      chosen += [m for m in legal if m[name] == value][:1]
  return list(dict.fromkeys(row.form(**m) for m in chosen))


def operand(b: Builder, form: Form, slot: Slot, label: Label, smem: Symbol, literal: bool) -> OperandLike:
  match slot.kind:
    case "int":
      return slot.values[-1] if literal else slot.values[0]
    case "label":
      return label
    case "symbol":
      return smem
    case "sreg":
      return {"u32": "tid.x", "u64": "clock64"}[form.mods["type"]]
    case "addr" if form.row is isa.LD_PARAM:
      return b.addr(b.entry.param("x"), 16)
    case "addr":
      return b.addr(smem if literal and slot.type == "b32" else b.reg(slot.classes[0]), -16 if literal else 0)
  if literal and slot.literals:
    value: int | float = NAMED.get(slot.name) or VALUES.get(slot.type) or 3
    return [value] * slot.count if slot.count else value
  # The widest class that the slot takes in one run, the natural one in the other.
  cls = slot.classes[-1 if literal else 0]
  return b.regs(cls, slot.count) if slot.count else b.reg(cls)


def module(arch: str, literal: bool) -> Module:
  """One entry with every form whose floor is `arch`."""
  m = Module(target=arch)
  smem = m.dynamic_shared("smem", align=1024)
  e = m.entry("every_form", [Param("x", "tensormap")], 128, min_ctas=1 if arch == "sm_90a" else None)
  b = e.builder()
  for row in isa.ROWS.values():
    for form in forms(row):
      if form.arch == arch:
        label = b.label("next")
        operands = [operand(b, form, slot, label, smem, literal) for slot in form.slots]
        e.body.append(Inst(form, form.check(operands)))
        b.place(label)
  b(isa.RET)
  return m


@pytest.mark.parametrize("literal", [False, True], ids=["registers", "literals"])
@pytest.mark.parametrize("arch", ARCHS)
def test_ptxas_takes_every_form_at_its_own_arch_floor(arch, literal, tmp_path):
  text = module(arch, literal).render()
  path = tmp_path / "forms.ptx"
  path.write_text(text)
  done = subprocess.run([find_ptxas(), f"-arch={arch}", "-O0", path, "-o", tmp_path / "forms.cubin"],
                        capture_output=True, text=True, check=False)
  lines = text.splitlines()
  refused = [f"{lines[int(n) - 1]}: {why}" for n, why in re.findall(r"line (\d+); error\s*: (.*)", done.stderr)]
  assert not refused
  assert done.returncode == 0, done.stderr


def test_every_form_has_a_floor_that_is_certified():
  assert {form.arch for row in isa.ROWS.values() for form in forms(row)} == set(ARCHS)


def test_no_two_families_share_a_name():
  names = [name for family in isa.FAMILIES for name, value in vars(family).items() if isinstance(value, Instr)]
  assert len(names) == len(set(names)) == len(isa.ROWS) > 100
  assert all(getattr(isa, name) is row for name, row in isa.ROWS.items())


def test_no_syntax_shape_has_two_rows():
  shapes = [(row.template, row.operands, tuple(row.mods.items())) for row in isa.ROWS.values()]
  assert len(shapes) == len(set(shapes))


@pytest.mark.parametrize("row", isa.ROWS.values(), ids=isa.ROWS)
def test_row_cites_its_section_and_says_no_to_unknown_modifiers(row):
  assert re.match(r"9\.7\.\d+", row.section)
  with pytest.raises(PtxError, match="has no modifier 'nonsense'"):
    row.form(nonsense="x")


@pytest.mark.parametrize("row, mods", [
    (isa.ADD, {"type": "s32", "rnd": "rn"}),
    (isa.ADD, {"type": "bf16", "ftz": "ftz"}),
    (isa.CVT, {"to": "s32", "source": "f32"}),
    (isa.CVT, {"to": "f32", "source": "f16", "rnd": "rn"}),
    (isa.LD_GLOBAL, {"vec": "v4", "type": "b64"}),
    (isa.WGMMA_SS, {"shape": "m64n8k16", "d": "f16", "a": "bf16", "b": "bf16"}),
    (isa.ATOM, {"sem": "relaxed", "scope": "gpu", "space": "global", "op": "exch", "type": "u32"}),
])
def test_combinations_that_the_isa_lacks_are_refused(row, mods, tmp_path):
  with pytest.raises(PtxError, match="no such combination"):
    row.form(**mods)


@pytest.mark.parametrize("row, mods, shape", [
    (isa.WGMMA_SS, {"shape": "m64n256k16", "d": "f32", "a": "bf16", "b": "bf16"}, [128, 0, 0, 0, 0, 0, 0, 0]),
    (isa.WGMMA_RS, {"shape": "m64n96k16", "d": "f16", "a": "f16", "b": "f16"}, [24, 4, 0, 0, 0, 0, 0]),
    (isa.WGMMA_F8_SS, {"shape": "m64n128k32", "d": "f32", "a": "e4m3", "b": "e5m2"}, [64, 0, 0, 0, 0, 0]),
    (isa.MMA, {"shape": "m16n8k16", "d": "f32", "a": "bf16", "b": "bf16", "c": "f32"}, [4, 4, 2, 4]),
    (isa.MMA, {"shape": "m16n8k8", "d": "f16", "a": "f16", "b": "f16", "c": "f16"}, [2, 2, 1, 2]),
    (isa.MMA_TF32, {"shape": "m16n8k8"}, [4, 4, 2, 4]),
    (isa.LDMATRIX, {"num": "x4"}, [4, 0]),
    (isa.TMA_LOAD, {"dim": "3d"}, [0, 0, 3, 0]),
])
def test_vector_lengths_follow_the_shape(row, mods, shape):
  assert [slot.count for slot in row.form(**mods).slots] == shape
