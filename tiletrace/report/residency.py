"""What a CTA holds: shared memory over time, registers by role, and how many CTAs share an SM."""
from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from tiletrace.core.effects import Access, RefEffect
from tiletrace.core.graph import Eqn, Var
from tiletrace.core.rules import effects
from tiletrace.core.types import BarrierType, RefType, Space
from tiletrace.lowering.assemble import Cubin
from tiletrace.lowering.pipeline import Lowering
from tiletrace.lowering.schedule.resources import BARRIER_BYTES, buffer_bytes
from tiletrace.lowering.words import num_words
from tiletrace.report.sites import WARP, Role, Site

_REGISTER_UNIT = 8      # registers of a thread: a warp is given multiples of 256 (CUDA occupancy calculator)


def shared_memory(lowering: Lowering, places: Sequence[Site]) -> dict[str, Any]:
  """Every buffer's bytes, and when it is written and read.

  Time is the order of the program's lines that touch shared memory: what role by role is one after the other runs
  side by side. A buffer lives from its first to its last access; one that a loop touches, as long as the loop; barriers
  live all the time.
  """
  program = lowering.program
  touched = [(s, what) for s in places if (what := _shared_effects(s.eqn))]
  steps: list[tuple[Role, str]] = []
  columns: list[int] = []
  loops: dict[Eqn, list[int]] = {}
  for s, _ in touched:
    step = s.role, s.eqn.loc.short()
    if not steps or steps[-1] != step:
      steps.append(step)
    columns.append(len(steps) - 1)
    if s.loop is not None:
      loops.setdefault(s.loop, []).append(columns[-1])
  buffers = []
  for var, offset in sorted(program.offsets.items(), key=lambda item: item[1]):
    uses: dict[int, str] = {}
    live: list[int] = []
    for (s, what), here in zip(touched, columns):
      for root, access in what:
        if root is var:
          uses[here] = "".join(sorted({*uses.get(here, ""), access.value[0]}))
          live += [here] if s.loop is None else loops[s.loop]
    if isinstance(var.type, BarrierType):
      nbytes, live = BARRIER_BYTES * var.type.count, list(range(len(steps)))
    else:
      nbytes = buffer_bytes(var, program.layouts)
    buffers.append({"buffer": var.hint or "buffer", "type": str(var.type), "offset": offset, "bytes": nbytes,
                    "uses": [{"step": i, "access": {"r": "read", "w": "write"}.get(a, "read and write")}
                             for i, a in sorted(uses.items())],
                    "live": [min(live), max(live)] if live else None})
  peak = max((sum(b["bytes"] for b in buffers if b["live"] and b["live"][0] <= i <= b["live"][1])
              for i in range(len(steps))), default=0)
  return {"bytes": program.smem_bytes, "buffers": buffers, "live_peak_bytes": peak,
          "steps": [{"role": str(role), "line": line} for role, line in steps]}


def _shared_effects(eqn: Eqn) -> list[tuple[Var, Access]]:
  out = []
  for effect in effects(eqn) if not eqn.blocks else ():
    if isinstance(effect, RefEffect):
      ref = eqn.refs[effect.operand]
      if ref.type.space is Space.SHARED:
        out.append((ref.root, effect.access))
  return out


def registers(lowering: Lowering, places: Sequence[Site], cubin: Cubin | None) -> dict[str, Any]:
  """Registers of a thread: what a launch can give, what ptxas took, and by role its budget and its fragments."""
  program = lowering.program
  most = min(255, lowering.target.registers // program.threads // _REGISTER_UNIT * _REGISTER_UNIT)
  fragments: dict[Role, list[dict[str, Any]]] = {}
  for s in places:
    own = fragments.setdefault(s.role, []) if s.eqn.primitive.name not in ("alloc_barrier", "warpgroup") else []
    for var in s.eqn.outvars:
      if isinstance(var.type, RefType) and var.type.space is Space.FRAGMENT and var in program.layouts:
        own.append({"fragment": var.hint or "fragment", "type": str(var.type),
                    "registers": num_words(var.dtype, program.layouts[var].extent("reg"))})
  roles = [{"role": str(role), "threads": role.threads, "budget": role.registers, "fragments": held,
            "fragment_registers": sum(f["registers"] for f in held)}
           for role, held in fragments.items() if held or role.registers is not None or len(fragments) == 1]
  out: dict[str, Any] = {"at_most_at_entry": most, "roles": roles}
  if cubin is not None:
    out |= {"at_entry": cubin.registers, "spill_stores": cubin.spill_stores, "spill_loads": cubin.spill_loads,
            "stack": cubin.stack}
  return out


def occupancy(lowering: Lowering, cubin: Cubin | None) -> dict[str, Any]:
  """CTAs that an SM holds side by side, what allows no more, and how the grid fills the GPU.

  Without a cubin registers are not known and do not count. Limits: CUDA Programming Guide, table of compute
  capabilities.
  """
  target, threads = lowering.target, lowering.program.threads
  per_sm = {"shared memory": target.sm_smem_bytes // (lowering.program.smem_bytes + target.reserved_smem_bytes),
            "threads": target.sm_threads // threads, "CTAs": target.sm_ctas}
  if cubin is not None:
    each = -(-cubin.registers // _REGISTER_UNIT) * _REGISTER_UNIT * threads
    per_sm["registers"] = target.registers // each if each else target.sm_ctas
  limit = min(per_sm, key=lambda k: per_sm[k])
  ctas = per_sm[limit]
  programs, options = math.prod(lowering.graph.options.grid), lowering.graph.options
  slots = max(1, ctas * target.sm_count // options.cluster_size * options.cluster_size)
  launched = min(programs, slots) if options.persistent else programs
  waves = programs / slots
  return {"ctas_per_sm": ctas, "limited_by": limit, "limits": per_sm, "registers_known": cubin is not None,
          "warps_per_sm": ctas * threads // WARP, "most_warps_per_sm": target.sm_threads // WARP,
          "programs": programs, "ctas": launched, "persistent": options.persistent, "waves": waves,
          "busy": programs / (math.ceil(waves) * slots) if programs else 0.0}
