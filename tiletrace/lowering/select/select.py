"""Chooses a variant for every op, best first. gemm before layouts (its variant fixes them), the rest after."""
from __future__ import annotations

import dataclasses
from collections.abc import Iterable

import tiletrace.lowering.select.gather
import tiletrace.lowering.select.prefetch  # noqa: F401  (rules register themselves)
from tiletrace.core.graph import Block, Eqn, TileGraph, Var, expand_block
from tiletrace.lowering.facts import Facts
from tiletrace.lowering.hazards import unordered
from tiletrace.lowering.layouts.relation import Layout
from tiletrace.lowering.options import CompileOptions
from tiletrace.lowering.ownership import is_explicit, role_sizes
from tiletrace.lowering.select.context import SelectContext, check_in_range, select_rules
from tiletrace.lowering.select.floors import check_floors
from tiletrace.lowering.select.memory import copy_by_threads
from tiletrace.lowering.select.mma import as_mma_sync, policy_of, select_gemm
from tiletrace.lowering.target import Target
from tiletrace.lowering.variants import Choice


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Selected:
  """A graph whose ops carry their variant in `dispatch` (and `vec`, `guard`, `layout`), with the reasons."""
  graph: TileGraph
  layouts: dict[Var, Layout]
  choices: tuple[Choice, ...]


def context(graph: TileGraph, layouts: dict[Var, Layout], target: Target, options: CompileOptions) -> SelectContext:
  facts = Facts(graph)
  return SelectContext(graph, layouts, facts, target, options, role_sizes(graph).__getitem__, is_explicit(graph),
                       unordered(graph, facts))


def choose_anchors(graph: TileGraph, target: Target, options: CompileOptions) -> tuple[TileGraph, tuple[Choice, ...]]:
  """Before layouts: refuses what the target has not, and a gemm that no variant can compute, with every variant's
  reason; turns those that go to mma.sync into loads and products of values; the choices are theirs."""
  check_floors(graph, target)
  ctx, choices = context(graph, {}, target, options), []

  def anchored(eqn: Eqn) -> Iterable[Eqn]:
    if eqn.primitive.name not in ("gemm", "gemm_async"):
      return (eqn,)
    _, choice = select_gemm(eqn, ctx)
    assert choice is not None
    if choice.variant != "mma_sync":
      return (eqn,)
    choices.append(choice)
    return as_mma_sync(eqn, policy_of(eqn, ctx))

  return graph.replace(body=expand_block(graph.body, anchored)), tuple(choices)


def select(graph: TileGraph, layouts: dict[Var, Layout], target: Target, options: CompileOptions,
           before: tuple[Choice, ...] = ()) -> Selected:
  """Chooses the variant of every op, beside the choices made `before`.

  Raises:
    LoweringError: an op that no variant can emit, with the reason of each.
  """
  ctx = context(graph, layouts, target, options)
  choices = list(before)
  body = _block(graph.body, ctx, choices)
  return Selected(graph.replace(body=body), layouts, tuple(choices))


def _block(block: Block, ctx: SelectContext, choices: list[Choice]) -> Block:
  eqns = []
  for eqn in block.eqns:
    if not ctx.explicit:
      check_in_range(eqn, ctx)
    rule = select_rules.get(eqn.primitive)
    if rule is not None:
      eqn, choice = rule(eqn, ctx)
      if choice is not None:
        choices.append(choice)
    if eqn.blocks:
      eqn = eqn.replace(blocks=tuple(_block(b, ctx, choices) for b in eqn.blocks))
    eqns.append(eqn)
  return dataclasses.replace(block, eqns=tuple(eqns))


def demote_copies(block: Block, ctx: SelectContext, notes: list[str]) -> Block:
  """Copies that were to go to a producer, made by the threads that compute: cp.async (waited for at once) or vectors.
  Those that run ahead are scheduled already."""
  def demoted(eqn: Eqn) -> Iterable[Eqn]:
    waiting = eqn.primitive.name == "copy" and not eqn.params.get("ahead")
    return copy_by_threads(eqn, ctx, notes) if waiting else (eqn,)

  return expand_block(block, demoted)
