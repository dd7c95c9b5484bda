"""The special registers (PTX ISA 10), for all threads of a machine."""
from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from tiletrace.sim.strands import WARP

if TYPE_CHECKING:
  from tiletrace.sim.machine import Machine


def position(linear: np.ndarray, extents: tuple[int, int, int]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
  """x, y, z of a linear index, x fastest."""
  x, y, _ = extents
  return linear % x, linear // x % y, linear // (x * y)


def _lane(m: Machine) -> np.ndarray:
  return np.arange(m.threads) % WARP


def _axis(a: int) -> dict[str, Callable[[Machine], Any]]:
  axis = "xyz"[a]
  return {
      f"tid.{axis}": lambda m: np.arange(m.threads) % m.cta_threads if a == 0 else 0,
      f"ntid.{axis}": lambda m: m.cta_threads if a == 0 else 1,
      f"ctaid.{axis}": lambda m: position(m.cta + m.rank, m.launch.grid)[a],
      f"nctaid.{axis}": lambda m: m.launch.grid[a],
      f"cluster_ctaid.{axis}": lambda m: position(m.rank, m.launch.cluster)[a],
      f"cluster_nctaid.{axis}": lambda m: m.launch.cluster[a],
      f"clusterid.{axis}": lambda m: position(m.cta + m.rank, m.launch.grid)[a] // m.launch.cluster[a],
      f"nclusterid.{axis}": lambda m: m.launch.grid[a] // m.launch.cluster[a],
  }


# name -> its value in each thread, or in all
SPECIAL: dict[str, Callable[[Machine], Any]] = {
    **_axis(0), **_axis(1), **_axis(2),
    "cluster_ctarank": lambda m: m.rank, "cluster_nctarank": lambda m: m.ctas,
    "laneid": _lane, "warpid": lambda m: np.arange(m.threads) % m.cta_threads // WARP,
    "smid": lambda m: m.cta + m.rank, "nsmid": lambda m: m.launch.grid[0] * m.launch.grid[1] * m.launch.grid[2],
    "lanemask_eq": lambda m: 1 << _lane(m), "lanemask_lt": lambda m: (1 << _lane(m)) - 1,
    "lanemask_le": lambda m: (2 << _lane(m)) - 1, "lanemask_gt": lambda m: 0xFFFF_FFFF & ~((2 << _lane(m)) - 1),
    "lanemask_ge": lambda m: 0xFFFF_FFFF & ~((1 << _lane(m)) - 1),
    "clock": lambda m: m.launch.steps, "clock64": lambda m: m.launch.steps, "globaltimer": lambda m: m.launch.steps,
    "dynamic_smem_size": lambda m: m.launch.smem_bytes, "total_smem_size": lambda m: m.shared.end,
    "gridid": lambda m: 0,
}
