"""The examples in docstrings of the core's own parts; tests/docs/reference_test.py runs those of the language."""
from __future__ import annotations

import doctest

from tiletrace.core import dtypes


def test_examples():
  result = doctest.testmod(dtypes)
  assert result.attempted and not result.failed
