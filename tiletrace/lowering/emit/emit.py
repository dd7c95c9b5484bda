"""A scheduled program to a ptx.Module: prologue, then the equations in order."""
from __future__ import annotations

import dataclasses

# The rules register themselves; this list of imports is the list of what can be emitted.
import tiletrace.lowering.emit.atomic
import tiletrace.lowering.emit.barrier
import tiletrace.lowering.emit.control
import tiletrace.lowering.emit.cumulative
import tiletrace.lowering.emit.debug
import tiletrace.lowering.emit.elementwise
import tiletrace.lowering.emit.gather
import tiletrace.lowering.emit.grid
import tiletrace.lowering.emit.memory
import tiletrace.lowering.emit.mma
import tiletrace.lowering.emit.mma_sync
import tiletrace.lowering.emit.prefetch
import tiletrace.lowering.emit.profile
import tiletrace.lowering.emit.reduce
import tiletrace.lowering.emit.relayout
import tiletrace.lowering.emit.roles
import tiletrace.lowering.emit.shape
import tiletrace.lowering.emit.tma
import tiletrace.lowering.emit.transcendental  # noqa: F401
from tiletrace.core.errors import LoweringError
from tiletrace.core.graph import walk
from tiletrace.core.ops.roles import warpgroup_p
from tiletrace.core.types import RefType
from tiletrace.lowering.emit.barrier import init_barriers, leave_cluster
from tiletrace.lowering.emit.context import WARPGROUP, EmitContext
from tiletrace.lowering.emit.profile import begin_profile
from tiletrace.lowering.emit.tensor_maps import TensorMap
from tiletrace.lowering.facts import Facts
from tiletrace.lowering.options import CompileOptions
from tiletrace.lowering.ptx import isa
from tiletrace.lowering.ptx.module import Entry, Module, Param
from tiletrace.lowering.schedule.leading import leading
from tiletrace.lowering.schedule.program import Program
from tiletrace.lowering.target import Target


@dataclasses.dataclass(frozen=True, slots=True)
class Emitted:
  """A module and what its launch needs: one pointer for each distinct reference, one i32 for each of the graph's
  size_names, then the tensor maps; `overlap`: it may start before the kernel before it has ended."""
  module: Module
  num_pointers: int
  tensor_maps: tuple[TensorMap, ...]
  overlap: bool


def emit(program: Program, options: CompileOptions) -> Emitted:
  """Renders a program. The parameters are the distinct references' addresses, the sizes that the call decides,
  then the tensor maps.

  Tensor maps are found while emitting the body, so the prologue that takes their addresses is put before it afterwards.

  Raises:
    LoweringError: several CTAs are to share an SM whose registers the roles of fewer take.
  """
  graph = program.graph
  budgets = [e for e in walk(graph.body) if e.primitive is warpgroup_p and e.params["regs"] is not None]
  taken = WARPGROUP * sum(e.params["count"] * e.params["regs"] for e in budgets)
  if taken * options.ctas_per_sm > program.target.registers:
    raise LoweringError(f"ctas_per_sm={options.ctas_per_sm}, but the roles of one CTA take {taken} registers of "
                        f"{program.target.registers}", loc=budgets[0].loc, hint="drop ctas_per_sm=, or regs=")
  module = Module(target=program.target.name)
  smem = module.dynamic_shared("smem", align=1024)
  entry = module.entry(graph.name, (), program.threads, min_ctas=options.ctas_per_sm,
                       cluster=graph.options.launch_cluster)
  ctx = EmitContext(graph, program.layouts, program.offsets, program.target, module, entry, smem, Facts(graph),
                    program.threads)
  roots = list(dict.fromkeys(graph.invars))
  names = graph.size_names
  entry.params = (*(Param(f"arg{i}", "u64") for i in range(len(roots))),
                  *(Param(f"size{i}", "u32") for i in range(len(names))))
  _pointers(ctx, entry, roots)
  ctx.sizes({name: ctx.b.new(isa.LD_PARAM, ctx.b.addr(entry.param(f"size{i}")), type="u32")
             for i, name in enumerate(names)})
  ctx.prologue()
  if program.offsets:
    ctx.smem_base()
  begin_profile(ctx)
  head = len(entry.body)
  overlap = options.overlap_launch and program.target.lacks(isa.GRIDDEPCONTROL.arch) is None
  if overlap:                        # the next kernel may come: it waits for all of this one
    ctx.cache_hints.clear()          # what the kernel before this one still writes is not read-only
    ctx.b(isa.GRIDDEPCONTROL, op="launch_dependents")
  init_barriers(ctx)
  first = leading(graph.body)
  ctx.block(dataclasses.replace(graph.body, eqns=graph.body.eqns[:first]))
  if overlap:                        # all threads: who waits for this kernel has then waited for those before it, too
    ctx.b(isa.GRIDDEPCONTROL, op="wait")
  ctx.block(dataclasses.replace(graph.body, eqns=graph.body.eqns[first:]))
  leave_cluster(ctx)
  ctx.b(isa.RET)
  _at_head(ctx, entry, head)
  _check_instructions(entry, program.target)
  return Emitted(module, len(roots), tuple(ctx.maps.maps), overlap)


def _check_instructions(entry: Entry, target: Target) -> None:
  """What no variant's predicate has found: an instruction that the target has not.

  Raises:
    LoweringError: with the instruction, what it needs, and the target.
  """
  for inst in entry.instructions():
    reason = target.lacks(inst.form.arch)
    if reason is not None:
      raise LoweringError(f"'{inst.form}': {reason}", loc=inst.loc)


def _pointers(ctx: EmitContext, entry: Entry, roots: list) -> None:
  """Arguments as global addresses; only those that code reads survive ptxas."""
  for i, var in enumerate(roots):
    assert isinstance(var.type, RefType)
    generic = ctx.b.new(isa.LD_PARAM, ctx.b.addr(entry.param(f"arg{i}")), type="u64")
    ctx.bind_pointer(var, ctx.b.new(isa.CVTA_TO, generic, space="global"))


def _at_head(ctx: EmitContext, entry: Entry, head: int) -> None:
  """Masks and policies that stay in registers, and generic addresses of tensor maps, prefetched by one thread: placed
  where they dominate every use."""
  maps = ctx.maps.maps
  entry.params = (*entry.params, *(Param(f"map{i}", "tensormap") for i in range(len(maps))))
  body, entry.body = entry.body, []
  b = ctx.b
  for value, register in ctx.kept.items():
    b(isa.MUL_LO, register, b.special("ntid.y"), value, type="u32")
  for policy, register in ctx.policies.items():
    b(isa.CREATEPOLICY, register, 1.0, l2=f"L2::{policy}")
  for i, m in enumerate(maps):
    address = ctx.maps.addresses[m]
    raw = b.new(isa.MOV_SYMBOL, entry.param(f"map{i}"), type="u64")
    b(isa.CVTA, address, raw, space="param")
  if maps:
    skip = b.label("prefetched")
    b(isa.BRA, skip, pred=b.new(isa.SETP, ctx.tid(), 0, cmp="ne", type="s32"))
    for m in maps:
      b(isa.PREFETCH_TENSORMAP, b.addr(ctx.maps.addresses[m]))
    b.place(skip)
  entry.body = body[:head] + entry.body + body[head:]
