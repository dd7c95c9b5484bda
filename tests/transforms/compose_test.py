"""Kernels inside control flow, shard_map, donated jits and the rest of jax; what they are called there."""
from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tiletrace as tt
from tests.transforms.kernels import add_in_place, like, normal, scale_rows
from tiletrace.core.errors import TileTypeError

P = jax.sharding.PartitionSpec
X, S = normal(0, 6, 5), normal(1, 6)
WANT = X * S[:, None]


# --- control flow and evaluation

def times(f, n):
  return jax.lax.while_loop(lambda c: c[0] < n, lambda c: (c[0] + 1, f(c[1], S)), (0, X))[1]


@pytest.mark.parametrize(("run", "want"), [
    (lambda f: f(X, S), WANT),
    (lambda f: jax.jit(f)(X, S), WANT),
    (lambda f: jax.checkpoint(f)(X, S), WANT),
    (lambda f: jax.jit(f).lower(like(X), like(S)).compile()(X, S), WANT),
    (lambda f: jax.lax.map(lambda x: f(x, S), np.stack([X, -X])), np.stack([WANT, -WANT])),
    (lambda f: jax.jit(lambda x: jax.lax.scan(lambda c, s: (f(c, s), c), x, np.stack([S, S]))[0])(X),
     WANT * S[:, None]),
    (lambda f: jax.jit(lambda p: jax.lax.cond(p, f, lambda x, s: x, X, S))(True), WANT),
    (lambda f: jax.jit(lambda p: jax.lax.cond(p, f, lambda x, s: x, X, S))(False), X),
    (lambda f: jax.jit(lambda n: times(f, n))(2), WANT * S[:, None]),
    (lambda f: jax.vmap(lambda n: times(f, n))(np.arange(2)), np.stack([X, WANT])),
], ids=["eager", "jit", "remat", "ahead of time", "map", "scan", "cond", "cond, other", "while", "vmap of while"])
def test_result_is_the_same_under(run, want):
  np.testing.assert_array_equal(run(functools.partial(scale_rows, vjp=None)), want)


def test_disable_jit_runs_the_kernel():
  with jax.disable_jit():
    np.testing.assert_array_equal(scale_rows(X, S), WANT)
    np.testing.assert_array_equal(jax.vmap(scale_rows, in_axes=(0, None))(X[None], S), WANT[None])


def test_eval_shape_and_make_jaxpr_show_types_and_one_short_equation():
  assert jax.eval_shape(scale_rows, like(X), like(S)) == like(X)
  text = str(jax.make_jaxpr(functools.partial(scale_rows, vjp=None))(X, S))
  assert text.count("tile_call[program=<scale_rows ") == 1 and len(text) < 200, text
  assert " at kernels.py:" in text


def test_kernel_s_name_is_in_the_locations_of_the_module():
  assert "scale_rows" in jax.jit(scale_rows).lower(X, S).as_text(debug_info=True)


def test_equal_calls_trace_once_and_calls_of_different_grids_do_not_share():
  traces = []

  def kernel(x, y):
    traces.append(tt.num_programs(0))
    for i in range(tt.num_programs(0)):          # every program writes all: the last is right, whatever the grid
      y[i] = x[i] * float(tt.num_programs(0))

  def call(n):
    return tt.tile_call(kernel, jax.ShapeDtypeStruct((n,), np.float32), grid=(n,))(np.ones(n, np.float32))

  for n in (2, 5, 3, 4, 2, 5):
    np.testing.assert_array_equal(call(n), np.full(n, n))
  assert sorted(set(traces)) == [2, 3, 4, 5] and len(traces) == 4


def test_static_arguments_make_kernels_of_their_own():
  def kernel(x, y, *, scale):
    y[...] = x[...] * scale

  @functools.partial(jax.jit, static_argnums=1)
  def f(x, scale):
    return tt.tile_call(functools.partial(kernel, scale=scale), like(x), grid=(1,))(x)

  for scale in (2, 3, 2.5, -1):
    np.testing.assert_array_equal(f(X, scale), X * np.float32(scale))


