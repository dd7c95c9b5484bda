"""tt.timeline: what profiled kernels record, as a file for Perfetto."""
from __future__ import annotations

import json
import os
import pathlib
from types import TracebackType
from typing import Self

import jax

from tiletrace.lowering.profile import COLLECTORS, Event, perfetto


class timeline:
  """Collects the spans (`tt.profile`) of kernels that run inside, and writes them at its end.

  The file is in the Trace Event Format: https://ui.perfetto.dev and chrome://tracing open it. A process is an SM, a
  thread a warpgroup of a CTA; a span's arguments are the program's ids, its cycles and its line. Times are those of
  %globaltimer, which all SMs share and which the hardware may count in steps; of a warpgroup with many spans the newest
  are kept.

  Args:
    path: of the file; None: none is written.
  Attributes:
    events: all spans, in no order.

  Example:
    >>> def kernel(x, y):
    ...   with tt.profile("add"):
    ...     y[...] = x[...] + 1
    >>> x = jnp.ones(128)
    >>> options = tt.CompileOptions(profile=True)
    >>> f = tt.tile_call(kernel, jax.ShapeDtypeStruct(x.shape, x.dtype), grid=1, backend="sim", options=options)
    >>> with tt.timeline("trace.json") as t:
    ...   y = f(x)
    >>> [event.name for event in t.events]
    ['add']
  """

  def __init__(self, path: str | os.PathLike[str] | None = None):
    self.path = None if path is None else pathlib.Path(path)
    self.events: list[Event] = []

  def __enter__(self) -> Self:
    COLLECTORS.append(self.events.extend)
    return self

  def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
               traceback: TracebackType | None) -> None:
    jax.effects_barrier()                       # what kernels recorded arrives after their results
    COLLECTORS.remove(self.events.extend)
    if self.path is not None and kind is None:
      self.path.write_text(json.dumps(perfetto(self.events)), encoding="utf-8")
