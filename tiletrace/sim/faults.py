"""What the simulator finds: faults with stable names, and the error that carries them."""
from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterable, Sequence
from typing import Any

from tiletrace.core.errors import SimulationError
from tiletrace.core.source import Loc

# name of a kind -> what it says about a kernel
KINDS = {
    "race": "two accesses of the same bytes, at least one a write, that nothing orders",
    "missing proxy fence": "the async proxy meets a generic write, or overwrites a generic read, without a proxy fence",
    "overwritten while read asynchronously": "bytes are written while a copy or a wgmma in flight may still read them",
    "asynchronous write not waited for": "what a copy in flight writes is used before its completion is waited for",
    "race between CTAs": "two CTAs access the same global memory, at least one writes, and nothing orders them",
    "write to an input": "a store into an operand that is no output",
    "mbarrier initialisation not visible": "an mbarrier is used by those who need not see that it is initialised",
    "register in flight": "a register that a wgmma in flight reads or writes is touched before its wait",
    "missing wgmma fence": "registers that a wgmma uses were written and no wgmma.fence followed",
    "uninitialised register": "a register is read that the thread has not written",
    "uninitialised shared memory": "bytes of shared memory are read that nobody has written",
    "non-coherent load": "ld.global.nc of an operand that the kernel writes",
    "out of bounds": "an access outside of every array, or of the CTA's shared memory",
    "misaligned": "an address, or a tensor copy's innermost coordinate, that the instruction does not take",
    "deadlock": "every warp waits",
    "barrier count": "a barrier with more, fewer or other arrivals than it counts",
    "transaction bytes": "an mbarrier whose expected bytes and arriving bytes differ",
    "mbarrier": "an mbarrier that is not initialised, or memory of one that is used as data",
    "register budget": "setmaxnreg beyond what the launch gave",
    "not uniform": "an instruction for whole warps or warpgroups that some of their threads do not execute alike",
    "descriptor": "a matrix descriptor or tensor map that the hardware does not take",
    "asynchronous at exit": "a thread ends while copies that it started are in flight",
    "trap": "the kernel executed trap",
    "step limit": "the kernel did not end within the limit of steps",
    "wrong result": "an output differs from that of the same kernel as jax ops (`tiletrace.check`)",
}


class Violation(Exception):
  """Raised by an instruction's semantics; the machine knows the instruction and makes it a `Fault`.

  Attributes:
    kind: a name of `KINDS`.
    threads: which threads of the CTA; empty for all of the instruction's.
    addresses: the bytes concerned.
    other: the instruction that this one collides with, as the machine has it, or None.
  """

  def __init__(self, kind: str, text: str, *, threads: Iterable[Any] = (), addresses: Iterable[Any] = (),
               other: Any = None):
    super().__init__(text)
    assert kind in KINDS, kind
    self.kind, self.text, self.other = kind, text, other
    self.threads, self.addresses = tuple(int(t) for t in threads), tuple(int(a) for a in addresses)


@dataclasses.dataclass(frozen=True, slots=True)
class Place:
  """An instruction: its index and text, its line in the rendered PTX, and the Python line it came from."""
  index: int
  text: str
  line: int
  loc: Loc | None

  def __str__(self) -> str:
    text = self.text if len(self.text) <= 140 else self.text[:100] + " ... " + self.text[-35:]
    out = f"PTX line {self.line}: {text}"
    return out if self.loc is None else f"{out}\n  at {self.loc}\n{self.loc.excerpt()}"


