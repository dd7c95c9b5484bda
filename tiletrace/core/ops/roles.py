"""Roles (level 0): code for some warpgroups of the program, or for one thread."""
from __future__ import annotations

from typing import Any

from tiletrace.core.errors import ControlFlowError, TileIndexError, TileTypeError
from tiletrace.core.graph import Eqn, Primitive
from tiletrace.core.ops.control import block_effects
from tiletrace.core.rules import effect_rules, type_rules
from tiletrace.core.scopes import Branch
from tiletrace.core.source import user_loc
from tiletrace.core.trace import Scope, bind, current
from tiletrace.core.types import Type

warpgroup_p = Primitive("warpgroup", level=0)
elect_p = Primitive("elect", level=0)

effect_rules.register(warpgroup_p, elect_p)(block_effects)


@type_rules.register(warpgroup_p, elect_p)
def _role_types(eqn: Eqn) -> tuple[Type, ...]:
  (body,) = eqn.blocks
  if eqn.invars or body.invars or body.outs:
    raise TileTypeError(f"{eqn.primitive}: a role takes and returns nothing", loc=eqn.loc)
  return ()


class _Role(Branch):
  role = True

  def __init__(self, primitive: Primitive, outer: tuple[Primitive, ...], **params: Any):
    super().__init__(f"tt.{primitive}", primitive=primitive, **params)
    self.primitive, self.outer = primitive, outer
    self.whatever = "for every thread"

  def begin(self) -> None:
    inside = self.trace.scope.role
    if inside is not None and inside.params["primitive"] not in self.outer:
      self.trace.fail(ControlFlowError(f"{self.what} inside {inside.what}", loc=self.loc,
                                       hint="close the outer role first"))

  def end(self, scope: Scope) -> None:
    params = {k: v for k, v in self.params.items() if k != "primitive"}
    bind(self.primitive, (), params, (scope.block(),), loc=self.loc)


def warpgroup(which: int | range, *, regs: int | None = None) -> Branch:
  """Code for one warpgroup, or several neighbours: `with tt.warpgroup(0, regs=24):`, `tt.warpgroup(range(1, 3))`.

  Args:
    which: index or range of warpgroups of the program, below the call's `warpgroups`.
    regs: registers a thread may hold in this role (PTX ISA, setmaxnreg): a multiple of 8 from 24 to 256.
  Raises:
    TileTypeError: `which` is no int or range with step 1; `regs` is not allowed.
    TileIndexError: the program has no such warpgroup.

  Example:
    >>> def kernel(x, y):
    ...   s = tt.alloc_shared((16, 32), x.dtype)
    ...   full = tt.alloc_barrier(arrivals=1)
    ...   with tt.warpgroup(0, regs=24), tt.elect():
    ...     full[0].arrive_expect_tx(s.nbytes)
    ...     tt.copy_async(x, s, barrier=full[0], dispatch="tma")
    ...   with tt.warpgroup(1, regs=240):
    ...     full[0].wait(0)
    ...     y[...] = s[...]
    >>> x = jnp.ones((16, 32))
    >>> tt.tile_call(kernel, jax.ShapeDtypeStruct(x.shape, x.dtype), grid=1, warpgroups=2)(x).sum()
    Array(512., dtype=float32)
  """
  what = "tt.warpgroup"
  if isinstance(which, int) and not isinstance(which, bool):
    which = range(which, which + 1)
  if not isinstance(which, range) or which.step != 1 or not which:
    raise TileTypeError(f"{what}: which is {which!r}", loc=user_loc(),
                        hint="an index or a range of neighbours: tt.warpgroup(0), tt.warpgroup(range(1, 3))")
  count = current().options.warpgroups
  if which.start < 0 or which.stop > count:
    raise TileIndexError(f"{what}: {which} of a program with {count} warpgroup{'s' * (count != 1)}", loc=user_loc(),
                         hint="tile_call(..., warpgroups=n) counts all of them, producers too")
  if regs is not None and (isinstance(regs, bool) or not isinstance(regs, int) or regs % 8 or not 24 <= regs <= 256):
    raise TileTypeError(f"{what}: regs is {regs!r}", loc=user_loc(), hint="a multiple of 8 from 24 to 256")
  return _Role(warpgroup_p, (), first=which.start, count=len(which), regs=regs)


def elect(*, each: str = "scope") -> Branch:
  """Code for exactly one thread of the current scope: `with tt.elect():`.

  The example of `tt.alloc_barrier` uses it.

  Args:
    each: "scope", or "warpgroup" for one thread of each warpgroup of the scope.
  """
  if each not in ("scope", "warpgroup"):
    raise TileTypeError(f"tt.elect: each is {each!r}", loc=user_loc(), hint='"scope" or "warpgroup"')
  return _Role(elect_p, (warpgroup_p,), each=each)


def arrivals() -> int:
  """How many times a barrier arrival in the current scope counts: once a warpgroup, or once an elected thread."""
  trace = current()
  count, one_thread = trace.options.warpgroups, False
  for scope in trace.stack:
    if scope.params.get("primitive") is warpgroup_p:
      count = scope.params["count"]
    elif scope.params.get("primitive") is elect_p:
      one_thread = scope.params["each"] == "scope"
  return 1 if one_thread else count
