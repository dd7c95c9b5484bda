"""Special functions that jax leaves to XLA, by XLA's own formulas in f32."""
from __future__ import annotations

import math

from tiletrace.core.ops import elementwise as ops, floats, transcendental as more
from tiletrace.core.tile import Tile
from tiletrace.jaxpr.rules import formula

# M. Giles, Approximating the erfinv function, GPU Computing Gems 2011: polynomials in w = -log(1 - x^2), where that is
# below 5 and where it is not, highest power first.
_ERFINV = (
    (2.81022636e-08, 3.43273939e-07, -3.5233877e-06, -4.39150654e-06, 0.00021858087, -0.00125372503, -0.00417768164,
     0.246640727, 1.50140941),
    (-0.000200214257, 0.000100950558, 0.00134934322, -0.00367342844, 0.00573950773, -0.0076224613, 0.00943887047,
     1.00167406, 2.83297682))
# Lanczos' approximation of the gamma function with g = 7.
_G = 7
_BASE = 0.99999999999980993
_LANCZOS = (676.520368121885098567009190444019, -1259.13921672240287047156078755283, 771.3234287776530788486528258894,
            -176.61502916214059906584551354, 12.507343278686904814458936853, -0.13857109526572011689554707,
            9.984369578019570859563e-6, 1.50563273514931155834e-7)


@formula("erf_inv")
def _erf_inv(x: Tile) -> Tile:
  w = -more.log1p(-(x * x))
  near = w < 5
  w = ops.where(near, w - 2.5, floats.sqrt(w) - 3)
  p = ops.where(near, _ERFINV[0][0], _ERFINV[1][0])
  for a, b in zip(_ERFINV[0][1:], _ERFINV[1][1:]):
    p = ops.where(near, a, b) + p * w
  return ops.where(abs(x) == 1, x * math.inf, p * x)


def _terms(x: Tile) -> tuple[Tile, Tile, list[Tile]]:
  """Of x, or of 1 - x below a half: x - 1, its logarithm of t = x - 1 + g + 1/2, and the denominators."""
  z = ops.where(x < 0.5, -x, x - 1)
  log_t = math.log(_G + 0.5) + more.log1p(z / (_G + 0.5))
  return z, log_t, [z + (i + 1) for i in range(len(_LANCZOS))]


@formula("lgamma")
def _lgamma(x: Tile) -> Tile:
  """Below a half by the reflection formula, the sine of what is left of x beside an integer."""
  z, log_t, below = _terms(x)
  total = sum((c / b for c, b in zip(_LANCZOS, below)), start=z * 0 + _BASE)
  t = z + (_G + 0.5)
  log_y = math.log(2 * math.pi) / 2 + (z + 0.5 - t / log_t) * log_t + floats.log(total)
  fraction = abs(x) - ops.floor(abs(x))
  sine = floats.log(floats.sin(math.pi * ops.where(fraction > 0.5, 1 - fraction, fraction)))
  reflected = ops.where(more.isfinite(sine), math.log(math.pi) - sine - log_y, -sine)
  return ops.where(more.isinf(x), math.inf, ops.where(x < 0.5, reflected, log_y))


@formula("digamma")
def _digamma(x: Tile) -> Tile:
  z, log_t, below = _terms(x)
  total = sum((c / b for c, b in zip(_LANCZOS, below)), start=z * 0 + _BASE)
  slope = sum((-c / (b * b) for c, b in zip(_LANCZOS, below)), start=z * 0)
  y = log_t + slope / total - _G / (z + (_G + 0.5))
  rest = x + abs(ops.floor(x + 0.5))
  reflected = y - math.pi / more.tan(math.pi * rest)
  pole = (x <= 0) & (x == ops.floor(x))
  return ops.where(pole, math.nan, ops.where(x < 0.5, reflected, y))
