"""Runs the equations of one program as jax ops: values in an environment, references as arrays that are replaced."""
from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from tiletrace.core.effects import Access, RefEffect
from tiletrace.core.errors import LoweringError
from tiletrace.core.graph import Atom, Block, Eqn, Literal, RefOperand, Var, walk
from tiletrace.core.rules import RuleTable, effects
from tiletrace.core.types import TileType
from tiletrace.lowering.xla.buffer import Frame, Window
from tiletrace.lowering.xla.ranges import Ranges

# An xla rule: (machine, eqn) -> the values of the equation's results that are tiles.
XlaRule = Callable[["Machine", Eqn], Sequence[jax.Array | np.ndarray]]
xla_rules: RuleTable[XlaRule] = RuleTable("xla", levels=frozenset({1}))

# (eqn, an array that it computed or wrote) -> the array to go on with, of the same shape and dtype (perturb.py).
Perturb = Callable[[Eqn, Any], Any]


def varying_axes(x: Any) -> frozenset[str]:
  """The manual mesh axes (jax.shard_map) along which a value varies."""
  return frozenset(jax.typeof(x).manual_axis_type.varying)


def vary(x: Any, axes: frozenset[str]) -> jax.Array:
  """`x`, varying along `axes` too. Loop carries and branches must agree in this."""
  missing = tuple(sorted(axes - varying_axes(x)))
  return lax.pcast(x, missing, to="varying") if missing else x


def written(blocks: Sequence[Block]) -> tuple[Var, ...]:
  """The references that equations inside write, in program order of the first write."""
  out: dict[Var, None] = {}
  for block in blocks:
    for eqn in walk(block):
      refs = eqn.refs
      for effect in effects(eqn) if refs else ():
        if isinstance(effect, RefEffect) and effect.access is Access.WRITE:
          out[refs[effect.operand].root] = None
  return tuple(out)


class Machine:
  """The state of one program.

  Attributes:
    ranges: what is known of index scalars.
    overhangs: see buffer.overhangs.
    frames: where the array of each reference lies.
    program_ids: one i32 scalar for each grid axis.
    axes: the manual mesh axes along which every reference varies.
    env: the value of each variable.
    memory: the array of each reference.
    perturb: what happens to the values of each equation, or None.
  """

  def __init__(self, ranges: Ranges, overhangs: dict[Var, tuple[tuple[int, int], ...]], frames: dict[Var, Frame],
               program_ids: Sequence[jax.Array | np.ndarray], axes: frozenset[str], env: dict[Var, Any],
               memory: dict[Var, jax.Array], perturb: Perturb | None = None):
    self.ranges, self.overhangs, self.frames = ranges, overhangs, frames
    self.program_ids, self.axes, self.env, self.memory = program_ids, axes, env, memory
    self.perturb = perturb

  def read(self, atom: Atom) -> jax.Array | np.ndarray:
    """The value of an operand; a literal is a numpy array of rank 0."""
    return np.asarray(atom.value).astype(atom.type.dtype) if isinstance(atom, Literal) else self.env[atom]

  def run(self, block: Block) -> list[jax.Array | np.ndarray]:
    for eqn in block.eqns:
      if eqn.primitive.level == 0:
        raise LoweringError(
            f"{eqn.primitive} is explicit orchestration, which plain jax ops cannot express", loc=eqn.loc,
            hint='level-0 kernels run on the GPU or, with backend="sim" or none, in the simulator, never through xla')
      outs = [v for v in eqn.outvars if isinstance(v.type, TileType)]  # a reference's value lies in memory
      for var, value in zip(outs, xla_rules[eqn.primitive](self, eqn), strict=True):
        assert (value.shape, value.dtype) == (var.type.shape, var.type.dtype), (eqn, value)  # type: ignore[union-attr]
        self.env[var] = value if self.perturb is None else self.perturb(eqn, value)
      if self.perturb is not None and not eqn.blocks:
        for root in self.carried([Block((), (eqn,))]):
          self.memory[root] = self.perturb(eqn, self.memory[root])
    return list(map(self.read, block.outs))

  def carried(self, blocks: Sequence[Block]) -> tuple[Var, ...]:
    """The references of this program that the blocks write."""
    return tuple(v for v in written(blocks) if v in self.memory)

  def function(self, block: Block, carried: Sequence[Var]) -> Callable[..., tuple[list[jax.Array], list[jax.Array]]]:
    """The block as a function (values of invars, arrays of `carried`) -> (outs, arrays of `carried`)."""
    def call(values: Sequence[Any], arrays: Sequence[jax.Array]) -> tuple[list[jax.Array], list[jax.Array]]:
      inner = Machine(self.ranges, self.overhangs, dict(self.frames), self.program_ids, self.axes,
                      {**self.env, **dict(zip(block.invars, values))}, {**self.memory, **dict(zip(carried, arrays))},
                      self.perturb)
      outs = inner.run(block)
      return list(map(self.vary, outs)), [self.vary(inner.memory[v]) for v in carried]
    return call

  def vary(self, x: Any) -> jax.Array:
    return vary(jnp.asarray(x), self.axes)

  def window(self, ref: RefOperand) -> Window:
    return Window(ref, self.frames[ref.root], self.ranges, self.read)

  def load(self, ref: RefOperand, fill_value: Any, mask: jax.Array | np.ndarray | None = None) -> jax.Array:
    """The view's elements; `fill_value` for those that do not exist or that `mask` (of the view's shape) excludes."""
    window = self.window(ref)
    box = window.read(self.memory[ref.root])
    fill = np.asarray(fill_value).astype(box.dtype)
    exists = window.mask(bounds=True)
    if exists is not None:
      box = lax.select(_expand(exists, box.shape), box, lax.full(box.shape, fill, box.dtype))
    tile = window.to_view(box)
    if mask is not None:
      tile = lax.select(_expand(mask, tile.shape), tile, lax.full(tile.shape, fill, tile.dtype))
    return tile

  def store(self, ref: RefOperand, value: jax.Array | np.ndarray, mask: jax.Array | np.ndarray | None = None) -> None:
    """Writes a tile of the view's shape, or a scalar to every element; what does not exist is dropped."""
    window = self.window(ref)
    box = window.from_view(_expand(value, ref.shape))
    exists = window.mask(bounds=False)
    parts = [] if exists is None else [_expand(exists, box.shape)]
    if mask is not None:
      parts.append(window.from_view(_expand(mask, ref.shape)))
    merged = functools.reduce(lax.bitwise_and, parts) if parts else None
    self.memory[ref.root] = self.vary(window.write(self.memory[ref.root], box, merged))


def _expand(x: jax.Array | np.ndarray, shape: tuple[int, ...]) -> jax.Array:
  """Broadcast of a scalar, or of an array of equal rank."""
  if x.shape == shape:
    return x  # type: ignore[return-value]
  if not x.ndim:
    return lax.broadcast(x, shape)
  return lax.broadcast_in_dim(x, shape, tuple(range(len(shape))))
