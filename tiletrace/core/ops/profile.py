"""tt.profile: a span of a kernel whose time is recorded, where profiling is on; else it is nothing."""
from __future__ import annotations

from types import TracebackType
from typing import Self

from tiletrace.core import dtypes
from tiletrace.core.effects import Effect, OrderEffect
from tiletrace.core.errors import TileTypeError
from tiletrace.core.graph import Eqn, Primitive
from tiletrace.core.operands import check, tile_types
from tiletrace.core.rules import effect_rules, type_rules
from tiletrace.core.source import user_loc
from tiletrace.core.trace import bind
from tiletrace.core.types import RefType, TileType

profile_mark_p = Primitive("profile_mark")        # params: name, begin
# One record of each warpgroup's first thread (lowering/profile.py). Reference: the records. Values: the program's ids.
# Params: span, the number of the name; begin; block, words of a warpgroup's records, and words of one; warpgroups of a
# CTA.
profile_record_p = Primitive("profile_record", level=0)


@type_rules.register(profile_mark_p)
def _mark_type(eqn: Eqn) -> tuple[()]:
  check(not eqn.invars, "profile_mark takes no operands")
  return ()


@type_rules.register(profile_record_p)
def _record_type(eqn: Eqn) -> tuple[()]:
  (ref,) = eqn.refs
  check(isinstance(ref.root.type, RefType) and ref.type.dtype == dtypes.i32, "profile_record writes words of i32")
  check(set(tile_types(eqn.values)) <= {TileType((), dtypes.i32)}, "profile_record takes the program's ids")
  return ()


@effect_rules.register(profile_mark_p, profile_record_p)
def _kept(eqn: Eqn) -> tuple[Effect, ...]:
  """Every warpgroup has its own words, so only the program orders them."""
  return (OrderEffect(eqn.primitive.name),)


class profile:
  """A named span of a kernel: `with tt.profile("load"):`.

  With profiling on (CompileOptions(profile=True), or TT_PROFILE=1) one thread of each warpgroup that comes through
  records the time at both ends, and `tt.timeline` collects them. With it off no code is made. As jax ops there is
  nothing to record either.

  A span takes as long as its threads do: what they only start (copies, wgmma) is over where it is waited for. Where the
  compiler adds a producer warpgroup, spans around copies, or around the loops that they stand in, are its spans, too.

  Args:
    name: of the span; a string. Several may have the same.
  Raises:
    TileTypeError: the name is no string.

  Example:
    >>> def kernel(x, y):
    ...   with tt.profile("store"):
    ...     y[...] = x[...]
    >>> x = jnp.array([1., 2.])
    >>> tt.tile_call(kernel, jax.ShapeDtypeStruct(x.shape, x.dtype), grid=1)(x)
    Array([1., 2.], dtype=float32)
  """

  def __init__(self, name: str):
    if not isinstance(name, str):
      raise TileTypeError(f"tt.profile: the name is {name!r}, not a string", loc=user_loc(),
                          hint='with tt.profile("load"):')
    self.name = name

  def __enter__(self) -> Self:
    bind(profile_mark_p, (), {"name": self.name, "begin": True})
    return self

  def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
               traceback: TracebackType | None) -> None:
    if kind is None:
      bind(profile_mark_p, (), {"name": self.name, "begin": False})
