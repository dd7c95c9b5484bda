"""What a warp's memory access costs: wavefronts of shared memory, sectors of global memory.

Shared memory has 32 banks of 4-byte words. A warp's access is served in phases of 128 bytes: all lanes for up to 4
bytes a lane (CUDA C++ Programming Guide, shared memory), 16 lanes for 8, 8 lanes for 16 (measured). A phase takes one
wavefront for each distinct word in its most loaded bank. Global memory moves in sectors of 32 bytes.
"""
from __future__ import annotations

import numpy as np

BANKS, WORD, SECTOR = 32, 4, 32


def shared_wavefronts(addresses: np.ndarray, nbytes: int, active: np.ndarray | None = None) -> np.ndarray:
  """[w] wavefronts of each warp's access.

  Args:
    addresses: [w, lanes] byte addresses, aligned to `nbytes`. Matrix moves give their row addresses: 8 or more lanes.
    nbytes: bytes of a lane's access: 1, 2, 4, 8 or 16.
    active: [w, lanes] bool, or None: all.
  """
  words = max(nbytes // WORD, 1)
  group = BANKS // words
  warps, lanes = addresses.shape
  first = addresses // WORD if active is None else np.where(active, addresses // WORD, -words - 1)
  touched = (first[..., None] + np.arange(words)).reshape(warps * (lanes // group), -1)
  touched = np.sort(touched, axis=1)
  distinct = touched >= 0
  distinct[:, 1:] &= touched[:, 1:] != touched[:, :-1]
  bank = touched % BANKS + BANKS * np.arange(len(touched))[:, None]
  load = np.bincount(bank[distinct], minlength=BANKS * len(touched)).reshape(-1, BANKS).max(axis=1)
  return load.reshape(warps, -1).sum(axis=1)


def global_sectors(addresses: np.ndarray, nbytes: int, active: np.ndarray | None = None) -> np.ndarray:
  """[w] sectors that each warp's access touches.

  Args:
    addresses: [w, lanes] byte addresses, aligned to `nbytes`.
    nbytes: bytes of a lane's access, at most 32.
    active: [w, lanes] bool, or None: all.
  """
  assert nbytes <= SECTOR, nbytes
  sectors = addresses // SECTOR if active is None else np.where(active, addresses // SECTOR, -1)
  sectors = np.sort(sectors, axis=1)
  distinct = sectors >= 0
  distinct[:, 1:] &= sectors[:, 1:] != sectors[:, :-1]
  return distinct.sum(axis=1)
