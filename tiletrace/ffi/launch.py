"""Launches kernel images without JAX, through cuda-python: for tests, benchmarks and tools.

Everything runs in the primary context of a device, which is also the one that JAX uses.
"""
from __future__ import annotations

import ctypes
import dataclasses
import functools
import re
import time
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from tiletrace.core.errors import LaunchError
from tiletrace.ffi.image import KernelImage, TensorMapSpec

try:
  from cuda.bindings import driver as _driver  # pyright: ignore[reportAttributeAccessIssue, reportMissingImports]
except ImportError:
  _driver = None
cuda: Any = _driver     # its functions are typed by their C signatures, which pyright cannot follow

OPERAND_ALIGNMENT = 16
_COUNTER_BYTES = 4


def _check(result: tuple[Any, ...], what: str) -> Any:
  """Unpacks (status, value...) of a driver call."""
  status, *values = result
  if status != cuda.CUresult.CUDA_SUCCESS:
    _, text = cuda.cuGetErrorString(status)
    raise LaunchError(f"{what}: {text.decode() if text else 'unknown error'} (CUDA error {int(status)})")
  return values[0] if len(values) == 1 else tuple(values)


@dataclasses.dataclass(frozen=True)
class Device:
  """A GPU and its primary context, current on the thread that called `device`.

  Attributes:
    ordinal: its index among the visible devices.
    name: as the driver gives it, "NVIDIA H200".
    capability: compute capability times ten, 90 for Hopper.
    num_sms: streaming multiprocessors.
  """

  ordinal: int
  name: str
  capability: int
  num_sms: int
  context: Any = dataclasses.field(repr=False, compare=False)

  def runs(self, target: str) -> bool:
    """Whether a cubin for `target` runs here: an "a" target on exactly its capability, others from it on."""
    match = re.fullmatch(r"sm_(\d+)(a?)", target)
    assert match, target
    wanted = int(match[1])
    if match[2]:
      return self.capability == wanted
    return self.capability // 10 == wanted // 10 and self.capability >= wanted


def device(ordinal: int = 0) -> Device:
  """Opens a device and makes its primary context current on this thread.

  Raises:
    LaunchError: cuda-python or the driver is missing, or there is no such device.
  """
  opened = _open(ordinal)
  _check(cuda.cuCtxSetCurrent(opened.context), f"device {ordinal}")
  return opened


@functools.cache
def _open(ordinal: int) -> Device:
  if cuda is None:
    raise LaunchError("launching without JAX needs the package cuda-python",
                      hint="pip install 'tiletrace[cuda13]'")
  try:
    _check(cuda.cuInit(0), "cannot initialise the NVIDIA driver")
  except RuntimeError as e:       # cuda-python's own, when libcuda.so.1 is missing
    raise LaunchError(f"there is no NVIDIA driver: {e}") from e
  handle = _check(cuda.cuDeviceGet(ordinal), f"device {ordinal}")
  attribute = cuda.CUdevice_attribute

  def query(name: str) -> int:
    return _check(cuda.cuDeviceGetAttribute(getattr(attribute, f"CU_DEVICE_ATTRIBUTE_{name}"), handle), name)

  return Device(
      ordinal=ordinal,
      name=_check(cuda.cuDeviceGetName(256, handle), f"device {ordinal}").split(b"\0")[0].decode(),
      capability=10 * query("COMPUTE_CAPABILITY_MAJOR") + query("COMPUTE_CAPABILITY_MINOR"),
      num_sms=query("MULTIPROCESSOR_COUNT"),
      context=_check(cuda.cuDevicePrimaryCtxRetain(handle), f"device {ordinal}"))


