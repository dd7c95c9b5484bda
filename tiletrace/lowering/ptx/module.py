"""A PTX module: entries of structured instructions, rendered to text at the end.

>>> m = Module(target="sm_90a")
>>> e = m.entry("fill", params=[Param("out", "u64")], threads=128)
>>> b = e.builder()
>>> out = b.new(isa.LD_PARAM, b.addr(e.param("out")), type="u64")
>>> tid = b.special("tid.x")
>>> address = b.new(isa.MAD_WIDE, tid, 4, out, type="u32")
>>> b(isa.ST_GLOBAL, b.addr(address), 1.0, type="f32")
>>> b(isa.RET)
>>> text = m.render()
"""
from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

from tiletrace.lowering.ptx import isa
from tiletrace.lowering.ptx.instr import Form, Inst, Instr, PtxError
from tiletrace.lowering.ptx.registers import (
  REGISTER_PREFIX,
  SPECIAL_REGISTERS,
  Addr,
  Label,
  OperandLike,
  Reg,
  Symbol,
)

_LOOK_BACK = 16


@dataclasses.dataclass(frozen=True, slots=True)
class Param:
  """A kernel parameter: a PTX type such as "u64", or "tensormap" (128 bytes, aligned to 64)."""
  name: str
  type: str

  def __str__(self) -> str:
    if self.type == "tensormap":
      return f".param .align 64 .b8 {self.name}[128]"
    return f".param .{self.type} {self.name}"


@dataclasses.dataclass(frozen=True, slots=True)
class Note:
  """A line of text in a body: "pragma", "comment" or "section"."""
  kind: str
  text: str


Item = Inst | Label | Note


class Entry:
  """A kernel.

  Attributes:
    threads: threads of a CTA (.reqntid), which setmaxnreg needs together with `min_ctas` (ptxas C7508).
    min_ctas: .minnctapersm, or None.
    cluster: CTAs of a cluster per axis, or None.
    max_registers: .maxnreg, or None.
    body: instructions, labels and notes in program order.
    registers: class -> registers, in order of creation.
  """

  def __init__(self, name: str, params: Sequence[Param], threads: int, min_ctas: int | None,
               cluster: tuple[int, ...] | None, max_registers: int | None):
    self.name, self.params, self.threads, self.min_ctas = name, tuple(params), threads, min_ctas
    self.cluster, self.max_registers = cluster, max_registers
    self.body: list[Item] = []
    self.registers: dict[str, list[Reg]] = {cls: [] for cls in REGISTER_PREFIX}
    self.labels = 0

  def param(self, name: str) -> Symbol:
    """The parameter as an operand: `b.addr(e.param("a"))`, or its address by MOV_SYMBOL and CVTA."""
    if all(p.name != name for p in self.params):
      raise PtxError(f"{self.name} has no parameter {name!r}")
    return Symbol(name, "param")

  def builder(self) -> Builder:
    return Builder(self)

  def instructions(self) -> Iterator[Inst]:
    return (item for item in self.body if isinstance(item, Inst))


