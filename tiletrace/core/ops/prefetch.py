"""prefetch: what a view of global memory holds is brought into the L2 cache."""
from __future__ import annotations

from typing import Any

from tiletrace.core.effects import Effect, OrderEffect, read
from tiletrace.core.errors import TileTypeError
from tiletrace.core.graph import Eqn, Primitive
from tiletrace.core.operands import check
from tiletrace.core.ref import Ref, describe
from tiletrace.core.rules import effect_rules, type_rules
from tiletrace.core.source import user_loc
from tiletrace.core.trace import bind
from tiletrace.core.types import Space

prefetch_p = Primitive("prefetch")      # a reference


@type_rules.register(prefetch_p)
def _type(eqn: Eqn) -> tuple[()]:
  check(len(eqn.refs) == 1 and eqn.refs[0].type.space is Space.GLOBAL, "prefetch takes a view of global memory")
  return ()


@effect_rules.register(prefetch_p)
def _effects(eqn: Eqn) -> tuple[Effect, ...]:
  return (read(0), OrderEffect("prefetch"))


def prefetch(src: Any) -> None:
  """Asks for what a view of global memory holds to be brought into the L2 cache. Nothing waits for it.

  In a kernel with CompileOptions(overlap_launch=True), prefetches that come before everything else run before the
  kernel before has ended: weights then are on their way while it still computes. That kernel may even be writing what
  is prefetched, as all SMs read and write through one L2 cache.

  It is a hint (PTX ISA, cp.async.bulk.prefetch): pieces of a view that lie outside of the array are left out, and so
  are views without 16 bytes that are aligned and side by side; the report says so.

  Args:
    src: a reference in global memory, or a view of one, at places that the program's ids or sizes give.
  Raises:
    TileTypeError: it is no reference in global memory.

  Example:
    >>> def kernel(w, y):
    ...   i = tt.program_id(0)
    ...   tt.prefetch(w.at[tt.block(i, 16), :])
    ...   y[tt.block(i, 16)] = tt.sum(w[tt.block(i, 16), :], axis=1)
    >>> options = tt.CompileOptions(overlap_launch=True)
    >>> call = tt.tile_call(kernel, jax.ShapeDtypeStruct((32,), jnp.float32), grid=2, options=options)
    >>> call(jnp.ones((32, 64))).sum()
    Array(2048., dtype=float32)
  """
  if not isinstance(src, Ref) or src.type.space is not Space.GLOBAL:
    what = describe(src) if isinstance(src, Ref) else f"a {type(src).__name__}"
    raise TileTypeError(f"prefetch: src is {what}", loc=user_loc(),
                        hint="a reference in global memory: an input or output of the kernel, or a view of one")
  bind(prefetch_p, src.operands, {"views": (src.view,)})
