"""Every stage of a small kernel, from Python to machine code, with a word on how to read it. Needs no GPU.

  python examples/look_inside.py
"""
from __future__ import annotations

import jax
import jax.numpy as jnp

import tiletrace as tt

BM, BN, BK = 64, 64, 64


def matmul_relu_kernel(a, b, c):
  i, j = tt.program_id(0), tt.program_id(1)
  a_s = tt.alloc_shared((BM, BK), a.dtype)
  b_s = tt.alloc_shared((BK, BN), b.dtype)
  acc = tt.alloc_fragment((BM, BN), jnp.float32)
  acc[...] = 0
  for k in tt.pipelined(tt.cdiv(a.shape[1], BK), num_stages=3):
    tt.copy(a.at[tt.block(i, BM), tt.block(k, BK)], a_s)
    tt.copy(b.at[tt.block(k, BK), tt.block(j, BN)], b_s)
    tt.gemm(a_s, b_s, acc)
  c[tt.block(i, BM), tt.block(j, BN)] = tt.maximum(acc[...], 0).astype(c.dtype)


STAGES = {
    "trace": """
The kernel ran once, with references and tiles that hold no data; what it did is this graph. A name, its type, the
operation. `a[j:+64, k:+64]` is a view of 64 x 64 elements that starts at (j, k); `<-` stores; `h[...] += gemm` reads
two shared buffers. The loop stands there once: its index is an abstract integer, and its body ran a second time only
to see that it does the same in every iteration.""",
    "layout": """
Each tile has a layout now, `@L1` and so on; the legend below says what it is. `S[shape:(stride@axis, ...)]` reads from
the tensor's side: which step in which hardware axis an index makes. `off` counts elements of shared memory; `warp`,
`lane` and `reg` name a thread and a register of it. The operands of the gemm are swizzled as TMA writes and wgmma reads
them; the accumulator lies in registers as wgmma leaves it, and the elementwise operations took over its layout.""",
    "select": """
Each operation has its implementation, `dispatch=`. Below the graph stands each choice with its line and, where better
ones declined, why they did: nothing is slow in silence.""",
    "schedule": """
The same language one level down; an expert could have written it. The buffers became rings of 3 slots with two
barriers a slot: `full` (the bytes have arrived) and `empty` (the readers are done). One warpgroup only issues copies,
the other only computes: it keeps one gemm in flight (`wgmma_wait[n=1]`) and then gives the slot of the previous one
back. The result leaves through shared memory. Last stands the map of shared memory.""",
    "ptx": """
One instruction sequence for each line of the schedule. (The first and last lines only.)""",
    "sass": """
What ptxas made of it. (The first lines only.)""",
}
HEAD, TAIL = 40, 12


def title(text: str) -> None:
  print(f"\n{'=' * 100}\n{text}\n{'=' * 100}")


def excerpt(text: str) -> str:
  lines = text.splitlines()
  if len(lines) <= HEAD + TAIL:
    return text
  return "\n".join([*lines[:HEAD], f"... {len(lines) - HEAD - TAIL} lines ...", *lines[-TAIL:]])


def main() -> int:
  shape = jax.ShapeDtypeStruct((256, 256), jnp.bfloat16)      # stages need shapes and dtypes, no data
  f = tt.tile_call(matmul_relu_kernel, out_shape=shape, grid=(4, 4))
  lowered = f.trace(shape, shape).lower()
  for stage, comment in STAGES.items():
    title(stage)
    print(comment.strip() + "\n")
    try:
      text = lowered.as_text(stage)
    except tt.AssembleError as e:           # ptxas or the disassembler is not installed here
      print(f"(skipped: {e.message.splitlines()[0]}; {e.hint})")
      continue
    print(excerpt(text) if stage in ("ptx", "sass") else text)
  title("report")
  print("What was decided, and what it costs.\n")
  try:
    print(lowered.compile().report())
  except tt.AssembleError as e:
    print(f"(not assembled: {e.message.splitlines()[0]}; {e.hint})\n\n{lowered.report()}")
  return 0


if __name__ == "__main__":
  raise SystemExit(main())
