"""Small pieces of text that every printer shares: variable names, numbers, bracketed parameters."""
from __future__ import annotations

import string
from collections.abc import Collection, Iterator, Mapping


def letters(taken: Collection[str] = ()) -> Iterator[str]:
  """a, b, ..., z, aa, ab, ...: jaxpr's names, without those in `taken`."""
  names = [""]
  while True:
    names = [n + c for n in names for c in string.ascii_lowercase]
    yield from (n for n in names if n not in taken)


def bracketed(params: Mapping[str, str]) -> str:
  """`[axis=0 kind=bulk]`, sorted; nothing for no parameters."""
  return f"[{' '.join(f'{k}={v}' for k, v in sorted(params.items()))}]" if params else ""


def indented(lines: list[str], depth: int = 1) -> list[str]:
  return ["  " * depth + line if line else line for line in lines]
