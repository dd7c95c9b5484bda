"""tt.plot_layout: layouts as an image, or as a page that answers where an element lies."""
from __future__ import annotations

import colorsys
import importlib
import json
import os
import pathlib
import textwrap
from collections.abc import Sequence
from typing import Any

from tiletrace.core.dtypes import canonical
from tiletrace.core.errors import TileTypeError
from tiletrace.core.source import user_loc
from tiletrace.lowering.layouts.notation import Notation
from tiletrace.lowering.layouts.relation import Layout
from tiletrace.report.legend import Legend
from tiletrace.report.picture import Picture, picture
from tiletrace.stages import Compiled, Lowered

_PAGE = pathlib.Path(__file__).with_name("page.html")
_LABELLED = 32                  # rows and columns of an image up to which cells have text
_GOLDEN = 0.618033988749895     # of the circle of hues, from one thread to the next: neighbours differ


def plot_layout(what: Layout | Notation | Lowered | Compiled, path: str | os.PathLike[str], *,
                only: str | Sequence[str] | None = None, dtype: Any = None, rows: int = 64,
                columns: int = 64) -> pathlib.Path:
  """Draws layouts: which thread and register, or which place in shared memory, has each element.

  Args:
    what: a layout, in the notation of tiletrace.layout or as an object; or a lowered or compiled kernel, of which all
      layouts are drawn.
    path: ends in .png or .svg (by matplotlib, which tiletrace does not bring along), or in .html: one page without any
      other file, where a click on an element shows who holds it and in which bank it lies, in all layouts of its shape.
    only: of a kernel: names of variables ("acc") or of layouts ("L2", as in the report).
    dtype: of a layout in shared memory, for its banks; of a kernel it is known.
    rows, columns: the most of the last two dimensions that are drawn; the dimensions before stand at 0.
  Returns:
    the path.
  Raises:
    TileTypeError: `what`, the ending or a name is none of these.
    ImportError: an image without matplotlib.

  Example:
    >>> from tiletrace.layout import S, lane, reg
    >>> tt.plot_layout(S[(16, 16):(1 @ lane, 1 @ reg)], "mine.html").name
    'mine.html'
  """
  path = pathlib.Path(path)
  pictures = _pictures(what, only, dtype, rows, columns)
  if path.suffix == ".html":
    path.write_text(page(pictures), encoding="utf-8")
  elif path.suffix in (".png", ".svg"):
    drawn = figure(pictures)
    with importlib.import_module("matplotlib").rc_context({"svg.fonttype": "none"}):      # text stays text
      drawn.savefig(path)
  else:
    raise TileTypeError(f"plot_layout: {path.name!r} ends in {path.suffix or 'nothing'}", loc=user_loc(),
                        hint=".png, .svg or .html")
  return path


def _pictures(what: Any, only: str | Sequence[str] | None, dtype: Any, rows: int, columns: int) -> list[Picture]:
  what = what.lowered if isinstance(what, Compiled) else what
  what = what.layout() if isinstance(what, Notation) else what
  if isinstance(what, Layout):
    return [picture(what, itemsize=None if dtype is None else canonical(dtype).itemsize, rows=rows, columns=columns)]
  if not isinstance(what, Lowered):
    raise TileTypeError(f"plot_layout takes a layout or a lowered kernel, got {type(what).__name__}", loc=user_loc(),
                        hint="f.lower(x), or S[(8, 4):(4 @ lane, 1 @ lane)] of tiletrace.layout")
  legend = Legend(what.lowering)
  found: dict[tuple[Layout, int | None], list[str]] = {}        # one for each width of elements: their banks differ
  for layout, owners in legend.owners.items():
    for var in owners:
      names = found.setdefault((layout, var.dtype.itemsize if "off" in layout.axes else None), [])
      names += [legend.variables[var]] if legend.variables[var] not in names else []
  wanted = None if only is None else {only} if isinstance(only, str) else set(only)
  known = {name for (layout, _), names in found.items() for name in (legend.names[layout], *names)}
  if wanted is not None and wanted - known:
    raise TileTypeError(f"plot_layout: only={sorted(wanted - known)}, and the kernel has no such layout or variable",
                        loc=user_loc(), hint=", ".join(sorted(known)))
  return [picture(layout, name=legend.names[layout], variables=names, itemsize=itemsize, rows=rows, columns=columns)
          for (layout, itemsize), names in found.items()
          if wanted is None or wanted & {legend.names[layout], *names}]


# ---- the page


def page(pictures: Sequence[Picture]) -> str:
  """One HTML page that needs no other file: the pictures as data, and the script that draws them."""
  data = json.dumps([p.data() for p in pictures], separators=(",", ":")).replace("<", "\\u003c")
  return _PAGE.read_text(encoding="utf-8").replace("/* pictures */", data)


# ---- the image


def figure(pictures: Sequence[Picture]) -> Any:
  """A matplotlib Figure with the pictures below each other. Colours tell threads, or banks, apart.

  Raises:
    ImportError: there is no matplotlib.
  """
  heights = [max(1.5, 0.32 * min(p.rows, _LABELLED)) + 0.7 for p in pictures]
  width = max(4.0, *(0.55 * min(p.columns, _LABELLED) for p in pictures))
  try:
    matplotlib = importlib.import_module("matplotlib.figure")
  except ImportError as e:
    raise ImportError("tt.plot_layout draws images with matplotlib, which is not installed: pip install matplotlib, "
                      "or write a page: .html") from e
  drawn = matplotlib.Figure(figsize=(width + 0.8, sum(heights)), layout="constrained")
  for ax, p in zip(drawn.subplots(len(pictures), squeeze=False, height_ratios=heights)[:, 0], pictures):
    ax.imshow([[colour(p, i, j) for j in range(p.columns)] for i in range(p.rows)], aspect="auto")
    ax.set_title("\n".join(textwrap.wrap(f"{p.name} = {p.text}", int(12 * width))
                           + ([", ".join(p.variables)] if p.variables else [])), fontsize=8)
    if p.rows <= _LABELLED and p.columns <= _LABELLED:
      for i in range(p.rows):
        for j in range(p.columns):
          ax.text(j, i, label(p, i, j), ha="center", va="center", fontsize=5)
  return drawn


def label(p: Picture, row: int, column: int) -> str:
  """What a cell says: `T3:1` for register 1 of thread 3, `+` for more copies; an offset; or nothing."""
  found = p.at(row, column)
  if not found:
    return ""
  return str(found[0][0]) if p.shared else f"T{found[0][0]}:{found[0][1]}" + ("+" if len(found) > 1 else "")


def colour(p: Picture, row: int, column: int) -> tuple[float, float, float]:
  """By thread, or by bank; white where nobody holds the element."""
  found, bank = p.at(row, column), p.bank(row, column)
  if not found:
    return 1.0, 1.0, 1.0
  return colorsys.hls_to_rgb((bank / 32 if bank is not None else found[0][0] * _GOLDEN) % 1, 0.82, 0.75)

