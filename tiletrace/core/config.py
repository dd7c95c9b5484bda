"""Every environment switch of tiletrace, in one place. Read at use, never at import.

>>> read({"TT_CACHE": "0"}).cache
False
"""
from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Mapping

from tiletrace.core.errors import TileTraceError


class ConfigError(TileTraceError):
  """A TT_* environment variable with a value that it does not take."""
  code = "TT010"


@dataclasses.dataclass(frozen=True, slots=True)
class Dump:
  """What TT_DUMP asks for: names of stages ("all" is every one), and the directory (None: standard error)."""
  stages: frozenset[str] = frozenset()
  directory: str | None = None

  def wants(self, stage: str) -> bool:
    return stage in self.stages or "all" in self.stages


@dataclasses.dataclass(frozen=True, slots=True)
class Config:
  """The switches as read; the fields are those of `SWITCHES`."""
  dump: Dump
  force: tuple[tuple[str, str], ...]
  cache: bool
  cache_dir: str
  ptxas: str | None
  lineinfo: bool
  verify: bool
  stop_after: str | None
  backend: str | None
  debug: bool
  profile: bool
  target: str | None


@dataclasses.dataclass(frozen=True, slots=True)
class Switch:
  """One environment variable.

  Attributes:
    field: its name in `Config`.
    default: its value, as a user would write it, where it is not set; "" where that means nothing.
    example: a value to show.
  """
  name: str
  field: str
  default: str
  example: str
  meaning: str
  parse: Callable[[str], object]


def _bool(text: str) -> bool:
  if text not in ("0", "1"):
    raise ValueError("0 or 1")
  return text == "1"


def _text(text: str) -> str | None:
  return text or None


def _backend(text: str) -> str | None:
  if text not in ("", "xla", "sim"):
    raise ValueError("xla or sim")
  return text or None


def _dump(text: str) -> Dump:
  stages, at, directory = text.partition("@")
  if at and not directory:
    raise ValueError("a directory after `@`")
  return Dump(frozenset(filter(None, (s.strip() for s in stages.split(",")))), directory or None)


def _force(text: str) -> tuple[tuple[str, str], ...]:
  pairs = [tuple(part.strip().split(":")) for part in text.split(",")] if text else []
  if not all(len(pair) == 2 and all(pair) for pair in pairs):
    raise ValueError("`op:variant` pairs, separated by commas")
  return tuple((op, variant) for op, variant in pairs)


SWITCHES = (
    Switch("TT_DUMP", "dump", "", "layout,ptx", "print these stages of every compilation to standard error, or, as "
           "`all@DIR`, write them to files below DIR", _dump),
    Switch("TT_FORCE", "force", "", "copy:cp_async", "force variants of tile ops; where one declines, its reason is "
           "the error", _force),
    Switch("TT_CACHE", "cache", "1", "0", "0: keep compiled kernels in memory only", _bool),
    Switch("TT_CACHE_DIR", "cache_dir", "~/.cache/tiletrace", "/tmp/tiletrace", "where compiled kernels are kept",
           os.path.expanduser),
    Switch("TT_PTXAS", "ptxas", "", "/usr/local/cuda/bin/ptxas", "the assembler to use; otherwise the wheel "
           "nvidia-cuda-nvcc, PATH and /usr/local/cuda* are searched", _text),
    Switch("TT_LINEINFO", "lineinfo", "0", "1", "1: line tables in the machine code, so that profilers show Python "
           "lines", _bool),
    Switch("TT_VERIFY", "verify", "1", "0", "0: skip the checks between compiler passes", _bool),
    Switch("TT_STOP_AFTER", "stop_after", "", "schedule", "compile up to this stage and no further", _text),
    Switch("TT_BACKEND", "backend", "", "sim", "how kernels run whose tile_call names no backend: xla as jax ops, sim "
           "in the simulator", _backend),
    Switch("TT_DEBUG", "debug", "0", "1", "1: kernels print (`tt.debug_print`) and check (`tt.debug_check`, "
           "`tt.assume`), as with CompileOptions(debug=True)", _bool),
    Switch("TT_PROFILE", "profile", "0", "1", "1: kernels record the times of `tt.profile`, as with "
           "CompileOptions(profile=True)", _bool),
    Switch("TT_TARGET", "target", "", "sm_80", "the target of kernels whose options name none; otherwise that of the "
           "GPU, sm_90a where there is none", _text),
)


def read(environ: Mapping[str, str] | None = None) -> Config:
  """The switches as the environment has them now. An empty variable counts as not set.

  Raises:
    ConfigError: a value that its switch does not take.
  """
  environ = os.environ if environ is None else environ
  values = {}
  for switch in SWITCHES:
    text = environ.get(switch.name) or switch.default
    try:
      values[switch.field] = switch.parse(text)
    except ValueError as e:
      raise ConfigError(f"{switch.name} must be {e}, got {text!r}",
                        hint=f"for example {switch.name}={switch.example}: {switch.meaning}") from None
  return Config(**values)


def describe() -> str:
  """The switches as a Markdown table, for the documentation."""
  rows = [f"| `{s.name}` | `{s.default or ' '}` | `{s.example}` | {s.meaning} |" for s in SWITCHES]
  return "\n".join(["| variable | default | example | meaning |", "|---|---|---|---|", *rows])