class Builder:
  """Appends to an entry's body."""

  def __init__(self, entry: Entry):
    self.entry, self.loc = entry, None

  def reg(self, cls: str) -> Reg:
    """A new register of class pred, b16, b32, b64, f32 or f64."""
    regs = self.entry.registers[cls]
    reg = Reg(cls, len(regs))
    regs.append(reg)
    return reg

  def regs(self, cls: str, n: int) -> list[Reg]:
    return [self.reg(cls) for _ in range(n)]

  def __call__(self, row: Instr | Form, *operands: OperandLike, pred: Reg | None = None, negate: bool = False,
               **mods: str) -> None:
    """Appends an instruction; Python ints and floats are literals. `row` may have its modifiers already.

    Raises:
      PtxError: operands or modifiers that the row does not take.
    """
    form = _form(row, mods)
    if pred is not None and pred.cls != "pred":
      raise PtxError(f"{form}: the guard {pred} is no predicate")
    inst = Inst(form, form.check(operands), pred, negate, self.loc)
    if _is_relu(inst) and (bound := self._bounded(inst.operands[1])) is not None:
      x, limit = bound.operands[1:]
      tmp = self.reg("b32")
      self.entry.body.append(Inst(form, (tmp, x, 0), pred, negate, self.loc))
      inst = Inst(bound.form, (inst.operands[0], tmp, max(limit, 0)), pred, negate, self.loc)  # type: ignore[type-var]
    self.entry.body.append(inst)

  def _bounded(self, x: Any) -> Inst | None:
    """The min or max with a literal that made a register's value a few instructions ago, of what is still there."""
    redefined: set[Any] = set()
    for item in self.entry.body[:-_LOOK_BACK:-1]:
      if not isinstance(item, Inst):
        return None
      if x in item.writes():
        bounds = item.form.row in (isa.MIN, isa.MAX) and item.form.mods.get("type") == "s32" and item.pred is None
        whole = bounds and isinstance(item.operands[2], int) and isinstance(item.operands[1], Reg)
        return item if whole and item.operands[1] not in redefined | {x} else None
      redefined |= set(item.writes())
    return None

  def new(self, row: Instr | Form, *operands: OperandLike, pred: Reg | None = None, negate: bool = False,
          **mods: str) -> Any:
    """Like calling, with new destination registers of the row's natural class, which are returned.

    One destination gives a register, or a list where it is a vector; several give a tuple of these.
    """
    form = _form(row, mods)
    made = [self.regs(s.classes[0], s.count) if s.count else self.reg(s.classes[0]) for s in form.destinations]
    if not made:
      raise PtxError(f"{form} has no destination")
    given, fresh = iter(operands), iter(made)
    try:
      every = [next(fresh) if s.role == "dst" else next(given) for s in form.slots]
    except StopIteration:
      raise PtxError(f"{form} takes {len(form.slots) - len(made)} sources, got {len(operands)}") from None
    self(form, *every, *given, pred=pred, negate=negate)
    return made[0] if len(made) == 1 else tuple(made)

  def special(self, name: str) -> Reg:
    """A special register's value, e.g. `b.special("tid.x")`, in a new register."""
    return self.new(isa.MOV_SREG, name, type=SPECIAL_REGISTERS[name])

  def addr(self, base: Reg | Symbol, offset: int = 0) -> Addr:
    return Addr(base, offset)

  def label(self, name: str) -> Label:
    """A label with a name of its own, not yet placed."""
    label = Label(f"${name}_{self.entry.labels}")
    self.entry.labels += 1
    return label

  def place(self, label: Label) -> None:
    self.entry.body.append(label)

  def pragma(self, text: str) -> None:
    """For what follows: `nounroll` stands directly before the loop's label."""
    self.entry.body.append(Note("pragma", text))

  def comment(self, text: str) -> None:
    self.entry.body.append(Note("comment", text))

  def section(self, text: str) -> None:
    self.entry.body.append(Note("section", text))

  @contextlib.contextmanager
  def at(self, loc: Any) -> Iterator[None]:
    """Instructions built inside carry `loc`."""
    before, self.loc = self.loc, loc
    try:
      yield
    finally:
      self.loc = before


def _is_relu(inst: Inst) -> bool:
  """max(x, 0) of integers. After a min or max with a literal, ptxas 13.0 (no longer 13.5) makes one instruction of
  both with a predicate for `== literal`, which two of its parts write: wrong. The other way round it does not."""
  return inst.form.row is isa.MAX and inst.form.mods.get("type") == "s32" and inst.operands[2] == 0


def _form(row: Instr | Form, mods: dict[str, str]) -> Form:
  if isinstance(row, Form):
    assert not mods, f"{row} has its modifiers already, got {mods}"
    return row
  return row.form(**mods)


@dataclasses.dataclass(frozen=True, slots=True)
class Shared:
  """A shared variable; `nbytes` None is the dynamic one, whose size the launch gives."""
  name: str
  align: int
  nbytes: int | None = None

  def __str__(self) -> str:
    if self.nbytes is None:
      return f".extern .shared .align {self.align} .b8 {self.name}[];"
    return f".shared .align {self.align} .b8 {self.name}[{self.nbytes}];"


@dataclasses.dataclass(frozen=True, slots=True)
class Constants:
  """A table of 32-bit integers in global memory, which nothing writes."""
  name: str
  values: tuple[int, ...]

  def __str__(self) -> str:
    return f".global .align 4 .s32 {self.name}[{len(self.values)}] = {{{', '.join(map(str, self.values))}}};"


