"""tt.plot_layout: cells are what the layouts say, in images and in the page and its script."""
from __future__ import annotations

import html.parser
import importlib
import json
import pathlib
import re
import shutil
import subprocess
import xml.etree.ElementTree
from typing import Any

import numpy as np
import pytest

import tiletrace as tt
from tests.lowering.kernels import BF16, F32
from tests.report.kernels import gemm, relayout
from tiletrace.core.errors import TileTypeError
from tiletrace.layout import R, S, lane, off, reg, warp
from tiletrace.lowering.layouts.catalog import wgmma_accumulator
from tiletrace.lowering.layouts.fragment import row_of
from tiletrace.lowering.layouts.relation import Layout
from tiletrace.lowering.layouts.shared import shared_layout
from tiletrace.report.picture import picture
from tiletrace.report.plot import colour, label

CLICK = pathlib.Path(__file__).with_name("click.mjs")
SVG = "{http://www.w3.org/2000/svg}"
SMALL = S[(8, (4, 2)):(4 @ lane, (1 @ lane, 1 @ reg))]


class _Page(html.parser.HTMLParser):
  """Its tags, and the text of its scripts."""

  def __init__(self, text: str):
    super().__init__()
    self.tags: list[tuple[str, dict[str, str | None]]] = []
    self.scripts: list[str] = []
    self.feed(text)

  def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
    self.tags.append((tag, dict(attrs)))
    if tag == "script":
      self.scripts.append("")

  def handle_data(self, data: str) -> None:
    if self.tags and self.tags[-1][0] == "script":
      self.scripts[-1] += data


def pictures_of(path: pathlib.Path) -> list[dict[str, Any]]:
  return json.loads(_Page(path.read_text()).scripts[0])


# ---- cells

@pytest.mark.parametrize("layout", [wgmma_accumulator(64, 32), row_of(wgmma_accumulator(64, 32), 1),
                                    (S[(2, 8):(1 @ warp, 1 @ lane)] + R[4:8 @ lane] + 5 @ warp).layout()], ids=str)
def test_a_cell_has_every_thread_and_register_that_holds_the_element(layout: Layout):
  drawn = picture(layout, rows=64, columns=64)
  held: dict[tuple[int, ...], set[tuple[int, int]]] = {}
  for w, l, r in np.ndindex(*(layout.extent(a) for a in ("warp", "lane", "reg"))):
    at = layout.start("warp") + w
    found = layout.table(("warp", "lane", "reg"))[w, l, r]
    held.setdefault((0, 0, *found.tolist())[-2:], set()).add((l + 32 * at, r))

  assert {(i, j): set(drawn.at(i, j)) for i in range(drawn.rows) for j in range(drawn.columns)} == held


