"""Literals of `and` that stay in a register, so that ptxas makes one instruction of `x & a ^ b`."""
from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

import tiletrace as tt
from tests.lowering.kernels import count, lower, struct

U32 = jnp.uint32
WORDS = np.random.default_rng(0).integers(0, 2**32, 1024, dtype=np.uint32)


def kept(program):
  return program.as_text("ptx").count("%ntid.y")


def lowered(f, dtype=U32):
  def kernel(x, y):
    y[...] = f(x[...])

  return lower(kernel, [struct(1024, dtype=dtype)], struct(1024, dtype=dtype))


@pytest.mark.parametrize("f", [
  lambda x: x & np.uint32(0xF000F) ^ np.uint32(0x43084308), lambda x: x & np.uint32(0xFF00FF) | np.uint32(0x43004300),
  lambda x: np.uint32(7) | (np.uint32(0x80000001) & x)])
def test_a_mask_before_another_literal_is_a_register_of_the_kernel(f):
  program = lowered(f)
  assert kept(program) == count(program, r"mul\.lo\.u32 %r\d+, %r\d+, \d+") == 1
  assert count(program, r"and\.b32 %r\d+, %r\d+, %r\d+") == 8              # elements a thread
  np.testing.assert_array_equal(program.simulate(WORDS)[0], f(WORDS))


def test_one_mask_is_one_register_and_four_are_kept_at_most():
  def f(x):
    out = x
    for mask in (1, 3, 3, 7, 15, 31, 63):
      out = out + (x & np.uint32(mask) ^ np.uint32(0x55555555))
    return out

  program = lowered(f)
  assert kept(program) == 4
  with np.errstate(over="ignore"):
    np.testing.assert_array_equal(program.simulate(WORDS)[0], f(WORDS))


@pytest.mark.parametrize(("f", "dtype"), [
  (lambda x: x & np.uint32(0xF000F), U32), (lambda x: (x & np.uint32(0xF000F)) + np.uint32(5), U32),
  (lambda x: x & np.uint16(0xF) ^ np.uint16(3), jnp.uint16)])
def test_a_mask_that_nothing_is_put_to_is_a_literal(f, dtype):
  assert kept(lowered(f, dtype)) == 0


def test_a_mask_that_something_else_reads_too_is_a_literal():
  def f(x):
    low = x & np.uint32(0xF000F)
    return (low ^ np.uint32(0x43084308)) * low

  assert kept(lowered(f)) == 0


def test_a_mask_serves_every_role_and_branch_of_a_kernel():
  def kernel(x, n, y):
    s = tt.alloc_shared((256,), x.dtype)
    acc = tt.alloc_fragment((256,), x.dtype)
    acc[...] = 0
    for k in tt.pipelined(4, num_stages=2):
      tt.copy(x.at[tt.block(k, 256)], s)
      with tt.when(k < n[0]):
        acc[...] += s[...] & np.uint32(0xF0F0F) ^ np.uint32(0x1234567)
    y[...] = acc[...] & np.uint32(0xF0F0F) ^ np.uint32(0x7654321)

  program = lower(kernel, [struct(1024, dtype=U32), struct(1, dtype=jnp.int32)], struct(256, dtype=U32), warpgroups=2)
  assert kept(program) == 1
  for n in (0, 3):
    want = np.zeros(256, np.uint32)
    for block in WORDS.reshape(4, 256)[:n]:
      want = want + (block & np.uint32(0xF0F0F) ^ np.uint32(0x1234567))
    np.testing.assert_array_equal(program.simulate(WORDS, np.asarray([n], np.int32))[0],
                                  want & np.uint32(0xF0F0F) ^ np.uint32(0x7654321))
