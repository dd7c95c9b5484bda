"""The site: its navigation has every page, links lead somewhere, and mkdocs builds it without a warning."""
from __future__ import annotations

import importlib.util
import os
import pathlib
import re
import subprocess
import sys

import pytest

from tests.docs.pages import DOCS

ROOT = DOCS.parent
PAGES = sorted(str(page.relative_to(DOCS)) for page in DOCS.rglob("*.md"))
MISSING = [name for name in ("mkdocs", "material", "mkdocstrings") if importlib.util.find_spec(name) is None]


def test_the_navigation_has_every_page_once():
  nav = (ROOT / "mkdocs.yml").read_text().partition("\nnav:\n")[2]

  assert sorted(re.findall(r"(\S+\.md)$", nav, re.MULTILINE)) == PAGES


def anchors(text: str) -> set[str]:
  """What a link to a page may end in: its headings, as mkdocs and GitHub write them, and its own anchors."""
  headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
  slugs = {re.sub(r"[^\w -]", "", h.lower()).replace(" ", "-") for h in headings}
  return slugs | set(re.findall(r'id="([^"]+)"', text))


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_to_headings_that_exist(page: str):
  text = re.sub(r"```.*?```|`[^`\n]*`", "", (DOCS / page).read_text(), flags=re.DOTALL)
  for target, anchor in re.findall(r"\]\(([^)#:]*)(?:#([^)]*))?\)", text):
    path = (DOCS / page).parent / target if target else DOCS / page
    assert path.exists(), target
    assert not anchor or anchor in anchors(path.read_text()), f"{target}#{anchor}"


@pytest.mark.skipif(bool(MISSING), reason=f"not installed: {', '.join(MISSING)}; pip install -e '.[docs]' brings them")
def test_mkdocs_builds_the_site_without_warnings(tmp_path: pathlib.Path):
  done = subprocess.run([sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)], cwd=ROOT,
                        env=os.environ | {"NO_MKDOCS_2_WARNING": "1"}, capture_output=True, text=True, check=False)

  assert done.returncode == 0, done.stderr
  assert "WARNING" not in done.stderr
  pages = {page.parent.name: page.read_text() for page in tmp_path.glob("reference/*/index.html")}
  assert 'id="tiletrace.gemm"' in pages["gemm"]
  assert "acc += a @ b" in pages["gemm"]
  assert pages["gemm"].count("<table>") == 1                       # the docstring's table of dtypes
  assert pages["gemm"].count("Examples:") == 1
  assert pages["functions"].count("Examples:") == pages["functions"].count('class="doc doc-object doc-function"')
  text = "".join(pages.values())
  assert "<blockquote>" not in text, "an example that was not taken for one"
  assert "**unknown" not in re.sub(r"<[^>]+>", "", text)
