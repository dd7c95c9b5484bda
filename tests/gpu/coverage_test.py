"""No row of the instruction table is without a kernel that runs it alone on both machines, but for those named here."""
from __future__ import annotations

from tests.gpu import isa_row_kernels as kernels, sync_rows_test as sync, tensor_copies_test as tensor
from tests.gpu.isa_rows_test import ARITHMETIC, NAMES, OTHERS
from tiletrace.lowering.ptx import isa

WITHOUT = {
    "TRAP": "it ends the kernel with an error",
    "FENCE_PROXY_TENSORMAP": "no kernel writes a tensor map",
    "FENCE_PROXY_TENSORMAP_RELEASE": "no kernel writes a tensor map",
}


def test_every_row_stands_in_a_kernel_for_both_machines():
  built = [build(row) for build, row in OTHERS]
  built += [kernels.arithmetic(row) for row in ARITHMETIC]
  built += [kernels.wgmma(case)[0] for case in kernels.WGMMAS]
  built += [tensor.loads(tensor.CASES[0])[0], tensor.stores(tensor.CASES[0])[0]]
  built += [tensor.stores(tensor.reducing("float32"), "add")[0]]
  built += [build()[0] for build in (*sync.EXCHANGES, sync.mbarrier_phases)]
  found = {inst.row for kernel in built for inst in kernel.module.entries[0].instructions()}

  assert {NAMES[row] for row in isa.ROWS.values() if row not in found} == set(WITHOUT)
