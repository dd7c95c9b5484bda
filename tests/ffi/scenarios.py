"""Runs images through both launchers on the fake driver and prints, as JSON, what each asked of it.

Run by conftest.py: `python -m tests.ffi.scenarios libcuda.so.1 host_handler.so`. The XLA handler runs on the CPU
backend, with real attributes and buffers; `ffi.launch` runs on cuda-python.
"""
from __future__ import annotations

import ctypes
import dataclasses
import gc
import json
import re
import sys
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import export

import tiletrace as tt
from tiletrace.core.errors import AssembleError, LaunchError
from tiletrace.core.types import Size
from tiletrace.ffi import launch, library
from tiletrace.ffi.image import KernelImage, SizeSource, TensorMapSpec
from tiletrace.ffi.primitive import export_checks

KINDS = {"operand": "p", "tensormap": "t", "scalar_i32": "i", "size": "i"}

MAP = TensorMapSpec(operand=0, dtype="float32", dims=(8, 4), strides=(32,), box=(8, 2), swizzle=32, l2_promotion=128,
                    offset_bytes=16)
PLAIN = KernelImage(name="triple", cubin=b"\x7fELFplain\0", grid=(3, 1, 1), block=128, cluster=None, smem_bytes=1024,
                    params=(("operand", 0), ("operand", 1), ("scalar_i32", -7)), tensor_maps=(), persistent=False,
                    source="triple.py:8", fingerprint="1a6cfb4d")
MAPPED = dataclasses.replace(PLAIN, cubin=b"\x7fELFmapped", tensor_maps=(MAP, dataclasses.replace(MAP, operand=1)),
                             params=(("tensormap", 1), ("operand", 1), ("tensormap", 0)))
M, N = Size(("m",)), Size(("n",))
ANY_SIZE = dataclasses.replace(
    PLAIN, cubin=b"\x7fELFsizes", grid=(M * N * 3, 1, 1),
    sizes=(SizeSource("m", 0, 0, 2, 100), SizeSource("n", 1, 1, 1, 100)),
    params=(("operand", 1), ("size", 1), ("size", 0), ("tensormap", 0)),
    tensor_maps=(dataclasses.replace(MAP, dims=(N, M * 2), strides=(N * 16,)),))
IMAGES = {
    "plain": PLAIN,
    "mapped": MAPPED,
    "no extent": dataclasses.replace(MAPPED, tensor_maps=(dataclasses.replace(MAP, dims=(8, 0)),),
                                     params=(("tensormap", 0),)),
    "vector": dataclasses.replace(MAPPED, tensor_maps=(dataclasses.replace(MAP, dims=(32,), strides=(), box=(8,)),),
                                  params=(("tensormap", 0),)),
    "persistent": dataclasses.replace(PLAIN, grid=(1000, 1, 1), persistent=True, smem_bytes=230_000),
    "persistent clusters": dataclasses.replace(PLAIN, grid=(999, 1, 1), cluster=(3, 1, 1), persistent=True),
    "persistent, small": dataclasses.replace(PLAIN, grid=(50, 1, 1), persistent=True),
    "clusters": dataclasses.replace(PLAIN, grid=(4, 6, 1), cluster=(2, 3, 1)),
    "large cluster": dataclasses.replace(PLAIN, grid=(16, 1, 1), cluster=(16, 1, 1)),
    "overlap": dataclasses.replace(PLAIN, overlap=True),
    "overlapping clusters": dataclasses.replace(PLAIN, grid=(4, 6, 1), cluster=(2, 3, 1), overlap=True),
    "empty": dataclasses.replace(PLAIN, grid=(0, 1, 1)),
    "any size": ANY_SIZE,
}
FAILING = {
    "older GPU": (PLAIN, 80, ""),
    "newer GPU": (PLAIN, 100, ""),
    "newer GPU, plain target": (dataclasses.replace(PLAIN, target="sm_80"), 90, ""),
    "no cubin": (PLAIN, 90, "cuModuleLoadData"),
    "no entry": (PLAIN, 90, "cuModuleGetFunction"),
    "no launch": (PLAIN, 90, "cuLaunchKernelEx"),
    "no map": (MAPPED, 90, "cuTensorMapEncodeTiled"),
}


def _sums_kernel(x, y):
  x_s, r = tt.alloc_shared((64, 32), x.dtype), tt.block(tt.program_id(0), 64)
  total = tt.alloc_fragment((64, 32), jnp.float32)
  total[...] = 0
  for k in tt.pipelined(tt.cdiv(x.shape[1], 32), num_stages=2):
    tt.copy(x.at[r, tt.block(k, 32)], x_s)
    total[...] += x_s[...]
  y[r] = tt.sum(total[...], axis=1)


def _halves(x):
  """Calls one after another, and in a scan, of a kernel that takes its programs."""
  def kernel(x, y):
    r = tt.block(tt.program_id(0), 128)
    y[r] = x[r] / 2

  call = tt.tile_call(kernel, jax.ShapeDtypeStruct(x.shape, x.dtype), grid=(tt.cdiv(x.shape[0], 128),),
                      persistent="dynamic")
  x = call(call(x))
  return jax.lax.scan(lambda c, _: (call(c), None), x, None, length=3)[0]


