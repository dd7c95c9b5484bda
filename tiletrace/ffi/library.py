"""Finds and loads libtiletrace_ffi.so and makes its handlers known to XLA.

Importing tiletrace registers them when the library is there, because a cached or exported executable runs without
anything being traced or lowered. When it is not there, only the CUDA path says so.
"""
from __future__ import annotations

import ctypes
import functools
import pathlib
import warnings

import jax

from tiletrace.core.errors import LaunchError

# Exported programs call the target by name: a change of the attributes needs a new one, beside the old.
TARGET = "tiletrace_launch_v1"
TARGET_OF_ANY_SIZE = "tiletrace_launch_of_any_size_v1"
SCHEMA = 3

PATH = pathlib.Path(__file__).with_name("libtiletrace_ffi.so")
BUILD_COMMAND = "cmake -S . -B build && cmake --build build"


@functools.cache
def load() -> ctypes.CDLL:
  """Loads the library, once per process.

  Raises:
    LaunchError: the library was not built, cannot be loaded, or belongs to another version of tiletrace.
  """
  if not PATH.exists():
    raise LaunchError(
        f"the CUDA launcher {PATH} is missing: tiletrace was installed without a C++ compiler, or runs from a source "
        "checkout that was not built",
        hint=f"install a C++17 compiler, then reinstall tiletrace, or run `{BUILD_COMMAND}` in the checkout")
  try:
    library = ctypes.CDLL(str(PATH))
    schema = library.tt_schema_version()
  except (OSError, AttributeError) as e:
    raise LaunchError(f"the CUDA launcher {PATH} cannot be loaded: {e}",
                      hint=f"rebuild it with `{BUILD_COMMAND}`, or reinstall tiletrace") from e
  if schema != SCHEMA:
    raise LaunchError(f"the CUDA launcher {PATH} reads attributes of version {schema}, this tiletrace writes {SCHEMA}",
                      hint=f"rebuild it with `{BUILD_COMMAND}`, or reinstall tiletrace")
  return library


@functools.cache
def register() -> None:
  """Registers the launcher for CUDA, once per process.

  Safe before and after the backend exists: JAX queues registrations until then, and the handlers register the type of
  their state themselves, when XLA asks for their metadata, so no order can be wrong.

  Raises:
    LaunchError: as `load`.
  """
  library = load()
  for target in (TARGET, TARGET_OF_ANY_SIZE):
    jax.ffi.register_ffi_target(target, {
        "instantiate": jax.ffi.pycapsule(library.tt_instantiate),
        "prepare": jax.ffi.pycapsule(library.tt_prepare),
        "execute": jax.ffi.pycapsule(library.tt_execute),
    }, platform="CUDA")


def register_at_import() -> None:
  """Registers the launcher when its library is there. A library that does not load is no reason to fail on a CPU."""
  if PATH.exists():
    try:
      register()
    except LaunchError as e:
      warnings.warn(str(e), RuntimeWarning, stacklevel=2)
