"""Options of a compilation: part of its cache key."""
from __future__ import annotations

import dataclasses

L2_PROMOTIONS = (0, 64, 128, 256)


@dataclasses.dataclass(frozen=True, slots=True)
class CompileOptions:
  """How to lower a kernel; `tile_call(options=...)` and `lower(options=...)` take one.

  Attributes:
    force: (op, variant) pairs; that op must use that variant, or lowering fails with the reason it declines.
    allow_spills: accept a kernel whose registers spill to local memory.
    allow_serialized_wgmma: accept ptxas' C75xx warnings (wgmma serialised: correct, slow).
    debug: tt.debug_print prints, tt.debug_check and tt.assume are checked; else no code is made for them.
    target: "sm_90a", "sm_80", "sm_86" or "sm_89"; None: TT_TARGET's, else that of the GPU, else sm_90a.
    profile: tt.profile records times; else no code is made for it.
    ctas_per_sm: how many CTAs an SM is to hold at least: ptxas takes no more registers than that leaves.
    l2_promotion: bytes that TMA brings into L2 around each piece of a row that it copies: 0, 64, 128 or 256. 256 suit
      what several CTAs read; what is read once comes faster by 128.
    overlap_launch: programmatic dependent launch. CTAs start as soon as those of the kernel before it in the stream
      leave room, where that one has this option too; they initialise their barriers and wait for its end before they
      read or write anything else. Targets before sm_90 launch as ever.

  Example:
    >>> def kernel(x, y):
    ...   s = tt.alloc_shared((64, 64), x.dtype)
    ...   tt.copy(x, s)
    ...   y[...] = s[...]
    >>> x = jax.ShapeDtypeStruct((64, 64), jnp.float32)
    >>> options = tt.CompileOptions(force=(("copy", "cp_async"),))
    >>> [c.variant for c in tt.tile_call(kernel, x, grid=1, options=options).lower(x).choices if c.op == "copy"]
    ['cp_async']
  """
  force: tuple[tuple[str, str], ...] = ()
  allow_spills: bool = False
  allow_serialized_wgmma: bool = False
  ctas_per_sm: int = 1
  l2_promotion: int = 256
  overlap_launch: bool = False
  debug: bool = False
  profile: bool = False
  target: str | None = None

  def forced(self, op: str) -> str | None:
    return dict(self.force).get(op)
