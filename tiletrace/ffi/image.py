"""The kernel image: everything a launcher needs, as plain data that outlives the process.

The image is what the caches store, what the XLA custom call carries as attributes, and what `ffi.launch` runs without
JAX. So it holds values only (no addresses, no paths, no device), and equal images have equal bytes.
"""
from __future__ import annotations

import dataclasses
import hashlib
import json
import math
from collections.abc import Mapping
from typing import Any, Literal

import numpy as np

from tiletrace.core.types import Extent, Size, extent_at

Param = tuple[Literal["operand", "tensormap", "scalar_i32", "size"], int]

_PARAM_KINDS = ("operand", "tensormap", "scalar_i32", "size")    # the index is the code that tiletrace_ffi.cc reads
_MAGIC = b"TTIMAGE1"
_DIGEST_BYTES = 32

MAX_GRID = (2**31 - 1, 65535, 65535)      # CUDA C++ Programming Guide, technical specifications, compute capability 9.0
MAX_BLOCK = 1024
MAX_CLUSTER = 16
MAX_SMEM_BYTES = 227 * 1024

# cuda.h CUtensorMapDataType, by element type: (code, bytes). A tensor map only moves bytes (and reduces), so every type
# of 8 bits is UINT8; the code matters for the out-of-bounds fill, which is zero for all of them.
_TENSOR_MAP_DTYPES: dict[str, tuple[int, int]] = {
    "bool": (0, 1), "int8": (0, 1), "uint8": (0, 1),
    "float8_e4m3fn": (0, 1), "float8_e5m2": (0, 1), "float8_e8m0fnu": (0, 1),
    "int16": (1, 2), "uint16": (1, 2), "float16": (6, 2), "bfloat16": (9, 2),
    "uint32": (2, 4), "int32": (3, 4), "float32": (7, 4),
    "uint64": (4, 8), "int64": (5, 8), "float64": (8, 8),
}
_SWIZZLE_CODES = {0: 0, 32: 1, 64: 2, 128: 3}            # cuda.h CUtensorMapSwizzle
_L2_PROMOTION_CODES = {0: 0, 64: 1, 128: 2, 256: 3}      # cuda.h CUtensorMapL2promotion


@dataclasses.dataclass(frozen=True)
class TensorMapSpec:
  """A TMA descriptor without its base address (CUDA driver API, cuTensorMapEncodeTiled).

  Attributes:
    operand: which operand's memory is described: inputs first, then outputs.
    dtype: element type by its jnp name.
    dims: extents in elements, innermost first, rank 1 to 5. A zero extent is legal: that map is never encoded.
    strides: bytes between neighbours along dims[1:], multiples of 16 below 2**40; the innermost is contiguous.
      Of dynamic shapes dims and strides may be a Size, which `at` replaces by a call's.
    box: elements moved by one instruction, innermost first, 1 to 256 along each dimension.
    swizzle: span in bytes of the shared memory swizzle: 0, 32, 64 or 128.
    l2_promotion: bytes fetched into L2 around a request: 0, 64, 128 or 256.
    offset_bytes: from the operand's start to that of the described memory, a multiple of 16. A map may begin before
      its operand, where no coordinates that a kernel uses lead.
  """

  operand: int
  dtype: str
  dims: tuple[int, ...]
  strides: tuple[int, ...]
  box: tuple[int, ...]
  swizzle: int
  l2_promotion: int
  offset_bytes: int = 0

  def __post_init__(self) -> None:
    rank = len(self.dims)
    assert self.operand >= 0, self
    assert self.dtype in _TENSOR_MAP_DTYPES, f"no tensor map holds {self.dtype}"
    assert 1 <= rank <= 5 and len(self.strides) == rank - 1 and len(self.box) == rank, self
    assert all(0 <= d <= 2**32 for d in map(_factor, self.dims)), self
    assert all(0 <= s < 2**40 and s % 16 == 0 for s in map(_factor, self.strides)), self
    assert all(1 <= b <= 256 for b in self.box), self
    assert self.swizzle in _SWIZZLE_CODES and self.l2_promotion in _L2_PROMOTION_CODES, self
    row = self.box[0] * self.itemsize
    assert row % 16 == 0 and (not self.swizzle or row <= self.swizzle), self
    assert self.offset_bytes % 16 == 0, self

  def at(self, sizes: Mapping[str, int]) -> TensorMapSpec:
    """The map of a call with these sizes."""
    dims, strides = (tuple(extent_at(n, sizes) for n in x) for x in (self.dims, self.strides))
    return dataclasses.replace(self, dims=dims, strides=strides)

  @property
  def itemsize(self) -> int:
    return _TENSOR_MAP_DTYPES[self.dtype][1]

  @property
  def dtype_code(self) -> int:
    return _TENSOR_MAP_DTYPES[self.dtype][0]

  @property
  def swizzle_code(self) -> int:
    return _SWIZZLE_CODES[self.swizzle]

  @property
  def l2_promotion_code(self) -> int:
    return _L2_PROMOTION_CODES[self.l2_promotion]

  def words(self) -> list[int]:
    """The map as tiletrace_ffi.cc reads it: six scalars, then dims, strides and box."""
    return [self.operand, self.dtype_code, len(self.dims), self.swizzle_code, self.l2_promotion_code,
            self.offset_bytes, *self.dims, *self.strides, *self.box]


