"""Runs a script with every kernel in the simulator, and says what is wrong with the kernels.

  python -m tiletrace.check [--json] [--summary] [--seeds N] [--no-assemble] FILE [ARGUMENTS...]

Every kernel that the script builds is traced, lowered, assembled (where there is a ptxas) and simulated: those that run
with their arguments, each time they run, the others with random ones (integers: zeros). The exit status is 0 if nothing
was found, 1 if something was, 2 if the script itself failed.
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
from tiletrace.sim.faults import Fault
from tiletrace.sim.launch import Result, run
from tiletrace.stages import TileProgram

_MOST_FAULTS = 20        # of one kernel that are printed


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
    known = {(f.kind, f.place, f.other) for f in self.faults}
    self.faults += [f for f in result.faults if (f.kind, f.place, f.other) not in known]
    if self.summary is None:
      self.summary = result.counters

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


class Checker:
  """The observer of a script's kernels.

  Attributes:
    kernels: by fingerprint, in the order in which they were traced.
  """

  def __init__(self, seeds: int, assemble: bool, summary: bool):
    self.seeds, self.assemble, self.summary = seeds, assemble, summary
    self.kernels: dict[str, Checked] = {}
    self._assembled: set[str] = set()

  def traced(self, program: TileProgram) -> None:
    self.kernels.setdefault(program.fingerprint, Checked(program))

  def simulate(self, program: TileProgram, inputs: Sequence[np.ndarray]) -> Sequence[np.ndarray]:
    checked = self.kernels[program.fingerprint]
    self._assemble(checked, program.lowering)
    results = [run(program.lowering, inputs, seed=seed, counters=self.summary and not seed) for seed in
               range(self.seeds)]
    for result in results:
      checked.add(result)
    return results[0].outputs

  def finish(self) -> None:
    """Kernels that did not run: with random arguments."""
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


def check(path: str, arguments: Sequence[str] = (), *, seeds: int = 2, assemble: bool = True, summary: bool = False
          ) -> tuple[list[Checked], str | None]:
  """Runs a script as `__main__`.

  Args:
    path: the script. arguments: its command line.
    seeds: schedules that each launch is simulated under.
    assemble: whether ptxas sees the kernels too.
    summary: whether to count bytes, wavefronts and the like.
  Returns:
    the kernels in the order in which they were traced; the traceback of the script, if it failed.
  """
  checker, failure, argv = Checker(seeds, assemble, summary), None, sys.argv
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
  parser.add_argument("file")
  parser.add_argument("arguments", nargs=argparse.REMAINDER, help="the script's")
  options = parser.parse_args(argv)
  assemble = not options.no_assemble
  if assemble and not _has_ptxas():
    print("note: there is no ptxas: kernels are not assembled", file=sys.stderr)
    assemble = False
  with contextlib.redirect_stdout(sys.stderr) if options.json else contextlib.nullcontext():
    kernels, failure = check(options.file, options.arguments, seeds=options.seeds, assemble=assemble,
                             summary=options.summary)
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