def test_a_weakly_typed_operand_has_its_dtype_and_the_result_is_strong():
  def kernel(x, y):
    y[...] = x[...] * 2

  call = tt.tile_call(kernel, jax.ShapeDtypeStruct((), np.float32), grid=(1,))
  for f in (call, jax.jit(call)):
    result = f(1.5)
    assert (float(result), result.weak_type, result.dtype) == (3.0, False, np.float32)
  assert (jnp.float16(1) * call(1.5)).dtype == np.float32


def test_x64_mode_changes_neither_32_bit_kernels_nor_64_bit_data():
  with jax.enable_x64(True):
    assert scale_rows(X, S).dtype == np.float32
    np.testing.assert_array_equal(jax.jit(jax.vmap(scale_rows, in_axes=(0, None)))(X[None], S), WANT[None])
    grad = jax.grad(lambda x: scale_rows(x, S).sum())(X)
    assert grad.dtype == np.float32
    lowered = jax.jit(scale_rows).trace(X, S).lower(lowering_platforms=("cuda",)).as_text()
    assert "tiletrace_launch_v1" in lowered

    def count(x, y):
      y[...] = x[...] + 1

    big = np.asarray([2**40, -3])
    np.testing.assert_array_equal(tt.tile_call(count, like(big), grid=(1,))(big), big + 1)


# --- memory in place

def test_a_donated_input_becomes_the_output_and_reads_see_the_writes():
  h = jnp.asarray(X)
  pointer = h.unsafe_buffer_pointer()
  new, double = jax.jit(add_in_place, donate_argnums=0)(h, X + 1)
  assert h.is_deleted() and new.unsafe_buffer_pointer() == pointer
  np.testing.assert_array_equal(new, X + (X + 1))
  np.testing.assert_array_equal(double, 2 * (X + (X + 1)))      # reads `h` after the write to `h_out`: one reference


@pytest.mark.parametrize("f", [add_in_place, jax.jit(add_in_place)], ids=["eager", "jit"])
def test_an_input_that_is_not_donated_keeps_its_value(f):
  h = jnp.asarray(X)
  new, _ = f(h, X + 1)
  np.testing.assert_array_equal(h, X)
  np.testing.assert_array_equal(new, X + (X + 1))


def zero_all(h, y, h_out):
  h_out[...] = 0.0
  h_out[...] = h[...] + y[...]


def zero_a_block(h, y, h_out):
  r = tt.block(tt.program_id(0), 2)
  h_out[r] = tt.zeros((2, 5))
  h_out[r] += y[r]


@pytest.mark.parametrize(("kernel", "zeroed"), [(zero_all, "h_out[...]"), (zero_a_block, "h_out[r]")])
def test_a_kernel_that_zeroes_what_is_aliased_before_it_reads_it_is_refused_at_the_store(kernel, zeroed):
  call = tt.tile_call(kernel, like(X), grid=3, input_output_aliases={0: 0})
  message = f"{kernel.__name__}: 'h_out' is the memory of the input 'h', and is zeroed before that is read"
  with pytest.raises(TileTypeError, match=message) as e:
    call(X, X)
  assert e.value.hint is not None and e.value.hint.startswith("drop the pair from input_output_aliases")
  assert f"{zeroed} = " in str(e.value) and "^" * len(zeroed) in str(e.value)


def test_zeroing_a_part_in_place_or_after_reading_is_no_mistake():
  def evict(cache, at, out, total):
    total[...] = tt.sum(cache[...])
    out[at[0]] = 0.0

  def clear(cache, at, out):
    out[at[0]] = 0.0

  at, want = np.asarray([4], np.int32), X.copy()
  want[4] = 0
  outs = like(X), jax.ShapeDtypeStruct((), np.float32)
  got, total = tt.tile_call(evict, outs, grid=1, input_output_aliases={0: 0})(X, at)
  np.testing.assert_allclose(total, X.sum(), rtol=1e-5)
  np.testing.assert_array_equal(got, want)
  np.testing.assert_array_equal(tt.tile_call(clear, like(X), grid=1, input_output_aliases={0: 0})(X, at), want)