class Module:
  """Entries, tables and shared variables of one PTX file.

  Args:
    target: "sm_90a"; the suffix is needed by wgmma and setmaxnreg.
    version: PTX ISA version, as old as the rows allow, so that older assemblers and drivers take it.
  """

  def __init__(self, target: str = "sm_90a", version: str = "8.6"):
    self.target, self.version = target, version
    self.entries: list[Entry] = []
    self.shared: list[Shared] = []
    self.constants: list[Constants] = []

  def entry(self, name: str, params: Sequence[Param], threads: int, *, min_ctas: int | None = None,
            cluster: tuple[int, ...] | None = None, max_registers: int | None = None) -> Entry:
    entry = Entry(name, params, threads, min_ctas, cluster, max_registers)
    self.entries.append(entry)
    return entry

  def dynamic_shared(self, name: str, *, align: int) -> Symbol:
    self.shared.append(Shared(name, align))
    return Symbol(name, "shared")

  def static_shared(self, name: str, nbytes: int, *, align: int) -> Symbol:
    self.shared.append(Shared(name, align, nbytes))
    return Symbol(name, "shared")

  def table(self, values: tuple[int, ...]) -> Symbol:
    """The table with these values, one for all who ask."""
    found = next((c for c in self.constants if c.values == values), None)
    if found is None:
      found = Constants(f"table{len(self.constants)}", values)
      self.constants.append(found)
    return Symbol(found.name, "global")

  def render(self, *, debug: bool = False, lineinfo: bool = False) -> str:
    """The PTX text; the same module gives the same bytes.

    Args:
      debug: with comments and sections.
      lineinfo: with .file and .loc from each instruction's `loc` (`filename` and `line`).
    """
    return "\n".join(line for line, _ in self.lines(debug=debug, lineinfo=lineinfo)) + "\n"

  def lines(self, *, debug: bool = False, lineinfo: bool = False) -> list[tuple[str, Any]]:
    """Each line of `render` with the location of the instruction on it, or None."""
    files = self._files() if lineinfo else {}
    out: list[tuple[str, Any]] = [(f".version {self.version}", None), (f".target {self.target}", None),
                                  (".address_size 64", None)]
    out += [(f'.file {number} "{name}"', None) for name, number in files.items()]
    out += [(str(variable), None) for variable in (*self.constants, *self.shared)]
    for entry in self.entries:
      out += [(line, None) for line in _head(entry)]
      _body(entry, out, files, debug)
      out.append(("}", None))
    return out

  def _files(self) -> dict[str, int]:
    names = (i.loc.filename for e in self.entries for i in e.instructions() if i.loc is not None)
    return {name: number for number, name in enumerate(dict.fromkeys(names), 1)}


def _head(entry: Entry) -> list[str]:
  lines = ["", f".visible .entry {entry.name}("]
  lines += [f"  {p}{',' if p is not entry.params[-1] else ''}" for p in entry.params]
  lines += [")", f".reqntid {entry.threads}, 1, 1"]
  if entry.min_ctas is not None:
    lines.append(f".minnctapersm {entry.min_ctas}")
  if entry.max_registers is not None:
    lines.append(f".maxnreg {entry.max_registers}")
  if entry.cluster is not None:
    lines += [".explicitcluster", f".reqnctapercluster {', '.join(map(str, (*entry.cluster, 1, 1)[:3]))}"]
  lines.append("{")
  lines += [f"  .reg .{cls} {REGISTER_PREFIX[cls]}<{len(regs)}>;" for cls, regs in entry.registers.items() if regs]
  return lines


def _body(entry: Entry, out: list[tuple[str, Any]], files: dict[str, int], debug: bool) -> None:
  at = None
  for item in entry.body:
    if isinstance(item, Inst):
      loc = item.loc
      if files and loc is not None and (loc.filename, loc.line) != at:
        at = (loc.filename, loc.line)
        out.append((f"  .loc {files[loc.filename]} {loc.line} {loc.span.column + 1}", None))
      out.append((f"  {item.text()}", loc))
    elif isinstance(item, Label):
      out.append((f"{item.name}:", None))
    elif item.kind == "pragma":
      out.append((f'  .pragma "{item.text}";', None))
    elif debug:
      out.append((f"  // {item.text}" if item.kind == "comment" else f"  // ---- {item.text}", None))
