"""Runs a script with every kernel in the simulator, and says what is wrong with the kernels.

  python -m tiletrace.check [--json] [--summary] [--seeds N] [--no-assemble] [--no-compare] FILE [ARGUMENTS...]

Every kernel that the script builds is traced, lowered, assembled (where there is a ptxas) and simulated: those that run
with their arguments, each time they run, the others with random ones (integers: zeros). When the script has ended, the
results of every launch are compared with those of the same kernel as jax ops. The exit status is 0 if nothing was
found, 1 if something was, 2 if the script itself failed.
"""
from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import runpy
import sys
import traceback
from collections.abc import Sequence
from typing import Any

import numpy as np

from tiletrace import stages
from tiletrace.core.errors import AssembleError, TileTraceError
from tiletrace.lowering import pipeline
from tiletrace.lowering.assemble import find_ptxas
from tiletrace.sim.compare import MOST_ELEMENTS, Comparison
from tiletrace.sim.faults import Fault
from tiletrace.sim.launch import Result, run
from tiletrace.stages import TileProgram

_MOST_FAULTS = 20        # of one kernel that are printed
_MOST_KEPT = 8 * MOST_ELEMENTS       # of all launches' operands and results, until they are compared


@dataclasses.dataclass(frozen=True, slots=True)
class Launched:
  """The operands of a launch, and its results under each seed that gave others than the seeds before it."""
  inputs: tuple[np.ndarray, ...]
  outputs: tuple[tuple[np.ndarray, ...], ...]

  @property
  def size(self) -> int:
    """Elements that are kept."""
    return sum(x.size for x in self.inputs) + sum(x.size for xs in self.outputs for x in xs)


@dataclasses.dataclass(slots=True)
class Checked:
  """A kernel and what was found.

  Attributes:
    launches: how often it was simulated, over all seeds.
    faults: of all of them, each once.
    errors: of lowering, assembling and arguments.
    notes: what was not done.
    summary: counts of the first launch, where they were asked for.
  """
  program: TileProgram
  launches: int = 0
  faults: list[Fault] = dataclasses.field(default_factory=list)
  errors: list[str] = dataclasses.field(default_factory=list)
  notes: list[str] = dataclasses.field(default_factory=list)
  summary: Any = None

  @property
  def ok(self) -> bool:
    return not self.faults and not self.errors

  def add(self, result: Result) -> None:
    self.launches += 1
    self.found(result.faults)
    if self.summary is None:
      self.summary = result.counters

  def found(self, faults: Sequence[Fault]) -> None:
    known = {_identity(f) for f in self.faults}
    self.faults += [f for f in faults if _identity(f) not in known]

  def note(self, note: str) -> None:
    if note not in self.notes:
      self.notes.append(note)

  def __str__(self) -> str:
    state = "ok" if self.ok else "WRONG"
    out = [f"{self.program.name} ({self.program.source}): {state}, {self.launches} launches simulated"]
    out += [f"  note: {note}" for note in self.notes]
    out += [_indented(error) for error in self.errors]
    out += [_indented(str(fault)) for fault in self.faults[:_MOST_FAULTS]]
    if len(self.faults) > _MOST_FAULTS:
      out.append(f"  and {len(self.faults) - _MOST_FAULTS} more")
    if self.summary is not None:
      out.append(_indented(self.summary.text()))
    return "\n".join(out)

  def data(self) -> dict[str, Any]:
    return {"kernel": self.program.name, "source": self.program.source, "ok": self.ok, "launches": self.launches,
            "faults": [f.data() for f in self.faults], "errors": self.errors, "notes": self.notes,
            "summary": None if self.summary is None else self.summary.data()}


def _identity(fault: Fault) -> tuple:
  return fault.kind, fault.place, fault.other, fault.difference and fault.difference.output


class Checker:
  """The observer of a script's kernels.

  Attributes:
    kernels: by fingerprint, in the order in which they were traced.
  """

  def __init__(self, seeds: int, assemble: bool, summary: bool, compare: bool):
    self.seeds, self.assemble, self.summary, self.compare = seeds, assemble, summary, compare
    self.kernels: dict[str, Checked] = {}
    self._assembled: set[str] = set()
    self._comparisons: dict[str, Comparison] = {}
    self._launched: dict[str, list[Launched]] = {}
    self._kept = 0               # elements

  def traced(self, program: TileProgram) -> None:
    if not program.is_symbolic:     # nothing runs it here
      self.kernels.setdefault(program.fingerprint, Checked(program))

  def simulate(self, program: TileProgram, inputs: Sequence[np.ndarray]) -> Sequence[np.ndarray]:
    self.traced(program)          # those of modules that were imported before may have been
    checked = self.kernels[program.fingerprint]
    self._assemble(checked, program.lowering)
    results = [run(program.lowering, inputs, sizes=dict(program.sizes), seed=seed,
                   counters=self.summary and not seed) for seed in range(self.seeds)]
    for result in results:
      checked.add(result)
    if self.compare:
      self._keep(checked, inputs, results)
    return results[0].outputs

  def _keep(self, checked: Checked, inputs: Sequence[np.ndarray], results: Sequence[Result]) -> None:
    """For `finish`: this is called by a running computation of jax, within which another one could wait for it."""
    key = checked.program.fingerprint
    if key not in self._comparisons:
      self._comparisons[key] = Comparison(checked.program.lowering, checked.program.concrete)
    if why_not := self._comparisons[key].why_not():
      checked.note(why_not)
      return
    if any(r.faults for r in results):
      checked.note("results of launches that have other findings are not compared")
      return
    outputs: list[tuple[np.ndarray, ...]] = []
    for result in results:
      if not any(_same(result.outputs, known) for known in outputs):
        outputs.append(result.outputs)
    launched = Launched(tuple(x.copy() for x in inputs), tuple(outputs))
    if self._kept + launched.size > _MOST_KEPT:
      checked.note(f"results of later launches are not compared: {_MOST_KEPT} elements are the most that are kept")
      return
    self._kept += launched.size
    self._launched.setdefault(key, []).append(launched)

  def finish(self) -> None:
    """Runs the kernels that did not run, with random arguments; then compares all results."""
    self._run_others()
    for key, launches in self._launched.items():
      for launched in launches:
        faults, notes = self._comparisons[key].compare(launched.inputs, launched.outputs)
        self.kernels[key].found(faults)
        for note in notes:
          self.kernels[key].note(note)

  def _run_others(self) -> None:
    rng = np.random.default_rng(0)
    for checked in self.kernels.values():
      if checked.launches:
        continue
      try:
        checked.program.lowering          # noqa: B018  (it is lowered now)
      except TileTraceError as e:
        checked.errors.append(str(e))
        continue
      checked.notes.append("the script did not run it: simulated with random arguments")
      self.simulate(checked.program, [_random(rng, shape, dtype) for shape, dtype in checked.program.in_avals])

  def _assemble(self, checked: Checked, lowering: pipeline.Lowering) -> None:
    if not self.assemble or checked.program.fingerprint in self._assembled:
      return
    self._assembled.add(checked.program.fingerprint)
    try:
      pipeline.assemble(lowering)
    except AssembleError as e:
      checked.errors.append(str(e))


