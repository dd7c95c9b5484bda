"""The examples of the kernels run."""
from __future__ import annotations

import doctest

import pytest

from tiletrace.kernels import grouped_matmul, layer_norm, matmul, rms_norm, rows, softmax

FUNCTIONS = (grouped_matmul, layer_norm, matmul, rms_norm, softmax)
MODULES = [function.__module__ for function in FUNCTIONS] + [rows.__name__]


@pytest.mark.parametrize("name", MODULES)
def test_examples(name):
  failed, tried = doctest.testmod(__import__(name, fromlist=["_"]))
  assert tried and not failed
