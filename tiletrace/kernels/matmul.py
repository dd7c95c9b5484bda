"""Matrix products with what follows them: a bias for each column, and any jax.numpy function of the elements."""
from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

import tiletrace as tt
from tiletrace.core.errors import TileTypeError
from tiletrace.core.source import caller_loc
from tiletrace.kernels.arguments import check_elementwise, float_array, float_dtype, half_array
from tiletrace.lowering.target import SM_90A

Activation = Callable[[jax.Array], jax.Array]


@dataclasses.dataclass(frozen=True, slots=True)
class Tiling:
  """Blocks of a product, how deep its pipeline is, how fast an element of a tile goes in units of the first one, the
  CTAs of a cluster along rows and columns of tiles, and the bytes that TMA brings into L2 around what it copies."""
  bm: int
  bn: int
  warpgroups: int
  num_stages: int
  speed: float
  bk: int = 64
  cluster: tuple[int, int] | None = None
  l2_promotion: int = 256

  def grid(self, m: int, n: int) -> tuple[int, int]:
    """Programs for a result of m by n, in whole clusters: those past its end store nothing."""
    rows, columns = self.cluster or (1, 1)
    return tt.align_to(tt.cdiv(m, self.bm), rows), tt.align_to(tt.cdiv(n, self.bn), columns)

  def launch(self, m: int, n: int) -> dict[str, Any]:
    """Keywords of tile_call. Where each SM has one tile at most, there is none for an epilogue to hide behind, so that
    the next launch begins in it; but not where SMs have none: its CTAs would fill those first, not one SM each."""
    grid = self.grid(m, n)
    tiles, sms = math.prod(grid), SM_90A.sm_count
    options = tt.CompileOptions(overlap_launch=_FULL * sms <= tiles <= sms, l2_promotion=self.l2_promotion)
    return {"grid": grid, "warpgroups": self.warpgroups, "cluster": self.cluster, "raster": 16,
            "persistent": tiles > sms, "options": options}


_TILINGS = (Tiling(128, 256, 2, 4, 1.0), Tiling(192, 192, 3, 4, 0.99), Tiling(128, 128, 2, 4, 0.85),
            Tiling(64, 128, 1, 6, 0.65), Tiling(64, 64, 1, 8, 0.45))
_FULL = 0.95        # of the SMs have a tile
_LARGE = 2          # of them, for results of relu at most: another function needs registers of its own
_ONE_WAVE_STAGES = {(128, 128): 6, (64, 128): 8}     # measured, with TMA and 16 bits; 64 x 64 is slower with 6 and 12
_ROW = 128          # bytes of a piece of a row that TMA copies


def choose_tiling(m: int, n: int, k: int, *, form: str = "nn", itemsize: int = 2, plain: bool = True) -> Tiling:
  """The tiling whose waves over the SMs take the least time.

  Rows whose starts are no multiples of 128 bytes cost TMA more lines of L2 than they fill: there two CTAs above each
  other share what they read of B (TMA multicast). Where 128 bytes are all that a tile has of a row of B, the 128 beside
  them are another CTA's, and L2 does better without them. Where no SM has a second tile its ring is deeper.

  Args:
    form: is a, is b stored transposed?
    itemsize: bytes of an element of a and b.
    plain: nothing, or relu, follows the product.
  """
  pitches = [itemsize * (m if form[0] == "t" else k), itemsize * (k if form[1] == "t" else n)]
  tma = all(p % 16 == 0 for p in pitches)
  fitting = [t for i, t in enumerate(_TILINGS) if (plain or i >= _LARGE) and (tma or t.warpgroups < 3)]
  if tma and any(p % 128 for p in pitches):
    fitting = [dataclasses.replace(t, cluster=(2, 1)) if t.bm >= 128 else t for t in fitting]
  t = min(fitting, key=lambda t: _waves(m, n, t) * t.bm * t.bn / t.speed)
  if tma and itemsize == 2 and _waves(m, n, t) == 1:
    t = dataclasses.replace(t, num_stages=_ONE_WAVE_STAGES.get((t.bm, t.bn), t.num_stages))
  if form[1] == "n" and itemsize * t.bn == _ROW:
    t = dataclasses.replace(t, l2_promotion=_ROW)
  return t


def matmul_kernel(a, b, bias, c, *, form, activation, bm, bn, bk, num_stages):
  """form: is a, is b stored transposed? "nn" is a[m, k] @ b[k, n]."""
  i, j = tt.program_id(0), tt.program_id(1)
  a_t, b_t = form[0] == "t", form[1] == "t"
  a_s = tt.alloc_shared((bk, bm) if a_t else (bm, bk), a.dtype)
  b_s = tt.alloc_shared((bn, bk) if b_t else (bk, bn), b.dtype)
  acc = tt.alloc_fragment((bm, bn), jnp.float32)
  acc[...] = 0
  rows, cols = tt.block(i, bm), tt.block(j, bn)
  for k in tt.pipelined(tt.cdiv(a.shape[0 if a_t else 1], bk), num_stages=num_stages):
    inner = tt.block(k, bk)
    tt.copy(a.at[inner, rows] if a_t else a.at[rows, inner], a_s)
    tt.copy(b.at[cols, inner] if b_t else b.at[inner, cols], b_s)
    tt.gemm(a_s.T if a_t else a_s, b_s.T if b_t else b_s, acc)
  y = acc[...]
  if bias is not None:
    y = y + bias[None, cols].astype(jnp.float32)
  if activation is not None:
    y = tt.call_jax(activation, y)
  c[rows, cols] = y.astype(c.dtype)


