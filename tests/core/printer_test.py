from __future__ import annotations

import jax.numpy as jnp

import tiletrace as tt
from tests.tracing import Out, bf16, f32, i32, trace
from tiletrace.core.printer import to_text
from tiletrace.core.types import RefType, Space


def matmul_relu(a, b, c, *, bm=128, bn=256, bk=64, num_stages=4):
  i, j = tt.program_id(0), tt.program_id(1)
  a_s = tt.alloc_shared((bm, bk), a.dtype)
  b_s = tt.alloc_shared((bk, bn), b.dtype, layout=tt.swizzle(128))
  acc = tt.alloc_fragment((bm, bn), jnp.float32)
  acc[...] = 0
  for k in tt.pipelined(tt.cdiv(a.shape[1], bk), num_stages=num_stages):
    tt.copy(a.at[tt.block(i, bm), tt.block(k, bk)], a_s)
    tt.copy(b.at[tt.block(k, bk), tt.block(j, bn)], b_s)
    tt.gemm(a_s, b_s, acc)
  c[tt.block(i, bm), tt.block(j, bn)] = tt.maximum(acc[...], 0).astype(c.dtype)


def everything(x, n, y):
  i = tt.program_id(0)
  group = x.at[tt.ds(n[0], n[1]), :]
  s = tt.load(group.at[tt.ds(i * 16, 16, stride=2), :], fill_value=-jnp.inf, mask=i > 0)
  t_s = tt.alloc_shared((3, 64, 16), x.dtype)
  t_s.at[i % 3].T[...] = s * 0.1 + 1e-30
  for k in tt.range(2, n[2]):
    with tt.when(k == 3) as w:
      y[k, :] = s[0]
    with w.otherwise():
      tt.store(y.at[k], 0, mask=x[k, 0] > 0)
  total, _ = tt.fori_loop(0, 4, lambda j, c: (c[0] + tt.sum(x[j, :]), c[1]), (0.0, True))
  y[4, ::2] = total + jnp.inf


def level_0(a, b, c):
  a_s = tt.alloc_shared((2, 64, 64), a.dtype)
  b_s = tt.alloc_shared((2, 64, 64), b.dtype)
  full, empty = tt.alloc_barrier(2, arrivals=1), tt.alloc_barrier(2, arrivals=2)
  with tt.warpgroup(0, regs=24), tt.elect():
    for k in tt.range(4):
      empty[k % 2].wait((k // 2) & 1 ^ 1)
      full[k % 2].arrive_expect_tx(a_s.at[0].nbytes)
      tt.copy_async(a.at[0:64, tt.block(k, 64)], a_s.at[k % 2], barrier=full[k % 2], dispatch="tma")
  with tt.warpgroup(range(1, 3), regs=240):
    acc = tt.alloc_fragment((64, 64), jnp.float32)
    for k in tt.range(4):
      full[k % 2].wait((k // 2) & 1)
      tt.gemm_async(a_s.at[k % 2], b_s.at[k % 2].T, acc, accumulate=k > 0)
      tt.wgmma_wait(0)
      empty[k % 2].arrive()
    tt.fence()
    tt.sync(each="warpgroup")
    tt.commit_group()
    tt.wait_group(0, read=True)
    c[:, :] = acc[...].astype(c.dtype)


def gemm_graph():
  return trace(matmul_relu, a=bf16(1000, 336), b=bf16(336, 776), c=Out(bf16(1000, 776)), grid=(8, 4), warpgroups=2)


def test_text_of_the_gemm(golden):
  golden("trace_matmul_relu", to_text(gemm_graph()))


def test_text_of_views_masks_branches_and_exact_floats(golden):
  golden("trace_everything", to_text(trace(everything, x=f32(64, 64), n=i32(3), y=Out(f32(16, 64)))))


def test_text_of_level_0(golden):
  golden("trace_level_0", to_text(trace(level_0, a=bf16(64, 256), b=bf16(256, 64), c=Out(bf16(64, 64)), warpgroups=3)))


def test_printing_is_a_pure_function_of_the_graph():
  one, two = gemm_graph(), gemm_graph()
  assert to_text(one) == to_text(one) == to_text(two)


def test_letters_avoid_the_arguments_names():
  def kernel(b, a):
    a[...] = b[...] * 2

  lines = to_text(trace(kernel, b=f32(4), a=Out(f32(4)))).splitlines()
  assert lines[-3:] == ["  c:f32[4] <- b[...]", "  d:f32[4] = mul c 2.0", "  a[...] <- d"]


def test_annotations_stand_behind_the_bound_variable():
  def note(var):
    return "L1" if isinstance(var.type, RefType) and var.type.space is Space.SHARED else None

  text = to_text(gemm_graph(), note)
  assert text.count("@L1 = alloc") == 2
  assert text.count("@L1") == 2


def test_locations_are_the_users_lines():
  text = to_text(gemm_graph(), locs=True)
  first = matmul_relu.__code__.co_firstlineno
  assert f"a:i32[] = program_id[axis=0]  # printer_test.py:{first + 1}" not in text
  assert f"d:i32[] = program_id[axis=0]  # printer_test.py:{first + 1}" in text


def test_an_aliased_output_is_named_as_the_input_that_it_is():
  def kernel(h, out):
    h[...] = h[...] + 1
    assert out is not None

  graph = trace(kernel, h=Out(f32(4)), out=Out(f32(4)))
  aliased = graph.replace(invars=(graph.invars[0], graph.invars[0]), num_inputs=1)
  assert "  out out is h:Ref<global>{f32[4]}" in to_text(aliased).splitlines()