def _halves_of_any_size(x):
  def kernel(x, y):
    r = tt.block(tt.program_id(0), 128)
    y[r] = x[r] / 2

  return tt.tile_call(kernel, jax.ShapeDtypeStruct(x.shape, x.dtype), grid=(tt.cdiv(x.shape[0], 128),),
                      persistent="dynamic", dynamic_shapes=("n", "n"))(x)


def _sums_of_rows(x):
  return tt.tile_call(_sums_kernel, jax.ShapeDtypeStruct(x.shape[:1], x.dtype), grid=(tt.cdiv(x.shape[0], 64),),
                      dynamic_shapes=("m, 4*n", "m"))(x)


class Scenarios:

  def __init__(self, fake_path: str, handler_path: str):
    self.fake = ctypes.CDLL(fake_path, ctypes.RTLD_GLOBAL)
    self.fake.fake_log.restype = ctypes.c_char_p
    self.handler = ctypes.CDLL(handler_path)
    jax.ffi.register_ffi_target("host_launch", {
        "instantiate": jax.ffi.pycapsule(self.handler.tt_instantiate),
        "execute": jax.ffi.pycapsule(self.handler.tt_execute_on_host)}, platform="cpu")
    self.x = jax.random.normal(jax.random.key(0), (4, 8))

  def reset(self, image: KernelImage, capability: int = 90, failing: str = "") -> None:
    kinds = "".join(KINDS[kind] for kind, _ in image.params)
    self.fake.fake_reset(kinds.encode(), capability, 100, failing.encode())

  def log(self, addresses: tuple[int, int]) -> str:
    # XLA lets go of earlier executables when it likes: their unloading is not this call's.
    lines = self.fake.fake_log().decode().splitlines(keepends=True)
    text = "".join(line for line in lines if not line.startswith("unload"))
    for name, address in zip(("INPUT", "OUTPUT"), addresses):
      if address:
        text = text.replace(f"{address + 16:#x}", f"{name}+16").replace(f"{address:#x}", name)
    return text

  def xla(self, image: KernelImage, **changes: Any) -> str:
    """One compiled call; the executable and its module die with it."""
    attributes = {**image.attributes(), **changes}
    attributes = {k: v for k, v in attributes.items() if v is not None}
    call = jax.ffi.ffi_call("host_launch", jax.ShapeDtypeStruct((4, 8), jnp.float32))
    out = jax.jit(lambda x: call(x, **attributes))(self.x).block_until_ready()
    text = self.log((self.x.unsafe_buffer_pointer(), out.unsafe_buffer_pointer()))
    jax.clear_caches()
    gc.collect()
    return text

  def direct(self, image: KernelImage) -> str:
    source, out = launch.upload(np.asarray(self.x)), launch.empty((4, 8), np.float32)
    sizes = {s.name: self.x.shape[s.dim] // s.factor for s in image.sizes}
    launch.Launcher(image)(source.pointer, out.pointer, sizes=sizes)
    return self.log((source.pointer, out.pointer))

  def run(self) -> dict[str, Any]:
    result: dict[str, Any] = {"xla": {}, "direct": {}}
    for name, image in IMAGES.items():
      for launcher in ("xla", "direct"):
        self.reset(image)
        result[launcher][name] = getattr(self, launcher)(image)
    for name, (image, capability, failing) in FAILING.items():
      for launcher in ("xla", "direct"):
        self.reset(image, capability, failing)
        launch._open.cache_clear()
        result[launcher][name] = self.error(getattr(self, launcher), image)
    launch._open.cache_clear()
    result["attributes"] = self.bad_attributes()
    result["exported"] = self.exported()
    result["counted"] = self.counted()
    result["counted by the launcher"] = self.counted_by_the_launcher()
    result["shifted"] = self.shifted()
    result["shared module"] = self.shared_module()
    result["metadata"] = self.handler.tt_execute_metadata()
    return result

  @staticmethod
  def error(run: Callable[..., Any], *args: Any, **kwargs: Any) -> str:
    try:
      return f"no error: {run(*args, **kwargs)}"
    except (jax.errors.JaxRuntimeError, LaunchError) as e:
      return str(e)

  def bad_attributes(self) -> dict[str, str]:
    self.reset(PLAIN)
    changes = {
        "missing": dict(grid=None), "wrong type": dict(block=np.int64(128)),
        "cut short": dict(grid=np.ones(2, np.int32)), "map cut short": dict(tensor_maps=np.asarray(MAP.words()[:-1])),
        "unknown parameter": dict(params=np.asarray([9, 0])), "no such map": dict(params=np.asarray([1, 0])),
        "no such operand": dict(params=np.asarray([0, 5])),
        "unknown target": dict(target="gfx90a"), "no such product": dict(grid=np.asarray([-1, 1, 1], np.int32))}
    found = {name: self.error(self.xla, PLAIN, **change) for name, change in changes.items()}
    self.reset(ANY_SIZE)
    changes = {
        "products cut short": dict(products=np.asarray([1, 2, 0])),
        "no such size": dict(products=np.asarray([1, 1, 2])),
        "no such product of a map": dict(products=np.asarray([1, 0])),
        "no such dimension": dict(sizes=np.asarray([0, 2, 1, 100, 1, 1, 1, 100])),
        "no multiple": dict(sizes=np.asarray([0, 0, 3, 100, 1, 1, 1, 100])),
        "too large": dict(sizes=np.asarray([0, 0, 1, 3, 1, 1, 1, 100]))}
    return found | {name: self.error(self.xla, ANY_SIZE, **change) for name, change in changes.items()}

  def exported(self) -> list[str] | None:
    """A kernel exported with symbolic shapes, called with arrays of three sizes; None where there is no ptxas."""
    call = {"instantiate": jax.ffi.pycapsule(self.handler.tt_instantiate),
            "execute": jax.ffi.pycapsule(self.handler.tt_execute_on_host)}
    jax.ffi.register_ffi_target(library.TARGET_OF_ANY_SIZE, call, platform="cpu")
    m, n = export.symbolic_shape("m, n")
    checks = [*export_checks(), export.DisabledSafetyCheck.platform()]
    try:
      exported = export.export(jax.jit(_sums_of_rows), platforms=["cuda"], disabled_checks=checks)(
          jax.ShapeDtypeStruct((m, 4 * n), jnp.float32))
    except AssembleError:
      return None
    exported = export.deserialize(exported.serialize())
    out = []
    for shape in ((1, 4), (100, 64), (300, 200)):
      self.fake.fake_reset(b"ppiiit", 90, 100, b"")
      jax.jit(exported.call)(jnp.zeros(shape, jnp.float32)).block_until_ready()
      lines = self.fake.fake_log().decode().splitlines()
      encoded, launched = (next(line for line in lines if line.startswith(what)) for what in ("encode", "launch"))
      out.append(f"{encoded}; {launched.partition(' block')[0]} params {' '.join(launched.split()[-4:-1])}")
    return out

  def counted(self) -> dict[str, list[str]] | None:
    """The launches of programs that take theirs from a counter, compiled by XLA: grid, and what the counter held."""
    call = {"instantiate": jax.ffi.pycapsule(self.handler.tt_instantiate),
            "execute": jax.ffi.pycapsule(self.handler.tt_execute_on_host)}
    jax.ffi.register_ffi_target(library.TARGET, call, platform="cpu")
    checks = [*export_checks(), export.DisabledSafetyCheck.platform()]
    n, = export.symbolic_shape("n")
    found = {}
    for name, fn, size, kinds in (("calls", _halves, 1280, b"pcp"), ("any size", _halves_of_any_size, n, b"pcpii")):
      try:
        exported = export.export(jax.jit(fn), platforms=["cuda"], disabled_checks=checks)(
            jax.ShapeDtypeStruct((size,), jnp.float32))
      except AssembleError:
        return None
      compiled = jax.jit(export.deserialize(exported.serialize()).call)
      found[name] = []
      for _ in range(2):
        self.fake.fake_reset(kinds, 90, 4, b"")
        compiled(jnp.zeros(1280, jnp.float32)).block_until_ready()
        launches = re.findall(r"(launch grid \S+) .* (counter \S+)", self.fake.fake_log().decode())
        found[name] += [f"{grid}, {counter}" for grid, counter in launches]
    return found

  def counted_by_the_launcher(self) -> str:
    image = dataclasses.replace(PLAIN, persistent=True, counter=1,
                                params=(("operand", 0), ("operand", 1), ("operand", 2)))
    self.fake.fake_reset(b"pcp", 90, 100, b"")
    source, out = launch.upload(np.asarray(self.x)), launch.empty((4, 8), np.float32)
    launcher = launch.Launcher(image)
    for _ in range(2):
      launcher(source.pointer, out.pointer)
    return self.log((source.pointer, out.pointer))

  def shifted(self) -> dict[str, str]:
    self.reset(PLAIN)
    self.handler.tt_shift(ctypes.c_int64(8))
    out = {"xla": self.error(self.xla, PLAIN)}
    self.handler.tt_shift(ctypes.c_int64(0))
    out["direct"] = self.error(launch.Launcher(PLAIN), 512, 1032)
    return out

  def shared_module(self) -> str:
    """Two executables with one cubin between them, then neither."""
    image = dataclasses.replace(PLAIN, cubin=b"\x7fELFshared")
    self.reset(image)
    call = jax.ffi.ffi_call("host_launch", jax.ShapeDtypeStruct((4, 8), jnp.float32))
    attributes = image.attributes()
    both = [jax.jit(lambda x, scale=scale: call(x * scale, **attributes)).lower(self.x).compile() for scale in (2, 3)]
    for executable in both:
      executable(self.x).block_until_ready()
    del both, executable
    gc.collect()
    deadline = time.monotonic() + 10
    while "unload \x7fELFshar" not in self.fake.fake_log().decode() and time.monotonic() < deadline:
      time.sleep(0.01)
    return self.fake.fake_log().decode()


if __name__ == "__main__":
  print(json.dumps(Scenarios(*sys.argv[1:]).run()))
