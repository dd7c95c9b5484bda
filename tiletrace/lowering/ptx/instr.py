"""The row type of the PTX instruction table, and the instruction made from a row.

A row is one syntax shape of the PTX ISA. Its template is the opcode with the modifiers in print order, its operand
string is the operand list in print order:

  LD_SHARED = row("ld.shared.{vec}.{type}", "=d:~type*vec, [a:b32]", DATA, vec="- v2 v4", type="b32 f32 ...")

* `{name}` is a modifier; its choices are separated by spaces, and `-` (nothing is printed) makes it optional.
* `name:type` is an operand. The type is a PTX type, or a modifier or derived name that stands for one.
  `=` marks a destination, `+` one that is read and written. `!` forbids literals, `?` allows them although the type
  has none. `~` takes registers wider than the type, `^` only those of the natural class.
* `*n` is a vector of n in braces, where n is a number, a modifier (`v4`, `x4`, `3d`) or a derived name.
* `[name:type]` is an address whose base register has that type (b32: shared, b64: global or generic).
* `lo..hi` and `4/8/16` are integer literals in that range or set; `label`, `sreg` and `symbol` are themselves.
* Other punctuation is printed as it stands: `_, [a:b32]`, `[map:b64, c:s32*dim]`, `_|=p:pred`.
"""
from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tiletrace.lowering.ptx.registers import (
  SPECIAL_REGISTERS,
  Addr,
  Label,
  Operand,
  OperandLike,
  Operands,
  Reg,
  Special,
  Symbol,
  float_literal,
  int_literal,
)

Mods = Mapping[str, str]

# Type -> register classes that may hold it, the natural one first (PTX ISA section 9.4.1: bit-size types agree with
# every type of their size).
_CLASSES = {
    "pred": ("pred",),
    **dict.fromkeys(("b8", "u8", "s8", "b16", "u16", "s16", "f16", "bf16"), ("b16",)),
    **dict.fromkeys(("u32", "s32", "f16x2", "bf16x2"), ("b32",)),
    "b32": ("b32", "f32"), "f32": ("f32", "b32"),
    **dict.fromkeys(("u64", "s64"), ("b64",)),
    "b64": ("b64", "f64"), "f64": ("f64", "b64"),
}
_WIDER = {"b16": ("b16", "b32", "b64"), "b32": ("b32", "b64"), "b64": ("b64",)}
_NO_LITERAL = frozenset({"pred", "f16", "bf16", "f16x2", "bf16x2"})
_OPERAND = re.compile(r"(?P<before>[\[_|]*)(?P<role>[=+]?)(?P<name>\w+):(?P<flags>[?~!^]*)(?P<type>[\w./-]+)"
                      r"(?:\*(?P<count>\w+))?(?P<after>\]?)")


class PtxError(AssertionError):
  """An instruction that its row does not describe: a fault of the compiler, never of the user."""


@dataclasses.dataclass(frozen=True, slots=True)
class Slot:
  """One operand of a form, with its modifiers resolved.

  Attributes:
    role: "src", "dst" or "inout".
    kind: "value", "addr", "int", "label", "sreg" or "symbol".
    classes: register classes it takes (of the base, for an address), the natural one first.
    count: length of the vector, 0 for a scalar.
    values: what an "int" may be.
  """
  name: str
  role: str
  kind: str
  type: str
  classes: tuple[str, ...]
  count: int
  literals: bool
  before: str
  after: str
  values: range | tuple[int, ...] = ()

  @property
  def writes(self) -> bool:
    return self.role != "src"


class Form:
  """A row with its modifiers chosen; made once per combination."""
  __slots__ = ("arch", "destinations", "head", "mods", "plain", "row", "slots")

  def __init__(self, row: Instr, mods: dict[str, str], head: str, slots: tuple[Slot, ...], arch: str):
    self.row, self.mods, self.head, self.slots, self.arch = row, mods, head, slots, arch
    self.destinations = tuple(s for s in slots if s.role == "dst")
    self.plain = not any(s.before or s.after for s in slots)

  def __repr__(self) -> str:
    return self.head

  def check(self, operands: Sequence[OperandLike]) -> Operands:
    """The operands as stored in an `Inst`: vectors as tuples, names of special registers resolved."""
    slots = self.slots
    if len(operands) != len(slots):
      raise PtxError(f"{self.head} takes ({', '.join(s.name for s in slots)}), got {len(operands)} operands")
    return tuple([_check_operand(self.head, slot, x) for slot, x in zip(slots, operands)])

  def text(self, operands: Operands) -> str:
    if self.plain:
      out = ", ".join([_text(slot, x) for slot, x in zip(self.slots, operands)])
    else:
      out = ", ".join([f"{s.before}{_text(s, x)}{s.after}" for s, x in zip(self.slots, operands)])
      out = out.replace(", |", "|")
    return f"{self.head} {out};" if out else f"{self.head};"


