"""mbarriers, fences and syncs (level 0), and the state of a ring that a hand-written pipeline keeps."""
from __future__ import annotations

from typing import Any, NoReturn

from tiletrace.core import dtypes
from tiletrace.core.bytecode import target_name
from tiletrace.core.effects import Effect, OrderEffect
from tiletrace.core.errors import TileAttributeError, TileIndexError, TileTypeError
from tiletrace.core.graph import Eqn, Literal, Primitive, Var
from tiletrace.core.operands import check
from tiletrace.core.ops.control import integer
from tiletrace.core.ops.roles import arrivals
from tiletrace.core.printer import Printer, print_rules
from tiletrace.core.rules import effect_rules, type_rules
from tiletrace.core.source import Loc, user_frame, user_loc
from tiletrace.core.tile import Tile
from tiletrace.core.trace import Scope, Trace, Value, bind, current, wrapper
from tiletrace.core.types import BarrierType, TileType

alloc_barrier_p = Primitive("alloc_barrier", level=0)
barrier_wait_p = Primitive("barrier_wait", level=0)
barrier_arrive_p = Primitive("barrier_arrive", level=0)
barrier_arrive_expect_tx_p = Primitive("barrier_arrive_expect_tx", level=0)
fence_p = Primitive("fence", level=0)
sync_p = Primitive("sync", level=0)

FENCES = ("proxy_async_shared",)
MAX_TX_BYTES = 2**20 - 1  # PTX ISA, mbarrier: range of the tx-count
MAX_ARRIVALS = 2**20 - 1
_EACH = ("scope", "warpgroup")


# --- rules

@type_rules.register(alloc_barrier_p)
def _alloc_type(eqn: Eqn) -> tuple[BarrierType, ...]:
  return (BarrierType(eqn.params["count"], eqn.params["arrivals"]),)


@type_rules.register(barrier_wait_p, barrier_arrive_p, barrier_arrive_expect_tx_p)
def _use_type(eqn: Eqn) -> tuple[()]:
  barrier, *scalars = (v.type for v in eqn.values)
  check(isinstance(barrier, BarrierType), f"{eqn.primitive}: {barrier} is no barrier")
  check(scalars == [TileType((), dtypes.i32)] * (2 if eqn.primitive is barrier_wait_p else 1),
        f"{eqn.primitive}: index and phase are i32 scalars, got {', '.join(map(str, scalars))}")
  return ()


@type_rules.register(fence_p)
def _fence_type(eqn: Eqn) -> tuple[()]:
  check(eqn.params["kind"] in FENCES, f"fence: kind {eqn.params['kind']!r}")
  return ()


@type_rules.register(sync_p)
def _sync_type(eqn: Eqn) -> tuple[()]:
  check(eqn.params["each"] in _EACH, f"sync: each {eqn.params['each']!r}")
  return ()


@effect_rules.register(alloc_barrier_p, barrier_wait_p, barrier_arrive_p, barrier_arrive_expect_tx_p, fence_p, sync_p)
def _ordered(eqn: Eqn) -> tuple[Effect, ...]:
  return (OrderEffect(eqn.primitive.name),)


@print_rules.register(barrier_wait_p, barrier_arrive_p, barrier_arrive_expect_tx_p)
def _print_use(eqn: Eqn, p: Printer) -> str:
  barrier, index, *phase = map(p.atom, eqn.values)
  return " ".join([f"{eqn.primitive}{p.params(eqn)} {barrier}[{index}]", *phase])


# --- the user's objects

class BarrierArray(Value):
  """`count` mbarriers; `bars[slot]` selects one."""
  __slots__ = ()
  type: BarrierType

  def __getitem__(self, index: Any) -> Barrier:
    if isinstance(index, int) and not isinstance(index, bool) and not 0 <= index < self.type.count:
      raise TileIndexError(f"barrier {index} of {self.type.count}", loc=user_loc())
    return Barrier(self, integer(index, "barrier index"))

  def __len__(self) -> int:
    return self.type.count

  def __iter__(self) -> NoReturn:
    raise TileTypeError("a barrier array is not a sequence", loc=user_loc(), hint="select one: bars[slot]")

  def __getattr__(self, name: str) -> NoReturn:
    hint = f"select one: bars[slot].{name}(...)" if hasattr(Barrier, name) else None
    raise TileAttributeError(f"a barrier array has no attribute '{name}'", loc=user_loc(), hint=hint)


