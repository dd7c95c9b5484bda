"""Copies between references, and their asynchronous forms (level 0), as an author writes them."""
from __future__ import annotations

from typing import Any

from tiletrace.core import dtypes
from tiletrace.core.errors import TileTypeError
from tiletrace.core.indexed import Indexed
from tiletrace.core.operands import refuse_keywords
from tiletrace.core.ops.barrier import Barrier
from tiletrace.core.ops.memory import (
  COPY_WORDS,
  GROUPS,
  commit_group_p,
  copy_async_p,
  copy_p,
  evicted,
  fill_operand,
  load,
  ref_argument,
  store,
  wait_group_p,
  writable,
)
from tiletrace.core.ref import Ref, describe, plain_name, static_shape
from tiletrace.core.source import user_loc
from tiletrace.core.tile import METHODS
from tiletrace.core.trace import bind, current
from tiletrace.core.types import Space

_BITS, _HALVES = (dtypes.i32, dtypes.u32), (dtypes.f16, dtypes.bf16)
REDUCTIONS = {"add": (*_BITS, *_HALVES, dtypes.f32), **dict.fromkeys(("min", "max"), (*_BITS, *_HALVES)),
              **dict.fromkeys(("and", "or", "xor"), _BITS)}       # PTX ISA 9.7.9, cp.reduce.async.bulk.tensor
_DISPATCH = {"copy": (None, "tma", "cp_async", "vector", "scalar"), "copy_async": (None, "tma", "cp_async")}


def _copy_operands(what: str, src: Any, dst: Any, dispatch: str | None) -> tuple[Ref, Ref]:
  src = ref_argument(src, f"{what}: src", "a[...] loads; write a.at[...] for a view")
  dst = ref_argument(dst, f"{what}: dst", "dst[...] loads; write dst.at[...] for a view")
  writable(dst, what)
  for ref, name in ((src, "src"), (dst, "dst")):
    static_shape(ref, f"{what}: {name}")
  if src.shape != dst.shape:
    hint = None
    if src.ndim != dst.ndim:
      hint = "an integer index removes its dimension; for a block write tt.block(i, size) or tt.ds(start, size)"
    raise TileTypeError(f"{what}: shapes differ, src {describe(src)}, dst {describe(dst)}", loc=user_loc(), hint=hint)
  if src.dtype != dst.dtype:
    raise TileTypeError(f"{what} does not convert, src is {describe(src)}, dst is {describe(dst)}", loc=user_loc(),
                        hint=f"{plain_name(dst)}[...] = {plain_name(src)}[...].astype({plain_name(dst)}.dtype)")
  if dispatch not in _DISPATCH[what]:
    raise TileTypeError(f"{what}: dispatch is {dispatch!r}", loc=user_loc(),
                        hint="one of " + ", ".join(repr(d) for d in _DISPATCH[what]))
  return src, dst


def copy(src: Any, dst: Any, *, fill_value: Any = 0, dispatch: str | None = None, eviction_policy: str | None = None,
         **unknown: Any) -> None:
  """Copies one view to another of the same shape and dtype.

  Args:
    src, dst: references or views; what hangs over an edge of src arrives as `fill_value`, over one of dst is dropped.
    fill_value: Python number.
    dispatch: force an implementation: "tma", "cp_async", "vector" or "scalar".
    eviction_policy: "evict_first" of what nobody reads again, "evict_last" of what should stay in L2.
  Raises:
    TileTypeError: shapes or dtypes differ, a value instead of a reference, dst is an input.

  Example:
    >>> def kernel(x, y):
    ...   s = tt.alloc_shared((16, 32), x.dtype)
    ...   tt.copy(x.at[tt.block(1, 16), :], s)
    ...   y[...] = s[...]
    >>> x = jnp.ones((32, 32))
    >>> tt.tile_call(kernel, jax.ShapeDtypeStruct((16, 32), x.dtype), grid=1)(x).sum()
    Array(512., dtype=float32)
  """
  refuse_keywords("copy", unknown, COPY_WORDS)
  if isinstance(src, Indexed) or isinstance(dst, Indexed):
    evicted("copy", eviction_policy)
    METHODS["indexed_copy"](src, dst, fill_value, dispatch)
    return
  src, dst = _copy_operands("copy", src, dst, dispatch)
  policy = evicted("copy", eviction_policy, src, dst)
  spaces = {src.type.space, dst.type.space}
  if Space.FRAGMENT in spaces or spaces == {Space.GLOBAL}:  # through registers, as the author would write it
    if dispatch is not None:
      raise TileTypeError(f"copy: dispatch={dispatch!r} does not apply, {describe(src)} to {describe(dst)} is a load "
                          "and a store", loc=user_loc(), hint="drop dispatch=")
    reads, writes = (policy if r.type.space is Space.GLOBAL else {} for r in (src, dst))
    store(dst, load(src, fill_value=fill_value, **reads), **writes)
    return
  bind(copy_p, (*src.operands, *dst.operands),
       dict(views=(src.view, dst.view), fill_value=fill_operand(fill_value, src.dtype, "copy"), dispatch=dispatch,
            **policy))