class Launcher:
  """A kernel image loaded on a device; calling it launches.

  Args:
    image: what to launch.
    ordinal: the device.

  Raises:
    LaunchError: no driver, a device that the image's target does not run on, or a cubin that does not load.

  Example:
    launcher = Launcher(image)
    out = empty((1024,), np.float32)
    launcher(upload(x).pointer, out.pointer)
    y = out.download()
  """

  def __init__(self, image: KernelImage, ordinal: int = 0):
    self.image = image
    self.device = device(ordinal)
    self._where = f"tiletrace kernel '{image.name}' ({image.source})"
    if not self.device.runs(image.target):
      raise LaunchError(f"{self._where} was compiled for {image.target}, but device {ordinal}, {self.device.name}, is "
                        f"sm_{self.device.capability}")
    self._module = self._check(cuda.cuModuleLoadData(image.cubin), "cannot load the cubin")
    self._function = self._check(cuda.cuModuleGetFunction(self._module, image.name.encode()),
                                 f"the cubin has no entry '{image.name}'")
    attribute = cuda.CUfunction_attribute
    self._check(cuda.cuFuncSetAttribute(
        self._function, attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, image.smem_bytes),
        f"cannot have {image.smem_bytes} bytes of dynamic shared memory")
    if image.cluster and np.prod(image.cluster) > 8:
      self._check(cuda.cuFuncSetAttribute(
          self._function, attribute.CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED, 1),
          "cannot have clusters of more than 8 CTAs")
    self._config = self._launch_config()

  def __call__(self, *operands: int, stream: int = 0, sizes: Mapping[str, int] | None = None) -> None:
    """Launches, asynchronously.

    Args:
      *operands: device addresses of the inputs, then of the outputs (an aliased output repeats its input's). Not the
        counter that a kernel takes its programs from: each launch allocates its own on the stream.
      stream: a CUstream handle; 0 is the default stream.
      sizes: of an image of dynamic shapes, what its names stand for, the grid's axes among them.

    Raises:
      LaunchError: an address that is not a multiple of 16 bytes, or the driver refuses the launch.
    """
    image = self.image.at(sizes) if sizes else self.image
    if 0 in image.grid:           # CUDA refuses an empty grid
      return
    for i, address in enumerate(operands):
      if address % OPERAND_ALIGNMENT:
        raise LaunchError(f"{self._where}: operand {i} starts at {address:#x}, which is not a multiple of 16 bytes")
    if image.counter is None:
      self._launch(image, operands, stream)
      return
    counter = self._check(cuda.cuMemAllocAsync(_COUNTER_BYTES, stream), "no memory for its counter")
    try:
      self._check(cuda.cuMemsetD32Async(counter, 0, 1, stream), "cannot clear its counter")
      self._launch(image, (*operands[:image.counter], int(counter), *operands[image.counter:], int(counter)), stream)
    finally:
      cuda.cuMemFreeAsync(counter, stream)

  def _launch(self, image: KernelImage, operands: tuple[int, ...], stream: int) -> None:
    values = self._values(image, operands)
    arguments = (ctypes.c_void_p * len(values))(*(ctypes.addressof(v) for v in values))
    self._config.gridDimX, self._config.gridDimY, self._config.gridDimZ = image.launch_grid(self.device.num_sms)
    self._config.hStream = stream
    self._check(cuda.cuLaunchKernelEx(self._config, self._function, ctypes.addressof(arguments), 0),
                f"launch of grid {image.launch_grid(self.device.num_sms)} by {self.image.block} threads, cluster "
                f"{self.image.cluster}, {self.image.smem_bytes} bytes")

  def _check(self, result: tuple[Any, ...], what: str) -> Any:
    return _check(result, f"{self._where}: {what}")

  def _launch_config(self) -> Any:
    config = cuda.CUlaunchConfig()
    config.blockDimX, config.blockDimY, config.blockDimZ = self.image.block, 1, 1
    config.sharedMemBytes = self.image.smem_bytes
    attributes, ids = [], cuda.CUlaunchAttributeID
    if self.image.cluster:
      value = cuda.CUlaunchAttributeValue()
      value.clusterDim.x, value.clusterDim.y, value.clusterDim.z = self.image.cluster
      attributes.append((ids.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION, value))
    if self.image.overlap:
      value = cuda.CUlaunchAttributeValue()
      value.programmaticStreamSerializationAllowed = 1
      attributes.append((ids.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION, value))
    config.attrs, config.numAttrs = [_attribute(*x) for x in attributes], len(attributes)
    return config

  def _values(self, image: KernelImage, operands: tuple[int, ...]) -> list[Any]:
    """The value of each parameter, as the kernel reads it."""
    assert not image.sizes, f"{image}: sizes= is missing"
    values: list[Any] = []
    for kind, value in image.params:
      if kind == "operand":
        values.append(ctypes.c_uint64(operands[value]))
      elif kind == "tensormap":
        values.append(self._encode(image.tensor_maps[value], operands))
      else:
        values.append(ctypes.c_int32(value))
    return values

  def _encode(self, spec: TensorMapSpec, operands: tuple[int, ...]) -> Any:
    if 0 in spec.dims:            # nothing is there to copy, and CUDA refuses such a map
      return (ctypes.c_char * 128)()
    # Of one dimension there is no stride, but CUDA refuses none at all.
    encoded = self._check(cuda.cuTensorMapEncodeTiled(
        cuda.CUtensorMapDataType(spec.dtype_code), len(spec.dims), operands[spec.operand] + spec.offset_bytes,
        [cuda.cuuint64_t(d) for d in spec.dims], [cuda.cuuint64_t(s) for s in spec.strides or (16,)],
        [cuda.cuuint32_t(b) for b in spec.box], [cuda.cuuint32_t(1)] * len(spec.dims),
        cuda.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE, cuda.CUtensorMapSwizzle(spec.swizzle_code),
        cuda.CUtensorMapL2promotion(spec.l2_promotion_code),
        cuda.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE), f"tensor map {spec}")
    return (ctypes.c_char * 128).from_buffer_copy(ctypes.string_at(int(encoded.getPtr()), 128))