def test_zeroed_outputs_are_no_keyword_and_the_error_says_what_to_write():
  with pytest.raises(TypeError, match=r"no keyword 'zeroed_outputs'; use ref\[\.\.\.\] = 0 in the kernel"):
    tt.tile_call(zero_all, like(X), grid=1, zeroed_outputs=(0,))


def test_elements_that_nobody_writes_keep_the_aliased_input_s_value():
  def kernel(cache, row, at, out):
    out[at[0]] = row[...]

  call = tt.tile_call(kernel, like(X), grid=(1,), input_output_aliases={0: 0})
  want = X.copy()
  want[4] = X[0] * 2
  np.testing.assert_array_equal(jax.jit(call)(X, X[0] * 2, np.asarray([4], np.int32)), want)
  body = lambda c, i: (call(c, X[0] * i, i[None]), None)
  every_row = jax.lax.scan(body, X, np.arange(6, dtype=np.int32))[0]
  np.testing.assert_array_equal(every_row, X[0] * np.arange(6, dtype=np.float32)[:, None])


def test_aliases_reach_the_module_for_cuda():
  lowered = jax.jit(add_in_place, donate_argnums=0).trace(X, X).lower(lowering_platforms=("cuda",)).as_text()
  assert "output_operand_alias<output_tuple_indices = [0], operand_index = 0" in lowered
  assert "tf.aliasing_output = 0" in lowered


def test_an_alias_of_another_shape_is_refused_with_both():
  def kernel(h, out):
    out[...] = h[0]

  call = tt.tile_call(kernel, jax.ShapeDtypeStruct((5,), np.float32), grid=(1,), input_output_aliases={0: 0})
  with pytest.raises(TileTypeError, match=r"\{0: 0\}: input 0 is Ref<global>\{f32\[6,5\]\}, output 0 is Ref<.*\[5\]"
                     ) as refused:
    call(X)
  assert refused.value.hint == "an aliased output is the input's memory: give it the same shape and dtype"
  assert "call(X)" in str(refused.value) and "^^^^^^^" in str(refused.value)


# --- several devices

def mesh(kind=jax.sharding.AxisType.Auto):
  return jax.make_mesh((2,), ("d",), axis_types=(kind,), devices=jax.devices("cpu")[:2])


GRAD = lambda f: jax.grad(lambda x, s: jnp.sum(jnp.sin(f(x, s))), (0, 1))
ROWS, COPY = (P("d", None), P("d")), (P("d", None), P())
VMAPPED = lambda f: jax.vmap(f, in_axes=(0, None))


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("vjp", ["function", "xla"])
@pytest.mark.parametrize("transform", ["call", "replicated operand", "vmap inside"])
def test_shard_map_and_its_gradient(transform, vjp, check_vma):
  """Also of an operand that is sharded beside one that is the same everywhere."""
  f = scale_rows if vjp == "function" else functools.partial(scale_rows, vjp="xla")
  reference = lambda x, s: x * s[:, None]
  x, s, specs = X, S, ROWS
  if transform == "replicated operand":
    s, specs, reference = S[:3], COPY, lambda x, s: x * jnp.tile(s, 2)[:, None]
  if transform == "vmap inside":
    f, x, specs, reference = VMAPPED(f), np.stack([X, X + 1]), (P("d", None, None), P()), VMAPPED(reference)
  mapped = jax.shard_map(f, mesh=mesh(), in_specs=specs, out_specs=specs[0], check_vma=check_vma)
  np.testing.assert_allclose(jax.jit(mapped)(x, s), reference(x, s), rtol=1e-6)
  if vjp == "function" or check_vma:
    for got, want in zip(jax.jit(GRAD(mapped))(x, s), GRAD(reference)(x, s), strict=True):
      np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("axes", "x_spec", "s_spec"), [
    ({"d": 8}, P("d", None), P("d")), ({"d": 8}, P(None, "d"), P()), ({"r": 4, "c": 2}, P("r", "c"), P("r")),
    ({"r": 2, "c": 4}, P(("r", "c"), None), P(("r", "c"))), ({"r": 2, "c": 4}, P("c", None), P("c"))],
    ids=["rows", "columns", "both", "rows over two axes", "copies along an axis"])
