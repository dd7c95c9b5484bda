"""The tile_call primitive with a stand-in program: every transformation, on the CPU and lowered for CUDA."""
from __future__ import annotations

import dataclasses
import pickle
import re
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export

from tiletrace.core.errors import TileTypeError
from tiletrace.ffi import library
from tiletrace.ffi.image import KernelImage
from tiletrace.ffi.primitive import Aval, bind, export_checks

SHAPE = (4, 8)
F32 = np.dtype(np.float32)

built = pytest.mark.skipif(not library.PATH.exists(), reason=f"needs the CUDA launcher: {library.BUILD_COMMAND}")


@dataclasses.dataclass(frozen=True)
class Triple:
  """Adds its operand to a zeroed buffer, three times, in a loop that carries the buffer."""

  fingerprint: str = "1a6cfb4d77"
  name: str = "triple"
  source: str = "triple.py:8"
  in_avals: tuple[Aval, ...] = ((SHAPE, F32),)
  out_avals: tuple[Aval, ...] = ((SHAPE, F32),)
  aliases: tuple[tuple[int, int], ...] = ()
  backend: str | None = None
  hidden: tuple[()] = ()
  is_symbolic: bool = False
  grid: tuple[int, ...] = (1,)
  interpretations: list[Any] = dataclasses.field(default_factory=list, compare=False)

  def __repr__(self) -> str:
    return f"<{self.name} {self.fingerprint[:8]} at {self.source}>"

  def interpret(self, *arrays: jax.Array) -> list[jax.Array]:
    self.interpretations.append(arrays)
    return [jax.lax.fori_loop(0, 3, lambda _, acc: acc + arrays[0], jnp.zeros(shape, dtype))
            for shape, dtype in self.out_avals]

  def batch(self, size: int, batched: tuple[bool, ...]) -> Triple:
    def wider(avals: tuple[Aval, ...], which: tuple[bool, ...]) -> tuple[Aval, ...]:
      return tuple(((size, *shape) if b else shape, dtype) for (shape, dtype), b in zip(avals, which))

    return dataclasses.replace(self, fingerprint=f"{self.fingerprint} x {size} {batched}",
                               in_avals=wider(self.in_avals, batched), out_avals=wider(self.out_avals, (True,)))

  def image(self, target: str) -> KernelImage:
    return KernelImage(
        name=self.name, cubin=b"\x7fELF\x00cubin", grid=(3, 1, 1), block=128, cluster=None, smem_bytes=0,
        params=(("operand", 0), ("operand", 1)), tensor_maps=(), persistent=False, source=self.source,
        fingerprint=self.fingerprint, target=target)


@dataclasses.dataclass(frozen=True, repr=False)
class Add(Triple):
  name: str = "add"
  fingerprint: str = "add"
  in_avals: tuple[Aval, ...] = ((SHAPE, F32), (SHAPE, F32))

  def interpret(self, *arrays: jax.Array) -> list[jax.Array]:
    return [arrays[0] + arrays[1]]


@pytest.fixture(autouse=True)
def on_the_cpu() -> Iterator[None]:
  """The stand-in's cubin runs nowhere, also where there is a GPU."""
  with jax.default_device(jax.devices("cpu")[0]):
    yield


@pytest.fixture
def x() -> jax.Array:
  return jnp.asarray(np.random.default_rng(0).integers(-9, 9, SHAPE).astype(np.float32))


def triple(x: jax.Array) -> jax.Array:
  return bind(Triple(), x)[0]


@pytest.mark.parametrize("transform", [
    lambda f: f,
    jax.jit,
    jax.checkpoint,
    lambda f: lambda x: jax.lax.scan(lambda c, _: (c, f(c)), x, None, length=2)[1][1],
    lambda f: lambda x: jax.lax.map(f, x[None])[0],
    lambda f: jax.jit(lambda x: jax.lax.cond(x.sum() < 1e9, f, lambda x: x, x)),
    lambda f: jax.jit(f).lower(jax.ShapeDtypeStruct(SHAPE, F32)).compile(),
], ids=["eager", "jit", "remat", "scan", "map", "cond", "ahead of time"])
def test_program_runs_on_the_cpu(x, transform):
  np.testing.assert_array_equal(transform(triple)(x), 3 * np.asarray(x))