def copy_async(src: Any, dst: Any, *, barrier: Barrier | None = None, fill_value: Any = 0, dispatch: str | None = None,
               multicast: tuple[int, ...] = (), reduce: str | None = None, eviction_policy: str | None = None,
               **unknown: Any) -> None:
  """Starts a copy (level 0) that completes on `barrier`, or in the group that tt.commit_group closes.

  Args:
    src, dst: as for tt.copy.
    barrier: `full[slot]`, which counts dst's bytes down; None: a bulk or cp.async group.
    dispatch: "tma" or "cp_async".
    multicast: axes of the grid along which the CTAs of a cluster, all of which make this copy, share it: each brings
      its part of the bytes to the same place of all of them, and completes on the same barrier of all of them.
    reduce: "add", "min", "max", "and", "or" or "xor": what TMA does with each element of dst, in global memory, and
      that of src, as one (PTX ISA 9.7.9, cp.reduce.async.bulk.tensor). Programs come in any order.
    eviction_policy: as for tt.copy.
  Raises:
    TileTypeError: as tt.copy; a reduction of other dtypes than the hardware has, or not from shared to global memory.

  Example:
    >>> def kernel(x, y):
    ...   s = tt.alloc_shared((16, 32), x.dtype)
    ...   tt.copy_async(x, s, dispatch="cp_async")
    ...   tt.commit_group(kind="cp_async")
    ...   tt.wait_group(kind="cp_async")
    ...   tt.sync()
    ...   y[...] = s[...]
    >>> x = jnp.ones((16, 32))
    >>> tt.tile_call(kernel, jax.ShapeDtypeStruct(x.shape, x.dtype), grid=1)(x).sum()
    Array(512., dtype=float32)
  """
  refuse_keywords("copy_async", unknown, COPY_WORDS)
  policy = evicted("copy_async", eviction_policy, src, dst)
  src, dst = _copy_operands("copy_async", src, dst, dispatch)
  reduced = {} if reduce is None else _reduced(reduce, src, dst, eviction_policy)
  if barrier is not None and not isinstance(barrier, Barrier):
    raise TileTypeError(f"copy_async: barrier is {type(barrier).__name__}", loc=user_loc(),
                        hint="select one of tt.alloc_barrier's: barrier=full[slot]")
  shared = dict(multicast=_multicast(multicast, barrier)) if multicast else {}
  bind(copy_async_p, (*src.operands, *dst.operands, *(barrier.operands if barrier is not None else ())),
       dict(views=(src.view, dst.view), fill_value=fill_operand(fill_value, src.dtype, "copy_async"), dispatch=dispatch,
            **shared, **reduced, **policy))


def _reduced(op: str, src: Ref, dst: Ref, policy: str | None) -> dict[str, str]:
  if op not in REDUCTIONS:
    raise TileTypeError(f"copy_async: reduce is {op!r}", loc=user_loc(),
                        hint="one of " + ", ".join(repr(x) for x in REDUCTIONS))
  if dst.dtype not in REDUCTIONS[op]:
    known = ", ".join(map(dtypes.short_name, REDUCTIONS[op]))
    by_threads = f"tt.atomic_{op}(ref, value)" if (op in ("min", "max") and dst.dtype == dtypes.f32) else None
    raise TileTypeError(f"copy_async: reduce={op!r} of {dtypes.short_name(dst.dtype)}: TMA has it for {known}",
                        loc=user_loc(), hint=by_threads)
  if (src.type.space, dst.type.space) != (Space.SHARED, Space.GLOBAL):
    raise TileTypeError(f"copy_async: reduce={op!r} from {describe(src)} to {describe(dst)}", loc=user_loc(),
                        hint="TMA reduces what is in global memory with what is in shared memory")
  if policy is not None:
    raise TileTypeError(f"copy_async: reduce={op!r} with an eviction_policy", loc=user_loc(),
                        hint="drop eviction_policy=: a reduction takes none")
  return {"reduce": op}


def _multicast(axes: tuple[int, ...], barrier: Barrier | None) -> tuple[int, ...]:
  cluster = current().options.cluster or ()
  wide = tuple(a for a, n in enumerate(cluster) if n > 1)
  if barrier is None or not set(axes) <= set(wide):
    raise TileTypeError(f"copy_async: multicast={axes!r} along the axes {wide} of the cluster, on a barrier",
                        loc=user_loc(), hint="tile_call(cluster=...) says how many CTAs along each axis of the grid")
  return tuple(sorted(axes))


def commit_group(*, kind: str = "bulk") -> None:
  """Closes the group of asynchronous copies started so far (level 0). `kind`: "bulk" or "cp_async".

  The example of `tt.copy_async` uses it.
  """
  _kind("commit_group", kind)
  bind(commit_group_p, (), dict(kind=kind))


def wait_group(n: int = 0, *, kind: str = "bulk", read: bool = False) -> None:
  """Waits until at most `n` groups are pending (level 0); `read`: until their sources may be overwritten.

  The example of `tt.copy_async` uses it.
  """
  _kind("wait_group", kind)
  if isinstance(n, bool) or not isinstance(n, int) or n < 0:
    raise TileTypeError(f"wait_group: n is {n!r}, it must be a Python int >= 0", loc=user_loc())
  bind(wait_group_p, (), dict(kind=kind, n=n, read=bool(read)))


def _kind(what: str, kind: str) -> None:
  if kind not in GROUPS:
    raise TileTypeError(f"{what}: kind is {kind!r}", loc=user_loc(), hint='"bulk" or "cp_async"')