def test_on_a_mesh_of_eight_devices_the_kernel_its_gradient_and_its_vmap_are_those_of_the_jnp_function(
    axes, x_spec, s_spec):
  """With check_vma=True: what varies over an axis of the mesh, and what does not, is known to jax."""
  assert len(jax.devices("cpu")) >= 8
  where = jax.make_mesh(tuple(axes.values()), tuple(axes), axis_types=(jax.sharding.AxisType.Auto,) * len(axes),
                        devices=jax.devices("cpu")[:8])
  x, s, reference = normal(2, 16, 24), normal(3, 16), lambda x, s: x * s[:, None]
  mapped = jax.shard_map(scale_rows, mesh=where, in_specs=(x_spec, s_spec), out_specs=x_spec, check_vma=True)
  got = jax.jit(mapped)(x, s)
  np.testing.assert_array_equal(got, reference(x, s))
  assert len(got.sharding.device_set) == 8
  for g, want in zip(jax.jit(GRAD(mapped))(x, s), GRAD(reference)(x, s), strict=True):
    np.testing.assert_allclose(g, want, rtol=1e-5, atol=1e-5)
  both = np.stack([x, -x])
  np.testing.assert_array_equal(jax.jit(jax.vmap(mapped, in_axes=(0, None)))(both, s), np.stack([got, -got]))


def test_a_sum_over_eight_devices_of_what_a_kernel_makes_is_replicated():
  where = jax.make_mesh((8,), ("d",), axis_types=(jax.sharding.AxisType.Auto,), devices=jax.devices("cpu")[:8])
  x, s = normal(2, 16, 24), normal(3, 16)
  total = jax.shard_map(lambda x, s: jax.lax.psum(scale_rows(x, s).sum(0), "d"), mesh=where, in_specs=ROWS,
                        out_specs=P(), check_vma=True)
  np.testing.assert_allclose(jax.jit(total)(x, s), (x * s[:, None]).sum(0), rtol=1e-5, atol=1e-5)
  with pytest.raises(ValueError, match="out_specs"):       # jax knows that the kernel's result varies over the mesh
    jax.jit(jax.shard_map(lambda x, s: scale_rows(x, s).sum(0), mesh=where, in_specs=ROWS, out_specs=P()))(x, s)


def test_grad_inside_and_vmap_around_shard_map():
  inside = jax.shard_map(GRAD(scale_rows), mesh=mesh(), in_specs=ROWS, out_specs=ROWS)
  for got, want in zip(jax.jit(inside)(X, S), GRAD(lambda x, s: x * s[:, None])(X, S), strict=True):
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)
  around = jax.vmap(jax.shard_map(scale_rows, mesh=mesh(), in_specs=ROWS, out_specs=ROWS[0]))
  np.testing.assert_array_equal(jax.jit(around)(np.stack([X, -X]), np.stack([S, S])), np.stack([WANT, -WANT]))


def test_operands_on_explicit_mesh_axes_are_refused_with_advice():
  where = mesh(jax.sharding.AxisType.Explicit)
  with jax.set_mesh(where):
    x = jax.device_put(X, jax.sharding.NamedSharding(where, P("d", None)))
    expected = r"scale_rows \(kernels\.py:\d+\): operands lie on explicit mesh axes"
    with pytest.raises(TileTypeError, match=expected) as refused:
      jax.jit(functools.partial(scale_rows, vjp=None))(x, S)
  assert refused.value.hint == "a kernel sees one device's memory: wrap the call in jax.shard_map"
  assert "return tt.tile_call(" in str(refused.value) and "^" in str(refused.value)


@pytest.mark.parametrize("platform", ["tpu", "rocm"])
def test_a_platform_without_kernels_is_refused_with_the_kernel_s_name_and_line(platform):
  with pytest.raises(NotImplementedError, match=rf"'scale_rows' \(kernels\.py:\d+\) runs on CPUs .* not on {platform}"):
    jax.jit(scale_rows).trace(X, S).lower(lowering_platforms=(platform,))
