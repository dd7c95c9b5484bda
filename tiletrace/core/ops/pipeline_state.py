"""PipelineState: slot and phase of a ring, for pipelines written by hand."""
from __future__ import annotations

from tiletrace.core import dtypes
from tiletrace.core.errors import TileTypeError
from tiletrace.core.ops.elementwise import where
from tiletrace.core.ops.memory import alloc_fragment
from tiletrace.core.source import user_loc
from tiletrace.core.tile import Tile


class PipelineState:
  """Slot and phase of a ring of `num_stages`, kept in rank-0 references, so that `advance()` works in a traced loop.

  Args:
    num_stages: slots of the ring.
    phase: the first phase: 0 for a consumer, 1 for a producer that waits for `empty` barriers.

  Example:
    >>> def kernel(x, y):
    ...   s = tt.alloc_shared((2, 16, 32), x.dtype)
    ...   full, empty = (tt.alloc_barrier(2, arrivals=1) for _ in range(2))
    ...   with tt.warpgroup(0), tt.elect():
    ...     state = tt.PipelineState(2, phase=1)
    ...     for k in tt.range(4):
    ...       empty[state.slot].wait(state.phase)
    ...       full[state.slot].arrive_expect_tx(s.at[0].nbytes)
    ...       tt.copy_async(x.at[tt.block(k, 16), :], s.at[state.slot], barrier=full[state.slot], dispatch="tma")
    ...       state.advance()
    ...   with tt.warpgroup(1):
    ...     state, total = tt.PipelineState(2), tt.alloc_fragment((16, 32), x.dtype)
    ...     total[...] = 0
    ...     for k in tt.range(4):
    ...       full[state.slot].wait(state.phase)
    ...       total[...] += s[state.slot, :, :]
    ...       tt.fence()
    ...       tt.sync()
    ...       empty[state.slot].arrive()
    ...       state.advance()
    ...     y[...] = total[...]
    >>> x = jnp.ones((64, 32))
    >>> tt.tile_call(kernel, jax.ShapeDtypeStruct((16, 32), x.dtype), grid=1, warpgroups=2)(x).sum()
    Array(2048., dtype=float32)
  """

  def __init__(self, num_stages: int, *, phase: int = 0):
    if isinstance(num_stages, bool) or not isinstance(num_stages, int) or num_stages < 1:
      raise TileTypeError(f"PipelineState: num_stages is {num_stages!r}, it must be a Python int >= 1", loc=user_loc())
    if phase not in (0, 1):
      raise TileTypeError(f"PipelineState: phase is {phase!r}, it must be 0 or 1", loc=user_loc())
    self.num_stages = num_stages
    self._slot, self._phase = alloc_fragment((), dtypes.i32), alloc_fragment((), dtypes.i32)
    self._slot[...], self._phase[...] = 0, phase

  @property
  def slot(self) -> Tile:
    return self._slot[...]

  @property
  def phase(self) -> Tile:
    return self._phase[...]

  def advance(self) -> None:
    """Goes to the next slot; the phase flips when the ring is round."""
    slot = self._slot[...] + 1
    wrapped = slot == self.num_stages
    self._phase[...] = where(wrapped, self._phase[...] ^ 1, self._phase[...])
    self._slot[...] = where(wrapped, 0, slot)
