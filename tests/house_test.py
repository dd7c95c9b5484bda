"""The rules of the house (CONTRIBUTING.md), as tests: floors, sizes, names, tables, documents."""
from __future__ import annotations

import ast
import functools
import pathlib
import re
import sys
from collections.abc import Iterator

import pytest

import tiletrace
from tiletrace.core import config, errors, rules

ROOT = pathlib.Path(__file__).parents[1]
PACKAGE = pathlib.Path(tiletrace.__file__).parent
TREES = ("tiletrace", "tests", "examples", "benchmarks")

# A module belongs to the entry that is the longest prefix of its name. It imports from its own floor and lower ones.
FLOORS: tuple[tuple[str, ...], ...] = (
    ("core.source", "core.pretty", "core.pytrees"),
    ("core.errors", "core.bytecode", "core.config", "core.foreign"),
    ("core.dtypes", "core.types", "core.effects"),
    ("core.dimensions",),
    ("core.graph", "core.rules"),
    ("core.printer", "core.verify", "core.digest"),
    ("core.trace", "core.scopes", "core.simplify", "core.batch"),
    ("core.tile", "core.ref", "core.operands", "core.indexed"),
    ("core.ops",),
    ("core.batch", "core.specialise"),
    ("lowering.target", "lowering.options", "lowering.layouts", "lowering.ptx", "layout"),
    ("lowering.debug", "lowering.facts", "lowering.indexed", "lowering.hazards", "lowering.ownership",
     "lowering.shared_views", "lowering.matrix_views", "lowering.strides", "lowering.tables", "lowering.tma_plan",
     "lowering.wgmma_plan", "lowering.mma_plan", "lowering.profile", "lowering.steps", "lowering.tiles",
     "lowering.variants", "lowering.words", "lowering.infer.constraints"),
    ("lowering.infer",),
    ("lowering.select",),
    ("lowering.schedule",),
    ("lowering.emit",),
    ("lowering.assemble", "lowering.cache", "lowering.pipeline", "lowering.xla"),
    ("sim", "ffi", "jaxpr"),
    ("report", "stages", "api", "timeline"),
    ("",),                          # tiletrace/__init__.py
    ("kernels", "doctor", "check"),     # written with it, as users do
)
MAY_IMPORT_JAX = ("lowering.xla", "ffi", "jaxpr", "stages", "api", "timeline", "kernels", "doctor", "check")
MAY_KNOW_CUDA = ("lowering.assemble", "ffi")
CUDA_MODULES = {"cuda", "ctypes", "subprocess"}       # the driver, its libraries, its programs
CORE_MAY_IMPORT = {"numpy", "ml_dtypes", "tiletrace", *sys.stdlib_module_names}
FORBIDDEN_NAMES = {"utils", "util", "helpers", "helper", "common", "misc", "base"}
MAX_FILE, MAX_FUNCTION = 600, 80


@functools.cache
def sources() -> dict[pathlib.Path, ast.Module]:
  found = {p.relative_to(ROOT): p for tree in TREES for p in sorted((ROOT / tree).rglob("*.py"))}
  return {name: ast.parse(path.read_text()) for name, path in found.items()}


@functools.cache
def modules() -> dict[str, ast.Module]:
  """Module name below tiletrace -> its tree. Empty `__init__.py` files are left out."""
  trees = {}
  for path, tree in sources().items():
    if path.parts[0] == "tiletrace" and tree.body:
      trees[".".join(path.with_suffix("").parts[1:]).removesuffix("__init__").removesuffix(".")] = tree
  return trees


def imported(tree: ast.Module) -> Iterator[str]:
  """The full names of what a module imports at run time."""
  for node in tree.body:
    yield from _imported(node)