def _same(a: Sequence[np.ndarray], b: Sequence[np.ndarray]) -> bool:
  """Bit for bit."""
  return all(x.tobytes() == y.tobytes() for x, y in zip(a, b, strict=True))


def _random(rng: np.random.Generator, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
  if np.dtype(dtype).kind in "iub":
    return np.zeros(shape, dtype)
  return rng.standard_normal(shape).astype(dtype)


def _indented(text: str) -> str:
  return "\n".join(f"  {line}" for line in text.splitlines())


@contextlib.contextmanager
def _watching(checker: Checker):
  """Kernels run in the simulator, and the checker hears of them."""
  before = os.environ.get("TT_BACKEND")
  os.environ["TT_BACKEND"] = "sim"
  stages.OBSERVERS.append(checker)
  try:
    yield
  finally:
    stages.OBSERVERS.remove(checker)
    if before is None:
      del os.environ["TT_BACKEND"]
    else:
      os.environ["TT_BACKEND"] = before


def check(path: str, arguments: Sequence[str] = (), *, seeds: int = 2, assemble: bool = True, summary: bool = False,
          compare: bool = True) -> tuple[list[Checked], str | None]:
  """Runs a script as `__main__`.

  Args:
    path: the script. arguments: its command line.
    seeds: schedules that each launch is simulated under.
    assemble: whether ptxas sees the kernels too.
    summary: whether to count bytes, wavefronts and the like.
    compare: whether to compare results with those of the same kernels as jax ops.
  Returns:
    the kernels in the order in which they were traced; the traceback of the script, if it failed.
  """
  checker, failure, argv = Checker(seeds, assemble, summary, compare), None, sys.argv
  with _watching(checker):
    sys.argv = [path, *arguments]
    try:
      runpy.run_path(path, run_name="__main__")
    except SystemExit as e:
      if e.code not in (None, 0):
        failure = f"the script ended with status {e.code}"
    except BaseException:
      failure = traceback.format_exc()
    finally:
      sys.argv = argv
    checker.finish()
  return list(checker.kernels.values()), failure


def main(argv: Sequence[str] | None = None) -> int:
  """The command line; returns the exit status."""
  parser = argparse.ArgumentParser(prog="python -m tiletrace.check", description=(__doc__ or "").partition("\n")[0])
  parser.add_argument("--json", action="store_true", help="print one JSON object")
  parser.add_argument("--summary", action="store_true", help="print what each kernel's first launch did")
  parser.add_argument("--seeds", type=int, default=2, metavar="N", help="schedules to try (default 2)")
  parser.add_argument("--no-assemble", action="store_true", help="leave ptxas out")
  parser.add_argument("--no-compare", action="store_true", help="leave the comparison with jax ops out")
  parser.add_argument("file")
  parser.add_argument("arguments", nargs=argparse.REMAINDER, help="the script's")
  options = parser.parse_args(argv)
  assemble = not options.no_assemble
  if assemble and not _has_ptxas():
    print("note: there is no ptxas: kernels are not assembled", file=sys.stderr)
    assemble = False
  with contextlib.redirect_stdout(sys.stderr) if options.json else contextlib.nullcontext():
    kernels, failure = check(options.file, options.arguments, seeds=options.seeds, assemble=assemble,
                             summary=options.summary, compare=not options.no_compare)
  wrong = sum(not k.ok for k in kernels)
  if options.json:
    print(json.dumps({"ok": not wrong and failure is None, "kernels": [k.data() for k in kernels], "failure": failure},
                     indent=2))
  else:
    for k in kernels:
      print(k)
    print(f"{len(kernels)} kernels, {wrong} wrong" + (f"; the script failed:\n{failure}" if failure else ""))
  return 1 if wrong else 2 if failure else 0


def _has_ptxas() -> bool:
  try:
    find_ptxas()
  except AssembleError:
    return False
  return True


if __name__ == "__main__":
  sys.exit(main())
