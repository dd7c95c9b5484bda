"""Which loads of a fragment need registers of their own: those that are read after a later write to the fragment.

`ref[...]` is a snapshot, and a fragment lives in the same registers for its whole life. A load is therefore the
registers themselves, until a write comes between the load and one of its uses (or of a use of what shares them).
"""
from __future__ import annotations

from tiletrace.core.effects import Access, RefEffect
from tiletrace.core.graph import Block, Eqn, Var, walk
from tiletrace.core.rules import effects
from tiletrace.core.types import RefType, Space
from tiletrace.lowering.schedule.asynchrony import RENAMES


def written_fragments(eqn: Eqn) -> set[Var]:
  """Fragments that an equation, blocks included, writes."""
  out = set()
  for e in (eqn, *(i for b in eqn.blocks for i in walk(b))):
    for effect in effects(e) if not e.blocks else ():
      if isinstance(effect, RefEffect) and effect.access is Access.WRITE:
        root = e.refs[effect.operand].root
        if isinstance(root.type, RefType) and root.type.space is Space.FRAGMENT:
          out.add(root)
  return out


def _uses(eqn: Eqn) -> set[Var]:
  used = {a for a in eqn.invars if isinstance(a, Var)}
  for block in eqn.blocks:
    used |= {a for a in block.outs if isinstance(a, Var)}
    for inner in block.eqns:
      used |= _uses(inner)
  return used


def loads_to_copy(block: Block) -> set[Eqn]:
  """The fragment loads, in this block and those inside it, that need a copy."""
  out: set[Eqn] = set()
  writes = [written_fragments(e) for e in block.eqns]
  uses = [_uses(e) for e in block.eqns]
  for p, eqn in enumerate(block.eqns):
    for inner in eqn.blocks:
      out |= loads_to_copy(inner)
    if eqn.primitive.name != "load" or not _is_fragment(eqn.refs[0].root):
      continue
    root, shared = eqn.refs[0].root, {eqn.outvars[0]}
    written = False
    for q in range(p + 1, len(block.eqns)):
      used = bool(shared & uses[q])
      if used and (written or (root in writes[q] and block.eqns[q].blocks)):
        out.add(eqn)
        break
      if used and block.eqns[q].primitive.name in RENAMES:
        shared |= set(block.eqns[q].outvars)
      written = written or root in writes[q]
    if written and shared & {a for a in block.outs if isinstance(a, Var)}:
      out.add(eqn)
  return out


def _is_fragment(root: Var) -> bool:
  return isinstance(root.type, RefType) and root.type.space is Space.FRAGMENT
