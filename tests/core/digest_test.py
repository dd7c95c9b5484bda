from __future__ import annotations

import dataclasses
import enum
import functools
import math
import subprocess
import sys

import numpy as np
import pytest

import tiletrace as tt
from tests.tracing import Out, f32, trace
from tiletrace.core.digest import digest, encode
from tiletrace.core.graph import CallOptions


def kernel(x, y, *, scale=2.0, fill=0, size=8, again=False):
  i = tt.program_id(0)
  v = tt.load(x.at[tt.block(i, size)], fill_value=fill)
  for _ in tt.range(2):
    y[tt.block(i, size)] = v * scale
    if again:
      y[tt.block(i, size)] = v * scale


def of(fn=kernel, shape=(64,), **static):
  partial = functools.partial(fn, **static)
  partial.__name__ = "kernel"
  return trace(partial, x=f32(*shape), y=Out(f32(*shape)))


def test_equal_kernels_have_equal_digests_whatever_lines_and_names():
  def other(source, target):
    index = tt.program_id(0)

    value = tt.load(source.at[tt.block(index, 8)])
    for _ in tt.range(2):
      target[tt.block(index, 8)] = value * 2.0

  other.__name__ = "kernel"
  renamed = trace(other, source=f32(64), target=Out(f32(64)))
  assert digest(of()) == digest(of()) == digest(renamed)


def test_every_part_counts():
  base = of()
  options = dataclasses.replace(base.options, persistent=True)
  variants = [base, of(scale=3.0), of(scale=2.0000000000000004), of(fill=1), of(fill=-0.0), of(size=16), of(again=True),
              of(shape=(65,)), base.replace(name="other"), base.replace(options=options), base.replace(num_inputs=0),
              base.replace(invars=(*base.invars, base.invars[0]))]
  assert len({digest(g) for g in variants}) == len(variants)


def test_the_digest_is_the_same_in_another_process():
  code = ("import sys; sys.path.insert(0, '.'); from tests.core.digest_test import of, digest; print(digest(of()))")
  out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True,
                       env={"PYTHONHASHSEED": "7", "PATH": ""})
  assert out.stdout.strip() == digest(of())


class Colour(enum.Enum):
  RED = 1


@dataclasses.dataclass(frozen=True)
class Layout:
  shape: tuple[int, ...]


def test_parameters_of_different_kind_or_value_have_different_texts():
  values = [None, True, 1, 1.0, "1", (1,), ((1,),), (1, 1), math.nan, math.inf, -0.0, 0.0, np.dtype("int32"),
            Colour.RED, Layout((1,)), Layout((2,)), "None", CallOptions((1,))]
  assert len({encode(v) for v in values}) == len(values)


def test_a_parameter_without_a_stable_text_is_a_fault():
  with pytest.raises(AssertionError, match="no stable text"):
    encode(object())
