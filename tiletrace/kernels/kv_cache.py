"""Caches of keys: one array for each example, or pages that a table of numbers finds; and who sees which key."""
from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

import tiletrace as tt
from tiletrace.core.errors import TileTypeError
from tiletrace.core.source import caller_loc
from tiletrace.kernels.arguments import described

_LEAST_BLOCK = 16        # keys: k of one wgmma


@dataclasses.dataclass(frozen=True, slots=True)
class Sight:
  """Row r of a tile of queries is of token r // group; the last of `tokens` sees all keys, the one before it one less.

  One token: all rows see all keys.
  """
  tokens: int
  group: int


@dataclasses.dataclass(frozen=True, slots=True)
class Keys:
  """In a kernel: blocks of `block` keys of cache[b, s, ...], or [pages, page_size, ...] by table[b, max_pages].

  A page number outside of the cache is safe to copy from, since a tile outside of an array is zeros.
  """
  cache: Any
  table: Any
  block: int
  sight: Sight

  @property
  def capacity(self) -> int:
    """Of an example, in keys."""
    return self.cache.shape[1] * (1 if self.table is None else self.table.shape[1])

  def find(self, e: Any, j: Any) -> list[tuple[Any, Any, slice]]:
    """Of the j-th block of example e, part by part: the first two indices, of which the first is the page, and the rows
    of the block."""
    size, block = self.cache.shape[1], self.block
    if self.table is None:
      return [(e, tt.block(j, block), slice(None))]
    if size >= block:
      blocks = size // block
      return [(self.table[e, j // blocks], tt.block(j % blocks, block), slice(None))]
    pages = block // size
    return [(self.table[e, j * pages + i], slice(None), slice(i * size, (i + 1) * size)) for i in range(pages)]

  def is_edge(self, j: Any, stop: Any, parts: Sequence[tuple[Any, Any, slice]]) -> Any:
    """Whether any row does not see all keys of the block, where keys from `stop` on are not there."""
    edge = (j + 1) * self.block > stop - (self.sight.tokens - 1)
    for page, _, _ in parts if self.table is not None else ():
      edge = edge | (page < 0) | (page >= self.cache.shape[0])
    return edge

  def seen(self, j: Any, stop: Any, parts: Sequence[tuple[Any, Any, slice]], first_row: Any, rows: int) -> Any:
    """bool [rows or 1, block]."""
    at = tt.arange(self.block)[None, :]
    end = stop - j * self.block
    if self.sight.tokens == 1:
      seen = at < end
    else:
      token = (first_row + tt.arange(rows)) // self.sight.group
      seen = at < (end - (self.sight.tokens - 1 - token))[:, None]
    for page, _, part in parts if self.table is not None else ():
      gone = (page < 0) | (page >= self.cache.shape[0])
      if len(parts) > 1:
        gone = gone & (at >= part.start) & (at < part.stop)
      seen = seen & ~gone
    return seen


def check_cache(name: str, batch: int, cache: Any, lengths: Any, table: Any) -> None:
  """Refuses lengths and tables that do not fit the cache, and pages that cannot be cut into blocks."""
  if getattr(lengths, "shape", None) != (batch,) or lengths.dtype != jnp.int32:
    raise TileTypeError(f"{name}: lengths is {described(lengths)}", loc=caller_loc(),
                        hint=f"int32 [{batch}], one for each sequence: lengths.astype(jnp.int32)")
  if table is None:
    if cache.shape[0] != batch:
      raise TileTypeError(f"{name}: a cache of {cache.shape[0]} sequences, and {batch} of queries", loc=caller_loc(),
                          hint="[b, s, ...] for b sequences; a cache of pages needs block_table")
    return
  if getattr(table, "ndim", None) != 2 or table.shape[0] != batch or not table.shape[1] or table.dtype != jnp.int32:
    raise TileTypeError(f"{name}: block_table is {described(table)}", loc=caller_loc(),
                        hint=f"int32 [{batch}, max_pages], the numbers of the pages")
  if not cache.shape[0] or not cache.shape[1] or cache.shape[1] % _LEAST_BLOCK:
    raise TileTypeError(f"{name}: {cache.shape[0]} pages of {cache.shape[1]} keys", loc=caller_loc(),
                        hint=f"one page or more, of a multiple of {_LEAST_BLOCK} keys")


def block_of(most: int, page_size: int | None) -> int:
  """Keys of a block: `most`, where pages are as large or several make it up; else what divides both."""
  return most if page_size is None or page_size % most == 0 or most % page_size == 0 else math.gcd(most, page_size)


def gathered(cache: jax.Array, table: jax.Array | None) -> tuple[jax.Array, jax.Array]:
  """The cache as [b, s, ...], and bool [b, s]: whether a key is there. Those that are not are zeros."""
  if table is None:
    return cache, jnp.ones(cache.shape[:2], bool)
  has = (table >= 0) & (table < cache.shape[0])
  pages = cache[jnp.where(has, table, 0)]                  # [b, max_pages, page_size, ...]
  has = jnp.repeat(has, cache.shape[1], axis=1)
  flat = pages.reshape(*has.shape, *cache.shape[2:])
  return jnp.where(jnp.expand_dims(has, tuple(range(2, flat.ndim))), flat, 0), has


def seen_reference(lengths: jax.Array, has: jax.Array, queries: int, is_causal: bool) -> jax.Array:
  """bool [b, s_q, s]: whether a query sees a key of a cache where `has` [b, s] are."""
  s = has.shape[1]
  behind = queries - 1 - jnp.arange(queries) if is_causal else jnp.zeros(queries, jnp.int32)
  ends = jnp.clip(lengths, 0, s)[:, None] - behind
  return (jnp.arange(s) < ends[..., None]) & has[:, None, :]
