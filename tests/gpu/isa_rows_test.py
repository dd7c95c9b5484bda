"""Every row of the instruction table that stands alone, in the simulator and on a GPU: one module, the same bits."""
from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from tests.gpu import isa_row_kernels as kernels
from tests.gpu.agreement import record
from tests.gpu.isa_rows import THREADS, Kernel, Result
from tiletrace.lowering.ptx import isa
from tiletrace.lowering.ptx.instr import Form, Instr
from tiletrace.sim import fragments, numerics
from tiletrace.sim.storage import resize

NAMES = {row: name for name, row in isa.ROWS.items()}
ARITHMETIC = [row for row in isa.ROWS.values() if row in numerics.UNITS]
OTHERS: list[tuple[Callable[[Instr], Kernel], Instr]] = [
    (build, row) for build, rows in ((kernels.exchange, kernels.EXCHANGES), (kernels.memory, kernels.MEMORY),
                                     (kernels.copies, kernels.COPIES), (kernels.matrices, kernels.MATRICES),
                                     (kernels.products, kernels.PRODUCTS))
    for row in rows]
WIDE = [isa.CVT, isa.MOV, isa.SELP, isa.ADD, isa.AND]


def elements(x: np.ndarray, type_: str) -> tuple[np.ndarray, np.ndarray | None]:
  """(bits, numbers) of registers; halves of packed ones one by one; no numbers where the type is no float."""
  bits = x.view(f"u{x.itemsize}")
  element = type_.removesuffix("x2")
  if element not in ("f16", "bf16", "f32", "f64"):
    return bits, None
  with np.errstate(invalid="ignore"):       # a signalling NaN
    if type_ in ("f32", "f64"):
      return bits, bits.view(f"f{x.itemsize}").astype(np.float64)
    halves = bits.view(np.uint16) if type_ != element else bits.astype(np.uint16)     # the low half of a wider register
    wide = halves.view(np.float16) if element == "f16" else (halves.astype(np.uint32) << 16).view(np.float32)
    return halves, wide.astype(np.float64)


def bound(form: Form) -> tuple[float, float]:
  """(relative, absolute) distance of an approximate instruction from the exact value (PTX ISA 9.7.3, 9.7.4)."""
  element = form.mods.get("type", "f32").removesuffix("x2")
  return {
      isa.RCP: (2.0**-23, 0.0), isa.SQRT: (2.0**-23, 0.0), isa.RSQRT: (2.0**-22.9, 0.0), isa.EX2: (2.0**-22, 0.0),
      isa.LG2: (2.0**-22, 2.0**-22), isa.SIN: (0.0, 2.0**-20.5), isa.COS: (0.0, 2.0**-20.5),
      isa.DIV_APPROX: (2.0**-22, 2.0**-148), isa.EX2_F16: (2.0**-9.9, 0.0), isa.EX2_BF16: (2.0**-7, 0.0),
      isa.TANH: {"f32": (2.0**-11, 0.0), "f16": (0.0, 2.0**-10.987), "bf16": (2.0**-8, 0.0)}.get(element, (0.0, 0.0)),
  }.get(form.row, (0.0, 0.0))


def compared_type(result: Result) -> str:
  """tf32 is in registers of bits."""
  return "f32" if result.form.row is isa.CVT_TF32 else result.type


