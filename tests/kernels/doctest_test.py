"""The examples of the kernels run."""
from __future__ import annotations

import doctest
import inspect

import pytest

from tiletrace import kernels
from tiletrace.kernels import rows

FUNCTIONS = [getattr(kernels, name) for name in kernels.__all__ if not name.endswith("_reference")]
MODULES = sorted({inspect.getmodule(function).__name__ for function in FUNCTIONS} | {rows.__name__})


@pytest.mark.parametrize("name", MODULES)
def test_examples(name):
  failed, tried = doctest.testmod(__import__(name, fromlist=["_"]))
  assert tried and not failed


def test_every_kernel_has_an_example():
  assert not [function.__name__ for function in FUNCTIONS if ">>> " not in inspect.getdoc(function)]