@dataclasses.dataclass(frozen=True, eq=False)
class Instr:
  """One row of the instruction table.

  Attributes:
    template: opcode and modifiers in print order, e.g. "add.{rnd}.{ftz}.{type}".
    operands: the operand list in print order (module docstring).
    section: where the PTX ISA describes it (numbers as of version 8.6).
    mods: modifier -> choices; "" where it may be absent.
    arch: the lowest target that accepts it.
    floors: modifier value -> a higher target.
    derive: modifiers -> further names for types and counts; "arch" is a higher target.
    legal: modifiers -> whether the ISA has that combination.
  """
  template: str
  operands: str
  section: str
  mods: Mapping[str, tuple[str, ...]]
  arch: str
  floors: Mapping[str, str]
  derive: Callable[[Mods], Mapping[str, str | int]] | None
  legal: Callable[[Mods], bool] | None
  _forms: dict[tuple[tuple[str, str], ...], Form] = dataclasses.field(default_factory=dict, repr=False)

  def __repr__(self) -> str:
    return self.template

  @property
  def opcode(self) -> str:
    """The template up to the first modifier: "ld.global"."""
    return self.template.partition(".{")[0]

  def form(self, **mods: str) -> Form:
    """The row with these modifiers.

    Raises:
      PtxError: an unknown modifier or value, a missing one, or a combination that the ISA does not have.
    """
    key = tuple(mods.items())
    form = self._forms.get(key)
    if form is None:
      chosen = self._choose(mods)
      canonical = tuple(chosen.items())
      form = self._forms.get(canonical) or self._make(chosen)
      self._forms[key] = self._forms[canonical] = form
    return form

  def is_legal(self, mods: Mods) -> bool:
    return self.legal is None or self.legal(mods)

  def _choose(self, mods: Mods) -> dict[str, str]:
    for name in mods:
      if name not in self.mods:
        raise PtxError(f"{self} has no modifier {name!r}; it has {', '.join(self.mods) or 'none'}")
    chosen = {}
    for name, choices in self.mods.items():
      value = mods.get(name, "" if "" in choices else choices[0] if len(choices) == 1 else None)
      if value not in choices:
        raise PtxError(f"{self}: {name} must be one of {' '.join(c or '-' for c in choices)}, got {value!r}")
      chosen[name] = value
    if not self.is_legal(chosen):
      raise PtxError(f"{self}: the ISA has no such combination: {chosen}")
    return chosen

  def _make(self, mods: dict[str, str]) -> Form:
    parts = [mods[p[1:-1]] if p.startswith("{") else p for p in self.template.split(".")]
    names = {**mods, **(self.derive(mods) if self.derive else {})}
    slots = _slots(self.operands, names)
    arch = max([self.arch, str(names.get("arch", "")), *(self.floors.get(v, "") for v in mods.values())])
    return Form(self, mods, ".".join(p for p in parts if p), slots, arch)


def row(template: str, operands: str, section: str, *, arch: str = "sm_80", floors: Mapping[str, str] | None = None,
        derive: Callable[[Mods], Mapping[str, str | int]] | None = None,
        legal: Callable[[Mods], bool] | None = None, **mods: str) -> Instr:
  """A row from its compact notation (module docstring)."""
  table = {name: tuple("" if c == "-" else c for c in choices.split()) for name, choices in mods.items()}
  used = re.findall(r"\{(\w+)\}", template)
  assert sorted(used) == sorted(table), f"{template}: modifiers {used} and choices {list(table)} differ"
  return Instr(template, operands, section, {name: table[name] for name in used}, arch, floors or {}, derive, legal)


class Inst:
  """An instruction: a form, its operands (vectors are tuples), a guard, and the source location it came from."""
  __slots__ = ("form", "loc", "negate", "operands", "pred")

  def __init__(self, form: Form, operands: Operands, pred: Reg | None = None, negate: bool = False, loc: Any = None):
    self.form, self.operands, self.pred, self.negate, self.loc = form, operands, pred, negate, loc

  @property
  def row(self) -> Instr:
    return self.form.row

  @property
  def mods(self) -> Mods:
    return self.form.mods

  def text(self) -> str:
    """The instruction as PTX, e.g. "@!%p0 bra $done_1;"."""
    if self.pred is None:
      return self.form.text(self.operands)
    return f"@{'!' if self.negate else ''}{self.pred.name} {self.form.text(self.operands)}"

  __repr__ = text

  def reads(self) -> list[Reg]:
    """Registers read, the guard and the bases of addresses included."""
    out = [] if self.pred is None else [self.pred]
    for slot, x in zip(self.form.slots, self.operands):
      if slot.role != "dst":
        out += _registers(x)
    return out

  def writes(self) -> list[Reg]:
    """Registers written."""
    return [r for slot, x in zip(self.form.slots, self.operands) if slot.role != "src" for r in _registers(x)]


def _registers(x: Operand | tuple[Operand, ...]) -> list[Reg]:
  if isinstance(x, Reg):
    return [x]
  if isinstance(x, tuple):
    return [r for r in x if isinstance(r, Reg)]
  return [x.base] if isinstance(x, Addr) and isinstance(x.base, Reg) else []


