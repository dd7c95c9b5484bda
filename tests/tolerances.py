"""Results against float64 references, by the package's table of tolerances (`tiletrace/sim/tolerances.py`)."""
from __future__ import annotations

import ml_dtypes
import numpy as np

from tiletrace.sim.tolerances import tolerance


def assert_close(got: object, want: object, kind: str, what: str = "") -> None:
  """`got` has the dtype that is judged; `want` is the reference, float64 or exact. NaN equals NaN only."""
  got, want = np.asarray(got), np.asarray(want)
  assert got.shape == want.shape, (got.shape, want.shape)
  if kind == "exact":
    assert got.dtype == want.dtype, (got.dtype, want.dtype)
  rtol, by_largest = tolerance(got.dtype, kind)
  if got.dtype == ml_dtypes.bfloat16 or got.dtype.kind == "f":
    got, want = got.astype(np.float64), want.astype(np.float64)
  finite = np.abs(want[np.isfinite(want)]) if want.dtype.kind == "f" else np.zeros(0)
  np.testing.assert_allclose(got, want, rtol=rtol, atol=by_largest * finite.max(initial=0.0), err_msg=what)
