"""Kernels of dynamic shapes on a GPU: one code for several sizes, and programs exported with symbolic shapes."""
from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export

from tests.lowering.dynamic_shapes_test import check_product, gemm, normal, operands, scale
from tiletrace.ffi.primitive import export_checks

pytestmark = pytest.mark.gpu

SIZES = [(1, 8, 8), (100, 72, 56), (128, 64, 64), (1000, 1032, 520), (0, 8, 8), (4, 0, 16)]


@pytest.mark.parametrize("options", [
    {}, {"persistent": True, "raster": 4, "warpgroups": 2, "bm": 128, "bn": 128}, {"cluster": (2, 1)},
    {"persistent": "dynamic", "raster": 4}], ids=str)
def test_gemms_of_any_size_multiply(options):
  call = jax.jit(lambda a, b: gemm(a, b, **options)(a, b))
  for shape in SIZES:
    a, b = operands(*shape)
    check_product(call(a, b), a, b)


def test_arrays_of_any_size_without_promises_are_scaled():
  for m, n in ((1, 1), (33, 129), (1000, 777)):
    x, s = normal(0, m, n), normal(1, m)
    np.testing.assert_array_equal(scale(x, s, ("m, n", "m", "m, n"))(x, s), np.asarray(x) * np.asarray(s)[:, None])


@pytest.mark.parametrize("persistent", [False, True, "dynamic"])
def test_a_program_exported_with_symbolic_shapes_multiplies(persistent):
  m, k, n = export.symbolic_shape("m, k, n")
  specs = [jax.ShapeDtypeStruct(s, jnp.bfloat16) for s in ((m, 8 * k), (8 * k, 8 * n))]
  call = jax.jit(lambda a, b: gemm(a, b, persistent=persistent)(a, b))
  exported = export.export(call, platforms=["cuda"], disabled_checks=export_checks())(*specs)
  exported = export.deserialize(exported.serialize())
  for shape in SIZES[:4]:
    a, b = operands(*shape)
    check_product(exported.call(a, b), a, b)
