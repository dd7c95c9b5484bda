"""Descriptors and fragments against the hardware: one warpgroup multiplies tiles that the host laid out."""
from __future__ import annotations

import dataclasses

import ml_dtypes
import numpy as np
import pytest

from tiletrace.ffi import launch
from tiletrace.ffi.image import KernelImage
from tiletrace.lowering.assemble import assemble
from tiletrace.lowering.layouts.catalog import wgmma_a_fragment, wgmma_accumulator
from tiletrace.lowering.layouts.descriptor import Descriptor, wgmma_descriptor
from tiletrace.lowering.layouts.relation import Layout
from tiletrace.lowering.layouts.shared import SWIZZLES, shared_layout

DTYPES = {8: np.dtype(ml_dtypes.float8_e4m3fn), 16: np.dtype(np.float16), 32: np.dtype(np.float32)}
PTX_TYPES = {8: "e4m3", 16: "f16", 32: "tf32"}
K_STEPS = 4


@dataclasses.dataclass(frozen=True)
class Case:
  """A [128, k] (its lower 64 rows are used) times B [k, n]; `a_swizzle` None takes A from registers."""
  bits: int
  n: int
  a_major: str
  a_swizzle: int | None
  b_major: str
  b_swizzle: int

  @property
  def k(self) -> int:
    return K_STEPS * 256 // self.bits

  def operand(self, role: str) -> Layout:
    shape, k_dim = ((128, self.k), 1) if role == "A" else ((self.k, self.n), 0)
    major, swizzle = (self.a_major, self.a_swizzle or 0) if role == "A" else (self.b_major, self.b_swizzle)
    order = (k_dim, 1 - k_dim) if major == "k" else (1 - k_dim, k_dim)
    return shared_layout(shape, self.bits, swizzle, order=order, block_bytes=16)


CASES = [
  *(Case(bits, n, "k", s, "k", s) for bits in (8, 16, 32) for s in SWIZZLES for n in (8, 24, 96, 176, 256)),
  *(Case(16, n, a, s, "mn", s) for a in ("k", "mn") for s in SWIZZLES for n in (64, 192)),
  *(Case(16, n, "k", 128, "mn", 32) for n in (16, 48, 176)),
  *(Case(bits, 40, "k", None, "k", 64) for bits in (8, 16, 32)),
]


