"""Options of a compilation: part of its cache key."""
from __future__ import annotations

import dataclasses
from typing import Any

from tiletrace.core.errors import TileTypeError
from tiletrace.core.source import user_loc

_L2_PROMOTIONS = (0, 64, 128, 256)
_MOST_CTAS = 32      # of an SM, compute capability 9.0
_FLAGS = ("allow_spills", "allow_serialized_wgmma", "overlap_launch", "debug", "profile")


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
    ctas_per_sm: how many CTAs an SM is to hold at least: ptxas takes no more registers than that leaves, and roles get
      their parts of one CTA's.
    l2_promotion: bytes that TMA brings into L2 around each piece of a row that it copies: 0, 64, 128 or 256. 256 suit
      what several CTAs read; what is read once comes faster by 128.
    overlap_launch: programmatic dependent launch. CTAs start as soon as those of the kernel before it in the stream
      leave room, where that one has this option too; they initialise their barriers and wait for its end before they
      read or write anything else. Targets before sm_90 launch as ever.

  Raises:
    TileTypeError: a value that its option does not take. Whether there are such an op, variant and target shows when a
      kernel is lowered.

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

  def __post_init__(self) -> None:
    for name in _FLAGS:
      self._check(name, isinstance(getattr(self, name), bool), "True or False")
    self._check("force", _is_pairs(self.force), '((op, variant), ...), as in (("copy", "cp_async"),)')
    self._check("ctas_per_sm", type(self.ctas_per_sm) is int and 1 <= self.ctas_per_sm <= _MOST_CTAS,
                f"an int from 1 to {_MOST_CTAS}")
    self._check("l2_promotion", type(self.l2_promotion) is int and self.l2_promotion in _L2_PROMOTIONS,
                f"bytes that TMA brings into L2: {', '.join(map(str, _L2_PROMOTIONS))}")
    self._check("target", self.target is None or isinstance(self.target, str), 'a name like "sm_90a", or None')

  def _check(self, name: str, fits: bool, takes: str) -> None:
    if not fits:
      raise TileTypeError(f"CompileOptions: {name}={getattr(self, name)!r}", loc=user_loc(), hint=takes)

  def forced(self, op: str) -> str | None:
    return dict(self.force).get(op)


def _is_pairs(force: Any) -> bool:
  return isinstance(force, tuple) and all(
      isinstance(pair, tuple) and len(pair) == 2 and all(isinstance(word, str) for word in pair) for pair in force)


def given_options(options: Any, where: str) -> CompileOptions:
  """What was given as `options=`; None is all defaults.

  Raises:
    TileTypeError: something else was.
  """
  if options is not None and not isinstance(options, CompileOptions):
    raise TileTypeError(f"{where}: options={options!r}", loc=user_loc(), hint="tt.CompileOptions(...), or None")
  return options or CompileOptions()
