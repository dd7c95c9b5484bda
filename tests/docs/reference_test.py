"""docs/reference: every public name is on one page, every name on a page exists, and every example runs."""
from __future__ import annotations

import doctest
import inspect
import pathlib
import pkgutil
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tiletrace as tt
from tiletrace import kernels
from tiletrace.core.errors import TileTraceError

PAGES = sorted((pathlib.Path(__file__).parents[2] / "docs/reference").glob("*.md"))
PYTHONS_OWN = {"abs", "all", "any", "max", "min", "pow", "range", "round", "sum"}       # public, but not in __all__
NAMES = sorted({*tt.__all__, *PYTHONS_OWN})
CONSTANTS = {"SQUARE", "FULL_ROW", "FULL_COL"}
SEE = re.compile(r"The example of `tt\.(\w+)` uses it\.")


def documented() -> list[tuple[str, str | None]]:
  """What the pages take from docstrings: the object, and its heading."""
  text = "\n".join(page.read_text() for page in PAGES)
  return re.findall(r"^::: (\S+)\n(?:    options:\n      heading: tt\.(\w+)$)?", text, re.MULTILINE)


def test_every_public_name_is_on_one_page():
  text = "\n".join(page.read_text() for page in PAGES)
  headings = re.findall(r"heading: tt\.(\w+)$", text, re.MULTILINE)
  written = re.findall(r"tt\.(\w+)", "".join(re.findall(r"^## tt\..*$", text, re.MULTILINE)))

  assert sorted([*headings, *written]) == NAMES


def test_every_name_on_a_page_is_the_object_of_its_docstring():
  found = documented()

  assert len(found) > 100
  for path, heading in found:
    obj = pkgutil.resolve_name(path)
    assert inspect.getdoc(obj), path
    if heading:
      assert obj is getattr(tt, heading), path


def test_every_ready_kernel_is_on_its_page():
  listed = [path.rpartition(".")[2] for path, _ in documented() if path.startswith("tiletrace.kernels.")]

  assert sorted(listed) == [name for name in kernels.__all__ if not name.endswith("_reference")]


def examples(name: str) -> list[doctest.Example]:
  return doctest.DocTestParser().get_examples(inspect.getdoc(getattr(tt, name)) or "", name)


@pytest.mark.parametrize("name", [n for n in NAMES if n not in CONSTANTS])
def test_every_name_has_an_example_that_uses_it(name: str):
  """In its own docstring, or in one that it names; of the kinds of errors only the base has one."""
  obj = getattr(tt, name)
  if isinstance(obj, type) and issubclass(obj, TileTraceError) and obj is not TileTraceError:
    return
  elsewhere = SEE.search(inspect.getdoc(obj) or "")
  shown = "".join(e.source for e in examples(elsewhere[1] if elsewhere else name))

  assert shown
  if isinstance(obj, type) and name in ("Ref", "Tile", "TileCall"):     # made by others
    return
  assert re.search(rf"\b{obj.__name__.removesuffix('_')}\b", shown)


@pytest.mark.parametrize("path", [path for path, _ in documented()])
def test_the_arguments_of_a_docstring_are_those_of_the_function(path: str):
  obj = pkgutil.resolve_name(path)
  found = re.search(r"^Args:\n((?:  .*\n|\n)*)", (inspect.getdoc(obj) or "") + "\n", re.MULTILINE)
  named = [name.strip(" *") for names in re.findall(r"^  (\S[^:(]*):", found[1] if found else "", re.MULTILINE)
           for name in names.split(",")]

  assert not named or set(named) <= set(inspect.signature(obj).parameters)


class Runner(doctest.DocTestRunner):
  """Collects what failed."""

  def __init__(self):
    super().__init__()
    self.failed: list[str] = []

  def report_failure(self, out, test, example, got):
    self.failed.append(f"{example.source}gave\n{got}")

  def report_unexpected_exception(self, out, test, example, exc_info):
    self.failed.append(f"{example.source}raised {exc_info[1]!r}")


def run(name: str, obj: object) -> list[str]:
  """Runs the examples of a docstring from the imports that docs/reference/index.md names."""
  imports = {"jax": jax, "jnp": jnp, "tt": tt}
  shown = doctest.DocTestParser().get_doctest(inspect.getdoc(obj) or "", imports, name, None, 0)
  assert not [e.source for e in shown.examples if e.options.get(doctest.SKIP)], "an example that nothing runs"
  runner = Runner()
  runner.run(shown, out=lambda text: None)
  return runner.failed


@pytest.mark.parametrize("name", [n for n in NAMES if n not in CONSTANTS])
def test_the_examples_of_the_language_run(name: str, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch):
  monkeypatch.chdir(tmp_path)                 # some write a file

  assert not run(name, getattr(tt, name))


def test_examples_fail_where_their_output_is_not_what_they_say():
  def wrong():
    """
    >>> tt.cdiv(1000, 128)
    9
    """

  assert run("wrong", wrong) == ["tt.cdiv(1000, 128)\ngave\n8\n"]


def test_the_example_of_a_product_is_one():
  """`tt.gemm`'s example says True of two different matrices, transposed ones among them."""
  shown = "".join(e.source for e in examples("gemm"))

  assert "b_s.T" in shown
  scope: dict[str, object] = {"jax": jax, "jnp": jnp, "tt": tt}
  for example in examples("gemm")[:-1]:
    exec(compile(example.source, "<example>", "exec"), scope)
  assert float(np.asarray(scope["c"]).std()) > 1