def matmul_reference(a: jax.Array, b: jax.Array, bias: jax.Array | None = None, *, activation: Activation | None = None,
                     transpose_a: bool = False, transpose_b: bool = False, out_dtype: Any = None) -> jax.Array:
  """What `matmul` computes, in jax.numpy."""
  y = jnp.dot(a.T if transpose_a else a, b.T if transpose_b else b, preferred_element_type=jnp.float32)
  if bias is not None:
    y = y + bias.astype(jnp.float32)
  if activation is not None:
    y = activation(y)
  return y.astype(out_dtype or a.dtype)


def matmul(a: jax.Array, b: jax.Array, bias: jax.Array | None = None, *, activation: Activation | None = None,
           transpose_a: bool = False, transpose_b: bool = False, out_dtype: Any = None) -> jax.Array:
  """activation(a @ b + bias), accumulated in f32 and rounded once.

  Args:
    a: bfloat16 or float16 [..., k]; [k, m] where it is stored transposed.
    b: of a's dtype, [k, n]; [n, k] where it is stored transposed.
    bias: float [n].
    activation: a jax.numpy function of single elements, e.g. jax.nn.gelu, applied in f32. Pass the same function object
      in each call: another one is another kernel.
    transpose_a, transpose_b: read a, b as they are stored, as their transposes.
    out_dtype: of the result, by default a's.

  Returns:
    [..., n]; [m, n] where a is stored transposed.

  Raises:
    TileTypeError: dtypes or shapes that do not fit.

  The derivatives are products by this function too; that of `activation` is XLA's, at a recomputed a @ b + bias.

  Example:
    >>> import jax, jax.numpy as jnp
    >>> from tiletrace.kernels import matmul, matmul_reference
    >>> a, b = (jax.random.normal(jax.random.key(i), s, jnp.bfloat16) for i, s in enumerate(((2, 30, 72), (72, 40))))
    >>> y = jax.jit(lambda a, b: matmul(a, b, jnp.ones(40), activation=jax.nn.gelu))(a, b)
    >>> z = matmul_reference(a, b, jnp.ones(40), activation=jax.nn.gelu)
    >>> y.shape, bool(jnp.allclose(y.astype("float32"), z.astype("float32"), rtol=0.02, atol=0.02))
    ((2, 30, 40), True)
  """
  a, b = half_array("matmul", "a", a, wider="jnp.dot"), half_array("matmul", "b", b, wider="jnp.dot")
  if b.ndim != 2 or a.dtype != b.dtype or (a.ndim != 2 if transpose_a else a.ndim < 2):
    raise TileTypeError(f"matmul: a is {a.dtype}{list(a.shape)}, b {b.dtype}{list(b.shape)}", loc=caller_loc(),
                        hint="one dtype; b has rank 2, and so has a where it is transposed")
  k, n = b.shape[::-1] if transpose_b else b.shape
  if a.shape[0 if transpose_a else -1] != k:
    raise TileTypeError(f"matmul: a {list(a.shape)} and b {list(b.shape)} have different inner extents",
                        loc=caller_loc(), hint="transpose_a and transpose_b say which is stored transposed")
  if bias is not None and (bias := float_array("matmul", "bias", bias)).shape != (n,):
    raise TileTypeError(f"matmul: bias has the shape {bias.shape}, the product {n} columns", loc=caller_loc(),
                        hint="one element for each column")
  check_elementwise("matmul", "activation", activation)
  dtype = float_dtype("matmul", "out_dtype", out_dtype, a.dtype)
  outer = (a.shape[1],) if transpose_a else a.shape[:-1]
  flat = a if transpose_a else a.reshape(math.prod(outer), k)
  form = "nt"[transpose_a] + "nt"[transpose_b]
  call = matmul_call((math.prod(outer), n), dtype, k=k, form=form, activation=activation)
  return call(flat, b, bias).reshape(*outer, n)


def matmul_call(shape: tuple[int, ...], dtype: Any, *, k: int, form: str = "nn",
                activation: Activation | None = None) -> tt.TileCall:
  """The call behind `matmul` for a result of shape (m, n), of (a, b, bias); form: is a, is b stored transposed?"""
  m, n = shape
  t = choose_tiling(m, n, k, form=form, plain=activation in (None, jax.nn.relu))
  return tt.tile_call(
      functools.partial(matmul_kernel, form=form, activation=activation, bm=t.bm, bn=t.bn, bk=t.bk,
                        num_stages=t.num_stages),
      jax.ShapeDtypeStruct((m, n), dtype), name="matmul", **t.launch(m, n),
      vjp=functools.partial(_backward, form=form, activation=activation))


def _waves(m: int, n: int, t: Tiling) -> int:
  return tt.cdiv(math.prod(t.grid(m, n)), SM_90A.sm_count)


def _backward(inputs: tuple, y: jax.Array, dy: jax.Array, *, form: str, activation: Activation | None) -> tuple:
  a, b, bias = inputs
  a_t, b_t = form[0] == "t", form[1] == "t"
  if activation is not None:
    z = matmul(a, b, bias, transpose_a=a_t, transpose_b=b_t, out_dtype=jnp.float32)
    (dy,) = jax.vjp(activation, z)[1](dy.astype(jnp.float32))
  dz = dy.astype(a.dtype)
  da = matmul(b, dz, transpose_a=b_t, transpose_b=True) if a_t else matmul(dz, b, transpose_b=not b_t)
  db = matmul(dz, a, transpose_a=True, transpose_b=a_t) if b_t else matmul(a, dz, transpose_a=not a_t)
  dbias = None if bias is None else jnp.sum(dy.astype(jnp.float32), axis=0).astype(bias.dtype)
  return da, db, dbias
