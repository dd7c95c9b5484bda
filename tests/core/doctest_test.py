"""The examples in docstrings that need no kernel around them."""
from __future__ import annotations

import doctest

import pytest

from tiletrace.core import dtypes
from tiletrace.core.ops import elementwise, grid


@pytest.mark.parametrize("module", [dtypes, elementwise, grid], ids=lambda m: m.__name__)
def test_examples(module):
  result = doctest.testmod(module)
  assert result.attempted and not result.failed
