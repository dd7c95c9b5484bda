"""linear_attention against its recurrence in float64: decays, states, chunks that end early, what is refused."""
from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tiletrace as tt
from tests.lowering.kernels import BF16, F16, F32, notes, struct, variants
from tests.tolerances import assert_close
from tiletrace.kernels import linear_attention, linear_attention_reference
from tiletrace.kernels.linear_attention import linear_attention_call

# A chunk's weights and the state that it reads are rounded, too: of bf16 that is more than a product's own rounding.
KIND = {BF16: "f16_gemm", F16: "gemm"}


def operands(shape, dtype=BF16, seed=0):
  """(query, key, value, decay, initial state)"""
  b, s, h, dk, dv = shape
  rng = np.random.default_rng(seed)
  q, k, v = (jnp.asarray(rng.standard_normal((b, s, h, d), np.float32).astype(dtype)) for d in (dk, dk, dv))
  return q, k, v, jnp.asarray(rng.uniform(0.5, 1, h).astype(F32)), jnp.asarray(rng.standard_normal((b, h, dk, dv), F32))


def recurrence(q, k, v, decay, initial, scale):
  q, k, v = (np.asarray(x).astype(np.float64) for x in (q, k, v))
  b, s, h, dk = q.shape
  state = np.zeros((b, h, dk, v.shape[3])) if initial is None else np.asarray(initial, np.float64)
  rate = np.ones(h) if decay is None else np.asarray(decay, np.float64)
  out = np.zeros(v.shape)
  for t in range(s):
    state = state * rate[:, None, None] + k[:, t, :, :, None] * v[:, t, :, None, :]
    out[:, t] = scale * np.einsum("bhk,bhkv->bhv", q[:, t], state)
  return out, state


@pytest.mark.parametrize("dtype", [BF16, F16])
@pytest.mark.parametrize("shape", [(1, 1, 1, 64, 8), (2, 150, 3, 64, 72), (1, 64, 2, 128, 64), (1, 260, 1, 128, 136)])
@pytest.mark.parametrize(("decays", "starts"), [(False, False), (True, False), (True, True), (False, True)])
def test_every_token_sees_those_before_it_with_their_decay(dtype, shape, decays, starts):
  q, k, v, decay, initial = operands(shape, dtype)
  decay, initial = decay if decays else None, initial if starts else None
  want = recurrence(q, k, v, decay, initial, 0.25)
  for function in (linear_attention, linear_attention_reference):
    out, state = jax.jit(lambda *a, f=function: f(*a[:3], decay=a[3], scale=0.25, initial_state=a[4],
                                                  return_state=True))(q, k, v, decay, initial)
    assert out.dtype == dtype
    assert_close(out, want[0], KIND[dtype])
    assert_close(np.asarray(state).astype(dtype), want[1], KIND[dtype])


@pytest.mark.parametrize(("shape", "decays", "starts"), [
  ((1, 150, 2, 64, 72), True, True), ((1, 70, 1, 128, 64), False, True), ((2, 64, 1, 64, 64), True, False),
  ((1, 1, 1, 64, 8), True, True)])
def test_the_program_computes_the_recurrence(shape, decays, starts):
  q, k, v, decay, initial = operands(shape)
  inputs = (q, k, v, decay if decays else None, initial if starts else None)
  lowered = linear_attention_call(v.shape, BF16, dk=shape[3], scale=0.5, state=True).lower(*inputs)
  out, state = lowered.simulate(*inputs)
  want = recurrence(*inputs, 0.5)
  assert_close(out, want[0], KIND[BF16])
  assert_close(np.asarray(state).astype(BF16), want[1], KIND[BF16])


def test_a_strong_decay_forgets_without_overflow():
  q, k, v, _, _ = operands((1, 200, 1, 64, 64))
  decay = jnp.asarray([1e-3], F32)
  assert_close(linear_attention(q, k, v, decay=decay), recurrence(q, k, v, decay, None, 1)[0], KIND[BF16])


@pytest.mark.parametrize("dk", [64, 128])
@pytest.mark.parametrize("decays", [False, True])
def test_it_assembles_without_spills_or_serialised_wgmma_and_copies_by_tma(dk, decays):
  q, v = struct(2, 1024, 4, dk, dtype=BF16), struct(2, 1024, 4, 128, dtype=BF16)
  lowered = linear_attention_call(v.shape, BF16, dk=dk, state=True).lower(
      q, q, v, struct(4) if decays else None, struct(2, 4, dk, 128))
  assert lowered.compile().memory_analysis()["spill_stores"] == 0
  assert set(variants(lowered, "copy")) == {"tma"} and "relayout of" not in notes(lowered)
  assert variants(lowered, "gemm") == ["wgmma_ss", "wgmma_ss", "wgmma_rs", "wgmma_ss" if not decays else "wgmma_rs"]


def test_derivatives_are_those_of_the_reference():
  q, k, v, decay, initial = operands((1, 70, 2, 64, 16))
  pull = [jax.grad(lambda *a, f=f: jnp.sum(jnp.sin(f(*a[:3], decay=a[3], scale=0.1, initial_state=a[4]).astype(F32))),
                   (0, 1, 2, 3, 4))(q, k, v, decay, initial)
          for f in (linear_attention, linear_attention_reference)]
  for got, want in zip(*pull):
    np.testing.assert_allclose(got.astype(F32), want.astype(F32), rtol=0.05,
                               atol=0.05 * np.abs(np.asarray(want, np.float64)).max())


@pytest.mark.parametrize(("call", "message"), [
  (lambda q, k, v, d, i: linear_attention(q, k, v.astype(F32)), r"value is float32\[1, 30, 2, 16\]"),
  (lambda q, k, v, d, i: linear_attention(q, k[:, :20], v), r"key \[1, 20, 2, 64\]"),
  (lambda q, k, v, d, i: linear_attention(q[..., :32], k[..., :32], v), "the key dimension is 32"),
  (lambda q, k, v, d, i: linear_attention(q, k, v, decay=d[:1]), r"decay is float32\[1\]"),
  (lambda q, k, v, d, i: linear_attention(q, k, v, initial_state=i[0]), r"initial_state is float32\[2, 64, 16\]"),
])
def test_operands_that_do_not_fit_are_refused_at_the_callers_line(call, message):
  with pytest.raises(tt.TileTypeError, match=message) as e:
    call(*operands((1, 30, 2, 64, 16)))
  assert "linear_attention_test.py" in str(e.value) and "^" in str(e.value) and "hint:" in str(e.value)