def _attribute(id_: Any, value: Any) -> Any:
  attribute = cuda.CUlaunchAttribute()
  attribute.id, attribute.value = id_, value
  return attribute


class Buffer:
  """Device memory that holds an array; freed with the object.

  Attributes:
    pointer: its device address.
    shape, dtype: of the array.
  """

  def __init__(self, shape: tuple[int, ...], dtype: Any, ordinal: int = 0):
    self.shape, self.dtype = tuple(shape), np.dtype(dtype)
    self.nbytes = int(np.prod(self.shape, dtype=np.int64)) * self.dtype.itemsize
    device(ordinal)
    self.pointer = int(_check(cuda.cuMemAlloc(max(self.nbytes, 1)), f"allocation of {self.nbytes} bytes"))

  def __del__(self) -> None:
    if hasattr(self, "pointer") and cuda is not None:      # at the interpreter's end modules are gone
      cuda.cuMemFree(self.pointer)

  def write(self, array: np.ndarray) -> None:
    """Copies `array` to the device, and waits: streams of others, which do not wait for the default one, find it."""
    assert array.shape == self.shape and array.dtype == self.dtype, (array.shape, array.dtype, self.shape, self.dtype)
    if self.nbytes:
      contiguous = np.ascontiguousarray(array)
      _check(cuda.cuMemcpyHtoD(self.pointer, contiguous.ctypes.data, self.nbytes), "copy to the device")
      _check(cuda.cuStreamSynchronize(0), "copy to the device")

  def fill(self, byte: int) -> None:
    """Sets every byte, and waits. 0xFF is NaN in every float type: poison for outputs."""
    if self.nbytes:
      _check(cuda.cuMemsetD8(self.pointer, byte, self.nbytes), "fill")
      _check(cuda.cuStreamSynchronize(0), "fill")

  def download(self) -> np.ndarray:
    """Waits for the device and returns the array."""
    synchronize()
    out = np.empty(self.shape, self.dtype)
    if self.nbytes:
      _check(cuda.cuMemcpyDtoH(out.ctypes.data, self.pointer, self.nbytes), "copy from the device")
    return out


def upload(array: np.ndarray, ordinal: int = 0) -> Buffer:
  """A new buffer with the contents of `array`."""
  buffer = Buffer(array.shape, array.dtype, ordinal)
  buffer.write(array)
  return buffer


