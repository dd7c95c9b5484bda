# ruff: noqa
"""Who iterates a loop, and how it ends. See control_flow_test.py for how they are run."""
from __future__ import annotations

import contextlib
import itertools

import tiletrace as tt

@case("ok")
def plain_loop(x, r):
  for i in tt.range(4):
    for j in tt.range(2):
      r[...] = x + i + j
  r[...] = x

@case("ok")
def same_loop_object_twice(x, r):
  blocks = tt.range(4)
  for i in blocks: r[...] = x + i
  for i in blocks: r[...] = x + i

@case("ok")
def for_else(x, r):
  for i in tt.range(4): r[...] = x
  else: r[...] = x

@case("ok")
def static_continue(x, r):
  for i in tt.range(4):
    if True: continue
    r[...] = x

@case("ok")
def python_loops_inside(x, r):
  for i in tt.range(4):
    for s in range(3):
      if s == 1: continue
      if s == 2: break
      r[...] = x + i
    t = [x + s for s in range(3)]

@case(FLOW)
def break_static(x, r):
  for i in tt.range(4):
    r[...] = x
    if True:
      break #!
  r[...] = x

@case(FLOW)
def break_last_statement_of_kernel(x, r):
  for i in tt.range(4):
    break #!

@case(FLOW)
def break_inner(x, r):
  for i in tt.range(4):
    for j in tt.range(4):
      if True: break #!
    r[...] = x

@case(FLOW)
def return_in_loop(x, r):
  for i in tt.range(4):
    return #!

@case("ZeroDivisionError")
def exception_in_loop(x, r):
  for i in tt.range(4):
    1 / 0

@case(FLOW)
def exception_caught_outside(x, r):
  try:
    for i in tt.range(4):
      1 / 0 #!
  except ZeroDivisionError: pass
  r[...] = x

@case("ok")
def exception_caught_inside(x, r):
  for i in tt.range(4):
    try: 1 / 0
    except ZeroDivisionError: r[...] = x

@case(TYPE)
def tile_error_in_loop_keeps_its_own_line(x, r):
  for i in tt.range(4):
    if x: #!
      r[...] = x

@case(FLOW)
def goto_by_exception(x, r):
  class Stop(Exception): pass
  with contextlib.suppress(Stop):
    for i in tt.range(4):
      r[...] = x
      raise Stop #!

@case(FLOW)
def refusal_caught_twice(x, r):
  with contextlib.suppress(Exception):
    for i in tt.range(4):
      break #!
  with contextlib.suppress(Exception):
    r[...] = x

@case(FLOW)
def difference_caught(x, r):
  n = [0]
  with contextlib.suppress(Exception):
    for i in tt.range(4):
      r[...] = x + n[0] #!
      n[0] += 1

@case(FLOW)
def listcomp(x, r):
  t = [x + i for i in tt.range(4)] #!

@case(FLOW)
def dictcomp(x, r):
  t = {1: x + i for i in tt.range(4)} #!

@case(FLOW)
def setcomp_in_any(x, r):
  any({1 for i in tt.range(4)}) #!

@case(FLOW)
def genexpr(x, r):
  sum(1 for i in tt.range(4)) #!

@case(FLOW)
def nested_comp(x, r):
  t = [x + s for s in range(2) for i in tt.range(4)] #!

@case(FLOW)
def zip_first(x, r):
  for i, s in zip(tt.range(4), [1, 2, 3, 4]): r[...] = x #!

@case(FLOW)
def zip_second(x, r):
  for s, i in zip([1, 2, 3, 4], tt.range(4)): r[...] = x #!

@case(FLOW)
def enumerate_(x, r):
  for n, i in enumerate(tt.range(4)): r[...] = x #!

@case(FLOW)
def list_(x, r):
  for i in list(tt.range(4)): r[...] = x #!

@case(FLOW)
def star(x, r):
  tt.maximum(*tt.range(4)) #!

@case(FLOW)
def star_list(x, r):
  t = [*tt.range(4)] #!

@case(FLOW)
def unpack(x, r):
  i, j = tt.range(2) #!

@case(FLOW)
def unpack_star(x, r):
  i, *j = tt.range(2) #!

@case(FLOW)
def map_(x, r):
  for i in map(lambda i: i, tt.range(4)): r[...] = x #!

@case(FLOW)
def product_(x, r):
  for i, j in itertools.product(tt.range(4), tt.range(2)): r[...] = x #!

@case(FLOW)
def reversed_(x, r):
  for i in reversed(tt.range(4)): r[...] = x #!

@case(FLOW)
def contains_(x, r):
  if 3 in tt.range(4): r[...] = x #!

@case(FLOW)
def len_(x, r):
  len(tt.range(4)) #!

@case(FLOW)
def next_iter(x, r):
  i = next(iter(tt.range(4))) #!

@case(FLOW)
def next_of_the_loop(x, r):
  i = next(tt.range(4)) #!

@case(FLOW)
def with_range(x, r):
  with tt.range(4) as i: r[...] = x #!

@case(FLOW)
def generator_helper(x, r):
  def tiles(n):
    for i in tt.range(n): yield x + i #!
  for t in tiles(4): r[...] = t

@case(FLOW)
def generator_helper_zip(x, r):
  def tiles(n):
    for i in tt.range(n): yield x + i #!
  for t, s in zip(tiles(4), range(4)): r[...] = t

@case(FLOW)
def yield_from(x, r):
  def tiles(n): yield from tt.range(n) #!
  for t in tiles(4): r[...] = t

@case("ok")
def callback_helper(x, r):
  def tiles(n, body):
    for i in tt.range(n): body(x + i)
  def body(t): r[...] = t
  tiles(4, body)

@case(FLOW)
def never_iterated(x, r):
  tt.range(4) #!

@case(FLOW)
def kept_iterator(x, r):
  it = tt.range(4).__iter__() #!
  it.__next__()

@case("ok")
def loop_inside_try_finally(x, r):
  try:
    for i in tt.range(4): r[...] = x
  finally: r[...] = x

@case("ok")
def loop_in_a_comprehension_body_helper(x, r):
  def part(s):
    for i in tt.range(4): r[...] = x + s
  [part(s) for s in range(2)]

@case("ok")
def list_literal_in_a_loop(x, r):
  xs = [1, 2]
  for i in tt.range(4): r[...] = x + len([*xs, 3])
