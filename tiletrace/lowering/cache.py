"""Compiled kernels in memory and on disk.

Two kinds of entry share the store: "kernel", whose key the pipeline makes from a tile graph and its options, and
"cubin", whose key is the PTX text, the target, the flags and the assembler's version. A file is the SHA-256 of its
payload followed by the payload, written beside and renamed, so that any number of processes may share the directory.
"""
from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
import hashlib
import json
import os
import tempfile
import threading
import time
import warnings
from collections.abc import Iterator, Sequence

from tiletrace.core import config
from tiletrace.core.source import Loc
from tiletrace.lowering.assemble import AssembleOptions, Cubin, find_ptxas, judge, ptxas_version, run_ptxas

DISK_LIMIT = 1 << 30
MEMORY_LIMIT = 1 << 28
_CHECKSUM = hashlib.sha256().digest_size
_ABANDONED = 3600.0     # seconds after which a temporary file has no writer any more


def digest(*parts: str | bytes) -> str:
  """SHA-256 over the parts, unambiguous in where each ends.

  >>> digest("ab", "c") == digest("a", "bc")
  False
  """
  h = hashlib.sha256()
  for part in parts:
    data = part.encode() if isinstance(part, str) else part
    h.update(len(data).to_bytes(8, "little"))
    h.update(data)
  return h.hexdigest()


class Store:
  """Payloads by kind and digest: a memory front, and a directory behind it.

  The least recently used go first where the limits (bytes) are exceeded; on disk, use is the file's mtime.
  """

  def __init__(self, disk_limit: int = DISK_LIMIT, memory_limit: int = MEMORY_LIMIT):
    self.disk_limit, self.memory_limit = disk_limit, memory_limit
    self._memory: collections.OrderedDict[tuple[str, str], bytes] = collections.OrderedDict()
    self._memory_bytes = 0
    self._unscanned: int | None = None    # bytes written since the directory was last measured
    self._lock = threading.Lock()

  def get(self, kind: str, key: str) -> bytes | None:
    """The payload, or None. A corrupt file is removed and counts as absent."""
    with self._lock:
      payload = self._memory.get((kind, key))
      if payload is not None:
        self._memory.move_to_end((kind, key))
        return payload
    directory = _directory()
    payload = None if directory is None else _read(os.path.join(directory, f"{kind}-{key}"))
    if payload is not None:
      self._remember(kind, key, payload)
    return payload

  def put(self, kind: str, key: str, payload: bytes) -> None:
    """Keeps a payload. A directory that cannot be written gives a RuntimeWarning; memory keeps it all the same."""
    self._remember(kind, key, payload)
    directory = _directory()
    if directory is None:
      return
    try:
      os.makedirs(directory, exist_ok=True)
      _write(directory, f"{kind}-{key}", payload)
      with self._lock:
        self._unscanned = None if self._unscanned is None else self._unscanned + len(payload)
        full = self._unscanned is None or self._unscanned > self.disk_limit // 64
        if full:
          self._unscanned = 0
      if full:
        _evict(directory, self.disk_limit)
    except OSError as e:
      warnings.warn(f"compiled kernels cannot be kept in {directory} ({e}); set TT_CACHE_DIR to a directory that can "
                    "be written, or TT_CACHE=0", RuntimeWarning, stacklevel=2)

  def forget(self) -> None:
    """Empties the memory, not the disk."""
    with self._lock:
      self._memory.clear()
      self._memory_bytes = 0

  def _remember(self, kind: str, key: str, payload: bytes) -> None:
    with self._lock:
      self._memory_bytes += len(payload) - len(self._memory.pop((kind, key), b""))
      self._memory[kind, key] = payload
      while self._memory_bytes > self.memory_limit and len(self._memory) > 1:
        self._memory_bytes -= len(self._memory.popitem(last=False)[1])


def _directory() -> str | None:
  """Where entries are kept; None where TT_CACHE=0. The number is the format of the files."""
  switches = config.read()
  return os.path.join(switches.cache_dir, "1") if switches.cache else None


