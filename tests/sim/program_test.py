"""Decoding: dominators, reconvergence points, registers that may be unwritten, lines."""
from __future__ import annotations

import numpy as np
import pytest

from tests.sim.small import Small
from tests.sim.subjects import SUBJECTS, lowered
from tiletrace.lowering.ptx import isa
from tiletrace.sim.program import Program, SimulatorInputError, immediate_dominators


def reachable(root: int, follow: dict[int, list[int]], without: int | None = None) -> set[int]:
  seen, work = set(), [root] if root != without else []
  while work:
    node = work.pop()
    if node not in seen:
      seen.add(node)
      work += [n for n in follow[node] if n != without]
  return seen


def test_the_immediate_dominator_is_the_closest_of_those_that_every_path_meets():
  rng = np.random.default_rng(0)
  for _ in range(60):
    n = int(rng.integers(2, 12))
    follow = {i: sorted({int(x) for x in rng.integers(0, n, rng.integers(0, 4))}) for i in range(n)}
    found = immediate_dominators(0, follow)

    everything = reachable(0, follow)
    dominators = {v: {d for d in everything if d != v and v not in reachable(0, follow, without=d)}
                  for v in everything}
    assert found.keys() == everything - {0}
    for v, d in found.items():
      assert d in dominators[v]
      assert dominators[v] - {d} == dominators[d]


def test_a_branch_reconverges_where_its_two_ways_meet():
  k = Small()
  b, odd = k.b, k.compare("ne", k.b.new(isa.AND, k.tid, 1, type="b32"), 0)
  other, join = b.label("other"), b.label("join")
  b(isa.BRA, other, pred=odd)
  k.store(1)
  b(isa.BRA, join)
  b.place(other)
  k.store(2)
  b.place(join)
  k.sync()
  program = Program(k.end().module)

  [branch] = [op for op in program.ops if op.inst.row is isa.BRA and op.inst.pred is not None]
  assert program.ops[branch.join].inst.row is isa.BAR_SYNC_ALL


def test_a_way_that_ends_never_reconverges():
  k = Small()
  skip = k.skip_unless(k.compare("eq", k.tid, 3))
  k.b(isa.RET)
  k.b.place(skip)
  k.store(k.tid)
  program = Program(k.end().module)

  [branch] = [op for op in program.ops if op.inst.row is isa.BRA]
  assert branch.join == len(program.ops)


def test_a_guarded_write_leaves_a_register_unsure_and_an_unguarded_one_does_not():
  k = Small()
  b, p = k.b, k.compare("lt", k.tid, 5)
  sure, unsure = b.regs("b32", 2)
  b(isa.MOV, sure, 1, type="b32")
  b(isa.MOV, unsure, 1, type="b32", pred=p)
  total = b.new(isa.ADD, sure, unsure, type="u32")
  k.store(total)
  program = Program(k.end().module)

  assert program.tracked == [unsure]
  assert [op.unsure for op in program.ops if total in op.inst.writes()] == [(unsure,)]


@pytest.mark.parametrize("name", SUBJECTS)
def test_every_instruction_knows_its_line(name):
  module = lowered(name).lowering.emitted.module
  lines = module.render().splitlines()

  for op in Program(module).ops:
    assert lines[op.line - 1].strip() == op.inst.text()


def test_a_module_that_fails_the_lint_is_refused():
  k = Small()
  k.store(k.b.reg("b32"))
  with pytest.raises(SimulatorInputError, match=r"(?s)lint: undefined: %r\d+ is not written before.*TT510"):
    Program(k.end().module)