@dataclasses.dataclass(frozen=True, slots=True)
class Difference:
  """An output that is not what it should be.

  Attributes:
    output: the parameter's name. shape, dtype: of the output.
    count: elements that differ by more than they may.
    first: the index of the first one. got, want: what stands there. bound: how far it may be from `want`.
    error: the greatest distance of all; infinite where one of the two is NaN.
  """
  output: str
  shape: tuple[int, ...]
  dtype: str
  count: int
  first: tuple[int, ...]
  got: int | float
  want: int | float
  bound: float
  error: float

  def __str__(self) -> str:
    return (f"{self.count} of {math.prod(self.shape)} elements of {self.output}, {self.dtype}"
            f"[{','.join(map(str, self.shape))}], differ; the first is [{', '.join(map(str, self.first))}]: "
            f"{self.got:.8g}, as jax ops {self.want:.8g} (which may be {self.bound:.2g} off); greatest error "
            f"{self.error:.3g}")

  def data(self) -> dict[str, Any]:
    """As plain data. JSON has no NaN and no infinity: those are text."""
    return {name: x if not isinstance(x, float) or math.isfinite(x) else str(x)
            for name, x in dataclasses.asdict(self).items()}


@dataclasses.dataclass(frozen=True, slots=True)
class Fault:
  """One thing that is wrong with a kernel.

  Attributes:
    kind: a name of `KINDS`.
    kernel: the entry's name. cta: which of the grid; None where it is not one's.
    text: what happened.
    place: the instruction, None where no one instruction is at fault (a deadlock).
    other: the second instruction of a conflict.
    threads, addresses: those concerned.
    warps: the state of every warp, for deadlocks and the step limit.
    difference: of a wrong result.
  """
  kind: str
  kernel: str
  cta: int | None
  text: str
  place: Place | None = None
  other: Place | None = None
  threads: tuple[int, ...] = ()
  addresses: tuple[int, ...] = ()
  warps: tuple[str, ...] = ()
  difference: Difference | None = None

  def __str__(self) -> str:
    cta = "" if self.cta is None else f", CTA {self.cta}"
    out = [f"{self.kind}: {self.text} (kernel {self.kernel}{cta})"]
    if self.threads:
      out.append(f"  threads {ranges(self.threads)}")
    if self.addresses:
      out.append(f"  addresses {_hex(self.addresses)}")
    if self.place is not None:
      out.append(f"  {self.place}")
    if self.other is not None:
      out.append(f"  against {self.other}")
    out += [f"  {line}" for line in self.warps]
    return "\n".join(out)

  def data(self) -> dict[str, Any]:
    """As plain data, for JSON."""
    return {"kind": self.kind, "kernel": self.kernel, "cta": self.cta, "text": self.text,
            "threads": list(self.threads), "addresses": list(self.addresses), "place": _place_data(self.place),
            "other": _place_data(self.other), "warps": list(self.warps),
            "difference": None if self.difference is None else self.difference.data()}


def to_json(faults: Sequence[Fault]) -> str:
  return json.dumps([f.data() for f in faults], indent=2)


def raise_faults(faults: Sequence[Fault]) -> None:
  """Raises the first fault with its lines; the others follow in the message.

  Raises:
    SimulationError: where there is a fault; its `faults` are all of them.
  """
  if not faults:
    return
  first = faults[0]
  also = ("against", first.other.loc) if first.other is not None and first.other.loc is not None else None
  error = SimulationError("\n".join(map(str, faults)), loc=first.place.loc if first.place else None, also=also,
                          faults=tuple(faults))
  raise error


def ranges(threads: Sequence[int]) -> str:
  """`0-31, 64`."""
  ordered, parts, start = sorted(set(threads)), [], 0
  for i in range(1, len(ordered) + 1):
    if i == len(ordered) or ordered[i] != ordered[i - 1] + 1:
      first, last = ordered[start], ordered[i - 1]
      parts.append(str(first) if first == last else f"{first}-{last}")
      start = i
  return ", ".join(parts[:8]) + (f" and {len(parts) - 8} more ranges" if len(parts) > 8 else "")


def _hex(addresses: Sequence[int]) -> str:
  shown = ", ".join(f"{a:#x}" for a in addresses[:6])
  return shown + (f" and {len(addresses) - 6} more" if len(addresses) > 6 else "")


def _place_data(place: Place | None) -> dict[str, Any] | None:
  if place is None:
    return None
  loc = None if place.loc is None else {"file": place.loc.filename, "line": place.loc.line,
                                        "column": place.loc.span.column + 1}
  return {"instruction": place.text, "ptx_line": place.line, "python": loc}