def _imported(node: ast.AST) -> Iterator[str]:
  if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
    return
  if isinstance(node, ast.Import):
    yield from (alias.name for alias in node.names)
  elif isinstance(node, ast.ImportFrom):
    assert node.level == 0, f"a relative import: {ast.unparse(node)}"
    for alias in node.names:
      inside = f"{node.module}.{alias.name}"
      yield inside if inside.removeprefix("tiletrace.") in modules() else str(node.module)
  for child in ast.iter_child_nodes(node):
    yield from _imported(child)


def own_imports(module: str) -> set[str]:
  """The modules of tiletrace that a module imports."""
  names = {name for name in imported(modules()[module]) if name.partition(".")[0] == "tiletrace"}
  return {name.partition(".")[2] for name in names} & modules().keys() - {module}


def foreign_imports(module: str) -> set[str]:
  return {name.partition(".")[0] for name in imported(modules()[module])}


def below(module: str, *packages: str) -> bool:
  return any(module == p or module.startswith(p + ".") for p in packages)


def floor(module: str) -> int:
  homes = [(len(entry), i) for i, entries in enumerate(FLOORS) for entry in entries
           if module == entry or (entry and module.startswith(entry + "."))]
  assert homes, f"tiletrace.{module} is on no floor: give it one in FLOORS"
  return max(homes)[1]


@functools.cache
def functions() -> list[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda]]:
  return [(f"{path}:{node.lineno}", node) for path, tree in sources().items() for node in ast.walk(tree)
          if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)]


# --- floors

@pytest.mark.parametrize("module", sorted(modules()))
def test_imports_go_down_only(module: str):
  up = [f"tiletrace.{m}" for m in own_imports(module) if floor(m) > floor(module)]
  assert not up, f"tiletrace.{module} imports from a higher floor: {up}"


def test_no_modules_import_each_other():
  done: set[str] = set()

  def visit(module: str, path: tuple[str, ...]) -> None:
    assert module not in path, f"a cycle: {' -> '.join((*path[path.index(module):], module))}"
    if module not in done:
      for m in sorted(own_imports(module)):
        visit(m, (*path, module))
      done.add(module)

  for module in modules():
    visit(module, ())
  assert done == modules().keys()


@pytest.mark.parametrize("module", sorted(m for m in modules() if below(m, "core")))
def test_the_core_imports_the_standard_library_numpy_and_itself(module: str):
  assert foreign_imports(module) <= CORE_MAY_IMPORT
  assert all(below(m, "core") for m in own_imports(module))


def test_only_the_jax_side_imports_jax():
  importers = {m for m in modules() if foreign_imports(m) & {"jax", "jaxlib"}}
  assert all(below(m, *MAY_IMPORT_JAX) for m in importers), importers


def test_only_assemble_and_ffi_know_cuda():
  knowing = {m for m in modules() if foreign_imports(m) & CUDA_MODULES}
  assert all(below(m, *MAY_KNOW_CUDA) for m in knowing), knowing


# --- files and functions

def test_files_have_at_most_600_lines():
  lengths = {str(p): len((ROOT / p).read_text().splitlines()) for p in sources()}
  assert not {p: n for p, n in lengths.items() if n > MAX_FILE}


def test_functions_have_at_most_80_lines():
  long = {f"{where} {getattr(f, 'name', 'lambda')}": f.end_lineno - f.lineno + 1 for where, f in functions()
          if f.end_lineno - f.lineno + 1 > MAX_FUNCTION}
  assert not long


def test_no_function_imports():
  imports = ast.Import | ast.ImportFrom
  assert not [where for where, f in functions() for node in ast.walk(f) if isinstance(node, imports)]


def test_no_file_is_named_for_nothing():
  parts = {p: {part.removesuffix("_test") for part in p.with_suffix("").parts} for p in sources()}
  assert not [str(p) for p in sources() if FORBIDDEN_NAMES & parts[p]]


def test_annotations_are_never_evaluated():
  """So `from __future__ import annotations` stands first in every file that has code."""
  without = [str(p) for p, tree in sources().items() if len(tree.body) > 1
             and "from __future__ import annotations" not in map(ast.unparse, tree.body[:2])]
  assert not without


