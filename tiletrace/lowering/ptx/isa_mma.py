"""Tensor cores: wgmma, mma.sync, and the matrix loads and stores that feed them (PTX ISA 9.7.14, 9.7.15)."""
from __future__ import annotations

import re

from tiletrace.lowering.ptx.instr import Mods, row

WARP = "9.7.14 Warp Level Matrix Multiply-Accumulate Instructions"
WARPGROUP = "9.7.15 Asynchronous Warpgroup Level Matrix Multiply-Accumulate Instructions"

LDMATRIX = row("ldmatrix.sync.aligned.m8n8.{num}.{trans}.shared.b16", "=d:b32*num, [a:b32]", WARP, num="x1 x2 x4",
               trans="- trans")
STMATRIX = row("stmatrix.sync.aligned.m8n8.{num}.{trans}.shared.b16", "[a:b32], b:!b32*num", WARP, arch="sm_90",
               num="x1 x2 x4", trans="- trans")
MOVMATRIX = row("movmatrix.sync.aligned.m8n8.trans.b16", "=d:b32, a:!b32", WARP)


def _mma_sync(m: Mods) -> dict[str, str | int]:
  """Fragment sizes in 32-bit registers; f16 accumulators hold two elements each."""
  bits = {"f16": 16, "bf16": 16, "tf32": 32, "e4m3": 8, "e5m2": 8, "s8": 8, "u8": 8}[m["a"]]
  k = int(m["shape"].rpartition("k")[2])
  words = k * bits // 32
  acc = {"f32": ("f32", 4), "f16": ("b32", 2), "s32": ("s32", 4)}[m["d"]]
  return {"na": 16 * words // 32, "nb": 8 * words // 32, "acc": acc[0], "nd": acc[1]}


_MMA = "mma.sync.aligned.{shape}.row.col.{d}.{a}.{b}.{c}"
_MMA_OPERANDS = "=d:^acc*nd, a:^!b32*na, b:^!b32*nb, c:^!acc*nd"
MMA = row(_MMA, _MMA_OPERANDS, WARP, derive=_mma_sync,
          legal=lambda m: m["a"] == m["b"] and m["d"] == m["c"] and (m["d"] == "f32" or m["a"] == "f16"),
          shape="m16n8k16 m16n8k8", d="f32 f16", a="f16 bf16", b="f16 bf16", c="f32 f16")
MMA_TF32 = row(_MMA, _MMA_OPERANDS, WARP, derive=_mma_sync, shape="m16n8k8 m16n8k4", d="f32", a="tf32", b="tf32",
               c="f32")
MMA_F8 = row(_MMA, _MMA_OPERANDS, WARP, derive=_mma_sync, arch="sm_89", shape="m16n8k32", d="f32", a="e4m3 e5m2",
             b="e4m3 e5m2", c="f32")
MMA_S8 = row(_MMA, _MMA_OPERANDS, WARP, derive=_mma_sync, shape="m16n8k32 m16n8k16", d="s32", a="s8 u8", b="s8 u8",
             c="s32")

# ---- wgmma. A and B in shared memory are 64-bit descriptors; D stays in its registers, read and written.


def _wgmma(m: Mods) -> dict[str, str | int]:
  """D is 64 x N over 128 threads: N/2 registers, N/4 where a register holds two f16."""
  found = re.fullmatch(r"m64n(\d+)k\d+", m["shape"])
  assert found, m
  n = int(found[1])
  return {"acc": "b32", "nd": n // 4} if m["d"] == "f16" else {"acc": m["d"], "nd": n // 2}


def _shapes(k: int) -> str:
  return " ".join(f"m64n{n}k{k}" for n in range(8, 257, 8))


_HEAD = "wgmma.mma_async.sync.aligned.{shape}.{d}.{a}.{b}"
_SCALES = "scale_d:?pred, scale_a:-1/1, scale_b:-1/1"


def _legal_16bit(m: Mods) -> bool:
  return m["a"] == m["b"] and (m["d"] == "f32" or m["a"] == "f16")


WGMMA_SS = row(_HEAD, f"+acc:^acc*nd, a_desc:^!b64, b_desc:^!b64, {_SCALES}, trans_a:0..1, trans_b:0..1", WARPGROUP,
               arch="sm_90a", derive=_wgmma, legal=_legal_16bit, shape=_shapes(16), d="f32 f16", a="f16 bf16",
               b="f16 bf16")
WGMMA_RS = row(_HEAD, f"+acc:^acc*nd, a:^!b32*4, b_desc:^!b64, {_SCALES}, trans_b:0..1", WARPGROUP, arch="sm_90a",
               derive=_wgmma, legal=_legal_16bit, shape=_shapes(16), d="f32 f16", a="f16 bf16", b="f16 bf16")
WGMMA_F8_SS = row(_HEAD, f"+acc:^acc*nd, a_desc:^!b64, b_desc:^!b64, {_SCALES}", WARPGROUP, arch="sm_90a",
                  derive=_wgmma, shape=_shapes(32), d="f32 f16", a="e4m3 e5m2", b="e4m3 e5m2")
WGMMA_F8_RS = row(_HEAD, f"+acc:^acc*nd, a:^!b32*4, b_desc:^!b64, {_SCALES}", WARPGROUP, arch="sm_90a",
                  derive=_wgmma, shape=_shapes(32), d="f32 f16", a="e4m3 e5m2", b="e4m3 e5m2")
WGMMA_TF32_SS = row(_HEAD, f"+acc:^acc*nd, a_desc:^!b64, b_desc:^!b64, {_SCALES}", WARPGROUP, arch="sm_90a",
                    derive=_wgmma, shape=_shapes(8), d="f32", a="tf32", b="tf32")
WGMMA_TF32_RS = row(_HEAD, f"+acc:^acc*nd, a:^!b32*4, b_desc:^!b64, {_SCALES}", WARPGROUP, arch="sm_90a",
                    derive=_wgmma, shape=_shapes(8), d="f32", a="tf32", b="tf32")

_S8_SHAPES = " ".join(f"m64n{n}k32" for n in (8, 16, 24, *range(32, 257, 16)))
WGMMA_S8_SS = row(_HEAD, "+acc:^acc*nd, a_desc:^!b64, b_desc:^!b64, scale_d:?pred", WARPGROUP, arch="sm_90a",
                  derive=_wgmma, shape=_S8_SHAPES, d="s32", a="s8 u8", b="s8 u8")
WGMMA_S8_RS = row(_HEAD, "+acc:^acc*nd, a:^!b32*4, b_desc:^!b64, scale_d:?pred", WARPGROUP, arch="sm_90a",
                  derive=_wgmma, shape=_S8_SHAPES, d="s32", a="s8 u8", b="s8 u8")
WGMMA_FENCE = row("wgmma.fence.sync.aligned", "", WARPGROUP, arch="sm_90a")
WGMMA_COMMIT = row("wgmma.commit_group.sync.aligned", "", WARPGROUP, arch="sm_90a")
WGMMA_WAIT = row("wgmma.wait_group.sync.aligned", "n:0..7", WARPGROUP, arch="sm_90a")
