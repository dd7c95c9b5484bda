"""Builds the fake driver and the host handler, and runs the scenarios on them in a process of their own."""
from __future__ import annotations

import ctypes
import json
import os
import pathlib
import shutil
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[2]
CXX = os.environ.get("CXX") or shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")


def _has_driver() -> bool:
  try:
    ctypes.CDLL("libcuda.so.1")
  except OSError:
    return False
  return True


def _compile(out: pathlib.Path, *arguments: str) -> pathlib.Path:
  assert CXX is not None
  command = [CXX, "-std=c++17", "-O0", "-shared", "-fPIC", *arguments, "-o", str(out), "-ldl"]
  subprocess.run(command, cwd=ROOT, check=True)
  return out


@pytest.fixture(scope="session")
def host_handler(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
  if CXX is None:
    pytest.skip("needs a C++ compiler")
  return _compile(tmp_path_factory.mktemp("handler") / "host_handler.so", "-fvisibility=hidden", "-Itiletrace/ffi",
                  "-isystem", "third_party/xla_ffi", "tests/ffi/host_handler.cc")


@pytest.fixture(scope="session")
def fake_driver(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
  if CXX is None:
    pytest.skip("needs a C++ compiler")
  if _has_driver():
    pytest.skip("this machine has a driver: the GPU tests take its place")
  # The dynamic loader takes a library that is loaded already when its soname is asked for.
  return _compile(tmp_path_factory.mktemp("driver") / "libcuda.so.1", "-Wl,-soname,libcuda.so.1",
                  "tests/ffi/fake_cuda.cc")


@pytest.fixture(scope="session")
def scenarios(host_handler: pathlib.Path, fake_driver: pathlib.Path) -> dict:
  """What the two launchers asked of the fake driver; see scenarios.py."""
  done = subprocess.run([sys.executable, "-m", "tests.ffi.scenarios", str(fake_driver), str(host_handler)], cwd=ROOT,
                        env={**os.environ, "JAX_PLATFORMS": "cpu"}, capture_output=True, text=True, check=False)
  assert done.returncode == 0, done.stdout + done.stderr
  return json.loads(done.stdout)
