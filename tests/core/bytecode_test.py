from __future__ import annotations

import sys
from typing import Any

import pytest

from tiletrace.core import bytecode


def later(name: str) -> bool:
  """Whether the caller may read `name` after the line that asks."""
  return name in bytecode.read_later(sys._getframe(1), [name])


def test_a_name_is_read_later_if_a_path_reads_it_before_it_writes_it():
  n = m = k = 0
  seen = [later("n"), later("m"), later("k"), later("absent")]
  if seen:
    m = 1
  k = 2
  assert seen == [True, True, False, False]
  assert (n, m, k) == (0, 1, 2)


def test_a_loop_reads_what_stands_before_in_its_body():
  seen = []
  for s in range(2):
    n = s if not seen else n + 1  # noqa: F821, F841
    seen.append(later("n"))
  assert seen == [True, True]


def test_returning_ends_a_path_and_deleting_counts_as_a_write():
  def returns(flag: bool) -> bool:
    n = 0
    found = later("n")
    if flag:
      return found
    n = 1
    return n == 0

  def deletes() -> bool:
    n = 0
    found = later("n")
    del n
    return found

  assert returns(True) is False
  assert deletes() is False


def test_a_function_defined_later_reads_what_it_closes_over():
  n = 0
  found = later("n")

  def closure() -> int:
    return n

  assert found and closure() == 0


def test_a_comprehension_with_a_variable_of_that_name_is_no_read():
  def kernel() -> bool:
    n = 0
    found = later("n")
    n = sum([n * 1 for n in range(3)])
    return found and n == 3

  assert kernel() is False


class Asked:
  """Notes who iterates it."""

  def __init__(self) -> None:
    self.by: list[str | None] = []

  def __iter__(self) -> Any:
    self.by.append(bytecode.consumer(sys._getframe(1)))
    return iter((0, 1))


def test_only_a_for_statement_is_no_consumer():
  asked = Asked()
  for _ in asked:
    for _ in asked:
      pass
  assert asked.by == [None, None, None]


@pytest.mark.parametrize("consume, by", [
    (lambda a: list(a), "by a function such as zip"), (lambda a: [*a], "by * unpacking"),
    (lambda a: [x + 1 for x in a], "by a comprehension"),
    (lambda a: {x: 0 for y in (1,) for x in a}, "by a comprehension"),
    (lambda a: 3 in a, "by `in`"), (lambda a: print(*a, end=""), "by a call f(*loop)")])
def test_other_consumers_are_named(consume: Any, by: str):
  asked = Asked()
  consume(asked)
  assert len(asked.by) == 1 and (asked.by[0] or "").startswith(by)


def test_the_target_of_an_assignment_and_of_a_loop_is_found():
  class Target:
    def __next__(self) -> str | None:
      return bytecode.target_name(sys._getframe(1))

    def __iter__(self) -> Target:
      return self

  def target() -> str | None:
    return bytecode.target_name(sys._getframe(1))

  result = target()
  pair, _ = target(), 0
  found = [target()]
  for index in Target():  # noqa: B007
    break
  assert (result, index, found) == ("result", "index", [None])
  assert pair in (None, "pair")
