"""The store of compiled kernels: what it keeps, what it drops, many processes at once."""
from __future__ import annotations

import doctest
import os
import subprocess
import sys
import threading
import time

import numpy as np
import pytest

from tiletrace.core.errors import AssembleError
from tiletrace.lowering import cache
from tiletrace.lowering.assemble import AssembleOptions, Cubin
from tiletrace.lowering.ptx import Module, Param, isa

RNG = np.random.default_rng(7)


@pytest.fixture
def directory(monkeypatch, tmp_path):
  """An empty cache directory, and the folder inside it that holds the entries."""
  monkeypatch.setenv("TT_CACHE_DIR", str(tmp_path / "cache"))
  monkeypatch.delenv("TT_CACHE", raising=False)
  monkeypatch.setattr(cache, "STORE", cache.Store())
  return tmp_path / "cache" / "1"


def payload(n: int = 5000) -> bytes:
  return RNG.bytes(n)


def kernel_text(value: float = 1.25, fences: int = 0) -> str:
  m = Module()
  e = m.entry("store", [Param("out", "u64")], 128)
  b = e.builder()
  for _ in range(fences):
    b(isa.BAR_SYNC_ALL, 0)
  b(isa.ST_GLOBAL, b.addr(b.new(isa.LD_PARAM, b.addr(e.param("out")), type="u64")), value, type="f32")
  b(isa.RET)
  return m.render()


def test_a_payload_comes_back_from_memory_and_from_disk(directory):
  store, data = cache.Store(), payload()
  assert store.get("kernel", "ab12") is None
  store.put("kernel", "ab12", data)
  assert store.get("kernel", "ab12") == data
  store.forget()
  assert store.get("kernel", "ab12") == data
  assert cache.Store().get("kernel", "ab12") == data
  assert cache.Store().get("cubin", "ab12") is None
  assert [p.name for p in directory.iterdir()] == ["kernel-ab12"]


def test_tt_cache_0_keeps_nothing_on_disk(directory, monkeypatch):
  monkeypatch.setenv("TT_CACHE", "0")
  store, data = cache.Store(), payload()
  store.put("kernel", "k", data)
  assert store.get("kernel", "k") == data
  assert cache.Store().get("kernel", "k") is None
  assert not directory.exists()


@pytest.mark.parametrize("damage", [
    lambda data: data[:-1], lambda data: data + b"x", lambda data: data[:40] + bytes([data[40] ^ 1]) + data[41:],
    lambda data: b"", lambda data: bytes(len(data))], ids=["short", "long", "bit", "empty", "zeros"])
def test_a_corrupt_file_is_absent_and_removed(directory, damage):
  cache.Store().put("kernel", "k", payload())
  path = directory / "kernel-k"
  path.write_bytes(damage(path.read_bytes()))
  assert cache.Store().get("kernel", "k") is None
  assert not path.exists()


def test_the_least_recently_used_files_go_first(directory):
  store = cache.Store(disk_limit=50_000)
  for i in range(8):
    store.put("kernel", f"k{i}", payload())
    age = time.time() - 1000 + 10 * i
    os.utime(directory / f"kernel-k{i}", (age, age))
  assert cache.Store().get("kernel", "k0") is not None     # used: now the youngest
  store.put("kernel", "k8", payload())
  left = {p.name for p in directory.iterdir()}
  assert left == {f"kernel-k{i}" for i in (0, 2, 3, 4, 5, 6, 7, 8)}
  store.put("kernel", "k9", payload())
  assert {p.name for p in directory.iterdir()} == (left | {"kernel-k9"}) - {"kernel-k2"}
  assert sum(p.stat().st_size for p in directory.iterdir()) <= 50_000


def test_memory_is_bounded_too(directory, monkeypatch):
  monkeypatch.setenv("TT_CACHE", "0")
  store = cache.Store(memory_limit=20_000)
  for i in range(10):
    store.put("kernel", f"k{i}", payload())
    store.get("kernel", "k0")
  assert [i for i in range(10) if store.get("kernel", f"k{i}") is not None] == [0, 7, 8, 9]


def test_temporary_files_of_dead_writers_are_removed_and_of_live_ones_kept(directory):
  directory.mkdir(parents=True)
  (directory / "tmp-dead").write_bytes(payload())
  (directory / "tmp-live").write_bytes(payload())
  hour_ago = time.time() - 4000
  os.utime(directory / "tmp-dead", (hour_ago, hour_ago))
  cache.Store().put("kernel", "k", payload())
  assert {p.name for p in directory.iterdir()} == {"tmp-live", "kernel-k"}


def test_a_directory_that_cannot_be_made_gives_a_warning_and_memory_still_works(directory, monkeypatch, tmp_path):
  (tmp_path / "file").write_text("in the way")
  monkeypatch.setenv("TT_CACHE_DIR", str(tmp_path / "file"))
  store, data = cache.Store(), payload()
  with pytest.warns(RuntimeWarning, match="TT_CACHE_DIR"):
    store.put("kernel", "k", data)
  assert store.get("kernel", "k") == data


