from __future__ import annotations

import jax.numpy as jnp
import pytest

import tiletrace as tt
from tests.tracing import bf16, trace
from tiletrace.core.effects import OrderEffect, read, write
from tiletrace.core.rules import effects


def gemm_eqn(call, name="gemm"):
  """The gemm that `call(a, b, acc, value)` makes: a[64,32], b[32,128] in shared memory, acc[64,128], value[64,32]."""
  def kernel(x):
    a, b = tt.alloc_shared((64, 32), jnp.bfloat16), tt.alloc_shared((32, 128), jnp.bfloat16)
    call(a, b, tt.alloc_fragment((64, 128), jnp.float32), x[...])

  return next(e for e in trace(kernel, x=bf16(64, 32)).body.eqns if e.primitive.name == name)


def test_references_come_first_then_accumulate():
  eqn = gemm_eqn(lambda a, b, acc, v: tt.gemm(a, b, acc))
  assert [r.shape for r in eqn.refs] == [(64, 32), (32, 128), (64, 128)]
  assert [v.value for v in eqn.values] == [True]
  assert (eqn.params["a_in"], eqn.params["policy"]) == ("ref", "square")
  assert effects(eqn) == (read(0), read(1), read(2), write(2))


def test_a_value_operand_follows_accumulate():
  eqn = gemm_eqn(lambda a, b, acc, v: tt.gemm(v, b, acc, accumulate=False, policy=tt.FULL_COL))
  assert [r.shape for r in eqn.refs] == [(32, 128), (64, 128)]
  assert eqn.values[0].value is False and eqn.values[1].type.shape == (64, 32)
  assert (eqn.params["a_in"], eqn.params["policy"]) == ("value", "full_col")
  assert effects(eqn) == (read(0), write(1))


def test_an_abstract_accumulate_reads_the_accumulator():
  eqn = gemm_eqn(lambda a, b, acc, v: tt.gemm(a, b, acc, accumulate=tt.program_id(0) > 0))
  assert read(2) in effects(eqn)


def test_transposes_are_views_of_any_operand():
  def kernel(x):
    a, b = tt.alloc_shared((32, 64), jnp.bfloat16), tt.alloc_shared((2, 128, 32), jnp.bfloat16)
    tt.gemm(a.T, b.at[1].T, tt.alloc_fragment((64, 128), jnp.float32))

  eqn = trace(kernel, x=bf16(1)).body.eqns[-1]
  assert [r.view.perm for r in eqn.refs] == [(1, 0), (2, 1), (0, 1)]


@pytest.mark.parametrize("view", [lambda f: f.at[:, 32:], lambda f: f.at[32:, :].T])
def test_a_part_of_a_fragment_or_its_transpose_is_multiplied_as_a_value(view):
  """The registers of the whole are others than those that wgmma takes of the part."""
  def kernel(x):
    b, f = tt.alloc_shared((32, 128), jnp.bfloat16), tt.alloc_fragment((64, 64), jnp.bfloat16)
    tt.gemm(view(f), b, tt.alloc_fragment((64, 128), jnp.float32))

  *_, load, gemm = trace(kernel, x=bf16(1)).body.eqns
  assert load.primitive.name == "load" and gemm.params["a_in"] == "value" and gemm.values[1] is load.outvars[0]


def test_the_asynchronous_gemm_keeps_its_place():
  eqn = gemm_eqn(lambda a, b, acc, v: tt.gemm_async(a, b, acc), "gemm_async")
  assert OrderEffect("gemm_async") in effects(eqn)


@pytest.mark.parametrize(("call", "message"), [
  (lambda a, b, acc, v: tt.gemm(a, b.at[:, :64], acc), r"acc is \[64, 128\] but a @ b is \[64, 64\]"),
  (lambda a, b, acc, v: tt.gemm(a.T, b, acc), r"contracts K=64 of a \[32, 64\] with K=32 of b \[32, 128\]"),
  (lambda a, b, acc, v: tt.gemm(a.at[0], b, acc), "a has 1 dimensions, shape .*; it takes two"),
  (lambda a, b, acc, v: tt.gemm(a, tt.zeros((2, 32, 128), "bfloat16"), acc), "a has 2 dimensions, .*; it takes three"),
  (lambda a, b, acc, v: tt.gemm(tt.zeros((3, 64, 32), "bfloat16"), tt.zeros((2, 32, 128), "bfloat16"),
                                tt.alloc_fragment((2, 64, 128), "float32")), r"a is \[3, 64, 32\], b has 2 matrices"),
  (lambda a, b, acc, v: tt.gemm_async(a, v, acc), "b is a value bf16.*, not a reference"),
  (lambda a, b, acc, v: tt.gemm(a, b, v), "acc is a value bf16.*, not a reference"),
  (lambda a, b, acc, v: tt.gemm(a, b, b), r"acc is b: Ref<shared>\{bf16\[32,128\]\}, it must be in fragment memory"),
  (lambda a, b, acc, v: tt.gemm(a, acc, acc), r"b is acc: Ref<fragment>.*, it must be in shared memory"),
  (lambda a, b, acc, v: tt.gemm(v.astype("float16"), b, acc), "a is f16, b is bf16"),
  (lambda a, b, acc, v: tt.gemm(v.astype("int32"), b, acc), "a is i32, it takes f16, bf16, f32, f8e4m3, f8e5m2, i8"),
  (lambda a, b, acc, v: tt.gemm(a, b, tt.alloc_fragment((64, 128), "bfloat16")), "acc is bf16, of bf16 and bf16 it is"),
  (lambda a, b, acc, v: tt.gemm(a, b.at[:, :64], acc.at[:, :64]), r"acc is acc: Ref<fragment>\{f32\[64,64\]\}, a part"),
  (lambda a, b, acc, v: tt.gemm(b.T, a.T, acc.T), r"acc is acc: Ref<fragment>\{f32\[128,64\]\}, a part or a transpose"),
  (lambda a, b, acc, v: tt.gemm(a, b, tt.alloc_fragment((2, 64, 128), jnp.float32).at[1]), "a part or a transpose of"),
  (lambda a, b, acc, v: tt.gemm(a, b, acc, precision="tf32"), "precision is 'tf32', a and b are bf16"),
  (lambda a, b, acc, v: tt.gemm(a, b, acc, precision="highest"), "precision is 'highest'"),
  (lambda a, b, acc, v: tt.gemm(a, b, acc, policy=(2,)), r"policy is \(2,\)"),
  (lambda a, b, acc, v: tt.gemm(a, b, acc, policy=(2, 0)), r"policy is \(2, 0\)"),
  (lambda a, b, acc, v: tt.gemm(1.0, b, acc), "a is the number 1.0"),
  (lambda a, b, acc, v: tt.gemm(a, b, acc, policy="rows"), "policy is 'rows'"),
  (lambda a, b, acc, v: tt.gemm(a, b, acc, dispatch="cublas"), "dispatch is 'cublas'"),
  (lambda a, b, acc, v: tt.gemm(a, b, acc, accumulate=0.5), "gemm: accumulate takes a bool, got float"),
  (lambda a, b, acc, v: tt.gemm(a, b, acc, accumulate=v > 0), "gemm: accumulate takes a scalar condition"),
  (lambda a, b, acc, v: tt.gemm(a, b, acc, k_pack=2), "gemm has no keyword 'k_pack'"),
  (lambda a, b, acc, v: tt.wgmma_wait(9), "wgmma_wait: n is 9")])
def test_gemm_arguments_are_checked(call, message):
  with pytest.raises(tt.TileTypeError, match=message):
    gemm_eqn(call)
