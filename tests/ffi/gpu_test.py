"""Both launchers on a GPU, with hand-written PTX (the driver's JIT takes it where a cubin goes)."""
from __future__ import annotations

import dataclasses
import gc
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tiletrace as tt
from tiletrace.core.errors import LaunchError
from tiletrace.ffi import launch
from tiletrace.ffi.image import KernelImage, TensorMapSpec
from tiletrace.ffi.primitive import Aval, bind

pytestmark = pytest.mark.gpu

N = 1 << 12
F32, I32 = np.dtype(np.float32), np.dtype(np.int32)
HEAD = ".version 8.0\n.target sm_90a\n.address_size 64\n"

SCALE = HEAD + """
.visible .entry scale(.param .u64 x, .param .u64 y, .param .s32 by) .reqntid 128 {
  .reg .b64 %px, %py, %offset; .reg .b32 %cta, %thread, %i, %factor; .reg .f32 %v, %f;
  ld.param.u64 %px, [x]; ld.param.u64 %py, [y]; ld.param.s32 %factor, [by];
  mov.u32 %cta, %ctaid.x; mov.u32 %thread, %tid.x; mad.lo.u32 %i, %cta, 128, %thread;
  mul.wide.u32 %offset, %i, 4; add.u64 %px, %px, %offset; add.u64 %py, %py, %offset;
  ld.global.f32 %v, [%px]; cvt.rn.f32.s32 %f, %factor; mul.f32 %v, %v, %f; st.global.f32 [%py], %v;
  ret;
}
"""

# CTA i writes the grid's and the cluster's extent to row i.
EXTENT = HEAD + """
.visible .entry extent(.param .u64 y) .reqntid 32 {
  .reg .pred %p; .reg .b64 %py, %offset; .reg .b32 %cta, %thread, %v;
  ld.param.u64 %py, [y]; mov.u32 %cta, %ctaid.x; mov.u32 %thread, %tid.x;
  setp.ne.u32 %p, %thread, 0; @%p ret;
  mul.wide.u32 %offset, %cta, 8; add.u64 %py, %py, %offset;
  mov.u32 %v, %nctaid.x; st.global.u32 [%py], %v; mov.u32 %v, %cluster_nctaid.x; st.global.u32 [%py+4], %v;
  ret;
}
"""

# One box at (4, 2) of the first operand, by TMA, to shared memory and out to the second. Dynamic shared memory.
BOX = HEAD + """
.extern .shared .align 1024 .b8 smem[];
.visible .entry box(.param .align 64 .b8 map[128], .param .u64 y) .reqntid 32 {
  .reg .pred %p, %done; .reg .b64 %py, %pm, %offset, %state; .reg .f32 %v;
  .reg .b32 %thread, %s, %bar, %at, %four, %two;
  ld.param.u64 %py, [y]; mov.b64 %pm, map; cvta.param.u64 %pm, %pm; mov.u32 %thread, %tid.x; mov.u32 %s, smem;
  add.u32 %bar, %s, 1024;
  mov.u32 %four, 4; mov.u32 %two, 2;
  setp.ne.u32 %p, %thread, 0;
  @%p bra WAITING;
  mbarrier.init.shared::cta.b64 [%bar], 1;
  fence.mbarrier_init.release.cluster;
  mbarrier.arrive.expect_tx.shared::cta.b64 %state, [%bar], 128;
  cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%s], [%pm, {%four, %two}], [%bar];
WAITING:
  bar.sync 0;
POLL:
  mbarrier.try_wait.parity.shared::cta.b64 %done, [%bar], 0;
  @!%done bra POLL;
  shl.b32 %at, %thread, 2; add.u32 %s, %s, %at; ld.shared.f32 %v, [%s];
  mul.wide.u32 %offset, %thread, 4; add.u64 %py, %py, %offset; st.global.f32 [%py], %v;
  ret;
}
"""

BOX_MAP = TensorMapSpec(operand=0, dtype="float32", dims=(16, 5), strides=(64,), box=(8, 4), swizzle=0,
                        l2_promotion=128)


