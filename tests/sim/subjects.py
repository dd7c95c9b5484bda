"""Small kernels whose generated modules the tests of the simulator run, and break.

Every one has at least two tiles along its grid, stages + 2 iterations where it pipelines, and edges where it has any.
"""
from __future__ import annotations

import copy
import dataclasses
import functools
from collections.abc import Callable

import ml_dtypes
import numpy as np

import tiletrace as tt
from tests.gpu.corpus import Case, f64, normal, out
from tests.gpu.corpus_gemm import attention_like_kernel, generic_kernel, matmul, register_a_kernel
from tests.gpu.corpus_memory import rotate_kernel
from tests.gpu.corpus_reduce import FLOAT, rows_case
from tiletrace.lowering.ptx.module import Entry, Module
from tiletrace.stages import Lowered

BF16, F32 = ml_dtypes.bfloat16, np.float32
SUBJECTS: dict[str, Callable[[np.random.Generator], Case]] = {}


def subject(f: Callable[[np.random.Generator], Case]) -> Callable[[np.random.Generator], Case]:
  SUBJECTS[f.__name__] = f
  return f


@subject
def gemm(rng):
  """A ring of three slots filled by TMA, wgmma from shared memory, results through staging and TMA."""
  return matmul(rng, 256, 256, 320, bn=128)


@subject
def persistent_gemm(rng):
  """The same with a deferred epilogue that runs beside the next tile; three tiles for each CTA of two."""
  return matmul(rng, 384, 256, 192, bn=128, num_stages=2, persistent=True)


@subject
def gemm_by_cp_async(rng):
  """A ring that the producer's threads fill by cp.async of 4 bytes, with edges along every axis."""
  return matmul(rng, 100, 130, 322, bn=64, num_stages=3)


@subject
def gemm_from_registers(rng):
  """A goes from its slot through registers into wgmma."""
  a, b = normal(rng, 200, 256, dtype=BF16), normal(rng, 256, 64, dtype=BF16)
  call = tt.tile_call(functools.partial(register_a_kernel, bk=64), out(((200, 64), F32)), grid=2)
  return Case(call, (a, b), (2 * f64(a) @ f64(b),), "gemm")


@subject
def attention(rng):
  """Two rings, two products: the first one's result is the second one's operand, in registers."""
  q, k, v = (normal(rng, n, 64, dtype=BF16) for n in (200, 300, 300))
  call = tt.tile_call(functools.partial(attention_like_kernel, bn=96), out(((200, 64), BF16)), grid=2, warpgroups=2)
  s = np.maximum(f64(q) @ f64(k).T * 0.125, 0)
  return Case(call, (q, k, v), (f64(s.astype(BF16)) @ f64(v),), "gemm")


@subject
def gemm_of_written_operands(rng):
  """Threads write the operands of wgmma: no ring, no TMA."""
  a = rng.integers(-4, 4, (64, 192)).astype(BF16)
  b = rng.integers(-4, 4, (192, 32)).astype(BF16)
  call = tt.tile_call(generic_kernel, out(((64, 32), F32)), grid=1)
  return Case(call, (a, b), (2 * f64(a) @ (f64(b) + 1),), "gemm")


@subject
def rows(rng):
  """Reductions of rows by three warpgroups: shuffles, then an exchange through shared memory."""
  return rows_case(normal(rng, 7, 384), *FLOAT, rows=3, warpgroups=3)


@subject
def rotation(rng):
  """A loop of stores to and loads from one shared buffer."""
  x = rng.integers(-99, 99, (20, 16, 8), dtype=np.int32)
  return Case(tt.tile_call(rotate_kernel, out(((8, 16), np.int32)), grid=1), (x,), (x.sum(0, dtype=np.int32).T * 2,),
              "exact")


def scale_kernel(x, y, *, bm, bn):
  at = tt.block(tt.program_id(0), bm), tt.block(tt.program_id(1), bn)
  y[at] = x[at] * 2


@subject
def tails(rng):
  """Vectors of global memory, guarded at the edges of rows and columns."""
  x = rng.integers(-99, 99, (33, 100), dtype=np.int32)
  call = tt.tile_call(functools.partial(scale_kernel, bm=16, bn=64), out((x.shape, x.dtype)), grid=(3, 2))
  return Case(call, (x,), (x * 2,), "exact")


@functools.cache
def case(name: str) -> Case:
  return SUBJECTS[name](np.random.default_rng(len(name)))


@functools.cache
def lowered(name: str) -> Lowered:
  return case(name).call.lower(*case(name).inputs)


def module_copy(name: str) -> Module:
  """The subject's module, to be changed: instructions are shared, bodies are not."""
  old = lowered(name).lowering.emitted.module
  new = Module(old.target, old.version)
  new.shared = list(old.shared)
  new.entries = [copy.copy(e) for e in old.entries]
  for entry in new.entries:
    entry.body = list(entry.body)
    entry.registers = {cls: list(regs) for cls, regs in entry.registers.items()}
  return new


def with_module(name: str, module: Module) -> Lowered:
  """The subject lowered to `module`."""
  old = lowered(name)
  emitted = dataclasses.replace(old.lowering.emitted, module=module)
  return dataclasses.replace(old, lowering=dataclasses.replace(old.lowering, emitted=emitted, ptx=module.render()))


def entry_of(module: Module) -> Entry:
  [entry] = module.entries
  return entry
