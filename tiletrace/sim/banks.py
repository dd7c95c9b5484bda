"""What a warp's memory access costs: wavefronts of shared memory, sectors of global memory.

Shared memory has 32 banks of 4-byte words. A warp's access is served in phases of 128 bytes: all lanes for up to 4
bytes a lane (CUDA C++ Programming Guide, shared memory), 16 lanes for 8, 8 lanes for 16. A phase takes one wavefront
for each distinct word in its most loaded bank. Loads of 8 and 16 bytes take phases of twice as many lanes where all
active lanes n and n ^ 1, or all n and n ^ 2, read the same place (NVIDIA's developer forum, topic 77228).

Measured on an H200 (tests/gpu/banks_test.py) are loads: strides, random places and swizzled rows of 4, 8 and 16 bytes a
lane, and one place for all lanes, which took 2.3 cycles with 16 bytes. Other pairs of lanes, and stores, are not.
Global memory moves in sectors of 32 bytes.
"""
from __future__ import annotations

import numpy as np

BANKS, WORD, SECTOR = 32, 4, 32


def shared_wavefronts(addresses: np.ndarray, nbytes: int, active: np.ndarray | None = None, *,
                      loads: bool = False) -> np.ndarray:
  """[w] wavefronts of each warp's access.

  Args:
    addresses: [w, lanes] byte addresses, aligned to `nbytes`. Matrix moves give their row addresses: 8 or more lanes.
    nbytes: bytes of a lane's access: 1, 2, 4, 8 or 16.
    active: [w, lanes] bool, or None: all.
    loads: ld.shared of whole warps, where lanes that read the same place may share a phase.
  """
  words = max(nbytes // WORD, 1)
  if loads and words > 1 and addresses.shape[1] == BANKS:
    paired = _in_pairs(addresses, active)
    return np.where(paired, _wavefronts(addresses, words, 2 * BANKS // words, active),
                    _wavefronts(addresses, words, BANKS // words, active))
  return _wavefronts(addresses, words, BANKS // words, active)


def _in_pairs(addresses: np.ndarray, active: np.ndarray | None) -> np.ndarray:
  """[w] whether all active lanes n and n ^ 1, or all n and n ^ 2, have the same address."""
  lanes = np.arange(addresses.shape[1])
  one, two = (((addresses == addresses[:, lanes ^ k])
               | (False if active is None else ~(active & active[:, lanes ^ k]))).all(axis=1) for k in (1, 2))
  return one | two


def _wavefronts(addresses: np.ndarray, words: int, group: int, active: np.ndarray | None) -> np.ndarray:
  """[w], in phases of `group` lanes."""
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