def _image(ptx: str, name: str, **fields) -> KernelImage:
  fields = dict(grid=(N // 128, 1, 1), block=128, cluster=None, smem_bytes=0, tensor_maps=(), persistent=False,
                source=f"{name}.py:8", fingerprint=name, params=()) | fields
  return KernelImage(name=name, cubin=ptx.encode() + b"\0", **fields)


SCALE_IMAGE = _image(SCALE, "scale", params=(("operand", 0), ("operand", 1), ("scalar_i32", 3)))
EXTENT_IMAGE = _image(EXTENT, "extent", params=(("operand", 0),), block=32)
BOX_IMAGE = _image(BOX, "box", params=(("tensormap", 0), ("operand", 1)), tensor_maps=(BOX_MAP,), grid=(1, 1, 1),
                   block=32, smem_bytes=1024 + 8)


@dataclasses.dataclass(frozen=True)
class Program:
  kernel: KernelImage
  in_avals: tuple[Aval, ...] = (((N,), F32),)
  out_avals: tuple[Aval, ...] = (((N,), F32),)
  aliases: tuple[tuple[int, int], ...] = ()
  backend: str | None = None
  hidden: tuple[()] = ()
  is_symbolic: bool = False
  grid: tuple[int, ...] = (1,)

  @property
  def name(self) -> str:
    return self.kernel.name

  @property
  def source(self) -> str:
    return self.kernel.source

  @property
  def fingerprint(self) -> str:
    return self.kernel.fingerprint

  def interpret(self, *arrays: jax.Array) -> list[jax.Array]:
    raise AssertionError("interpreted on a GPU")

  def image(self, target: str) -> KernelImage:
    return self.kernel


def scale(x: jax.Array) -> jax.Array:
  return bind(Program(SCALE_IMAGE), x)[0]


@pytest.fixture
def x() -> np.ndarray:
  return np.random.default_rng(0).standard_normal(N, np.float32)


@pytest.mark.parametrize("transform", [
    lambda f: f, jax.jit, lambda f: lambda x: jax.lax.scan(lambda c, _: (c, f(c)), x, None, length=2)[1][1],
    lambda f: jax.jit(f).lower(jax.ShapeDtypeStruct((N,), F32)).compile()], ids=["eager", "jit", "scan", "compiled"])
def test_kernel_runs_in_jax(x, transform):
  np.testing.assert_array_equal(transform(scale)(x), 3 * x)


def test_many_calls_in_one_jit_run_in_order_with_changing_inputs(x):
  @jax.jit
  def f(x):
    for _ in range(12):     # enough for XLA to build a command buffer
      x = scale(x + 1)
    return x

  for shift in range(5):
    expected = x + np.float32(shift)
    for _ in range(12):
      expected = (expected + np.float32(1)) * np.float32(3)
    np.testing.assert_array_equal(f(x + np.float32(shift)), expected)


def test_donated_operand_is_updated_in_place(x):
  program = Program(dataclasses.replace(SCALE_IMAGE, fingerprint="aliased"), aliases=((0, 0),))
  operand = jax.device_put(x)
  address = operand.unsafe_buffer_pointer()
  out = jax.jit(lambda x: bind(program, x)[0], donate_argnums=0)(operand)
  assert out.unsafe_buffer_pointer() == address
  np.testing.assert_array_equal(out, 3 * x)


def test_operand_that_is_not_donated_survives_an_alias(x):
  program = Program(dataclasses.replace(SCALE_IMAGE, fingerprint="aliased"), aliases=((0, 0),))
  operand = jax.device_put(x)
  np.testing.assert_array_equal(jax.jit(lambda x: bind(program, x)[0])(operand), 3 * x)
  np.testing.assert_array_equal(operand, x)


def test_tensor_map_copies_the_box_and_fills_past_the_edge():
  a = np.random.default_rng(1).standard_normal((5, 16), np.float32)
  expected = np.zeros((4, 8), np.float32)
  expected[:3] = a[2:5, 4:12]
  program = Program(BOX_IMAGE, in_avals=(((5, 16), F32),), out_avals=(((4, 8), F32),))
  np.testing.assert_array_equal(jax.jit(lambda a: bind(program, a)[0])(a), expected)
  out = launch.empty((4, 8), F32)
  source = launch.upload(a)
  launch.Launcher(BOX_IMAGE)(source.pointer, out.pointer)
  np.testing.assert_array_equal(out.download(), expected)


@pytest.mark.parametrize("grid, cluster, persistent", [
    (64, None, False), (100_000, None, True), (100_000, (2, 1, 1), True), (64, (8, 1, 1), False),
    (64, (16, 1, 1), False)])
def test_grid_and_cluster_arrive(grid, cluster, persistent):
  image = dataclasses.replace(EXTENT_IMAGE, grid=(grid, 1, 1), cluster=cluster, persistent=persistent,
                              fingerprint=f"extent {grid} {cluster}")
  ctas = image.launch_grid(launch.device().num_sms)[0]
  expected = np.tile(np.asarray([ctas, cluster[0] if cluster else 1], I32), (ctas, 1))
  program = Program(image, in_avals=(), out_avals=(((ctas, 2), I32),))
  np.testing.assert_array_equal(jax.jit(lambda: bind(program)[0])(), expected)
  out = launch.empty((ctas, 2), I32)
  launch.Launcher(image)(out.pointer)
  np.testing.assert_array_equal(out.download(), expected)


def test_empty_grid_is_not_launched():
  program = Program(dataclasses.replace(SCALE_IMAGE, grid=(0, 1, 1), fingerprint="empty"), in_avals=(((0,), F32),),
                    out_avals=(((0,), F32),))
  assert jax.jit(lambda x: bind(program, x)[0])(jnp.zeros((0,))).shape == (0,)


def test_a_cubin_that_does_not_load_names_the_kernel_and_its_line(x):
  program = Program(dataclasses.replace(SCALE_IMAGE, cubin=b"not a cubin\0", fingerprint="bad"))
  with pytest.raises(jax.errors.JaxRuntimeError, match=r"'scale' \(scale\.py:8\): cannot load the cubin"):
    jax.block_until_ready(jax.jit(lambda x: bind(program, x)[0])(x))


def test_launch_without_jax_gives_the_same(x):
  source, out = launch.upload(x), launch.empty((N,), F32)
  launch.Launcher(SCALE_IMAGE)(source.pointer, out.pointer)
  np.testing.assert_array_equal(out.download(), 3 * x)


def test_launches_and_copies_captured_in_a_graph_run_at_each_call(x):
  source, out, again = launch.upload(x), launch.empty((N,), F32), launch.empty((N,), F32)
  launcher = launch.Launcher(SCALE_IMAGE)

  def enqueue(stream):
    launcher(source.pointer, out.pointer, stream=stream)
    launch.copy(again.pointer, out.pointer, out.nbytes, stream=stream)

  graph = launch.Graph(enqueue)
  assert np.isnan(out.download()).all()
  for factor in (1, 2):
    source.write(factor * x)
    graph()
    graph.synchronize()
    np.testing.assert_array_equal(again.download(), 3 * factor * x)


def test_a_capture_that_fails_ends(x):
  with pytest.raises(LaunchError, match="16 bytes"):
    launch.Graph(lambda stream: launch.Launcher(SCALE_IMAGE)(8, 8, stream=stream))
  np.testing.assert_array_equal(launch.upload(x).download(), x)


def test_a_graph_keeps_what_its_launches_read_and_write(x):
  def captured():
    source, out = launch.upload(x), launch.empty((N,), F32)
    launcher = launch.Launcher(SCALE_IMAGE)
    return launch.Graph(lambda stream: launcher(source.pointer, out.pointer, stream=stream)), weakref.ref(out)

  graph, out = captured()
  gc.collect()
  graph()
  graph.synchronize()
  np.testing.assert_array_equal(out().download(), 3 * x)
  del graph
  gc.collect()
  assert out() is None


def test_timing_is_positive_and_plausible(x):
  source, out = launch.upload(x), launch.empty((N,), F32)
  launcher = launch.Launcher(SCALE_IMAGE)
  seconds = launch.time_launches(lambda _: launcher(source.pointer, out.pointer), repeats=20, samples=3)
  assert len(seconds) == 3 and all(1e-7 < s < 1e-2 for s in seconds)


def test_kernel_runs_on_every_device_under_shard_map(x):
  devices = jax.devices()
  if len(devices) < 2:
    pytest.skip("needs two GPUs")
  mesh = jax.make_mesh((len(devices),), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
  spec = jax.sharding.PartitionSpec("d")
  many = np.tile(x, len(devices))
  out = jax.jit(jax.shard_map(scale, mesh=mesh, in_specs=spec, out_specs=spec))(many)
  np.testing.assert_array_equal(out, 3 * many)


# --- launches that overlap

def _passed_on_kernel(x, y):
  """A program adds one to what another program of the kernel before has written."""
  i = tt.program_id(0)
  y[tt.block(i, 128)] = x[tt.block((i + 37) % tt.num_programs(0), 128)] + 1


@pytest.mark.parametrize("graph", [False, True], ids=["stream", "graph"])
def test_kernels_whose_launches_overlap_see_all_of_the_one_before(graph):
  """Its results, and that it no longer reads: XLA gives the kernels of a chain the same two buffers in turn."""
  shape = jax.ShapeDtypeStruct((600 * 128,), jnp.float32)
  step = tt.tile_call(_passed_on_kernel, shape, grid=600, options=tt.CompileOptions(overlap_launch=True))

  def chain(x):
    for _ in range(60):
      x = step(x)
    return x

  x = jax.random.normal(jax.random.key(0), shape.shape)
  run = jax.jit(chain).lower(x).compile(compiler_options={"xla_gpu_graph_min_graph_size": 5 if graph else 1000})
  want = np.roll(np.asarray(x).reshape(600, 128), -37 * 60, axis=0).reshape(-1)
  for _ in range(60):
    want = want + np.float32(1)
  for _ in range(20):
    assert np.array_equal(run(x), want)
