# ruff: noqa
"""What tracing cannot answer. See control_flow_test.py for how they are run."""
from __future__ import annotations

import io
import math

import tiletrace as tt
from tiletrace.core.tile import Tile

@case(TYPE)
def if_tile(x, r):
  if x: r[...] = x #!

@case(TYPE)
def ternary(x, r):
  y = x if x > 0 else -x #!

@case(TYPE)
def chained(x, r):
  with tt.when(0 <= x < 4): r[...] = x #!

@case(TYPE)
def and_(x, r):
  with tt.when((x > 0) and (x < 4)): r[...] = x #!

@case(TYPE)
def not_(x, r):
  with tt.when(not x): r[...] = x #!

@case(TYPE)
def max_(x, r):
  y = max(x, x + 1) #!

@case(TYPE)
def sorted_(x, r):
  sorted([x, x + 1]) #!

@case(TYPE)
def assert_(x, r):
  assert x > 0 #!

@case(TYPE)
def in_list(x, r):
  if x in [1, 2]: r[...] = x #!

@case(TYPE)
def while_(x, r):
  while x < 3: r[...] = x #!

@case(TYPE)
def range_tile(x, r):
  for i in range(x): r[...] = x #!

@case(TYPE)
def list_index(x, r):
  y = [1, 2, 3][x] #!

@case(TYPE)
def int_(x, r):
  int(x) #!

@case(TYPE)
def math_exp(x, r):
  math.exp(x) #!

@case(TYPE)
def iterate_tile(x, r):
  for row in x: r[...] = row #!

@case("TypeError")
def dict_key(x, r):
  {x: 1}

@case(TYPE)
def match_(x, r):
  match x:
    case 0: r[...] = x #!
    case _: r[...] = x

@case("ok")
def fstring(x, r):
  s = f"{x} {x!r}"; print(x, file=io.StringIO())

@case("ok")
def isinstance_none(x, r):
  if x is None or not isinstance(x, Tile): 1 / 0

@case(TYPE)
def eq_none(x, r):
  if x == None: r[...] = x #!
