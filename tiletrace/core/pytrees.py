"""Nested tuples, lists and dicts of values: what loops carry and branches return."""
from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any


@dataclasses.dataclass(frozen=True, slots=True)
class Structure:
  """A container without its leaves. `kind` is None for a leaf; `keys` are a dict's, sorted."""
  kind: type | None
  keys: tuple[Any, ...] = ()
  children: tuple[Structure, ...] = ()

  @property
  def num_leaves(self) -> int:
    return 1 if self.kind is None else sum(c.num_leaves for c in self.children)

  def __str__(self) -> str:
    if self.kind is None:
      return "*"
    if self.kind is type(None):
      return "None"
    inner = [str(c) for c in self.children]
    if issubclass(self.kind, dict):
      return "{" + ", ".join(f"{k!r}: {c}" for k, c in zip(self.keys, inner)) + "}"
    if issubclass(self.kind, list):
      return "[" + ", ".join(inner) + "]"
    name = "" if self.kind is tuple else self.kind.__name__
    return f"{name}({', '.join(inner)}{',' if len(inner) == 1 else ''})"


LEAF = Structure(None)


def flatten(tree: Any) -> tuple[list[Any], Structure]:
  """The leaves, left to right, and the structure. Anything but a tuple, list, dict or None is a leaf.

  >>> flatten((1, {"b": 2, "a": [3]}))[0]
  [1, 3, 2]
  """
  if tree is None:
    return [], Structure(type(None))
  if not isinstance(tree, (tuple, list, dict)):
    return [tree], LEAF
  keys = tuple(sorted(tree)) if isinstance(tree, dict) else ()
  parts = [flatten(c) for c in ([tree[k] for k in keys] if isinstance(tree, dict) else tree)]
  return [leaf for leaves, _ in parts for leaf in leaves], Structure(type(tree), keys, tuple(s for _, s in parts))


def unflatten(structure: Structure, leaves: Sequence[Any]) -> Any:
  """The inverse of `flatten`; `leaves` has `structure.num_leaves` items."""
  assert len(leaves) == structure.num_leaves, (structure, len(leaves))
  return _build(structure, iter(leaves).__next__)


def _build(structure: Structure, leaf: Callable[[], Any]) -> Any:
  kind = structure.kind
  if kind is None:
    return leaf()
  if kind is type(None):
    return None
  children = [_build(c, leaf) for c in structure.children]
  if issubclass(kind, dict):
    return kind(zip(structure.keys, children))
  return kind(*children) if hasattr(kind, "_fields") else kind(children)