def _read(path: str) -> bytes | None:
  try:
    with open(path, "rb") as f:
      data = f.read()
  except OSError:
    return None
  checksum, payload = data[:_CHECKSUM], data[_CHECKSUM:]
  if hashlib.sha256(payload).digest() != checksum:
    with contextlib.suppress(OSError):
      os.unlink(path)
    return None
  with contextlib.suppress(OSError):   # another process may have evicted it, or the directory be read-only
    os.utime(path)
  return payload


def _write(directory: str, name: str, payload: bytes) -> None:
  handle, temporary = tempfile.mkstemp(prefix="tmp-", dir=directory)
  try:
    with os.fdopen(handle, "wb") as f:
      f.write(hashlib.sha256(payload).digest())
      f.write(payload)
    os.replace(temporary, os.path.join(directory, name))
  except BaseException:
    with contextlib.suppress(OSError):
      os.unlink(temporary)
    raise


def _files(directory: str) -> Iterator[tuple[float, int, str]]:
  """(mtime, bytes, path) of each file; one that vanishes meanwhile was evicted by another process."""
  with os.scandir(directory) as entries:
    for entry in entries:
      with contextlib.suppress(FileNotFoundError):
        stat = entry.stat()
        yield stat.st_mtime, stat.st_size, entry.path


def _evict(directory: str, limit: int) -> None:
  """Removes the oldest files until 7/8 of the limit is used, and temporary files without a writer."""
  files = sorted(_files(directory))
  total, goal = sum(size for _, size, _ in files), limit // 8 * 7
  abandoned = time.time() - _ABANDONED
  for mtime, size, path in files:
    temporary = os.path.basename(path).startswith("tmp-")
    if mtime < abandoned if temporary else total > goal:
      with contextlib.suppress(FileNotFoundError):
        os.unlink(path)
      total -= size


STORE = Store()

# ---- cubins


def assembler_version() -> str:
  """`ptxas_version()`, remembered by the file's path, size and time: running ptxas costs up to 80 ms."""
  path = find_ptxas()
  stat = os.stat(path)
  key = digest(path, str(stat.st_size), str(stat.st_mtime_ns))
  known = STORE.get("version", key)
  if known is None:
    known = ptxas_version().encode()
    STORE.put("version", key, known)
  return known.decode()


def assemble_cached(ptx: str, target: str, options: AssembleOptions | None = None, *,
                    locations: Sequence[Loc | None] = ()) -> Cubin:
  """`assemble`, through the store: the same text, target, flags and assembler are assembled once.

  What the options accept is not in the key, so it is judged again on each use.

  Raises:
    AssembleError: as `assemble`.
  """
  options = options or AssembleOptions()
  flags = options.flags(target)
  key = digest(ptx, target, assembler_version(), *flags)
  payload = STORE.get("cubin", key)
  if payload is None:
    cubin = run_ptxas(ptx, flags, locations)
    STORE.put("cubin", key, encode_cubin(cubin))
  else:
    cubin = decode_cubin(payload)
  judge(cubin, options, locations)
  return cubin


def encode_cubin(cubin: Cubin) -> bytes:
  """One line of JSON (all but the image), then the image."""
  facts = {f.name: getattr(cubin, f.name) for f in dataclasses.fields(cubin) if f.name != "image"}
  return json.dumps(facts).encode() + b"\n" + cubin.image


def decode_cubin(payload: bytes) -> Cubin:
  head, _, image = payload.partition(b"\n")
  facts = json.loads(head)
  return Cubin(image=image, **{**facts, "warnings": tuple(facts["warnings"])})


# ---- the package


@functools.cache
def package_digest() -> str:
  """Digest of the names and contents of tiletrace's source files: part of every "kernel" key."""
  root = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
  parts: list[str | bytes] = []
  for directory, folders, names in os.walk(root):
    folders.sort()
    for name in sorted(names):
      if name.endswith((".py", ".cc", ".h")):
        path = os.path.join(directory, name)
        with open(path, "rb") as f:
          parts += [os.path.relpath(path, root), f.read()]
  return digest(*parts)
