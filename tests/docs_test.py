"""The programs in docs/language.md run, or assemble where they need a GPU."""
from __future__ import annotations

import functools
import pathlib
import re
import runpy
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tiletrace as tt
from tests.tolerances import assert_close

PAGE = pathlib.Path(__file__).parents[1] / "docs/language.md"
rng = np.random.default_rng(3)


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
  path = tmp_path_factory.mktemp("docs") / "language.py"
  path.write_text("\n".join(re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)))
  return runpy.run_path(str(path))


def test_the_first_kernel_scales_rows(programs):
  x, s = rng.standard_normal((100, 37)).astype(jnp.bfloat16), rng.standard_normal(100).astype(np.float32)

  assert_close(programs["scale"](x, s), x.astype(np.float64) * s[:, None], "elementwise")


@pytest.mark.parametrize("m, n", [(1, 8), (100, 40), (64, 72)])
def test_the_kernel_of_any_size_sums_rows(programs, m, n):
  x = rng.standard_normal((m, n)).astype(jnp.bfloat16)

  assert_close(programs["sum_of_rows"](x), x.astype(np.float64).sum(0), "reduce")


def test_the_explicit_kernel_assembles_without_spills(programs):
  shape = jax.ShapeDtypeStruct((512, 512), jnp.bfloat16)
  kernel = functools.partial(programs["matmul_ws_kernel"], bm=128, bn=256, bk=64, num_stages=4)
  compiled = tt.tile_call(kernel, shape, grid=(4, 2), warpgroups=3).lower(shape, shape).compile()

  assert compiled.memory_analysis()["spill_stores"] == 0
  assert [c.variant for c in compiled.lowered.choices if c.op == "gemm"] == ["wgmma_ss"]


def test_the_explicit_kernel_runs_in_the_simulator_on_a_cpu(programs):
  x, y = (jnp.asarray(rng.standard_normal((256, 256)), jnp.bfloat16) for _ in range(2))
  with jax.default_device(jax.devices("cpu")[0]):
    got = programs["matmul_ws"](x, y)

  assert_close(got, np.asarray(x).astype(np.float64) @ np.asarray(y).astype(np.float64), "gemm")


def test_the_notation_places_elements(programs):
  layout = programs["S"][(8, 2, 4, 2):(4 @ programs["lane"], 1 @ programs["warp"], 1 @ programs["lane"],
                                       1 @ programs["reg"])].layout((8, 16))

  assert layout.is_injective()