def test_every_module_says_what_it_is():
  assert not [m for m, tree in modules().items() if ast.get_docstring(tree) is None]


def test_nothing_is_left_to_do():
  marker = re.compile(r"\b(TO" r"DO|FIX" r"ME|X" r"XX)\b")
  assert not [str(p) for p in sources() if marker.search((ROOT / p).read_text())]


# --- rules

def test_every_op_has_every_rule_that_its_level_needs():
  matrix = rules.coverage()
  tables = {t.concern: t.levels for t in rules.ALL_TABLES}
  required = {"type": {0, 1}, "effect": {0, 1}, "layout": {0, 1}, "emit": {0, 1}, "xla": {1}}

  assert {c: tables[c] for c in required} == required
  assert not [line for line in matrix.splitlines() if "MISSING" in line], matrix


# --- tests

def _asserts(node: ast.AST, asserting: set[str]) -> bool:
  for n in ast.walk(node):
    if isinstance(n, ast.Assert):
      return True
    if isinstance(n, ast.Call):
      name = n.func.attr if isinstance(n.func, ast.Attribute) else getattr(n.func, "id", "")
      if name in asserting or name in ("raises", "warns", "fail") or name.startswith("assert_"):
        return True
  return False


def test_every_test_asserts():
  bodies = [(where, f) for where, f in functions() if where.startswith("tests") and isinstance(f, ast.FunctionDef)]
  asserting: set[str] = {"golden"}        # the fixture
  while True:
    more = {f.name for _, f in bodies if f.name not in asserting and _asserts(f, asserting)}
    if not more:
      break
    asserting |= more
  assert not [f"{where} {f.name}" for where, f in bodies if f.name.startswith("test_") and not _asserts(f, asserting)]


# --- documents

def commands(path: str) -> list[str]:
  """The lines of the `sh` blocks of a document."""
  blocks = re.findall(r"```sh\n(.*?)```", (ROOT / path).read_text(), re.DOTALL)
  return [line for block in blocks for line in block.splitlines()]


def test_ci_runs_the_test_command_of_the_readme():
  [command] = [line for line in commands("README.md") if "pytest" in line]

  assert command in [line.strip() for line in (ROOT / ".ci/run").read_text().splitlines()]


def test_the_kernel_of_the_readme_is_the_example():
  [block] = re.findall(r"```python\n(import functools.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
  shown = [ast.unparse(node) for node in ast.parse(block).body if isinstance(node, ast.FunctionDef)]
  example = [ast.unparse(node) for node in sources()[pathlib.Path("examples/matmul_relu.py")].body
             if isinstance(node, ast.FunctionDef)]

  assert len(shown) == 2
  assert set(shown) <= set(example)


def test_the_switches_are_documented():
  assert config.describe() in (ROOT / "docs/configuration.md").read_text()


def _kinds(kind: type[errors.TileTraceError]) -> Iterator[type[errors.TileTraceError]]:
  yield kind
  for sub in kind.__subclasses__():
    yield from _kinds(sub)


def test_every_error_code_is_documented():
  texts = [(ROOT / p).read_text() for p in sources() if p.parts[0] == "tiletrace"]
  given = {code for text in texts for code in re.findall(r'code ?= ?"(TT\d{3})"', text)}
  documented = re.findall(r"^\| `(TT\d{3})` \|", (ROOT / "docs/errors.md").read_text(), re.MULTILINE)

  assert given >= {k.code for k in _kinds(errors.TileTraceError) if k.__module__.startswith("tiletrace")}
  assert sorted(given) == documented


def test_the_documents_link_to_files_that_exist():
  pages = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").glob("*.md"))]
  links = [(page, target) for page in pages for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text())]

  assert links
  assert not [f"{page.name}: {target}" for page, target in links if not (page.parent / target).exists()]