def _slots(operands: str, names: Mapping[str, str | int]) -> tuple[Slot, ...]:
  slots, literal = [], ""
  for text in operands.split(", ") if operands else ():
    if text == "_":   # the sink: printed, never given
      literal = "_, "
      continue
    match = _OPERAND.fullmatch(text)
    assert match, f"{operands!r}: cannot read {text!r}"
    slots.append(_slot(match, literal, names))
    literal = ""
  return tuple(slots)


def _slot(match: re.Match[str], literal: str, names: Mapping[str, str | int]) -> Slot:
  role = {"=": "dst", "+": "inout", "": "src"}[match["role"]]
  kind, flags, values = "value", match["flags"], ()
  type_ = str(names.get(match["type"], match["type"]))
  if type_.startswith("~"):      # a derived type may bring the flag along
    flags, type_ = flags + "~", type_[1:]
  before, after = match["before"], match["after"]
  if before == "[" and after:
    kind, before, after = "addr", "", ""
  elif type_ in ("label", "sreg", "symbol"):
    kind = type_
  elif ".." in type_:
    low, high = type_.split("..")
    kind, values = "int", range(int(low), int(high) + 1)
  elif "/" in type_ or type_.isdigit():
    kind, values = "int", tuple(int(v) for v in type_.split("/"))
  classes: tuple[str, ...] = _CLASSES[type_] if kind in ("value", "addr") else ()
  if "^" in flags:
    classes = classes[:1]
  elif classes and "~" in flags:
    classes += tuple(c for c in _WIDER.get(classes[0], ()) if c not in classes)
  literals = role == "src" and "!" not in flags and (type_ not in _NO_LITERAL or "?" in flags)
  count = _count(match["count"], names)
  return Slot(match["name"], role, kind, type_, classes, count, literals, literal + before, after, values)


def _count(text: str | None, names: Mapping[str, str | int]) -> int:
  """`v4`, `x4`, `3d`, 4 -> 4; no vector -> 0. TMA's one coordinate is a vector of one."""
  if text is None:
    return 0
  value = str(names.get(text, text))
  return int(value.strip("vxd") or 0)


def _check_operand(head: str, slot: Slot, x: OperandLike) -> Operand | tuple[Operand, ...]:
  if slot.kind == "value":
    if slot.count == 0:
      if type(x) is Reg and x.cls in slot.classes:
        return x
      return _check_value(head, slot, x)
    if not isinstance(x, (tuple, list)) or len(x) != slot.count:
      raise PtxError(f"{head}: {slot.name} is a vector of {slot.count}, got {x!r}")
    classes = slot.classes
    return tuple([r if type(r) is Reg and r.cls in classes else _check_value(head, slot, r) for r in x])
  if slot.kind == "addr":
    if type(x) is Addr:
      base = x.base
      space = "param" if head.startswith("ld.param") else "shared" if slot.type == "b32" else ""
      if base.cls in slot.classes if isinstance(base, Reg) else base.space == space:
        return x
    raise PtxError(f"{head}: {slot.name} is an address with a base of class {slot.classes}, got {x!r}")
  if slot.kind == "int":
    if type(x) is int and x in slot.values:
      return x
    raise PtxError(f"{head}: {slot.name} must be in {slot.values}, got {x!r}")
  if slot.kind == "label" and isinstance(x, Label):
    return x
  if slot.kind == "symbol" and isinstance(x, Symbol):
    return x
  if slot.kind == "sreg" and SPECIAL_REGISTERS.get(x if isinstance(x, str) else "") == head.split(".")[1]:
    return Special(str(x))
  raise PtxError(f"{head}: {slot.name} is a {slot.kind}, got {x!r}")


def _check_value(head: str, slot: Slot, x: Any) -> Operand:
  type_ = slot.type
  if slot.literals and isinstance(x, (int, float)) and not isinstance(x, bool):
    if type_ in ("f32", "f64"):
      return float(x)
    if type_ == "pred" and x in (0, 1):
      return x
    if isinstance(x, float) and type_ in ("b32", "b64"):
      return x
    if isinstance(x, int) and type_[0] in "bus":
      bits = int(type_[1:])
      if -(1 << (bits - 1)) <= x < 1 << bits:
        return x
  raise PtxError(f"{head}: {slot.name} is a {type_} {'or literal ' if slot.literals else ''}in one of {slot.classes}, "
                 f"got {x!r}{f' of class {x.cls}' if isinstance(x, Reg) else ''}")


def _text(slot: Slot, x: Operand | tuple[Operand, ...]) -> str:
  if type(x) is Reg:
    return x.name
  if type(x) is tuple:
    return f"{{{', '.join([r.name if type(r) is Reg else _text(slot, r) for r in x])}}}"  # type: ignore[union-attr]
  if type(x) is int:
    return int_literal(x)
  if type(x) is float:
    return float_literal(x, "f64" if slot.type in ("f64", "b64") else "f32")
  return str(x) if not isinstance(x, Label) else x.name
