"""A process for kernels that may fail: a GPU's error spoils the CUDA context of its process for all that follows."""
from __future__ import annotations

import multiprocessing
import traceback
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import numpy as np

from tiletrace.ffi import launch
from tiletrace.ffi.image import KernelImage

_POOL: list[ProcessPoolExecutor] = []     # none, or the one


def in_worker(function: Callable[..., Any], *args: Any) -> Any:
  """function(*args) in another process, the same one as long as nothing fails in it.

  Raises:
    AssertionError: the function raised; the next call gets a new process.
  """
  if not _POOL:
    _POOL.append(ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")))
  try:
    failure, value = _POOL[0].submit(_caught, function, args).result()
  except BaseException:
    _discard()
    raise
  if failure:
    _discard()
    raise AssertionError(failure)
  return value


def _discard() -> None:
  _POOL.pop().shutdown(wait=False, cancel_futures=True)


def _caught(function: Callable[..., Any], args: tuple) -> tuple[str, Any]:
  """(what went wrong, the result): not every exception can be sent."""
  try:
    return "", function(*args)
  except Exception:
    return traceback.format_exc(), None


def launched(image: KernelImage, inputs: np.ndarray, nbytes: int) -> np.ndarray:
  """The `nbytes` that a kernel with one input and one output leaves."""
  source, target = launch.upload(inputs), launch.empty((nbytes,), np.uint8)
  launch.Launcher(image)(source.pointer, target.pointer)
  return target.download()