@pytest.mark.parametrize(("dtype", "swizzle"), [(BF16, 128), (F32, 64), (np.int8, 32)])
def test_a_cell_of_shared_memory_has_the_offset_and_its_bank(dtype, swizzle):
  item = np.dtype(dtype).itemsize
  layout = shared_layout((16, 128 // item), 8 * item, swizzle)
  drawn = picture(layout, itemsize=item, columns=999)

  for i, j in [(0, 0), (3, 5), (15, 128 // item - 1)]:
    offset = layout.offset_of((i, j))
    assert drawn.at(i, j) == ((offset,),) and drawn.bank(i, j) == offset * item // 4 % 32


def test_padding_is_not_drawn_and_dimensions_before_the_last_two_stand_at_0():
  layout = S[(3, 4, 8):(32 @ off, 8 @ off, 1 @ off)].layout().with_valid((3, 3, 8))
  drawn = picture(layout)

  assert (drawn.rows, drawn.columns, drawn.shape) == (3, 8, (3, 3, 8))
  assert [drawn.at(i, 7) for i in range(3)] == [((7,),), ((15,),), ((23,),)]


# ---- images

def test_a_png_is_one(tmp_path):
  pytest.importorskip("matplotlib")
  path = tt.plot_layout(gemm().lowered, tmp_path / "gemm.png", only="acc", rows=16, columns=8)

  assert path == tmp_path / "gemm.png" and path.read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
  image = importlib.import_module("matplotlib.image").imread(path)
  assert image.shape[0] > 300 and len(np.unique(image.reshape(-1, image.shape[-1]), axis=0)) > 64   # a colour a thread


def test_an_svg_has_the_text_of_every_cell(tmp_path):
  pytest.importorskip("matplotlib")
  path = tt.plot_layout(SMALL, tmp_path / "small.svg")

  texts = [t.text for t in xml.etree.ElementTree.parse(path).iter(f"{SVG}text")]
  cells = [f"T{4 * i + j % 4}:{j // 4}" for i in range(8) for j in range(8)]
  assert sorted(t for t in texts if t and t.startswith("T")) == sorted(cells)
  assert any(t and t.startswith("layout = S[") for t in texts)


def test_colours_tell_threads_apart_and_copies_are_marked():
  drawn = picture(row_of(wgmma_accumulator(64, 32), 1))

  assert label(drawn, 0, 0) == "T0:0+" and label(drawn, 0, 1) == "T4:0+"
  threads = {drawn.at(0, j)[0][0] for j in range(drawn.columns)}
  assert len({colour(drawn, 0, j) for j in range(drawn.columns)}) == len(threads) == 32


def test_an_image_without_matplotlib_names_the_remedy(tmp_path, monkeypatch):
  def missing(name: str) -> None:
    raise ImportError(name)

  monkeypatch.setattr("tiletrace.report.plot.importlib.import_module", missing)
  with pytest.raises(ImportError, match=r"pip install matplotlib, or write a page: \.html"):
    tt.plot_layout(SMALL, tmp_path / "small.png")
  assert tt.plot_layout(SMALL, tmp_path / "small.html").exists()


# ---- the page

@pytest.fixture(scope="module")
def gemm_page(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
  return tt.plot_layout(relayout().lowered, tmp_path_factory.mktemp("page") / "layouts.html")


def test_the_page_needs_no_other_file(gemm_page):
  page = _Page(gemm_page.read_text())

  assert [t for t, a in page.tags if {"src", "href"} & a.keys() or t in ("link", "img", "iframe")] == []
  assert not re.search(r"https?:|import\s|fetch\(|XMLHttp", page.scripts[1])
  assert len(page.scripts) == 2 and '"use strict"' in page.scripts[1]


def test_the_pages_data_are_the_layouts_of_the_kernel(gemm_page):
  lowered = relayout().lowered
  by_name = {p["name"]: p for p in pictures_of(gemm_page)}
  layouts = lowered.report().data["layouts"]

  assert {n: p["text"] for n, p in by_name.items()} == {n: x["layout"] for n, x in layouts.items()}
  program = lowered.lowering.program
  (acc,) = [v for v in program.layouts if v.hint == "acc" and v in program.layouts]
  (mine,) = [p for p in by_name.values() if "acc" in p["variables"]]
  at = program.layouts[acc].locate((9, 21))
  assert mine["cells"][9 * mine["columns"] + 21] == [at["lane"] + 32 * at["warp"], at["reg"]]


def test_names_in_the_data_cannot_end_the_script(tmp_path, monkeypatch):
  monkeypatch.setattr(Layout, "__str__", lambda self: "</script><b>")
  path = tt.plot_layout(SMALL, tmp_path / "x.html")

  assert pictures_of(path)[0]["text"] == "</script><b>" and "</script><b>" not in path.read_text()


def click(page: pathlib.Path, *at: tuple[int, int, int]) -> dict[str, Any]:
  node = shutil.which("node")
  if node is None:
    pytest.skip("there is no node to run the page's script")
  done = subprocess.run([node, str(CLICK), str(page), json.dumps(at)], capture_output=True, text=True, check=False)
  assert done.returncode == 0, done.stderr
  return json.loads(done.stdout)


def test_a_click_tells_the_owner_and_in_other_layouts_of_the_shape_the_bank(gemm_page):
  pictures = pictures_of(gemm_page)
  names = [p["name"] for p in pictures]
  which, shared = (next(i for i, p in enumerate(pictures) if v in p["variables"]) for v in ("acc", "relayout"))
  result = click(gemm_page, (which, 9, 21), (shared, 9, 21))

  assert [o.split(":")[0] for o in result["options"]] == names
  thread, register = pictures[which]["cells"][9 * 64 + 21]
  (offset,) = pictures[shared]["cells"][9 * 64 + 21]
  owner = f"thread {thread} (warp {thread // 32}, lane {thread % 32}), register {register}"
  place = f"offset {offset}, byte {2 * offset}, bank {2 * offset // 4 % 32}"
  first, second = result["told"]
  assert first["told"].splitlines()[0] == "element (9, 21)"
  assert owner in first["told"] and place in first["told"] and place in second["told"]
  assert [t["told"].splitlines()[2].split()[0] for t in (first, second)] == [names[which], names[shared]]
  assert first["label"] == f"T{thread}:{register}" and second["label"] == str(offset)
  assert first["text"].startswith(f"{names[which]} = {pictures[which]['text']}")


def test_a_click_outlines_what_the_thread_holds_or_what_lies_in_the_bank(gemm_page):
  pictures = pictures_of(gemm_page)
  which, shared = (next(i for i, p in enumerate(pictures) if v in p["variables"]) for v in ("acc", "relayout"))
  first, second = click(gemm_page, (which, 0, 0), (shared, 0, 0))["told"]

  assert first["outlined"] == 64 * 64 // 128
  assert second["outlined"] == 64 * 64 // 32


def test_a_click_tells_all_copies(tmp_path):
  path = tt.plot_layout(row_of(wgmma_accumulator(64, 32), 1), tmp_path / "copies.html")
  (told,) = click(path, (0, 0, 9))["told"]

  lines = told["told"].splitlines()
  assert lines[0] == "element (9)" and "4 copies:" in told["told"] and told["label"].endswith("+")
  assert sum("register" in line for line in lines) == 4


def test_the_page_works_in_a_browser(gemm_page):
  playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
  with playwright.sync_playwright() as p:
    try:
      browser = p.chromium.launch()
    except playwright.Error as e:
      pytest.skip(f"there is no Chromium: {e}")
    page = browser.new_page()
    page.goto(gemm_page.as_uri())
    page.click("#cells", position={"x": 5, "y": 5})
    assert re.match(r"element \((0, )+0\)", page.inner_text("#told"))
    browser.close()


# ---- refusals

@pytest.mark.parametrize(("what", "path", "options", "said"), [
    (3, "a.html", {}, "takes a layout or a lowered kernel, got int"),
    (SMALL, "a.pdf", {}, r"'a.pdf' ends in .pdf"),
    (SMALL, "a", {}, "ends in nothing"),
])
def test_what_cannot_be_drawn_is_refused(tmp_path, what, path, options, said):
  with pytest.raises(TileTypeError, match=said):
    tt.plot_layout(what, tmp_path / path, **options)


def test_a_name_that_the_kernel_does_not_have_is_refused_with_those_that_it_has(tmp_path):
  with pytest.raises(TileTypeError, match="no such layout or variable") as e:
    tt.plot_layout(gemm().lowered, tmp_path / "a.html", only=["acc", "nothing"])
  assert "acc" in str(e.value.hint) and "a_s" in str(e.value.hint)


def test_a_layout_of_shared_memory_has_banks_once_its_dtype_is_told(tmp_path):
  layout = shared_layout((8, 64), 16, 128)
  unknown, known = (pictures_of(tt.plot_layout(layout, tmp_path / "a.html", dtype=d))[0] for d in (None, BF16))

  assert (unknown["itemsize"], known["itemsize"]) == (None, 2)