def judge(result: Result, got: np.ndarray, want: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
  """`got` against the simulator's, element by element: (whether it is the same, how far it is, how far it may be).

  The same is bit for bit, any NaN for NaN: which one `cvt` to tf32 makes the ISA leaves open, and an H200 made others
  than the simulator. Only approximations may be off, within the ISA's bounds; what is no number is infinitely far.
  """
  (a, x), (b, y) = elements(got, compared_type(result)), elements(want, compared_type(result))
  equal, error, allowed = a == b, np.full(len(a), np.inf), np.zeros(len(a))
  if x is not None and y is not None:
    relative, absolute = bound(result.form)
    equal |= np.isnan(x) & np.isnan(y)
    with np.errstate(invalid="ignore"):
      error = np.where(x == y, 0, np.nan_to_num(np.abs(x - y), nan=np.inf))
    if relative or absolute:          # the simulator rounds, too
      equal |= x == y
      rounding = {"f16": 2.0**-11, "bf16": 2.0**-8}.get(result.type.removesuffix("x2"), 2.0**-24)
      allowed = absolute + (relative + rounding) * np.abs(y) + 2.0**-149
    else:
      error = np.where(equal, 0, np.maximum(error, 2.0**-149))       # a zero of the other sign, too
  return equal, error, allowed


def assert_alike(result: Result, got: np.ndarray, want: np.ndarray) -> None:
  """`got` against the simulator's: the same, or an approximation within the ISA's bounds."""
  equal, error, allowed = judge(result, got, want)
  i = np.flatnonzero(~(equal | (error <= allowed)))
  a, b = (elements(x, compared_type(result))[0] for x in (got, want))
  assert not len(i), (f"{result.form}, result {result.part}: {len(i)} of {len(a)} differ, the first: got {a[i[0]]:#x}, "
                      f"the simulator {b[i[0]]:#x}, element {i[0]}")


def compare(kernel: Kernel) -> None:
  """Runs a kernel on both machines."""
  want, got = kernel.simulate(), kernel.launch()
  for result in kernel.results:
    record(result.form.row.section, str(result.form), *judge(result, result.read(got), result.read(want)))
  for result in kernel.results:
    assert_alike(result, result.read(got), result.read(want))


def check_units(kernel: Kernel) -> None:
  """What the machine left is what the unit gives for the operands, moved between classes."""
  memory = kernel.simulate()
  for result in kernel.results:
    slots = [s for s in result.form.slots if not s.writes for _ in range(max(s.count, 1))]
    sources = [x if isinstance(x, int) else resize(x, s.type, s.classes[0]) if s.type != "pred" else x
               for x, s in zip(result.sources, slots, strict=True)]
    unit = numerics.unit(result.form)
    assert unit is not None
    with np.errstate(all="ignore"):
      values = unit(*sources)
    value = values[result.part] if isinstance(values, tuple) else values
    want = value.astype(np.uint32) if result.cls == "pred" else resize(value, result.type, result.cls)
    assert_alike(result, result.read(memory), want)


@pytest.mark.parametrize("row", ARITHMETIC, ids=NAMES.get)
def test_arithmetic_assembles_and_runs_in_the_simulator(row: Instr):
  kernel = kernels.arithmetic(row)
  check_units(kernel)
  assert kernel.assemble().image


@pytest.mark.parametrize("row", WIDE, ids=NAMES.get)
def test_arithmetic_in_wider_registers_assembles_and_runs_in_the_simulator(row: Instr):
  kernel = kernels.arithmetic(row, widest=True)
  check_units(kernel)
  assert kernel.assemble().image


@pytest.mark.parametrize(("build", "row"), OTHERS, ids=lambda x: NAMES.get(x, "") if isinstance(x, Instr) else "")
def test_other_rows_assemble_and_run_in_the_simulator(build: Callable[[Instr], Kernel], row: Instr):
  kernel = build(row)
  memory = kernel.simulate()
  assert kernel.assemble().image
  assert kernel.results and all(len(r.read(memory)) == r.count for r in kernel.results)


@pytest.mark.parametrize("case", kernels.WGMMAS, ids=str)
def test_wgmma_assembles_and_runs_in_the_simulator(case: kernels.Wgmma):
  kernel, want = kernels.wgmma(case)
  memory = kernel.simulate()
  assert kernel.assemble().image
  accumulator = np.stack([r.read(memory) for r in kernel.results])
  assert np.array_equal(fragments.read_accumulator(accumulator, case.d), want)


@pytest.mark.gpu
@pytest.mark.parametrize("row", ARITHMETIC, ids=NAMES.get)
def test_arithmetic_is_what_the_gpu_computes(row: Instr):
  compare(kernels.arithmetic(row))


@pytest.mark.gpu
@pytest.mark.parametrize("row", WIDE, ids=NAMES.get)
def test_arithmetic_in_wider_registers_is_what_the_gpu_computes(row: Instr):
  compare(kernels.arithmetic(row, widest=True))


@pytest.mark.gpu
@pytest.mark.parametrize(("build", "row"), [x for x in OTHERS if x[1] is not isa.ELECT],
                         ids=lambda x: NAMES.get(x, "") if isinstance(x, Instr) else "")
def test_other_rows_do_what_the_gpu_does(build: Callable[[Instr], Kernel], row: Instr):
  compare(build(row))


@pytest.mark.gpu
@pytest.mark.parametrize("case", kernels.WGMMAS, ids=str)
def test_wgmma_of_whole_numbers_is_what_the_gpu_computes(case: kernels.Wgmma):
  """Every sum is exact in every order."""
  compare(kernels.wgmma(case)[0])


# Relative to the largest result. The tensor core aligns an instruction's products and the accumulator to the largest
# before it adds them, and drops what lies 2**-24 (8-bit types: about 2**-13) below: each of two steps up to 33 times.
SUMS = {"f32": 2.0**-18, "f16": 2.0**-9, "f8": 2.0**-7}


def compare_sums(kernel: Kernel) -> None:
  """Each form's results, relative to their largest."""
  want, got = kernel.simulate(), kernel.launch()
  for form in dict.fromkeys(r.form for r in kernel.results):
    a, b = (np.concatenate([numbers for r in kernel.results if r.form is form
                            if (numbers := elements(r.read(m), r.type)[1]) is not None]) for m in (got, want))
    kind = "f16" if form.mods["d"] == "f16" else "f8" if form.mods["a"] in ("e4m3", "e5m2") else "f32"
    allowed = SUMS[kind] * np.abs(b).max()
    record(f"{form.row.section}: normal numbers", str(form), a == b, np.abs(a - b), allowed)
    np.testing.assert_allclose(a, b, rtol=0, atol=allowed, err_msg=str(form))


@pytest.mark.gpu
@pytest.mark.parametrize("case", [c for c in kernels.WGMMAS if c.d != "s32"], ids=str)
def test_wgmma_of_normal_numbers_is_close_to_what_the_gpu_computes(case: kernels.Wgmma):
  compare_sums(kernels.wgmma(case, whole=False)[0])


@pytest.mark.gpu
@pytest.mark.parametrize("row", [isa.MMA, isa.MMA_TF32, isa.MMA_F8], ids=NAMES.get)
def test_mma_of_normal_numbers_is_close_to_what_the_gpu_computes(row: Instr):
  compare_sums(kernels.products(row, whole=False))


@pytest.mark.gpu
def test_one_lane_of_each_warp_is_elected():
  """Which one is not specified."""
  kernel = kernels.exchange(isa.ELECT)
  (result,) = kernel.results
  for memory in (kernel.simulate(), kernel.launch()):
    elected = result.read(memory).reshape(-1, 32).sum(axis=1)
    record(isa.ELECT.section, f"{isa.ELECT}: one lane", bool((elected == 1).all()))
    assert elected.tolist() == [1] * (THREADS // 32)