WRITER = """
import sys, hashlib
from tiletrace.lowering.cache import Store
store = Store(disk_limit=60_000)
for i in range(150):
  key = f"k{(i * 7 + int(sys.argv[1])) % 12}"
  expected = hashlib.sha256(key.encode()).digest() * 250
  got = store.get("kernel", key)
  assert got in (None, expected), key
  store.put("kernel", key, expected)
  store.forget()
"""


def test_processes_that_write_evict_and_read_at_once_never_see_a_torn_file(directory):
  running = [subprocess.Popen([sys.executable, "-W", "error", "-c", WRITER, str(n)], stderr=subprocess.PIPE)
             for n in range(3)]
  errors = [p.communicate()[1].decode() for p in running]
  assert errors == [""] * 3
  assert not [p for p in directory.iterdir() if p.name.startswith("tmp-")]


def test_threads_share_a_store(directory):
  store, failures = cache.Store(memory_limit=30_000), []
  data = {f"k{i}": payload() for i in range(12)}

  def work(n: int):
    for i in range(60):
      key = f"k{(i * 5 + n) % 12}"
      store.put("kernel", key, data[key])
      if store.get("kernel", key) != data[key]:
        failures.append(key)

  threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
  for t in threads:
    t.start()
  for t in threads:
    t.join()
  assert failures == []


def test_digest_tells_where_a_part_ends():
  assert cache.digest("ab", "c") != cache.digest("a", "bc") != cache.digest("abc")
  assert doctest.testmod(cache).failed == 0
  assert cache.digest("ä") == cache.digest("ä".encode())


def test_a_cubin_survives_encoding():
  cubin = Cubin(payload(), "k", 168, 8, 12, 16, 640, ("a\nwarning", "ptxas (C7510)"), "log\nline", 0.125)
  assert cache.decode_cubin(cache.encode_cubin(cubin)) == cubin


def test_the_same_text_is_assembled_once(directory, monkeypatch):
  calls = []
  run_ptxas = cache.run_ptxas
  monkeypatch.setattr(cache, "run_ptxas", lambda *a: calls.append(a) or run_ptxas(*a))
  first = cache.assemble_cached(kernel_text(), "sm_90a")
  assert cache.assemble_cached(kernel_text(), "sm_90a") == first
  monkeypatch.setattr(cache, "STORE", cache.Store())
  assert cache.assemble_cached(kernel_text(), "sm_90a") == first
  assert len(calls) == 1
  cache.assemble_cached(kernel_text(2.5), "sm_90a")
  cache.assemble_cached(kernel_text(), "sm_90a", AssembleOptions(lineinfo=True))
  monkeypatch.setattr(cache, "assembler_version", lambda: "99.0.1")
  cache.assemble_cached(kernel_text(), "sm_90a")
  assert len(calls) == 4


def test_findings_are_judged_on_every_use_of_a_cached_cubin(directory):
  text = kernel_text(3.5)
  key = cache.digest(text, "sm_90a", cache.assembler_version(), *AssembleOptions().flags("sm_90a"))
  spilled = Cubin(payload(), "store", 255, 64, 64, 64, 0, (), "", 0.1)
  cache.STORE.put("cubin", key, cache.encode_cubin(spilled))
  with pytest.raises(AssembleError, match="spill"):
    cache.assemble_cached(text, "sm_90a")
  assert cache.assemble_cached(text, "sm_90a", AssembleOptions(allow_spills=True)) == spilled


HIT = """
import sys, time
from tiletrace.lowering import cache
cache.run_ptxas = None      # a miss would call it
text = open(sys.argv[1]).read()
start = time.perf_counter()
cubin = cache.assemble_cached(text, "sm_90a")
print(time.perf_counter() - start, cubin.entry)
"""


def test_another_process_loads_a_cubin_in_a_few_milliseconds_without_running_ptxas(directory, tmp_path):
  path = tmp_path / "kernel.ptx"
  path.write_text(kernel_text(fences=500))
  cache.assemble_cached(path.read_text(), "sm_90a")
  times = []
  for _ in range(3):
    done = subprocess.run([sys.executable, "-c", HIT, path], capture_output=True, text=True, check=True)
    seconds, entry = done.stdout.split()
    assert entry == "store"
    times.append(float(seconds))
  assert min(times) < 0.040


def test_the_package_digest_is_quick_and_stable():
  cache.package_digest.cache_clear()
  start = time.perf_counter()
  first = cache.package_digest()
  assert time.perf_counter() - start < 0.1
  cache.package_digest.cache_clear()
  assert cache.package_digest() == first
  assert len(first) == 64
