"""python -m tiletrace.doctor: what it finds, what it advises, and its exit status."""
from __future__ import annotations

import os
import pathlib
import re
import subprocess
import sys

import jax
import numpy as np
import pytest

from tiletrace import doctor
from tiletrace.ffi import library
from tiletrace.lowering import assemble

ROOT = pathlib.Path(__file__).parents[1]


@pytest.fixture
def findings(capsys, monkeypatch, tmp_path):
  """Runs the doctor with an environment: (exit status, what it printed)."""
  monkeypatch.setattr(doctor, "gpus", list)

  def run(**environment: str) -> tuple[int, str]:
    monkeypatch.setenv("TT_CACHE_DIR", str(tmp_path / "cache"))
    for name, value in environment.items():
      monkeypatch.setenv(name, value)
    assemble._find.cache_clear()
    status = doctor.main()
    return status, capsys.readouterr().out
  return run


def test_module_prints_versions_and_tests_itself(tmp_path):
  done = subprocess.run([sys.executable, "-W", "error", "-m", "tiletrace.doctor"], cwd=ROOT, text=True, check=False,
                        env={**os.environ, "JAX_PLATFORMS": "cpu", "TT_CACHE_DIR": str(tmp_path)}, capture_output=True)
  assert done.returncode == 0, done.stdout + done.stderr
  for pattern in (r"ok tiletrace  source [0-9a-f]{12} in \S+", rf"ok packages   jax {jax.__version__}, jaxlib ",
                  r"ok devices    cpu:0 cpu", r"-- devices    no NVIDIA GPU that jax can use",
                  r"(ok|--) ptxas      \S+", r"(ok|--) launcher   \S+", rf"ok cache      \d+ entries, .* in {tmp_path}",
                  r"ok run        on \S+: 100 x 72 x 40 matmul is right, greatest error \d\.\de-0[5-9]",
                  r"all is well$"):
    assert re.search(pattern, done.stdout, re.M), (pattern, done.stdout)


def test_a_missing_assembler_is_no_fault_without_a_gpu(findings, monkeypatch):
  def nowhere() -> str:
    raise assemble.AssembleError("ptxas was not found; searched:\n    /nowhere", code="TT404", hint="pip install it")

  monkeypatch.setattr(assemble, "find_ptxas", nowhere)
  monkeypatch.setattr(assemble, "ptxas_version", nowhere)
  status, text = findings()
  assert status == 0
  assert re.search(r"^-- ptxas      ptxas was not found; searched:\n +/nowhere\n +-> pip install it$", text, re.M), text
  found, = doctor.check_ptxas(needed=True)
  assert found.mark == "!!"


def test_an_assembler_that_was_asked_for_and_is_not_there_is_a_fault(findings):
  status, text = findings(TT_PTXAS="/nonexistent/ptxas")
  assert status == 1
  assert "!! ptxas      TT_PTXAS=/nonexistent/ptxas is not an executable file" in text
  assert "-> correct TT_PTXAS, or unset it" in text and text.endswith("1 broken\n")
  assert "ok switches   TT_CACHE_DIR=" in text


def test_a_missing_launcher_is_a_fault_where_there_is_a_gpu(monkeypatch, tmp_path):
  library.load.cache_clear()
  monkeypatch.setattr(library, "PATH", tmp_path / "libtiletrace_ffi.so")
  try:
    (idle,), (needed,) = doctor.check_launcher(needed=False), doctor.check_launcher(needed=True)
  finally:
    library.load.cache_clear()
  assert (idle.mark, needed.mark) == ("--", "!!")
  assert library.BUILD_COMMAND in (needed.remedy or "")


def test_a_cache_that_cannot_be_written_is_a_fault_with_a_remedy(findings, tmp_path):
  (tmp_path / "file").write_text("no directory")
  status, text = findings(TT_CACHE_DIR=str(tmp_path / "file"))
  assert status == 1
  assert re.search(r"!! cache      \S+ cannot be written: .*\n +-> set TT_CACHE_DIR to a directory", text), text
  status, text = findings(TT_CACHE_DIR=str(tmp_path / "file"), TT_CACHE="0")
  assert status == 0 and "-- cache      TT_CACHE=0" in text


def test_a_switch_with_a_wrong_value_is_named(findings):
  status, text = findings(TT_CACHE="perhaps")
  assert status == 1
  assert "!! switches   TT_CACHE must be 0 or 1, got 'perhaps'" in text


def test_wrong_numbers_are_a_fault(findings, monkeypatch):
  real = doctor._operands
  monkeypatch.setattr(doctor, "_self_test", lambda: lambda a, b: np.full((100, 72), np.nan, np.float32))
  found, = doctor.check_run(jax.devices("cpu")[0])
  assert real()[0].shape == (100, 40)
  assert found.mark == "!!" and "is WRONG, greatest error nan" in found.text


@pytest.mark.parametrize("kind, capability, mark, said", [
  ("NVIDIA A100", "8.0", "ok", "compiled for sm_80"), ("NVIDIA L40S", "8.9", "ok", "compiled for sm_89"),
  ("Tesla T4", "7.5", "!!", "has compute capability 7.5")])
def test_gpus_of_other_generations_have_their_target_or_the_way_around(monkeypatch, kind, capability, mark, said):
  class Other:
    platform, id, device_kind, compute_capability = "gpu", 0, kind, capability

  monkeypatch.setattr(doctor, "gpus", lambda: [Other()])
  found = list(doctor.check_devices())
  assert [f.mark for f in found] == ["ok", mark]
  assert kind in found[1].text and said in found[1].text
  assert mark == "ok" or 'backend="xla"' in (found[1].remedy or "")


def test_a_backend_that_does_not_start_is_a_fault(monkeypatch):
  def refuse() -> list:
    raise RuntimeError("Unable to initialize backend 'cuda'")

  monkeypatch.setattr(doctor.jax, "devices", refuse)
  found, = doctor.check_devices()
  assert found.mark == "!!" and "Unable to initialize backend 'cuda'" in found.text
  assert "JAX_PLATFORMS=cpu" in (found.remedy or "")


@pytest.mark.gpu
def test_the_gpu_is_found_and_runs_the_self_test():
  found = list(doctor.examine())
  assert not [str(f) for f in found if f.mark == "!!"]
  assert any(f.subject == "run" and "cuda" in f.text.lower() for f in found)
