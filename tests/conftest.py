"""Runs before jax is imported anywhere: eight CPU devices for shard_map, a cache that no earlier run has filled.

GPU tests skip, with a reason, where there is no GPU for them.
"""
from __future__ import annotations

import atexit
import ctypes
import gc
import importlib.metadata
import os
import pathlib
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.gpu import agreement


def _no_gpu() -> str | int:
  """Why GPU tests cannot run, or the GPU's major compute capability. Asks the driver directly: initialising jax for
  that takes seconds."""
  try:
    driver = ctypes.CDLL("libcuda.so.1")
  except OSError:
    return "no NVIDIA driver"
  major = ctypes.c_int()
  if driver.cuInit(0) or driver.cuDeviceGetAttribute(ctypes.byref(major), 75, 0):     # COMPUTE_CAPABILITY_MAJOR
    return "no NVIDIA GPU"
  return major.value


def _set_environment() -> None:
  """Of this process and of those that it starts. Without a GPU, XLA compiles most of what tests run, once each, and
  that took three quarters of their time: with few optimizations it takes a quarter of that."""
  flags = ["--xla_force_host_platform_device_count=8"]
  if isinstance(_no_gpu(), str):
    os.environ.setdefault("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")
    if importlib.metadata.version("jaxlib").startswith("0.10."):       # XLA ends at a flag that it does not know
      flags += ["--xla_cpu_use_fusion_emitters=false", "--xla_cpu_parallel_codegen_split_count=1"]
  os.environ["XLA_FLAGS"] = " ".join([os.environ.get("XLA_FLAGS", ""), *flags])
  if "TT_CACHE_DIR" not in os.environ:        # workers inherit the directory of the process that started them
    os.environ["TT_CACHE_DIR"] = tempfile.mkdtemp(prefix="tiletrace-tests-")
    atexit.register(shutil.rmtree, os.environ["TT_CACHE_DIR"], ignore_errors=True)


_set_environment()
gc.set_threshold(50_000, 20, 20)     # JAX's caches are 10^6 objects that live long: a look at all takes a second


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
  """`gpu` asks for compute capability 9.0, `gpu(least=8)` for that of any GPU from 8.0 on."""
  needing = [(item, mark) for item in items if (mark := item.get_closest_marker("gpu"))]
  found = _no_gpu() if needing else 0
  for item, mark in needing:
    least = mark.kwargs.get("least")
    if isinstance(found, str):
      item.add_marker(pytest.mark.skip(reason=found))
    elif found < least if least is not None else found != 9:
      item.add_marker(pytest.mark.skip(reason=f"the GPU has compute capability {found}.x"))


def pytest_collection_finish() -> None:
  """Modules and tests stay to the end: no collection looks at them again, pytest's last ones (seconds) neither."""
  gc.freeze()


def pytest_addoption(parser: pytest.Parser) -> None:
  parser.addoption("--update-golden", action="store_true", help="rewrite tests/golden/*.txt with what the tests see")


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Callable[[str, str], None]:
  """`golden(name, text)`: the text equals tests/golden/<name>.txt."""
  def check(name: str, text: str) -> None:
    path = pathlib.Path(__file__).parent / "golden" / f"{name}.txt"
    if request.config.getoption("--update-golden"):
      path.parent.mkdir(exist_ok=True)
      path.write_text(text)
    assert text == path.read_text(), f"tests/golden/{name}.txt differs; --update-golden rewrites it"
  return check


@pytest.fixture(autouse=True)
def _agreement(request: pytest.FixtureRequest) -> Iterator[None]:
  """What a test recorded goes with its report, from whichever process."""
  yield
  if records := agreement.taken():
    request.node.user_properties.append((agreement.PROPERTY, records))


_GROWTH = 1 << 29
_most_memory = 1 << 30


def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
  """XLA keeps every program that it compiled: between modules, a process that has grown drops them."""
  global _most_memory
  jax = sys.modules.get("jax")
  if jax is not None and (nextitem is None or nextitem.path != item.path) and _resident() > _most_memory:
    jax.clear_caches()
    gc.collect()
    if sys.platform == "linux":
      ctypes.CDLL("libc.so.6").malloc_trim(0)
    _most_memory = max(_most_memory, _resident() + _GROWTH)     # what cannot be dropped is not dropped again


def _resident() -> int:
  """Bytes of this process in memory; 0 where that is not known."""
  statm = pathlib.Path("/proc/self/statm")
  return int(statm.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") if statm.exists() else 0


def pytest_terminal_summary(terminalreporter: Any) -> None:
  """How well the simulator and the GPU agreed, if anything was compared."""
  records = [agreement.Record(**r) for reports in terminalreporter.stats.values() for report in reports
             for name, value in getattr(report, "user_properties", ()) if name == agreement.PROPERTY for r in value]
  if not records:
    return
  terminalreporter.section("the simulator and the GPU")
  terminalreporter.write_line(agreement.table(records))
  if path := os.environ.get("TT_AGREEMENT"):
    agreement.write(path, records)