def _factor(n: Extent) -> int:
  return n.factor if isinstance(n, Size) else n


@dataclasses.dataclass(frozen=True)
class SizeSource:
  """Where a call finds what a name stands for: extent `dim` of `operand`, divided by `factor`, from 1 to `most`.

  `operand` is None for an axis of the grid, `dim`, in clusters of `factor`.
  """

  name: str
  operand: int | None
  dim: int
  factor: int
  most: int


@dataclasses.dataclass(frozen=True)
class KernelImage:
  """A compiled kernel and how to launch it.

  Attributes:
    name: the kernel's name, which is also its entry symbol in the cubin.
    cubin: machine code for `target`.
    grid: CTAs along x, y, z. Tile grids are flattened to x, whose limit is 2**31 - 1. A zero launches nothing. Of
      dynamic shapes a Size.
    block: threads of a CTA.
    cluster: CTAs of a cluster along x, y, z, or None.
    smem_bytes: dynamic shared memory of a CTA.
    params: the entry's parameters in order. ("operand", i) is the address of operand i, inputs first, then outputs (an
      aliased output has its input's address); ("tensormap", i) is `tensor_maps[i]` by value, 128 bytes aligned to 64;
      ("scalar_i32", v) is the constant v; ("size", i) what `sizes[i]` is at a call.
    tensor_maps: what the "tensormap" parameters refer to.
    persistent: grid[0] is clamped at launch to the number of SMs of the device, in whole clusters.
    source: where the kernel was written, "file.py:12".
    fingerprint: hash of what the image was compiled from.
    target: the architecture of the cubin. An "a" suffix binds it to exactly that compute capability; others run on
      later GPUs of the same major one. A program for sm_80 that is to run on an sm_90 is assembled for that, and this
      is "sm_90".
    sizes: of dynamic shapes, what each call decides. `at` gives the image of one call, without them.
    overlap: CTAs may start before the kernel before it in the stream has ended (programmatic stream serialization); the
      code waits for that itself.
    counter: the operand, the last of the inputs and of the outputs, that the CTAs of a launch take their programs from:
      one i32 that is zero before it, and each launch's own. `ffi.launch` makes it, XLA's custom call is given it.

  Example:
    >>> image = KernelImage("copy", b"cubin", (4, 1, 1), 128, None, 0, (("operand", 0), ("operand", 1)), (), False,
    ...                     "copy.py:3", "1a6cfb4d")
    >>> KernelImage.from_bytes(image.to_bytes()) == image
    True
  """

  name: str
  cubin: bytes
  grid: tuple[int, int, int]
  block: int
  cluster: tuple[int, int, int] | None
  smem_bytes: int
  params: tuple[Param, ...]
  tensor_maps: tuple[TensorMapSpec, ...]
  persistent: bool
  source: str
  fingerprint: str
  target: str = "sm_90a"
  sizes: tuple[SizeSource, ...] = ()
  overlap: bool = False
  counter: int | None = None

  def __post_init__(self) -> None:
    where = f"{self.name} ({self.source})"
    grid = tuple(map(_factor, self.grid))
    assert all(0 <= g <= limit for g, limit in zip(grid, MAX_GRID)), f"{where}: grid {self.grid}"
    assert 1 <= self.block <= MAX_BLOCK, f"{where}: {self.block} threads"
    assert 0 <= self.smem_bytes <= MAX_SMEM_BYTES, f"{where}: {self.smem_bytes} bytes of shared memory"
    assert not self.persistent or self.grid[1:] == (1, 1), f"{where}: a persistent grid lies along x"
    if self.cluster is not None:
      assert 1 <= math.prod(self.cluster) <= MAX_CLUSTER, f"{where}: cluster {self.cluster}"
      assert all(g % c == 0 for g, c in zip(grid, self.cluster)), f"{where}: {self.grid} in {self.cluster}"
    for kind, value in self.params:
      assert kind in _PARAM_KINDS, f"{where}: parameter {kind}"
      assert kind != "operand" or value >= 0, f"{where}: operand {value}"
      assert kind != "tensormap" or 0 <= value < len(self.tensor_maps), f"{where}: tensor map {value}"
      assert kind != "size" or 0 <= value < len(self.sizes), f"{where}: size {value}"
      assert kind != "scalar_i32" or -(2**31) <= value < 2**31, f"{where}: scalar {value}"

  def __repr__(self) -> str:
    return f"<image {self.name} {self.fingerprint[:8]} at {self.source}>"

  def at(self, sizes: Mapping[str, int]) -> KernelImage:
    """The image of a call: the same code, launched for these sizes."""
    params: list[Param] = [("scalar_i32", sizes[self.sizes[v].name]) if kind == "size" else (kind, v)
                           for kind, v in self.params]
    return dataclasses.replace(self, grid=(extent_at(self.grid[0], sizes), *self.grid[1:]), params=tuple(params),
                               tensor_maps=tuple(m.at(sizes) for m in self.tensor_maps), sizes=())

  def launch_grid(self, num_sms: int) -> tuple[int, int, int]:
    """The grid on a device of `num_sms` SMs, of a call."""
    assert isinstance(self.grid[0], int), f"{self}: grid {self.grid}"
    if not self.persistent:
      return self.grid  # type: ignore[return-value]
    step = self.cluster[0] if self.cluster else 1
    return (min(self.grid[0], max(step, num_sms // step * step)), 1, 1)

  def with_grid_operand(self, index: int) -> KernelImage:
    """The image of a call that has one more operand, of no bytes: at `index`, with the shape (0, *grid).

    Under jax.export symbolic extents of a grid are numbers nowhere but in shapes, which the launcher sees.
    """
    def moved(i: int) -> int:
      return i + (i >= index)

    params: list[Param] = [(kind, moved(v) if kind == "operand" else v) for kind, v in self.params]
    assert self.counter is None or self.counter < index, f"{self}: operand {index} before its counter"
    sizes = (dataclasses.replace(s, operand=index, dim=s.dim + 1) if s.operand is None else
             dataclasses.replace(s, operand=moved(s.operand)) for s in self.sizes)
    return dataclasses.replace(
        self, params=tuple(params), sizes=tuple(sizes),
        tensor_maps=tuple(dataclasses.replace(m, operand=moved(m.operand)) for m in self.tensor_maps))

  def _numbers(self) -> dict[str, Any]:
    """The grid and the tensor maps. Of dynamic shapes -1 - i is the i-th of the products: factor, count, sizes."""
    maps: list[Any] = [w for spec in self.tensor_maps for w in spec.words()]
    sizes = dict.fromkeys(n for n in (*self.grid, *maps) if isinstance(n, Size))
    products: dict[Any, int] = {n: -1 - i for i, n in enumerate(sizes)}
    numbers = {"grid": np.asarray([products.get(n, n) for n in self.grid], np.int32),
               "tensor_maps": np.asarray([products.get(n, n) for n in maps], np.int64)}
    if not self.sizes:
      return numbers
    assert all(s.operand is not None for s in self.sizes), f"{self}: no operand has the grid"
    index = {s.name: i for i, s in enumerate(self.sizes)}
    return {**numbers,
            "sizes": np.asarray([w for s in self.sizes for w in (s.operand, s.dim, s.factor, s.most)], np.int64),
            "products": np.asarray([w for n in sizes for w in (n.factor, len(n.names), *(index[x] for x in n.names))],
                                   np.int64)}

  def attributes(self) -> dict[str, Any]:
    """The attributes of the XLA custom call, in the types its decoder demands (int32 and int64 are distinct).

    Of dynamic shapes `at` gives those of one call, where its sizes are known; else the launcher reads them from the
    operands' shapes (`with_grid_operand`).
    """
    return {
        "kernel": self.name,
        "source": self.source,
        "fingerprint": self.fingerprint,
        "target": self.target,
        "cubin": self.cubin,
        "block": np.int32(self.block),
        "cluster": np.asarray(self.cluster or (0, 0, 0), np.int32),
        "smem_bytes": np.int32(self.smem_bytes),
        "persistent": self.persistent,
        "overlap": self.overlap,
        "params": np.asarray([w for kind, v in self.params for w in (_PARAM_KINDS.index(kind), v)], np.int64),
        **self._numbers(),
    }

  def to_bytes(self) -> bytes:
    """A self-contained, deterministic form with a digest."""
    fields = dataclasses.asdict(self)
    del fields["cubin"]
    header = json.dumps(fields, sort_keys=True, separators=(",", ":")).encode()
    body = len(header).to_bytes(8, "little") + header + self.cubin
    return _MAGIC + hashlib.sha256(body).digest() + body

  @classmethod
  def from_bytes(cls, data: bytes) -> KernelImage:
    """Reads `to_bytes`'s form.

    Raises:
      ValueError: the bytes are not a whole image of this version.
    """
    start = len(_MAGIC) + _DIGEST_BYTES
    body = data[start:]
    if data[:len(_MAGIC)] != _MAGIC or hashlib.sha256(body).digest() != data[len(_MAGIC):start]:
      raise ValueError("not a tiletrace kernel image, or a damaged one")
    size = int.from_bytes(body[:8], "little")
    fields = json.loads(body[8:8 + size])
    maps = tuple(TensorMapSpec(**{k: _tupled(v) for k, v in spec.items()}) for spec in fields.pop("tensor_maps"))
    sizes = tuple(SizeSource(**source) for source in fields.pop("sizes"))
    return cls(cubin=body[8 + size:], tensor_maps=maps, sizes=sizes, **{k: _tupled(v) for k, v in fields.items()})


def _tupled(value: Any) -> Any:
  if isinstance(value, dict):
    return Size(tuple(value["names"]), value["factor"])
  return tuple(map(_tupled, value)) if isinstance(value, list) else value