def test_program_runs_under_disable_jit(x):
  with jax.disable_jit():
    np.testing.assert_array_equal(triple(x), 3 * np.asarray(x))


def test_jaxpr_shows_one_short_equation(x):
  assert str(jax.make_jaxpr(triple)(x)) == (
      "{ lambda ; a:f32[4,8]. let\n"
      "    b:f32[4,8] = tile_call[program=<triple 1a6cfb4d at triple.py:8>] a\n"
      "  in (b,) }")


def test_equal_eager_calls_compile_once(x):
  first = Triple(fingerprint="counted")
  for _ in range(3):
    bind(first, x)
    bind(Triple(fingerprint="counted"), x)
  assert len(first.interpretations) == 1


def test_result_of_a_weakly_typed_operand_is_strong():
  weak = jax.lax.broadcast(jnp.asarray(2.0), ())
  assert weak.aval.weak_type
  program = Triple(fingerprint="scalar", in_avals=(((), F32),), out_avals=(((), F32),))
  assert not jax.eval_shape(lambda w: bind(program, w), weak)[0].weak_type


def test_program_without_operands_runs():
  program = Add(fingerprint="iota", in_avals=())
  object.__setattr__(program, "interpret", lambda: [jnp.arange(32, dtype=jnp.float32).reshape(SHAPE)])
  np.testing.assert_array_equal(jax.jit(lambda: bind(program)[0])(), np.arange(32).reshape(SHAPE))


def test_equal_calls_in_one_module_are_one_function(x):
  text = jax.jit(lambda x: triple(triple(triple(x)))).lower(x).as_text()
  assert text.count("func.func private @triple(") == 1 and text.count("call @triple(") == 3


def test_kernel_s_name_is_in_the_module_s_locations(x):
  assert re.search(r'triple/tile_call|"triple"', jax.jit(triple).lower(x).as_text(debug_info=True))


def _lower_for_cuda(fn, *args) -> str:
  return jax.jit(fn).trace(*args).lower(lowering_platforms=("cuda",)).as_text()


@built
def test_lowering_for_cuda_on_this_machine_gives_the_custom_call_with_the_image(x):
  text = _lower_for_cuda(triple, x)
  call = re.search(r"stablehlo\.custom_call @tiletrace_launch_v1\((.*)", text)
  assert call is not None
  for attribute in (r'kernel = "triple"', r'source = "triple.py:8"', r'target = "sm_90a"', r'cubin = "\7FELF\00cubin"',
                    "block = 128 : i32", "grid = dense<[3, 1, 1]> : tensor<3xi32>", "persistent = false",
                    "params = dense<[0, 0, 0, 1]> : tensor<4xi64>", "smem_bytes = 0 : i32"):
    assert attribute in call[1], attribute
  assert "while" not in text


@built
def test_a_module_for_cuda_holds_one_copy_of_a_cubin(x):
  text = _lower_for_cuda(lambda x: triple(triple(triple(x))), x)
  assert text.count("custom_call @tiletrace_launch_v1") == 1


@built
def test_lowering_for_cuda_is_deterministic(x):
  assert _lower_for_cuda(triple, x) == _lower_for_cuda(lambda x: bind(Triple(), x)[0], x).replace("_lambda", "triple")


@built
def test_aliases_reach_the_custom_call(x):
  program = Triple(fingerprint="aliased", aliases=((0, 0),))
  text = _lower_for_cuda(lambda x: bind(program, x)[0], x)
  assert "output_operand_alias<output_tuple_indices = [], operand_index = 0" in text


def test_the_xla_backend_interprets_on_cuda_too(x):
  text = _lower_for_cuda(lambda x: bind(Triple(fingerprint="xla", backend="xla"), x)[0], x)
  assert "custom_call" not in text and "while" in text


def test_other_platforms_have_no_rule(x):
  with pytest.raises(NotImplementedError, match=r"'triple' \(triple\.py:8\) runs on CPUs and on CUDA GPUs, not on tpu"):
    jax.jit(triple).trace(x).lower(lowering_platforms=("tpu",))


@built
def test_export_carries_the_image_and_runs_on_the_cpu(x):
  exported = export.export(jax.jit(triple), platforms=["cpu", "cuda"], disabled_checks=export_checks())(x)
  again = export.deserialize(exported.serialize())
  np.testing.assert_array_equal(again.call(x), 3 * np.asarray(x))
  assert "tiletrace_launch_v1" in again.mlir_module()