def program(case: Case) -> tuple[str, int]:
  """PTX of the product, and its bytes of shared memory. Operands: that memory's image, A by threads, the result."""
  layouts = {role: case.operand(role) for role in "AB"}
  sizes = {role: -(-t.extent("off") * case.bits // 8 // 1024) * 1024 for role, t in layouts.items()}
  descs: dict[str, Descriptor] = {role: wgmma_descriptor(t, case.bits, role=role) for role, t in layouts.items()}
  count, in_registers = case.n // 2, case.a_swizzle is None
  kind = PTX_TYPES[case.bits]
  lines = []
  for step in range(K_STEPS):
    a_bits = descs["A"].encode(descs["A"].tile_offset(64, step * descs["A"].step))
    b_bits = descs["B"].encode(descs["B"].k_offset(step) + sizes["A"])
    lines.append(f"add.u64 %da, %base, {a_bits}; add.u64 %db, %base, {b_bits};")
    left = "{" + ", ".join(f"%a{4 * step + i}" for i in range(4)) + "}" if in_registers else "%da"
    trans = [descs["B"].transpose] if in_registers else [descs["A"].transpose, descs["B"].transpose]
    tail = "".join(f", {t}" for t in trans) if case.bits == 16 else ""
    d = ", ".join(f"%d{i}" for i in range(count))
    lines.append(f"wgmma.mma_async.sync.aligned.m64n{case.n}k{256 // case.bits}.f32.{kind}.{kind} "
                 f"{{{d}}}, {left}, %db, %on, 1, 1{tail};")
  newline = "\n  "
  loads = [f"ld.global.b32 %a{i}, [%pa+{512 * i}];" for i in range(4 * K_STEPS)] if in_registers else []
  total = sizes["A"] + sizes["B"]
  return f"""
.version 8.0
.target sm_90a
.address_size 64
.extern .shared .align 1024 .b8 smem[];
.visible .entry product(.param .u64 image, .param .u64 a, .param .u64 d) .reqntid 128 {{
  .reg .pred %more, %on; .reg .b32 %t, %at, %s, %to, %v, %a<16>; .reg .f32 %d<{count}>;
  .reg .b64 %pi, %pa, %pd, %from, %wide, %base, %da, %db;
  ld.param.u64 %pi, [image]; ld.param.u64 %pa, [a]; ld.param.u64 %pd, [d];
  mov.u32 %t, %tid.x; mov.u32 %s, smem; shl.b32 %at, %t, 2;
  mul.wide.u32 %wide, %t, 4; add.u64 %pa, %pa, %wide; add.u64 %pd, %pd, %wide;
COPY:
  cvt.u64.u32 %from, %at; add.u64 %from, %from, %pi; ld.global.b32 %v, [%from];
  add.u32 %to, %s, %at; st.shared.b32 [%to], %v;
  add.u32 %at, %at, 512; setp.lt.u32 %more, %at, {total}; @%more bra COPY;
  {newline.join(loads)}
  fence.proxy.async.shared::cta;
  bar.sync 0;
  bfe.u32 %s, %s, 4, 14; cvt.u64.u32 %base, %s; setp.eq.u32 %on, 0, 0;
  {newline.join(f"mov.f32 %d{i}, 0f00000000;" for i in range(count))}
  wgmma.fence.sync.aligned;
  {newline.join(lines)}
  wgmma.commit_group.sync.aligned;
  wgmma.wait_group.sync.aligned 0;
  {newline.join(f"st.global.f32 [%pd+{512 * i}], %d{i};" for i in range(count))}
  ret;
}}
""", total


def stored(layout: Layout, values: np.ndarray) -> np.ndarray:
  memory = np.zeros(layout.extent("off"), values.dtype)
  memory[layout.coordinates("off", np.ogrid[tuple(slice(0, s) for s in values.shape)])] = values
  data = memory.view(np.uint8)
  return np.pad(data, (0, -len(data) % 1024))


@pytest.mark.parametrize("case", [CASES[0], CASES[-1], Case(16, 256, "mn", 0, "mn", 128)], ids=str)
def test_the_probe_assembles(case):
  text, _ = program(case)
  assert assemble(text, "sm_90a").image


@pytest.mark.gpu
@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_hardware_multiplies_what_the_layouts_say(case):
  rng = np.random.default_rng(case.n)
  a, b = (rng.integers(-4, 5, shape).astype(DTYPES[case.bits]) for shape in ((128, case.k), (case.k, case.n)))
  fragment = wgmma_a_fragment(64, case.k, case.bits).table(("reg", "lane", "warp"))
  in_threads = a[64:][fragment[..., 0], fragment[..., 1]]                       # [elements, lane, warp]
  words = np.ascontiguousarray(in_threads.transpose(2, 1, 0)).view(np.uint32)      # [warp, lane, words]
  text, smem = program(case)
  image = KernelImage(name="product", cubin=text.encode() + b"\0", grid=(1, 1, 1), block=128, cluster=None,
                      smem_bytes=smem, params=(("operand", 0), ("operand", 1), ("operand", 2)), tensor_maps=(),
                      persistent=False, source="gpu_test.py:1", fingerprint="product")
  memory = launch.upload(np.concatenate([stored(case.operand("A"), a), stored(case.operand("B"), b)]))
  registers = launch.upload(np.ascontiguousarray(words.reshape(128, -1).T))
  out = launch.empty((case.n // 2, 4, 32), np.float32)
  out.fill(0xFF)
  launch.Launcher(image)(memory.pointer, registers.pointer, out.pointer)

  index = wgmma_accumulator(64, case.n).table(("reg", "warp", "lane"))
  expected = a[64:].astype(np.float64) @ b.astype(np.float64)
  assert np.array_equal(out.download(), expected[index[..., 0], index[..., 1]])