def empty(shape: tuple[int, ...], dtype: Any, ordinal: int = 0) -> Buffer:
  """A new buffer, poisoned: NaN in every float type, -1 in the signed integers."""
  buffer = Buffer(shape, dtype, ordinal)
  buffer.fill(0xFF)
  return buffer


def synchronize() -> None:
  """Waits for all work of the current context.

  Raises:
    LaunchError: an earlier launch failed on the device, e.g. an illegal address.
  """
  _check(cuda.cuCtxSynchronize(), "an earlier launch failed")


def copy(to: int, source: int, nbytes: int, *, stream: int = 0) -> None:
  """Copies from one device address to another, asynchronously."""
  _check(cuda.cuMemcpyDtoDAsync(to, source, nbytes, stream), f"copy of {nbytes} bytes")


class Graph:
  """What `enqueue(stream)` puts on a stream, captured in a CUDA graph: a call runs all of that again, asynchronously.

  The host's part of a launch, which takes as long as a small kernel, is then paid once for all of them. The graph keeps
  `enqueue` and what it returned, since what they refer to is what the captured launches read and write.

  Example:
    graph = Graph(lambda stream: [launcher(x.pointer, out.pointer, stream=stream) for _ in range(100)])
    graph()
    graph.synchronize()
  """

  def __init__(self, enqueue: Callable[[int], Any]):
    device()
    self._stream = _check(cuda.cuStreamCreate(cuda.CUstream_flags.CU_STREAM_NON_BLOCKING), "stream")
    mode = cuda.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED       # a Buffer may be collected meanwhile: its free
    _check(cuda.cuStreamBeginCapture(self._stream, mode), "capture")
    try:
      self._kept = enqueue, enqueue(int(self._stream))
    except BaseException:              # else the thread captures on, and every later call of it fails
      cuda.cuGraphDestroy(cuda.cuStreamEndCapture(self._stream)[1])
      cuda.cuStreamDestroy(self._stream)
      raise
    graph = _check(cuda.cuStreamEndCapture(self._stream), "capture")
    self._executable = _check(cuda.cuGraphInstantiate(graph, 0), "graph")
    cuda.cuGraphDestroy(graph)

  def __call__(self) -> None:
    _check(cuda.cuGraphLaunch(self._executable, self._stream), "launch of a graph")

  def synchronize(self) -> None:
    """Waits for all that was called."""
    _check(cuda.cuStreamSynchronize(self._stream), "an earlier launch failed")

  def __del__(self) -> None:
    if hasattr(self, "_executable") and cuda is not None:
      cuda.cuGraphExecDestroy(self._executable)
      cuda.cuStreamDestroy(self._stream)


def time_launches(launch: Callable[[int], Any], *, repeats: int = 100, warmup_seconds: float = 0.1,
                  samples: int = 5) -> list[float]:
  """Seconds for each of `samples` back-to-back runs of `launch(i)`, i < repeats, divided by `repeats`.

  Warms up for `warmup_seconds` first, so that clocks are near their sustained value. `launch` must enqueue on the
  default stream and not wait.
  """
  device()
  end = time.perf_counter() + warmup_seconds
  while time.perf_counter() < end:
    for i in range(repeats):
      launch(i)
    synchronize()
  flags = cuda.CUevent_flags.CU_EVENT_DEFAULT
  start, stop = _check(cuda.cuEventCreate(flags), "event"), _check(cuda.cuEventCreate(flags), "event")
  seconds = []
  for _ in range(samples):
    _check(cuda.cuEventRecord(start, 0), "event")
    for i in range(repeats):
      launch(i)
    _check(cuda.cuEventRecord(stop, 0), "event")
    _check(cuda.cuEventSynchronize(stop), "an earlier launch failed")
    seconds.append(_check(cuda.cuEventElapsedTime(start, stop), "event") * 1e-3 / repeats)
  cuda.cuEventDestroy(start)
  cuda.cuEventDestroy(stop)
  return seconds
