"""What the race detector remembers of a memory: for every granule its last write and its reads since then.

A granule is 16 bytes until an access starts or ends inside of one; then the memory's granules become as small as that
access needs (8, 4, 2 or 1 bytes), so neighbours in one vector never look like one place.
"""
from __future__ import annotations

import numpy as np

GRANULE = 16                # bytes, of the widest access that one thread makes
_MAX_READER_BYTES = 1 << 26
_NOBODY = -1


def distinct(x: np.ndarray) -> np.ndarray:
  """Each number once, ascending; most often they are that already."""
  return x if (x[1:] > x[:-1]).all() else np.unique(x)


class Shadow:
  """The state of `nbytes` of memory from address `base` on.

  Attributes (one entry for each granule):
    w_col, w_clk, w_place: the last write as an epoch (column of the clocks, value) and where it was; clk 0: never.
    w_atomic: whether it was an atomic.
    r_col, r_clk, r_place: the last read since then; clk 0: none.
    r_row: the row of `Readers` with every read since then, where several are not ordered among each other; else -1.
    w_cta, r_cta: in memory of the whole grid, whose threads the last write and read are of; else -1.
    r_many: whether several CTAs have read since the last write.
  """

  def __init__(self, base: int, nbytes: int, *, grid_wide: bool = False, read_only: bool = False):
    assert base % GRANULE == 0, f"memory at {base:#x} is not aligned to {GRANULE} bytes"
    self.base, self.nbytes, self.granule = base, nbytes, GRANULE
    self.grid_wide, self.read_only = grid_wide, read_only
    n = 0 if read_only else -(-nbytes // GRANULE)
    self.fields: dict[str, np.ndarray] = {
        name: np.zeros(n, np.int32) for name in ("w_col", "w_clk", "w_place", "r_col", "r_clk", "r_place")}
    self.fields["r_row"] = np.full(n, -1, np.int32)
    self.fields["w_atomic"] = np.zeros(n, bool)
    if grid_wide:
      self.fields |= {"w_cta": np.full(n, _NOBODY, np.int32), "r_cta": np.full(n, _NOBODY, np.int32),
                      "r_many": np.zeros(n, bool)}
    self._publish()

  def _publish(self) -> None:
    f = self.fields
    self.w_col, self.w_clk, self.w_place, self.w_atomic = f["w_col"], f["w_clk"], f["w_place"], f["w_atomic"]
    self.r_col, self.r_clk, self.r_place, self.r_row = f["r_col"], f["r_clk"], f["r_place"], f["r_row"]
    if self.grid_wide:
      self.w_cta, self.r_cta, self.r_many = f["w_cta"], f["r_cta"], f["r_many"]

  def address(self, granules: np.ndarray) -> np.ndarray:
    """The byte addresses at which granules start."""
    return granules.astype(np.int64) * self.granule + self.base

  def fit(self, bits: int, readers: Readers) -> None:
    """Makes granules small enough for an access; `bits` is the union of its offsets and lengths."""
    if bits & (self.granule - 1) == 0:
      return
    smaller = bits & -bits
    for name, values in self.fields.items():
      self.fields[name] = np.repeat(values, self.granule // smaller)
    pieces = self.granule // smaller
    self.granule = smaller
    self._publish()
    split = self.r_row >= 0
    if split.any():
      if self.grid_wide:                         # rows of another CTA's clocks: its last read is kept
        self.r_row[split & (self.r_cta != readers.cta)] = -1
        split &= self.r_cta == readers.cta
      readers.use_more(self.r_row[split][::pieces], pieces - 1)

  def of_lanes(self, addresses: np.ndarray, nbytes: int, readers: Readers) -> tuple[np.ndarray, int]:
    """(granules [lanes * per lane], granules per lane) of an access of `nbytes` for each address [lanes]."""
    offsets = addresses - self.base
    self.fit(int(np.bitwise_or.reduce(offsets)) | nbytes, readers)
    first, each = offsets // self.granule, nbytes // self.granule
    if each == 1:
      return first, 1
    return (first[:, None] + np.arange(each)).ravel(), each

  def of_bytes(self, addresses: np.ndarray, nbytes: int, readers: Readers) -> np.ndarray:
    """The granules of a set of elements in any order, each once; small where the set holds parts of granules."""
    offsets = addresses - self.base
    low, high = int(offsets.min()) // GRANULE * GRANULE, int(offsets.max()) + nbytes
    if nbytes % GRANULE == 0 and int(np.bitwise_or.reduce(offsets)) % GRANULE == 0:
      each = nbytes // self.granule
      marks = np.zeros((high - low) // self.granule, bool)
      marks[((offsets - low) // self.granule)[:, None] + np.arange(each)] = True
      return np.flatnonzero(marks) + low // self.granule
    marks = np.zeros(-(-(high - low) // GRANULE) * GRANULE, bool)
    for byte in range(nbytes):
      marks[offsets - low + byte] = True
    size = self.granule
    while True:
      parts = marks.reshape(-1, size)
      hit = parts.any(1)
      if parts[hit].all():
        break
      size //= 2
    self.fit(size, readers)
    return np.flatnonzero(marks.reshape(-1, self.granule).any(1)) + low // self.granule


class Readers:
  """Rows of clocks [columns]: who read a granule, where one epoch cannot say it. Granules may share a row.

  Attributes:
    cta: whose clocks.
  """

  def __init__(self, columns: int, cta: int = 0):
    self.cta = cta
    self.rows = np.zeros((0, columns), np.int32)
    self._uses = np.zeros(0, np.int32)           # granules that have a row
    self._free: list[int] = []

  def widen(self, columns: int) -> None:
    self._resize(len(self.rows), columns)

  def _resize(self, n: int, columns: int) -> None:
    old, uses = self.rows, self._uses
    self.rows, self._uses = np.zeros((n, columns), np.int32), np.zeros(n, np.int32)
    self.rows[:len(old), :old.shape[1]], self._uses[:len(uses)] = old, uses

  def take(self, n: int) -> np.ndarray:
    """Up to `n` rows of zeros, each for one granule; fewer where that would take more memory than is meant for them."""
    have = len(self.rows)
    if len(self._free) < n:
      most = _MAX_READER_BYTES // (4 * self.rows.shape[1])
      grown = min(max(have + n - len(self._free), 2 * have, 64), most)
      if grown > have:
        self._resize(grown, self.rows.shape[1])
        self._free.extend(range(have, grown))
    n = min(n, len(self._free))
    got = np.asarray(self._free[len(self._free) - n:], np.int32)
    del self._free[len(self._free) - n:]
    self._uses[got] = 1
    return got

  def take_alike(self, columns: np.ndarray, values: np.ndarray) -> np.ndarray:
    """A row for each granule [n] that has one reader so far, that reader in it: one for all that have the same. -1
    where there is no memory for it."""
    _, first, which = np.unique(columns.astype(np.int64) << 32 | values, return_index=True, return_inverse=True)
    rows = np.full(len(first), -1, np.int32)
    got = self.take(len(first))
    rows[:len(got)] = got
    self.rows[got, columns[first[:len(got)]]] = values[first[:len(got)]]
    self._uses[got] = np.bincount(which)[:len(got)]
    return rows[which]

  def add_to_all(self, rows: np.ndarray, column: int, value: int) -> np.ndarray:
    """The rows of granules [n], each granule once, with one more reader; -1 where there is no memory for them."""
    out = rows.copy()
    for row in np.unique(rows).tolist():
      mine = rows == row
      n = int(np.count_nonzero(mine))
      if n < self._uses[row]:
        out[mine] = row = self.copy(row, n)
      if row >= 0:
        self.rows[row, column] = value
    return out

  def copy(self, row: int, granules: int) -> int:
    """A row like this one for some of the granules that have it; -1 where there is no memory for it."""
    got = self.take(1)
    self._uses[row] -= granules
    if not got.size:
      return -1
    self.rows[got[0]] = self.rows[row]
    self._uses[got[0]] = granules
    return int(got[0])

  def alone(self, rows: np.ndarray) -> np.ndarray:
    """Rows of granules [n], each granule once -> a row for each that no other granule has."""
    out = rows.copy()
    for i in np.flatnonzero(self._uses[rows] > 1).tolist():
      if self._uses[rows[i]] > 1:                # not yet the last
        out[i] = self.copy(int(rows[i]), 1)
    return out

  def use_more(self, rows: np.ndarray, n: int) -> None:
    """`n` more granules have each of the rows."""
    np.add.at(self._uses, rows, n)

  def drop(self, rows: np.ndarray) -> None:
    """Granules [n], each once, no longer have their rows."""
    np.subtract.at(self._uses, rows, 1)
    unused = np.unique(rows[self._uses[rows] == 0])
    self.rows[unused] = 0
    self._free.extend(unused.tolist())
