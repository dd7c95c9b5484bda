"""The launcher's library: what it exports, when it registers, and what is said when it is missing."""
from __future__ import annotations

import os
import pathlib
import shutil
import subprocess
import sys
from collections.abc import Iterator

import jax
import pytest

from tiletrace.core.errors import LaunchError
from tiletrace.ffi import library
from tiletrace.ffi.image import KernelImage
from tiletrace.ffi.primitive import bind

ROOT = pathlib.Path(__file__).parents[2]
EXPORTS = {"tt_execute", "tt_instantiate", "tt_prepare", "tt_schema_version"}

built = pytest.mark.skipif(not library.PATH.exists(), reason=f"needs the CUDA launcher: {library.BUILD_COMMAND}")


@pytest.fixture
def unbuilt(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> Iterator[pathlib.Path]:
  """The package as if its library had not been built."""
  library.load.cache_clear()
  library.register.cache_clear()
  monkeypatch.setattr(library, "PATH", tmp_path / "libtiletrace_ffi.so")
  yield library.PATH
  library.load.cache_clear()
  library.register.cache_clear()


@built
@pytest.mark.skipif(shutil.which("nm") is None, reason="needs nm")
def test_library_exports_exactly_the_entry_points():
  text = subprocess.run(["nm", "-D", "--defined-only", str(library.PATH)], capture_output=True, text=True,
                        check=True).stdout
  assert {line.split()[-1] for line in text.splitlines()} == EXPORTS


@built
@pytest.mark.skipif(shutil.which("ldd") is None, reason="needs ldd")
def test_library_links_neither_cuda_nor_python():
  text = subprocess.run(["ldd", str(library.PATH)], capture_output=True, text=True, check=True).stdout
  assert "cuda" not in text and "python" not in text


@built
@pytest.mark.parametrize("order", [
    "import tiletrace.ffi.primitive; import jax; jax.devices()",
    "import jax; jax.devices(); import tiletrace.ffi.primitive",
    "from tiletrace.ffi import library; library.load(); import jax; jax.devices(); library.register()",
    "import jax; from tiletrace.ffi import library; library.register(); library.register(); import tiletrace",
], ids=["before the backend", "after the backend", "loaded first", "twice"])
def test_registration_is_safe_in_every_order(order):
  script = order + "; print(jax.numpy.arange(3).sum())"
  done = subprocess.run([sys.executable, "-W", "error", "-c", script], cwd=ROOT, capture_output=True, text=True,
                        env={**os.environ, "JAX_PLATFORMS": "cpu"}, check=False)
  assert (done.returncode, done.stdout) == (0, "3\n"), done.stderr


def test_importing_without_the_library_is_silent(unbuilt):
  library.register_at_import()          # a warning would be an error

  assert library.register.cache_info().currsize == 0


def test_importing_with_a_damaged_library_warns(unbuilt):
  unbuilt.write_bytes(b"\x7fELF and no more")
  with pytest.warns(RuntimeWarning, match="cannot be loaded"):
    library.register_at_import()


def test_a_missing_library_is_explained_with_the_build_command(unbuilt):
  with pytest.raises(LaunchError, match="is missing: tiletrace was installed without a C") as error:
    library.register()
  assert library.BUILD_COMMAND in str(error.value)


def test_lowering_for_cuda_without_the_library_is_refused(unbuilt):
  class Program:
    name, source, fingerprint, aliases, backend, hidden = "copy", "copy.py:3", "c0", (), None, ()
    is_symbolic, grid = False, (1,)
    in_avals = out_avals = (((4,), jax.numpy.dtype("float32")),)

    def interpret(self, x: jax.Array) -> list[jax.Array]:
      return [x]

    def image(self, target: str) -> KernelImage:
      raise AssertionError("compiled for a launcher that is not there")

  with pytest.raises(LaunchError, match="is missing"):
    jax.jit(lambda x: bind(Program(), x)).trace(jax.numpy.ones(4)).lower(lowering_platforms=("cuda",))


def test_a_damaged_library_is_refused(unbuilt):
  unbuilt.write_bytes(b"\x7fELF and no more")
  with pytest.raises(LaunchError, match="cannot be loaded") as error:
    library.load()
  assert library.BUILD_COMMAND in str(error.value)


def test_a_library_of_another_schema_is_refused(host_handler, unbuilt, monkeypatch):
  monkeypatch.setattr(library, "PATH", host_handler)
  monkeypatch.setattr(library, "SCHEMA", 7)
  with pytest.raises(LaunchError, match="reads attributes of version 3, this tiletrace writes 7"):
    library.load()


@pytest.mark.skipif(shutil.which("cmake") is None, reason="needs cmake")
def test_a_machine_without_a_compiler_configures(tmp_path):
  done = subprocess.run(["cmake", "-S", str(ROOT), "-B", str(tmp_path)], capture_output=True, text=True,
                        env={**os.environ, "CXX": "/nonexistent/c++"}, check=False)
  assert done.returncode == 0, done.stderr
  assert "no C++ compiler found; installing without the CUDA launcher" in done.stderr
  assert subprocess.run(["cmake", "--build", str(tmp_path)], capture_output=True, check=False).returncode == 0
