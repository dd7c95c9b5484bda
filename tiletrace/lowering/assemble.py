"""PTX text to machine code with the `ptxas` binary, which needs no GPU.

nvJitLink ignores `setmaxnreg` and the driver's compiler gives no log, so neither stands in for ptxas.
"""
from __future__ import annotations

import dataclasses
import functools
import glob
import importlib.util
import os
import re
import subprocess
import tempfile
import time
from collections.abc import Sequence

from tiletrace.core import config
from tiletrace.core.errors import AssembleError
from tiletrace.core.source import Loc


@dataclasses.dataclass(frozen=True, slots=True)
class AssembleOptions:
  """What to ask of ptxas, and which of its findings to accept.

  Attributes:
    lineinfo: line tables, from the .loc lines of the text.
    allow_spills: accept registers that spill to local memory.
    allow_serialized_wgmma: accept C75xx: wgmma serialised, waits injected, or setmaxnreg ignored.
  """
  lineinfo: bool = False
  allow_spills: bool = False
  allow_serialized_wgmma: bool = False

  def flags(self, target: str) -> tuple[str, ...]:
    return (f"-arch={target}", "-O3", "-v", *(("-lineinfo",) if self.lineinfo else ()))


@dataclasses.dataclass(frozen=True, slots=True)
class Cubin:
  """Machine code of one entry, and what ptxas said about it.

  Attributes:
    image: the ELF file that the driver loads.
    registers: per thread at entry; setmaxnreg redistributes them.
    spill_stores, spill_loads, stack: bytes per thread in local memory.
    smem: bytes of static shared memory per CTA; the dynamic part is the launch's.
    warnings: ptxas' warnings and C75xx remarks.
    seconds: wall time of ptxas.
  """
  image: bytes
  entry: str
  registers: int
  spill_stores: int
  spill_loads: int
  stack: int
  smem: int
  warnings: tuple[str, ...]
  log: str
  seconds: float


def assemble(ptx: str, target: str, options: AssembleOptions | None = None, *,
             locations: Sequence[Loc | None] = ()) -> Cubin:
  """Assembles a PTX text with one entry.

  Args:
    ptx: what `Module.render` gives.
    target: "sm_90a".
    options: flags, and findings to accept.
    locations: the Python location of each line of `ptx` (`Module.lines`), for messages.

  Raises:
    AssembleError: there is no ptxas; it refuses the text; or it spills or serialises wgmma and the options do not
      accept that.
  """
  options = options or AssembleOptions()
  cubin = run_ptxas(ptx, options.flags(target), locations)
  judge(cubin, options, locations)
  return cubin


def run_ptxas(ptx: str, flags: Sequence[str], locations: Sequence[Loc | None] = ()) -> Cubin:
  """`assemble` without judging what ptxas found."""
  start = time.perf_counter()
  with tempfile.TemporaryDirectory(prefix="tiletrace-") as directory:
    source, output = os.path.join(directory, "kernel.ptx"), os.path.join(directory, "kernel.cubin")
    with open(source, "w", encoding="utf-8") as f:
      f.write(ptx)
    done = subprocess.run([find_ptxas(), *flags, source, "-o", output], capture_output=True, text=True, check=False)
    log = (done.stdout + done.stderr).replace(source, "kernel.ptx")
    if done.returncode != 0:
      raise _refusal(ptx, log, done.returncode, locations)
    with open(output, "rb") as f:
      image = f.read()
  return _parse(image, log, time.perf_counter() - start)


_REMARK = re.compile(r"ptxas (?:.*, line (?P<line>\d+); )?(?P<kind>warning|info|error|fatal)\s*:\s*(?P<text>.*)")
_C75 = re.compile(r"\(?\bC75\d\d\b")


def _parse(image: bytes, log: str, seconds: float) -> Cubin:
  def number(pattern: str) -> int:
    found = re.search(pattern, log)
    return int(found[1]) if found else 0

  entries = re.findall(r"Compiling entry function '(\w+)'", log)
  assert len(entries) == 1, f"one entry per module, ptxas found {entries}:\n{log}"
  warnings = [m[0] for m in _REMARK.finditer(log) if m["kind"] == "warning" or _C75.search(m["text"])]
  return Cubin(
      image, entries[0], number(r"Used (\d+) registers"), number(r"(\d+) bytes spill stores"),
      number(r"(\d+) bytes spill loads"), number(r"(\d+) bytes stack frame"), number(r"(\d+) bytes smem"),
      tuple(warnings), log, seconds)


def judge(cubin: Cubin, options: AssembleOptions, locations: Sequence[Loc | None] = ()) -> None:
  """Refuses serialised wgmma and spills, unless the options accept them.

  Raises:
    AssembleError: TT402 or TT403.
  """
  serialized = [w for w in cubin.warnings if _C75.search(w)]
  if serialized and not options.allow_serialized_wgmma:
    near = re.search(r"around line (\d+)", "\n".join(serialized))
    raise AssembleError(
        f"{cubin.entry}: ptxas serialises wgmma or ignores setmaxnreg:\n    " + "\n    ".join(serialized),
        loc=_location(locations, int(near[1])) if near else None, code="TT402",
        hint="the kernel would be right but slow: tt.wgmma_wait(0) before what touches an accumulator or a register "
             "operand of a gemm_async in flight, regs= within what the CTA has at launch; allow_serialized_wgmma=True "
             "accepts it as it is")
  if (cubin.spill_stores or cubin.spill_loads) and not options.allow_spills:
    raise AssembleError(
        f"{cubin.entry}: registers spill to local memory ({cubin.spill_stores} bytes stored, {cubin.spill_loads} "
        f"loaded per thread, {cubin.registers} registers)", code="TT403",
        hint="use smaller tiles or more warpgroups; allow_spills=True accepts it")