@wrapper(BarrierType)
def make_barrier(trace: Trace, scope: Scope, var: Var, loc: Loc) -> BarrierArray:
  return BarrierArray(trace, scope, var, loc)


class Barrier:
  """One mbarrier. A phase completes when all `arrivals` have come and all expected bytes have been counted down."""
  __slots__ = ("_array", "_index")

  def __init__(self, array: BarrierArray, index: Tile | Literal):
    self._array, self._index = array, index

  @property
  def operands(self) -> tuple[Value | Literal, ...]:
    return (self._array, self._index)

  def wait(self, phase: Any) -> None:
    """Returns when the phase of parity `phase` (0 or 1) has completed; phase 1 passes on a fresh barrier."""
    bind(barrier_wait_p, (*self.operands, integer(phase, "wait: phase")), {})

  def arrive(self, *, count: int | None = None, cluster: bool = False) -> None:
    """Arrives: once for each warpgroup of the current scope, once under tt.elect(); `count` overrides the sum.

    Args:
      cluster: at the same barrier of every CTA of the cluster, this one included.
    """
    count = arrivals() if count is None else _positive(count, "arrive: count")
    if cluster and current().options.cluster is None:
      raise TileTypeError("arrive: cluster=True in a kernel without clusters", loc=user_loc(),
                          hint="tile_call(cluster=...), or drop it")
    bind(barrier_arrive_p, self.operands, dict(count=count, **(dict(cluster=True) if cluster else {})))

  def arrive_expect_tx(self, nbytes: int) -> None:
    """Arrives once and expects `nbytes` more bytes from asynchronous copies in this phase."""
    nbytes = _positive(nbytes, "arrive_expect_tx: nbytes")
    if nbytes > MAX_TX_BYTES:
      raise TileTypeError(f"arrive_expect_tx: {nbytes} bytes, a barrier counts to {MAX_TX_BYTES}", loc=user_loc())
    bind(barrier_arrive_expect_tx_p, self.operands, dict(nbytes=nbytes))


def _positive(n: Any, what: str) -> int:
  if isinstance(n, bool) or not isinstance(n, int) or n < 1:
    got = n.type if isinstance(n, Value) else repr(n)
    raise TileTypeError(f"{what} must be a positive Python int, got {got}", loc=user_loc())
  return n


def alloc_barrier(count: int = 1, *, arrivals: int) -> BarrierArray:
  """`count` mbarriers in shared memory, initialised before any role starts.

  Args:
    count: how many.
    arrivals: arrivals that complete a phase (PTX ISA, mbarrier.init).

  Example:
    >>> def kernel(x, y):
    ...   s = tt.alloc_shared((16, 32), x.dtype)
    ...   full = tt.alloc_barrier(arrivals=1)
    ...   with tt.elect():
    ...     full[0].arrive_expect_tx(s.nbytes)
    ...     tt.copy_async(x, s, barrier=full[0], dispatch="tma")
    ...   full[0].wait(0)
    ...   y[...] = s[...]
    >>> x = jnp.ones((16, 32))
    >>> tt.tile_call(kernel, jax.ShapeDtypeStruct(x.shape, x.dtype), grid=1)(x).sum()
    Array(512., dtype=float32)
  """
  params = dict(count=_positive(count, "alloc_barrier: count"), arrivals=_positive(arrivals, "alloc_barrier: arrivals"))
  if arrivals > MAX_ARRIVALS:
    raise TileTypeError(f"alloc_barrier: {arrivals} arrivals, a barrier counts to {MAX_ARRIVALS}", loc=user_loc())
  out, = bind(alloc_barrier_p, (), params)
  assert isinstance(out, BarrierArray)
  frame = user_frame()
  out.var.hint = None if frame is None else target_name(frame)
  return out


def fence(kind: str = "proxy_async_shared") -> None:
  """Makes generic writes to shared memory visible to asynchronous copies and wgmma (PTX ISA, fence.proxy.async).

  The example of `tt.gemm_async` uses it.
  """
  if kind not in FENCES:
    raise TileTypeError(f"fence: kind is {kind!r}", loc=user_loc(), hint="one of " + ", ".join(map(repr, FENCES)))
  bind(fence_p, (), dict(kind=kind))


def sync(*, each: str = "scope") -> None:
  """Waits for all threads of the current scope, or of each of its warpgroups.

  The example of `tt.copy_async` uses it.
  """
  if each not in _EACH:
    raise TileTypeError(f"sync: each is {each!r}", loc=user_loc(), hint='"scope" or "warpgroup"')
  bind(sync_p, (), dict(each=each))
