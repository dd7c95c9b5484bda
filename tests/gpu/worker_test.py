"""What fails in the worker fails once."""
from __future__ import annotations

import os

import pytest

from tests.gpu.worker import in_worker


def test_calls_share_a_process_until_one_fails():
  first = in_worker(os.getpid)
  assert first == in_worker(os.getpid) != os.getpid()

  with pytest.raises(AssertionError, match="no_such_place"):
    in_worker(os.stat, "/no_such_place")
  second = in_worker(os.getpid)
  assert second != first

  with pytest.raises(Exception, match="terminated"):
    in_worker(os._exit, 3)
  assert in_worker(os.getpid) not in (first, second)
