from __future__ import annotations

import collections
import random

from tiletrace.core.pytrees import LEAF, flatten, unflatten

Point = collections.namedtuple("Point", "x y")


def test_leaves_come_left_to_right_and_dicts_by_key():
  leaves, structure = flatten((1, {"b": 2, "a": [3, None]}, Point(4, (5,))))
  assert leaves == [1, 3, 2, 4, 5]
  assert str(structure) == "(*, {'a': [*, None], 'b': *}, Point(*, (*,)))"


def test_unflatten_inverts_flatten_and_keeps_container_types():
  rng = random.Random(7)

  def tree(depth: int):
    kind = rng.randrange(6 if depth else 1)
    children = [tree(depth - 1) for _ in range(rng.randrange(4))] if kind else []
    return (rng.random(), tuple(children), children, dict(zip("xyz", children)), None,
            Point(*(children + [1, 2])[:2]))[kind]

  for _ in range(200):
    value = tree(4)
    leaves, structure = flatten(value)
    assert structure.num_leaves == len(leaves)
    back = unflatten(structure, leaves)
    assert back == value and type(back) is type(value)


def test_structures_of_different_containers_differ():
  assert flatten(0)[1] == LEAF
  assert len({flatten(t)[1] for t in ((1, 2), [1, 2], {"a": 1, "b": 2}, {"a": 1, "c": 2}, Point(1, 2), None)}) == 6