@pytest.mark.parametrize("derivative", [
    lambda x: jax.grad(lambda x: triple(x).sum())(x),
    lambda x: jax.jvp(triple, (x,), (x,)),
    lambda x: jax.linearize(triple, x)])
def test_a_derivative_is_refused_with_the_kernel_s_name_and_line(x, derivative):
  with pytest.raises(NotImplementedError, match=r"'triple' \(triple\.py:8\) has no derivative: give tile_call a vjp="):
    derivative(x)


def test_vmap_binds_the_batched_program(x):
  both = jnp.stack([x, x + 1])
  np.testing.assert_array_equal(jax.vmap(triple)(both), 3 * np.asarray(both))
  inner = jnp.stack([x, -x], 1)
  np.testing.assert_array_equal(jax.vmap(triple, in_axes=1, out_axes=1)(inner), 3 * inner)


def test_custom_vjp_around_a_program_works(x):
  f = jax.custom_vjp(triple)
  f.defvjp(lambda x: (triple(x), None), lambda _, g: (triple(g),))
  np.testing.assert_array_equal(jax.jit(jax.grad(lambda x: f(x).sum()))(x), np.full(SHAPE, 3.0))


def _mesh(kind: jax.sharding.AxisType) -> jax.sharding.Mesh:
  return jax.make_mesh((2,), ("d",), axis_types=(kind,), devices=jax.devices("cpu")[:2])


P = jax.sharding.PartitionSpec
sharded = pytest.mark.parametrize("check_vma", [True, False])


@sharded
def test_program_runs_under_shard_map(x, check_vma):
  mesh = _mesh(jax.sharding.AxisType.Auto)
  both = jnp.concatenate([x, x + 1])
  f = jax.shard_map(triple, mesh=mesh, in_specs=P("d", None), out_specs=P("d", None), check_vma=check_vma)
  np.testing.assert_array_equal(jax.jit(f)(both), 3 * np.asarray(both))
  np.testing.assert_array_equal(f(both), 3 * np.asarray(both))


@sharded
def test_a_sharded_and_a_replicated_operand_mix_under_shard_map(x, check_vma):
  mesh = _mesh(jax.sharding.AxisType.Auto)
  both = jnp.concatenate([x, x + 1])
  f = jax.shard_map(lambda a, b: bind(Add(), a, b)[0], mesh=mesh, in_specs=(P("d", None), P()),
                    out_specs=P("d", None), check_vma=check_vma)
  np.testing.assert_array_equal(jax.jit(f)(both, x), np.asarray(both) + np.tile(x, (2, 1)))


def test_custom_vjp_runs_under_shard_map(x):
  mesh = _mesh(jax.sharding.AxisType.Auto)
  f = jax.custom_vjp(triple)
  f.defvjp(lambda x: (triple(x), None), lambda _, g: (triple(g),))
  g = jax.shard_map(f, mesh=mesh, in_specs=P("d", None), out_specs=P("d", None))
  both = jnp.concatenate([x, x + 1])
  np.testing.assert_array_equal(jax.jit(jax.grad(lambda x: g(x).sum()))(both), np.full((8, 8), 3.0))


def test_explicitly_sharded_operands_are_refused_with_advice(x):
  mesh = _mesh(jax.sharding.AxisType.Explicit)
  with jax.set_mesh(mesh):
    operand = jax.device_put(x, jax.sharding.NamedSharding(mesh, P("d", None)))
    expected = r"triple \(triple\.py:8\): operands lie on explicit mesh axes: float32\[4@d,8"
    with pytest.raises(TileTypeError, match=expected) as refused:
      jax.jit(triple)(operand)
  assert refused.value.hint == "a kernel sees one device's memory: wrap the call in jax.shard_map"


def test_a_program_pickles_by_value():
  program = pickle.loads(pickle.dumps(Triple()))
  assert program == Triple() and hash(program) == hash(Triple())


def test_cpu_work_never_loads_the_launcher(x, monkeypatch):
  def fail() -> None:
    raise AssertionError("loaded")
  monkeypatch.setattr(library, "load", fail)
  np.testing.assert_array_equal(bind(Triple(fingerprint="unloaded"), x)[0], 3 * np.asarray(x))
