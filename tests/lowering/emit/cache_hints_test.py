"""Which loads take the read-only path; registers that leave room for several CTAs."""
from __future__ import annotations

import jax.numpy as jnp
import pytest

import tiletrace as tt
from tests.lowering.kernels import BF16, count, lower, matmul, struct


def rows(i):
  return tt.block(tt.program_id(0) + i, 8)


def test_inputs_that_one_equation_reads_take_the_read_only_path():
  def kernel(x, w, y):
    y[rows(0), :] = x[rows(0), :] + w[:][None, :]

  lowered = lower(kernel, [struct(64, 512), struct(512)], struct(64, 512), grid=8)
  assert count(lowered, r"ld\.global\.nc\.v4") == count(lowered, r"ld\.global") > count(lowered, r"st\.global\.v4") > 0


def test_what_a_loop_reads_takes_the_read_only_path():
  def kernel(w, y):
    acc = tt.alloc_fragment((512,), jnp.float32)
    acc[...] = 0
    for k in tt.range(4):
      acc[...] += w[k]
    y[tt.program_id(0)] = acc[...]

  lowered = lower(kernel, [struct(4, 512)], struct(8, 512), grid=8)
  assert count(lowered, r"ld\.global\.nc\.v4") == count(lowered, r"ld\.global") > 0


def test_what_is_read_twice_takes_ordinary_loads():
  """ptxas would take two read-only loads of one address for one, and keep the array in registers."""
  def kernel(x, y):
    for k in tt.range(4):
      y[k] = x[k] + 1
    for k in tt.range(4):
      y[k + 4] = x[k] * 2

  lowered = lower(kernel, [struct(4, 512)], struct(8, 512))
  assert count(lowered, r"ld\.global") == count(lowered, r"ld\.global\.v4") > 0


def test_narrow_accesses_take_the_read_only_path():
  def kernel(x, y):
    y[rows(0), :] = x[rows(0), :]

  lowered = lower(kernel, [struct(64, 333)], struct(64, 333), grid=8)
  assert count(lowered, r"ld\.global") == count(lowered, r"ld\.global\.nc\.f32") > 0


def test_what_the_kernel_writes_is_not_read_only():
  def kernel(h, h_out):
    h_out[rows(0), :] = h[rows(0), :] + 1

  lowered = lower(kernel, [struct(64, 512)], struct(64, 512), grid=8, input_output_aliases={0: 0})
  assert count(lowered, r"ld\.global") > 0 == count(lowered, r"ld\.global\.nc")


def test_ctas_per_sm_bounds_the_registers():
  def kernel(x, y):
    v = x[rows(0), :]
    y[rows(0), :] = v * tt.sum(v, axis=1, keepdims=True)

  def registers(**options):
    lowered = lower(kernel, [struct(64, 512)], struct(64, 512), grid=8, options=tt.CompileOptions(**options))
    return lowered.compile().memory_analysis()["registers"]

  assert registers(ctas_per_sm=8) <= 64
  assert registers(ctas_per_sm=10, allow_spills=True) <= 48


def test_roles_with_a_budget_have_the_sm_to_themselves():
  with pytest.raises(tt.LoweringError, match="ctas_per_sm=2, but this role has a budget"):
    matmul(dtype=BF16, options=tt.CompileOptions(ctas_per_sm=2))
