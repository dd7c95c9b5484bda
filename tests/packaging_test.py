"""The packages: an sdist without strays, and a wheel from it that installs and works, with and without a compiler."""
from __future__ import annotations

import importlib.util
import os
import pathlib
import site
import subprocess
import sys
import tarfile
import venv
import zipfile

import pytest

from tiletrace.ffi import library

ROOT = pathlib.Path(__file__).parents[1]
NO_COMPILER = "/nonexistent/c++"

pytestmark = pytest.mark.skipif(importlib.util.find_spec("scikit_build_core") is None, reason="needs scikit-build-core")


def _build(what: str, source: pathlib.Path, out: pathlib.Path, **environment: str) -> pathlib.Path:
  """Runs the build backend in a process of its own, as pip does; returns the file."""
  script = f"from scikit_build_core import build; print(build.build_{what}({str(out)!r}))"
  done = subprocess.run([sys.executable, "-c", script], cwd=source, env={**os.environ, **environment},
                        capture_output=True, text=True, check=False)
  assert done.returncode == 0, done.stdout + done.stderr
  return out / done.stdout.splitlines()[-1]


@pytest.fixture(scope="module")
def sdist(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
  return _build("sdist", ROOT, tmp_path_factory.mktemp("sdist"))


@pytest.fixture
def source(sdist: pathlib.Path, tmp_path: pathlib.Path) -> pathlib.Path:
  """The unpacked sdist: what a user without the repository builds from."""
  with tarfile.open(sdist) as archive:
    archive.extractall(tmp_path / "source", filter="data")
  return next((tmp_path / "source").iterdir())


def _doctor_in_a_fresh_environment(wheel: pathlib.Path, folder: pathlib.Path) -> tuple[pathlib.Path, str]:
  """(the installed package, what its doctor says). The dependencies are this environment's, tiletrace is not."""
  venv.create(folder, with_pip=False, symlinks=True)
  python = folder / "bin" / "python"
  subprocess.run([sys.executable, "-m", "pip", "--python", str(python), "install", "-q", "--no-deps", "--no-index",
                  str(wheel)], check=True, capture_output=True)
  packages = next((folder / "lib").glob("python*/site-packages"))
  (packages / "dependencies.pth").write_text("\n".join(site.getsitepackages()))
  done = subprocess.run([str(python), "-W", "error", "-m", "tiletrace.doctor"], cwd=folder, text=True, check=False,
                        env={**os.environ, "JAX_PLATFORMS": "cpu", "TT_CACHE_DIR": str(folder / "cache"),
                             "PYTHONPATH": ""}, capture_output=True)
  assert done.returncode == 0, done.stdout + done.stderr
  return packages / "tiletrace", done.stdout


def test_sdist_holds_the_sources_and_nothing_that_was_built(sdist):
  with tarfile.open(sdist) as archive:
    names = {name.partition("/")[2] for name in archive.getnames()}
    binary = [m.name for m in archive if m.isfile() and b"\0" in archive.extractfile(m).read()]  # type: ignore[union-attr]
  assert not binary
  tops = {name.split("/")[0] for name in names}
  assert {"CMakeLists.txt", "LICENSE", "README.md", "pyproject.toml", "tiletrace", "third_party", "tests"} <= tops
  assert {"tiletrace/ffi/tiletrace_ffi.cc", "third_party/xla_ffi/xla/ffi/api/ffi.h"} <= names
  strays = [n for n in names if n.startswith((".", "build/", "dist/")) or n.endswith((".so", ".pyc"))]
  assert not strays, strays[:20]
  assert sdist.stat().st_size < 3 * 2**19


@pytest.mark.skipif(not library.PATH.exists(), reason="needs a C++ compiler, as the launcher does")
def test_one_wheel_for_every_python_installs_and_works(source, tmp_path):
  wheel = _build("wheel", source, tmp_path)
  assert wheel.name.split("-")[2:4] == ["py3", "none"]
  with zipfile.ZipFile(wheel) as archive:
    names = archive.namelist()
  assert {"tiletrace/ffi/libtiletrace_ffi.so", "tiletrace/report/page.html"} <= set(names)
  assert all(n.split("/")[0] == "tiletrace" or ".dist-info/" in n for n in names), names
  package, text = _doctor_in_a_fresh_environment(wheel, tmp_path / "environment")
  assert f"ok launcher   {package / 'ffi' / 'libtiletrace_ffi.so'}, attributes of version" in text
  assert f"in {package}\n" in text and text.endswith("all is well\n")


def test_a_wheel_built_without_a_compiler_works_on_cpus(source, tmp_path):
  wheel = _build("wheel", source, tmp_path, CXX=NO_COMPILER)
  with zipfile.ZipFile(wheel) as archive:
    assert not [n for n in archive.namelist() if n.endswith(".so")]
  package, text = _doctor_in_a_fresh_environment(wheel, tmp_path / "environment")
  assert f"-- launcher   the CUDA launcher {package / 'ffi' / 'libtiletrace_ffi.so'} is missing" in text
  assert "-> install a C++17 compiler" in text and text.endswith("all is well\n")
