"""What the stages of a call say about it: costs, memory, reports."""
from __future__ import annotations

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tiletrace as tt
from tests.lowering.kernels import BF16, F32, lower, matmul, struct
from tests.transforms.kernels import add_in_place_kernel, like, scale_rows
from tiletrace.core.errors import TileTypeError


@pytest.mark.parametrize(("m", "n", "k"), [(1024, 1024, 512), (100, 200, 72), (128, 128, 0)])
def test_the_cost_of_a_matrix_product_is_its_tiles_flops_and_its_arrays_bytes(m, n, k):
  cost = matmul(m, n, k, bm=128, bn=128, bk=64).compile().cost_analysis()
  padded = [tt.align_to(x, b) for x, b in ((m, 128), (n, 128), (k, 64))]        # whole tiles are multiplied
  assert cost == {"flops": 2 * padded[0] * padded[1] * padded[2], "bytes": 2 * (m * k + k * n + m * n)}


def test_the_cost_of_a_result_in_place_is_a_read_and_a_write():
  def kernel(h, delta, h_out, norm):
    add_in_place_kernel(h, delta, h_out, norm, rows=4)

  h = struct(8, 1000)
  compiled = lower(kernel, [h, h], (h, h), grid=2, input_output_aliases={0: 0}).compile()
  assert compiled.cost_analysis() == {"flops": 0, "bytes": 4 * 8 * 1000 * 4}


def test_a_loop_of_abstract_length_counts_for_its_fewest_trips():
  def kernel(a, n, c):
    a_s = tt.alloc_shared((64, 64), BF16)
    acc = tt.alloc_fragment((64, 64), F32)
    acc[...] = 0
    tt.copy(a, a_s)
    for _ in tt.range(tt.minimum(tt.maximum(n[...], 2), 5)):
      tt.gemm(a_s, a_s.T, acc)
    c[...] = acc[...]

  lowered = lower(kernel, [struct(64, 64, dtype=BF16), struct(dtype=np.int32)], struct(64, 64))
  assert lowered.compile().cost_analysis()["flops"] == 2 * 2 * 64**3


def test_a_jitted_call_has_a_cost_analysis_too():
  x, s = struct(64, 100), struct(64)
  cost = jax.jit(scale_rows).lower(x, s).compile().cost_analysis()
  assert cost is not None and cost["bytes accessed"] >= 2 * 64 * 100 * 4


def test_memory_is_counted_and_the_report_has_it_all():
  lowered = matmul()
  compiled = lowered.compile()
  memory = compiled.memory_analysis()
  assert memory["spill_stores"] == memory["spill_loads"] == 0 and 24 < memory["registers"] <= 255
  assert memory["smem_bytes"] == lowered.lowering.program.smem_bytes
  report = json.loads(compiled.report(json=True))
  assert report["cost"] == compiled.cost_analysis()
  assert report["assembled"]["registers"] == memory["registers"]
  assert f"{report['cost']['flops'] / 1e9:.3f} GFLOP" in compiled.report()


@pytest.mark.parametrize(("change", "message"), [
    ({"kernel": 3}, "kernel is 3"), ({"out_shape": (3,)}, "out_shape has 3"), ({"name": 3}, "name=3"),
    ({"vjp": 3}, "vjp=3"), ({"vjp": "jax"}, "vjp='jax'"),
    ({"input_output_aliases": [0]}, r"input_output_aliases=\[0\]")], ids=str)
def test_arguments_of_another_kind_are_refused_at_the_call(change, message):
  given = {"kernel": lambda x, y: None, "out_shape": like(jnp.zeros(3)), "name": "kernel"} | change
  with pytest.raises(TileTypeError, match=message) as e:
    tt.tile_call(given.pop("kernel"), given.pop("out_shape"), grid=1, **given)
  assert "hint: " in str(e.value) and "stages_test.py" in str(e.value)


def test_a_random_key_is_no_array_of_a_kernel_but_its_data_are():
  call = tt.tile_call(lambda x, y: y.__setitem__(..., x[...]), like(jnp.zeros(2, jnp.uint32)), grid=1, name="kernel")
  key = jax.random.key(7)

  with pytest.raises(TileTypeError, match=r"kernel: an argument is key<fry>\[\](.*\n)*.*jax.random.key_data"):
    call(key)
  assert jnp.array_equal(call(jax.random.key_data(key)), jax.random.key_data(key))


def test_an_estimate_of_the_cost_is_refused_rather_than_dropped():
  with pytest.raises(TileTypeError, match=r"cost_estimate=.*: there are none yet") as e:
    tt.tile_call(lambda x, y: None, like(jnp.zeros(3)), grid=1, name="kernel", cost_estimate={"flops": 1})
  assert "tt.tile_call(" in str(e.value) and e.value.hint == "drop cost_estimate="
