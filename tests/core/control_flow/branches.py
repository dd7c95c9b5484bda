# ruff: noqa
"""Branches, functions and roles. See control_flow_test.py for how they are run."""
from __future__ import annotations

import contextlib

import numpy as np

import tiletrace as tt

@case("ok")
def when_natural(x, r):
  with tt.when(x > 0):
    r[...] = x
    with tt.when(x > 1): r[...] = x
  r[...] = x

@case("ok")
def when_decorator(x, r):
  @tt.when(x > 0)
  def _():
    if True: return
    r[...] = x
  r[...] = x

@case("ok")
def when_otherwise(x, r):
  with tt.when(x > 0) as w: r[...] = x
  with w.otherwise(): r[...] = -x
  with tt.when(x > 1) as w: r[...] = x
  with w.otherwise(): r[...] = -x

@case("ok")
def when_static(x, r):
  with tt.when(True): r[...] = x
  with tt.when(False) as w: r[...] = x
  with w.otherwise(): r[...] = x

@case(SCOPE)
def when_static_value_escapes(x, r):
  with tt.when(True): y = x + 1
  r[...] = y #!

@case(FLOW)
def otherwise_inside(x, r):
  with tt.when(x > 0) as w:
    with w.otherwise(): r[...] = x #!

@case(TYPE)
def when_decorator_returns(x, r):
  @tt.when(x > 0) #!
  def _(): return 3

@case(FLOW)
def when_return(x, r):
  with tt.when(x > 0):
    return #!
  r[...] = x

@case(FLOW)
def when_return_in_if(x, r):
  with tt.when(x > 0):
    r[...] = x
    if 1 < 2:
      return #!
  r[...] = x

@case(FLOW)
def when_continue(x, r):
  for i in tt.range(4):
    with tt.when(x > 0):
      continue #!
    r[...] = x

@case(FLOW)
def when_continue_oneline(x, r):
  for i in tt.range(4):
    with tt.when(x > 0): continue #!
    r[...] = x

@case(FLOW)
def when_break(x, r):
  for i in tt.range(4):
    with tt.when(x > 0): break #!
    r[...] = x

@case(FLOW)
def when_break_of_a_python_loop(x, r):
  for i in range(4):
    with tt.when(x > i): break #!
    r[...] = x

@case(FLOW)
def when_yield(x, r):
  @contextlib.contextmanager
  def positive():
    with tt.when(x > 0): yield #!
  with positive(): r[...] = x

@case("ok")
def when_with_python_loop(x, r):
  with tt.when(x > 0):
    for s in range(3):
      if s == 1: break
      r[...] = x
    for s in range(3): continue

@case("ok")
def when_with_nested_function(x, r):
  with tt.when(x > 0):
    def f(): return x + 1
    f()
    g = lambda: x + 1
    g()

@case("ok")
def when_before_a_shared_tail(x, r):
  for i in tt.range(4):
    with tt.when(x > 0):
      if i is not None: r[...] = x
      else: r[...] = i

@case(FLOW)
def when_two_items(x, r):
  with tt.when(x > 0), tt.when(x > 1):
    return #!
  r[...] = x

@case(FLOW)
def when_multiline(x, r):
  with (
      tt.when(x > 0),
      contextlib.nullcontext(),
  ):
    r[...] = x
    return #!
  r[...] = x

@case(FLOW)
def when_in_bool(x, r):
  if tt.when(x > 0): r[...] = x #!

@case(FLOW)
def when_forgotten_with(x, r):
  tt.when(x > 0) #!
  r[...] = x

@case("ok")
def when_exitstack(x, r):
  with contextlib.ExitStack() as st:
    st.enter_context(tt.when(x > 0)); r[...] = x
  r[...] = x

@case("ZeroDivisionError")
def when_exception(x, r):
  with tt.when(x > 0): 1 / 0

@case(FLOW)
def when_exception_caught(x, r):
  try:
    with tt.when(x > 0): 1 / 0 #!
  except ZeroDivisionError: pass
  r[...] = x

@case(FLOW)
def when_decorator_exception_caught(x, r):
  try:
    @tt.when(x > 0)
    def _(): 1 / 0 #!
  except ZeroDivisionError: pass
  r[...] = x

@case(FLOW)
def when_rebinds_python_int(x, r):
  n = 0
  with tt.when(x > 0): #!
    n = 1
  r[...] = x + n

