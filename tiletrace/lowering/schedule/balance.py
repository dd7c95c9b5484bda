"""The order of a persistent kernel's programs where they differ in length: each goes to the CTA that is free first.

What a program costs is known before anything runs where the trip counts of its loops depend on nothing but its ids, as
a causal attention's do. Then list scheduling (Graham, Bounds on Multiprocessing Timing Anomalies, 1969) in the order of
the raster gives each CTA its programs, and the result is a table in the kernel. Where CTAs take their programs when
they are free, the table has the longest first.
"""
from __future__ import annotations

import heapq
import math
from collections.abc import Callable

import numpy as np

from tiletrace.core.graph import Atom, Block, CallOptions, Eqn, Literal, Var
from tiletrace.core.ops import elementwise as ew, mma
from tiletrace.core.ops.control import cond_p, for_loop_p
from tiletrace.core.ops.fold import NUMPY
from tiletrace.core.ops.grid import program_id_p
from tiletrace.core.types import Size, TileType
from tiletrace.lowering.schedule.builder import Builder
from tiletrace.lowering.schedule.grid import raster_ids

_MOST_PROGRAMS = 16384        # in a table: 64 KiB, and what ptxas reads of it in milliseconds
_ELEMENTWISE = 16             # multiply-adds of a tensor core in the time of one elementwise operation on an element

_SCALAR: dict = {**NUMPY, ew.select_p: np.where}


class _Unknown(Exception):
  """A trip count that depends on more than the ids."""


def balanced_order(body: Block, options: CallOptions, num_sms: int) -> tuple[int, ...] | None:
  """The program at each place, in the places of a static tile loop over `num_sms` CTAs: the CTA takes places
  cta, cta + num_sms, ... A place that is empty holds the number of programs.

  None where every program costs the same, as far as is known, or no CTA has several, or clusters share programs.
  """
  total, costs = math.prod(options.grid), _different_costs(body, options, num_sms)
  if costs is None:
    return None
  free = [(0.0, cta) for cta in range(num_sms)]
  lists: list[list[int]] = [[] for _ in range(num_sms)]
  for program, cost in enumerate(costs.tolist()):
    at, cta = heapq.heappop(free)
    lists[cta].append(program)
    heapq.heappush(free, (at + cost, cta))
  rounds = max(map(len, lists))
  return tuple(programs[r] if r < len(programs) else total for r in range(rounds) for programs in lists)


def longest_first(body: Block, options: CallOptions, num_sms: int) -> tuple[int, ...] | None:
  """The programs in the order in which CTAs take them when they are free: by descending cost, those of one cost as the
  raster has them (Graham, 1969: the longest first). None where `balanced_order` has none."""
  costs = _different_costs(body, options, num_sms)
  return None if costs is None else tuple(np.argsort(-costs, kind="stable").tolist())


def _different_costs(body: Block, options: CallOptions, num_sms: int) -> np.ndarray | None:
  """What programs cost, where that is known and not the same for all, and CTAs have several of them."""
  total = math.prod(options.grid)
  if options.cluster_size > 1 or isinstance(total, Size) or not num_sms < total <= _MOST_PROGRAMS:
    return None
  costs = program_costs(body, options)
  return None if costs is None or (costs == costs[0]).all() else costs


def program_costs(body: Block, options: CallOptions) -> np.ndarray | None:
  """[programs] float64: what each program of the grid costs, in the order of the raster, in multiply-adds of a tensor
  core; None where that is not known."""
  total = math.prod(options.grid)
  b = Builder(body.eqns[0].loc)
  index = Var(TileType((), np.dtype(np.int32)), "tile")
  ids = raster_ids(b, index, options.grid, options.raster)
  costs = _Costs(total)
  costs.env[index] = np.arange(total)
  costs.block(Block((), tuple(b.eqns), ()))
  costs.ids = [costs.value(i) for i in ids]
  try:
    return costs.block(body) + np.zeros(total)
  except _Unknown:
    return None


class _Costs:
  """Evaluates scalars for all programs at once, and adds up what their equations cost."""

  def __init__(self, total: int):
    self.env: dict[Var, np.ndarray] = {}
    self.ids: list[np.ndarray] = []
    self.total = total

  def value(self, a: Atom) -> np.ndarray:
    if isinstance(a, Literal):
      return np.asarray(a.value)
    if a not in self.env:
      raise _Unknown
    return self.env[a]

  def block(self, block: Block) -> np.ndarray:
    costs = np.zeros(self.total)
    for eqn in block.eqns:
      costs += self._eqn(eqn)
    return costs

  def _eqn(self, eqn: Eqn) -> np.ndarray | float:
    if eqn.primitive is program_id_p:
      self.env[eqn.outvars[0]] = self.ids[eqn.params["axis"]]
      return 0.0
    if eqn.primitive is for_loop_p:
      return self._loop(eqn)
    if eqn.blocks:
      inner = [self.block(b) for b in eqn.blocks]
      if eqn.primitive is cond_p and eqn.values[0] in self.env and len(inner) == 1:
        return np.where(self.env[eqn.values[0]], inner[0], 0.0)  # type: ignore[index]
      return np.maximum.reduce(inner)
    self._scalar(eqn)
    if eqn.primitive is mma.gemm_p:
      (m, n), k = eqn.refs[-1].shape, eqn.refs[-2].shape[0]
      return float(m * n * k)
    return float(_ELEMENTWISE * sum(math.prod(v.shape) for v in eqn.outvars if isinstance(v.type, TileType)))

  def _loop(self, loop: Eqn) -> np.ndarray:
    lo, hi, step = (self.value(v) for v in loop.values[:3])
    if (np.asarray(step) <= 0).any():
      raise _Unknown
    self.env[loop.blocks[0].invars[0]] = lo + np.zeros(self.total, int)
    return np.maximum(-(-(hi - lo) // step), 0) * self.block(loop.blocks[0])

  def _scalar(self, eqn: Eqn) -> None:
    rule: Callable | None = _SCALAR.get(eqn.primitive)
    known = all(isinstance(v, Literal) or v in self.env for v in eqn.values)
    if rule is not None and known and len(eqn.outvars) == 1 and eqn.outvars[0].shape == ():
      self.env[eqn.outvars[0]] = np.asarray(rule(*map(self.value, eqn.values)))
