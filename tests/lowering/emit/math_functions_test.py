"""f32 functions made of PTX arithmetic: a few ulp from float64 over all of f32, and IEEE 754's special values."""
from __future__ import annotations

import math

import numpy as np
import pytest

from tests.lowering.emit.straight_line import evaluate
from tiletrace.lowering.emit import exponentials as ex, math_functions as fn, trigonometry as trig

rng = np.random.default_rng(11)
EDGES = np.array([0, 1, 2, 0.5, 0.25, 1e-45, 1e-40, 2**-126, 88.7, 89.4, 104, 1e5, 105615, 105616, 131072, 2**60, 3e38,
                  np.inf, np.nan], np.float32)


def everywhere(n: int = 1500) -> np.ndarray:
  """All exponents, the neighbourhoods of 0, 1 and what overflows exp, and both signs."""
  wide = rng.integers(0, 0x7F800000, n, dtype=np.uint32).view(np.float32)
  parts = [EDGES, wide, rng.standard_normal(n) * 3, rng.uniform(0, 100, n), rng.uniform(0, 1, n),
           1 + rng.normal(size=n) * 0.01]
  half = np.concatenate([np.asarray(p, np.float32) for p in parts])
  return np.concatenate([half, -half])


def ulps(got: np.ndarray, want: np.ndarray) -> np.ndarray:
  """How far `got` is from the float64 `want`, in units of the last place; of the least normal below it."""
  with np.errstate(all="ignore"):
    nearest = want.astype(np.float32)
    size = np.spacing(np.maximum(np.abs(nearest), np.float32(2**-126))).astype(np.float64)
    same = (got == nearest) & (np.signbit(got) == np.signbit(nearest)) | np.isnan(got) & np.isnan(want)
    return np.where(same, 0, np.abs(got - want) / size)


_erf, _erfc = (np.vectorize(f, otypes=[np.float64]) for f in (math.erf, math.erfc))
FUNCTIONS = {  # name -> (emitter, float64 reference, ulps)
  "asin": (trig.asin, np.arcsin, 2.5), "acos": (trig.acos, np.arccos, 2), "atan": (trig.atan, np.arctan, 2),
  "exp": (ex.exp, np.exp, 2), "expm1": (ex.expm1, np.expm1, 2), "sinh": (ex.sinh, np.sinh, 3),
  "cosh": (ex.cosh, np.cosh, 2), "tanh": (ex.tanh, np.tanh, 3), "log": (ex.log, np.log, 1.5),
  "log2": (ex.log2, np.log2, 2.5), "log10": (ex.log10, np.log10, 2.5), "log1p": (ex.log1p, np.log1p, 2),
  "asinh": (ex.asinh, np.arcsinh, 2), "acosh": (ex.acosh, np.arccosh, 3), "atanh": (ex.atanh, np.arctanh, 2.5),
  "erf": (fn.erf, _erf, 3), "erfc": (fn.erfc, _erfc, 6), "cbrt": (fn.cbrt, np.cbrt, 1.5),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_function_is_within_a_few_ulp_everywhere(name):
  emitter, reference, most = FUNCTIONS[name]
  x = everywhere()
  if name == "exp":                                            # where e**x is normal: below, ex2.approx rounds
    x = x[~(x < -87)]
  with np.errstate(all="ignore"):
    want = reference(x.astype(np.float64))
  error = ulps(evaluate(emitter, x), want)
  assert not np.isnan(error).any(), x[np.isnan(error)][:5]
  worst = error.argmax()
  assert error[worst] <= most, (x[worst], error[worst])


def _exact_turns(x: float) -> tuple[int, float]:
  """(n, r) with x = n pi / 2 + r, by pi to 1200 bits in integers."""
  bits = 1200
  pi = _pi(bits)
  numerator, denominator = x.as_integer_ratio()
  scaled = (numerator << bits + 1) // denominator              # 2 x, in units of 2**-bits
  n = (2 * scaled + pi) // (2 * pi)
  return n, (scaled - n * pi) / (1 << bits + 1)


def _pi(bits: int) -> int:
  """Machin's formula: pi = 16 atan(1/5) - 4 atan(1/239)."""
  def inverse_tangent(n: int) -> int:
    term = total = (1 << bits + 20) // n
    k = 1
    while term:
      term //= -n * n
      k += 2
      total += term // k
    return total
  return (16 * inverse_tangent(5) - 4 * inverse_tangent(239)) >> 20


@pytest.mark.parametrize("name", ["sin", "cos", "tan"])
def test_sines_are_within_a_few_ulp_of_every_finite_number(name):
  x = everywhere(800)
  x = x[np.isfinite(x)]
  turns = [_exact_turns(float(v)) for v in x]
  n, r = np.array([t[0] % 4 for t in turns]), np.array([t[1] for t in turns])
  s, c = np.sin(r), np.cos(r)
  sine, cosine = np.choose(n, [s, c, -s, -c]), np.choose(n, [c, -s, -c, s])
  want = {"sin": sine, "cos": cosine, "tan": sine / cosine}[name]
  want = np.where((x == 0) & (name != "cos"), x, want)
  error = ulps(evaluate(getattr(trig, name), x), want)
  assert error.max() <= (4 if name == "tan" else 2), (x[error.argmax()], error.max())


@pytest.mark.parametrize("name", ["sin", "cos", "tan"])
def test_sines_of_infinity_are_no_numbers(name):
  assert np.isnan(evaluate(getattr(trig, name), np.array([np.inf, -np.inf, np.nan]))).all()


SPECIAL = np.array([0, 1, np.inf, np.nan, 2, 0.5, 3, 1e-45, 3e38, 2.5, 1e9, 16777217, 16777215], np.float32)
SPECIAL = np.concatenate([SPECIAL, -SPECIAL])


def test_angles_of_points_are_right_with_zeros_and_infinities():
  y, x = (v.ravel() for v in np.meshgrid(SPECIAL, SPECIAL))
  more = everywhere()
  y, x = np.concatenate([y, more]), np.concatenate([x, rng.permutation(more)])
  assert ulps(evaluate(trig.atan2, y, x), np.arctan2(y.astype(np.float64), x)).max() <= 2


def test_powers_are_within_an_ulp_and_have_the_special_values_of_ieee_754():
  x, y = (v.ravel() for v in np.meshgrid(SPECIAL, SPECIAL))
  wide = everywhere()
  exponents = rng.uniform(-20, 20, len(wide))
  whole = np.round(exponents)
  near = rng.uniform(0.3, 3, len(wide))
  x = np.concatenate([x, wide, wide, near]).astype(np.float32)
  y = np.concatenate([y, exponents, whole, exponents * 10]).astype(np.float32)
  with np.errstate(all="ignore"):
    want = np.power(x.astype(np.float64), y)
  error = ulps(evaluate(ex.power, x, y), want)
  assert error.max() <= 1.5, (x[error.argmax()], y[error.argmax()], error.max())