@case(FLOW)
def when_rebinds_for_the_next_python_iteration(x, r):
  n = 0
  for s in range(2):
    r[...] = x + n
    with tt.when(x > 0): #!
      n = 1

@case(FLOW)
def when_rebinds_to_an_outer_tile(x, r):
  m, other = x + 1, x + 2
  with tt.when(x > 0): #!
    m = other
  r[...] = m

@case(FLOW)
def when_rebinds_a_reference(x, r):
  t = tt.alloc_fragment((), np.int32)
  with tt.when(x > 0): #!
    t = r
  t[...] = x

@case(FLOW)
def when_decorator_rebinds_nonlocal(x, r):
  n = 0
  @tt.when(x > 0) #!
  def _():
    nonlocal n
    n = 1
  r[...] = x + n

@case("ok")
def when_new_static_name(x, r):
  with tt.when(x > 0):
    half = 64
    r[...] = x + half
  with tt.when(x > 1): r[...] = x + half

@case("ok")
def when_reused_static_temporary(x, r):
  n = 0; r[...] = x + n
  with tt.when(x > 0):
    n = 1; r[...] = x + n
  n = 2; r[...] = x + n

@case("ok")
def fori_loop_natural(x, r):
  s, n = tt.fori_loop(0, 8, lambda i, c: (c[0] + i, c[1] + 1), (x, 0))
  r[...] = s + n

@case(FLOW)
def fori_loop_state(x, r):
  n = [0]
  def body(i, c):
    n[0] += 1
    return c + n[0] #!
  r[...] = tt.fori_loop(0, 8, body, x)

@case(FLOW)
def fori_loop_counts_calls(x, r):
  n = 0
  def body(i, c):
    nonlocal n
    n += 1
    return c + i
  s = tt.fori_loop(0, 8, body, x) #!
  r[...] = s + n

@case(FLOW)
def cond_rebinds_nonlocal(x, r):
  n = 0
  def taken():
    nonlocal n
    n = 1
    return x
  s = tt.cond(x > 0, taken, lambda: x) #!
  r[...] = s + n

@case(SCOPE)
def fori_loop_leak_to_the_next_iteration(x, r):
  last = [x]
  def body(i, c):
    c = c + last[0] #!
    last[0] = c
    return c
  r[...] = tt.fori_loop(0, 8, body, x)

@case(SCOPE)
def while_loop_leak(x, r):
  kept = []
  def body(c):
    kept.append(c + 1)
    return c + 1
  tt.while_loop(lambda c: c < 3, body, x)
  r[...] = kept[0] #!

@case(FLOW)
def while_loop_state(x, r):
  n = [0]
  def body(c):
    n[0] += 1
    return c + n[0] #!
  r[...] = tt.while_loop(lambda c: c < 3, body, x)

@case(SCOPE)
def cond_leak(x, r):
  kept = []
  def taken():
    kept.append(x + 1)
    return x
  tt.cond(x > 0, taken, lambda: x)
  r[...] = kept[0] #!

@case(FLOW)
def exception_out_of_fori_loop_caught(x, r):
  def body(i, c): return 1 / 0 #!
  with contextlib.suppress(ZeroDivisionError): tt.fori_loop(0, 8, body, x)
  r[...] = x

@case("ok")
def roles_natural(x, r):
  with tt.warpgroup(0, regs=24), tt.elect(): r[...] = x
  with tt.warpgroup(range(1, 3), regs=240):
    for i in tt.range(4): r[...] = x

@case(FLOW)
def return_out_of_a_role(x, r):
  with tt.warpgroup(0):
    return #!
  r[...] = x

@case(FLOW)
def continue_out_of_elect(x, r):
  for i in tt.range(4):
    with tt.elect(): continue #!
    r[...] = x

@case(FLOW)
def role_in_a_role(x, r):
  with tt.warpgroup(0):
    with tt.warpgroup(1): r[...] = x #!

@case(SCOPE)
def fragment_of_other_threads(x, r):
  t = tt.alloc_fragment((8,), np.int32)
  with tt.warpgroup(0): t[...] = 1 #!

@case(SCOPE)
def value_of_a_role_escapes(x, r):
  with tt.warpgroup(0): y = x + 1
  r[...] = y #!
