"""Which loads take the read-only path; registers that leave room for several CTAs."""
from __future__ import annotations

import jax.numpy as jnp
import pytest

import tiletrace as tt
from tests.lowering.kernels import count, lower, struct
from tiletrace.core.graph import walk


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


def sum_kernel(x, y):
  s = tt.alloc_shared((64, 64), x.dtype)
  acc = tt.alloc_fragment((64, 64), jnp.float32)
  acc[...] = 0
  for k in tt.pipelined(8, num_stages=2):
    tt.copy(x.at[tt.block(k, 64), :], s)
    acc[...] += s[...]
  y[...] = acc[...]


@pytest.mark.parametrize(("warpgroups", "ctas", "regs"), [
  (2, 1, [24, 240]), (2, 2, [24, 104]), (3, 2, [32, 72]), (2, 4, [24, 48])])
def test_roles_share_what_is_left_of_an_sm_for_one_cta(warpgroups, ctas, regs):
  lowered = lower(sum_kernel, [struct(512, 64)], struct(64, 64), warpgroups=warpgroups,
                  options=tt.CompileOptions(ctas_per_sm=ctas))
  roles = [e for e in walk(lowered.lowering.program.graph.body) if e.primitive.name == "warpgroup"]
  assert [r.params["regs"] for r in roles] == regs
  assert lowered.compile().memory_analysis()["registers"] * 128 * (1 + warpgroups) * ctas <= 65536


def test_roles_whose_registers_the_author_chose_fit_the_ctas_of_an_sm():
  def kernel(x, y):
    with tt.warpgroup(0, regs=240):
      y[...] = x[...]

  with pytest.raises(tt.LoweringError, match="ctas_per_sm=3, but the roles of one CTA take 30720 registers of 65536"):
    lower(kernel, [struct(64, 64)], struct(64, 64), options=tt.CompileOptions(ctas_per_sm=3))