def _refusal(ptx: str, log: str, status: int, locations: Sequence[Loc | None]) -> AssembleError:
  """The error for a text that ptxas does not take: its first five remarks, each with its line of PTX."""
  text = ptx.splitlines()
  shown, first = [], None
  for m in _REMARK.finditer(log):
    if m["kind"] in ("error", "fatal") and m["line"] and len(shown) < 5:
      first = first or int(m["line"])
      shown.append(f"line {m['line']}: {m['text']}\n      {text[int(m['line']) - 1].strip()}")
  return AssembleError(f"ptxas refuses the kernel (exit status {status}):\n    " +
                       ("\n    ".join(shown) or log.strip() or "it said nothing"),
                       loc=_location(locations, first) if first else None, code="TT401")


def _location(locations: Sequence[Loc | None], line: int) -> Loc | None:
  """The location of a line of PTX, or of the nearest one above that has any."""
  return next((loc for loc in reversed(locations[:line]) if loc is not None), None)


# ---- the tools


def find_ptxas() -> str:
  """The path of ptxas: TT_PTXAS, the wheel nvidia-cuda-nvcc, PATH, /usr/local/cuda*; the first that exists.

  Raises:
    AssembleError: it is nowhere, with every place that was searched.
  """
  return _find("ptxas", config.read().ptxas, os.environ.get("PATH", ""))


@functools.cache
def _find(tool: str, override: str | None, path: str) -> str:
  if override is not None:
    if not os.access(override, os.X_OK) or os.path.isdir(override):
      raise AssembleError(f"TT_PTXAS={override} is not an executable file", code="TT404")
    if tool == "ptxas":
      return override
  searched = [os.path.join(os.path.dirname(override), tool)] if override else []
  searched += [os.path.join(directory, tool) for directory in _wheel_directories()]
  searched += [os.path.join(directory, tool) for directory in path.split(os.pathsep) if directory]
  toolkits = sorted(glob.glob(_TOOLKITS), key=_toolkit_version, reverse=True)
  searched += [os.path.join(directory, "bin", tool) for directory in toolkits or [_TOOLKITS]]
  for candidate in searched:
    if os.access(candidate, os.X_OK) and not os.path.isdir(candidate):
      return candidate
  raise AssembleError(f"{tool} was not found; searched:\n    " + "\n    ".join(dict.fromkeys(searched)), code="TT404",
                      hint=_REMEDY[tool])


_TOOLKITS = "/usr/local/cuda*"
_REMEDY = {
    "ptxas": "pip install nvidia-cuda-nvcc (jax[cuda13] brings it), or set TT_PTXAS=/path/to/ptxas",
    "nvdisasm": "pip install nvidia-cuda-nvdisasm, or put a CUDA toolkit's bin directory on PATH",
}


def _toolkit_version(path: str) -> tuple[bool, list[int]]:
  """The link /usr/local/cuda first, then the newest."""
  numbers = [int(n) for n in re.findall(r"\d+", os.path.basename(path))]
  return not numbers, numbers


def _wheel_directories() -> list[str]:
  """bin directories of NVIDIA's CUDA wheels, which share the namespace package `nvidia`."""
  spec = importlib.util.find_spec("nvidia")
  roots = spec.submodule_search_locations if spec is not None and spec.submodule_search_locations else ()
  return [os.path.join(root, package, "bin") for root in roots for package in ("cu13", "cuda_nvcc")]


def ptxas_version() -> str:
  """The version of `find_ptxas()`, e.g. "13.0.88": part of the cache keys."""
  path = find_ptxas()
  stat = os.stat(path)
  return _version(path, stat.st_mtime_ns, stat.st_size)


@functools.cache
def _version(path: str, mtime_ns: int, size: int) -> str:
  done = subprocess.run([path, "--version"], capture_output=True, text=True, check=False)
  found = re.search(r"V(\d+\.\d+\.\d+)", done.stdout)
  if found is None:
    raise AssembleError(f"{path} --version does not answer like ptxas:\n    {(done.stdout + done.stderr).strip()}",
                        code="TT404")
  return found[1]


def sass(cubin: Cubin) -> str:
  """The disassembly of a cubin.

  Raises:
    AssembleError: there is no nvdisasm.
  """
  tool = _find("nvdisasm", config.read().ptxas, os.environ.get("PATH", ""))
  with tempfile.TemporaryDirectory(prefix="tiletrace-") as directory:
    path = os.path.join(directory, "kernel.cubin")
    with open(path, "wb") as f:
      f.write(cubin.image)
    done = subprocess.run([tool, "-c", path], capture_output=True, text=True, check=False)
  if done.returncode != 0:
    raise AssembleError(f"{tool} failed: {done.stderr.strip()}", code="TT405")
  return done.stdout
