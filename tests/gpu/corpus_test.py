"""The corpus on the CPU, where the kernels run as jax ops, and on a GPU."""
from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.gpu.agreement import record
from tests.gpu.corpus import Case, build
from tests.gpu.whole_corpus import CASES
from tests.tolerances import assert_close
from tiletrace.sim.tolerances import bounds


def _compare(name: str, case: Case, got: list) -> None:
  got = jax.tree.leaves(got)
  assert len(got) == len(case.want)
  for n, (g, want, kind) in enumerate(zip(got, case.want, case.kinds())):
    assert_close(np.asarray(g), want, kind, f"{name}, output {n}")


@pytest.mark.parametrize("name", CASES)
def test_on_the_cpu(name: str) -> None:
  case = build(name)
  cpu = jax.devices("cpu")[0]
  with jax.default_device(cpu):
    _compare(name, case, jax.jit(case.call)(*case.inputs))


@pytest.mark.gpu
@pytest.mark.parametrize("name", CASES)
def test_on_the_gpu(name: str) -> None:
  case = build(name)
  inputs = jax.tree.map(jnp.asarray, case.inputs)
  for o in jax.tree.leaves(case.call.out_shape):                # likely where the results will be: unwritten is seen
    jnp.full(o.shape, 77 if o.dtype != bool else True, o.dtype).block_until_ready().delete()
  got = jax.jit(case.call)(*inputs)
  for n, (g, want, kind) in enumerate(zip(jax.tree.leaves(got), case.want, case.kinds())):
    wide, reference = np.asarray(g).astype(np.float64), np.asarray(want).astype(np.float64)
    equal = (wide == reference) | np.isnan(wide) & np.isnan(reference)
    with np.errstate(invalid="ignore"):         # infinities
      error = np.abs(wide - reference)
    record(f"corpus against references, {kind}", f"{name}, output {n}", equal, error,
           bounds(reference, np.asarray(g).dtype, kind))
  _compare(name, case, got)
