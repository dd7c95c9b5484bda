"""Dimension strings, and what arrays say of their names."""
from __future__ import annotations

import pytest

from tiletrace.core.dimensions import Sizes, parse
from tiletrace.core.errors import TileTypeError
from tiletrace.core.types import MAX_SIZE, Size


@pytest.mark.parametrize("text, dims", [
    ("m, k", (Size(("m",)), Size(("k",)))), ("8*m, 64", (Size(("m",), 8), 64)), ("m*8,", (Size(("m",), 8),)),
    ("(n, _)", (Size(("n",)), None)), ("...", (Ellipsis,)), (None, (Ellipsis,)), ("", ()),
    ("b, ...", (Size(("b",)), ...))])
def test_dimensions_are_those_of_jax_export(text, dims):
  assert parse(text) == dims


@pytest.mark.parametrize("text", ["m+1", "m*k", "2*m*2", "-1", "0*m", "m k", "_m", f"{MAX_SIZE + 1}*m", "..., ..."])
def test_other_dimensions_are_refused_by_name(text):
  with pytest.raises(ValueError, match=r"dimension|more than one"):
    parse(text)


def test_multiples_of_a_name_are_one_size():
  sizes = Sizes("f")
  assert sizes.match("x", parse("8*m, k"), (32, 5)) == (Size(("m",), 8), Size(("k",)))
  assert sizes.match("y", parse("m, 2*m, ..."), (4, 8, 3, 3)) == (Size(("m",)), Size(("m",), 2), 3, 3)
  assert sizes.values == {"m": 4, "k": 5}


def test_the_number_of_elements_has_a_limit():
  Sizes("f").match("x", parse("m"), (MAX_SIZE,))
  with pytest.raises(TileTypeError, match="a dynamic dimension has at most 1073741824 elements"):
    Sizes("f").match("x", parse("m"), (MAX_SIZE + 1,))


def test_sizes_are_products_and_print_so():
  size = Size(("m",), 8) * 2 * Size(("k",))
  assert str(size) == "16*k*m" and size == Size(("k", "m"), 16)
  assert size // 4 == Size(("k", "m"), 4)  # type: ignore[operator]
  assert size.at({"k": 3, "m": 5}) == 240  # type: ignore[union-attr]
