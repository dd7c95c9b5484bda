# ruff: noqa
"""Python state that changes from one iteration to the next, and values that leave their loop. See control_flow_test.py for how they are run."""
from __future__ import annotations

import math
import random

import numpy as np

import tiletrace as tt

@case(SCOPE)
def carried_tile(x, r):
  m = x + 1
  for i in tt.range(4):
    m = tt.maximum(m, i) #!

@case(SCOPE)
def carried_tile_augmented(x, r):
  m = x + 1
  for i in tt.range(4):
    m += i #!

@case(FLOW)
def carried_python_int(x, r):
  phase = 0
  for i in tt.range(4):
    r[...] = x + phase #!
    phase ^= 1

@case("ok")
def reused_temporary(x, r):
  off = x + 1
  for i in tt.range(4):
    off = i * 2
    r[...] = off + 1

@case(FLOW)
def swapped_refs(x, r):
  a, b = r, tt.alloc_fragment((), np.int32)
  for i in tt.range(4):
    a[...] = b[...] + 1 #!
    a, b = b, a

@case(FLOW)
def rotated_buffers(x, r):
  ring = [tt.alloc_fragment((), np.int32) for _ in range(3)]
  for i in tt.range(4):
    ring[0][...] = x + i #!
    ring.append(ring.pop(0))

@case("ok")
def python_ring_unrolled(x, r):
  ring = [tt.alloc_fragment((), np.int32) for _ in range(3)]
  for i in range(4):
    ring[0][...] = x + i
    ring.append(ring.pop(0))

@case(SCOPE)
def ref_name_overwritten(x, r):
  acc = r
  for i in tt.range(4):
    acc = acc[...] + 1 #!

@case(FLOW)
def nonlocal_in_nested_function(x, r):
  phase = 0
  for i in tt.range(4):
    @tt.when(x > 0) #!
    def _():
      nonlocal phase
      r[...] = x + phase
      phase ^= 1

@case(SCOPE)
def list_append(x, r):
  outs = []
  for i in tt.range(4): outs.append(i + 1)
  r[...] = outs[0] #!

@case("ok")
def list_append_unused(x, r):
  outs = []
  for i in tt.range(4): outs.append(i + 1)

@case(SCOPE)
def list_item(x, r):
  ms = [x + 1, x + 2]
  for i in tt.range(4):
    ms[0] = ms[0] + 1 #!

@case("ok")
def list_of_strings(x, r):
  log = []
  for i in tt.range(4): log.append("hello")

@case("ok")
def python_inner_loop_variable(x, r):
  s = 7
  for i in tt.range(4):
    for s in range(3): r[...] = x + s

@case("ok")
def loop_variable_reused(x, r):
  for i in tt.range(4): r[...] = i
  for i in tt.range(4): r[...] = i

@case(SCOPE)
def attribute_state(x, r):
  class S: pass
  st = S(); st.m = x + 1
  for i in tt.range(4): st.m = st.m + 1 #!
  r[...] = st.m

@case(FLOW)
def attribute_static(x, r):
  class S: phase = 0
  st = S()
  for i in tt.range(4):
    r[...] = x + st.phase #!
    st.phase ^= 1

@case(SCOPE)
def attribute_tile_used_only_inside(x, r):
  class S: pass
  st = S(); st.m = x + 1
  for i in tt.range(4):
    st.m = st.m + i #!

@case(FLOW)
def bytearray_state(x, r):
  buf = bytearray(2)
  for i in tt.range(4):
    r[...] = x + buf[0] #!
    buf[0] += 1

@case(FLOW)
def numpy_state(x, r):
  buf = np.zeros(2, np.int32)
  for i in tt.range(4):
    r[...] = x + buf[0] #!
    buf[0] += 1

COUNT = 0

@case(FLOW)
def global_counter(x, r):
  global COUNT
  for i in tt.range(4):
    r[...] = x + COUNT #!
    COUNT += 1

@case(FLOW)
def python_iterator(x, r):
  numbers = iter(range(100))
  for i in tt.range(4): r[...] = x + next(numbers) #!

@case(FLOW)
def random_constant(x, r):
  for i in tt.range(4): r[...] = x + random.getrandbits(30) #!

@case(FLOW)
def number_of_operations(x, r):
  done = []
  for i in tt.range(4):
    if not done:
      r[...] = x #!
    done.append(1)

@case(FLOW)
def static_shape_changes(x, r):
  n = [4]
  for i in tt.range(4):
    t = tt.zeros((n[0],), np.int32) #!
    n[0] *= 2

@case(FLOW)
def nested_state(x, r):
  class S: n = 0
  st = S()
  for i in tt.range(4):
    for j in tt.range(4):
      for k in tt.range(4): r[...] = x + i + j + k
    r[...] = x + st.n; st.n += 1 #!

@case(FLOW)
def innermost_state(x, r):
  class S: n = 0
  st = S()
  for i in tt.range(4):
    for j in tt.range(4):
      for k in tt.range(4):
        r[...] = x + st.n; st.n += 1 #!

@case(FLOW)
def state_over_an_inner_loops_bound(x, r):
  n = [1]
  for i in tt.range(4):
    for j in tt.range(n[0]): r[...] = x #!
    n[0] += 1

@case("ok")
def deep_pure(x, r):
  for i in tt.range(4):
    y = x + i
    for j in tt.range(4):
      z = y + j
      for k in tt.range(4): r[...] = z + k

@case("ok")
def unused_log(x, r):
  class S: n = 0
  st = S()
  for i in tt.range(4):
    r[...] = x + i; st.n += 1

@case(FLOW)
def count_read_after_the_loop(x, r):
  n = 0
  for i in tt.range(8): #!
    r[...] = x
    n += 1
  r[...] = x + n

@case(FLOW)
def flag_read_after_the_loop(x, r):
  found = False
  for i in tt.range(x): #!
    found = True
  if found: r[...] = x

@case(FLOW)
def outer_tile_chosen_in_a_loop(x, r):
  m, other = x + 1, x + 2
  for i in tt.range(x): #!
    m = other
  r[...] = m

@case(FLOW)
def count_of_an_inner_loop_read_in_the_outer(x, r):
  n = 0
  for i in tt.range(8):
    for j in tt.range(8): n += 1 #!
    r[...] = x + n

@case("ok")
def rebound_in_a_loop_and_written_before_it_is_read(x, r):
  n, cols = 0, tt.ds(0, 1)
  for i in tt.range(8):
    n, cols = 1, tt.ds(i, 1)
    r[...] = x + n
  n, cols = 2, tt.ds(0, 1)
  r[...] = x + n + cols.size

@case("ok")
def nan_constant(x, r):
  f = tt.alloc_fragment((), np.float32)
  for i in tt.range(4): f[...] = f[...] + math.nan

@case(SCOPE)
def escape_from_loop(x, r):
  for i in tt.range(4): y = i + 1
  r[...] = y #!

@case(SCOPE)
def escape_of_index(x, r):
  for i in tt.range(4): r[...] = x
  r[...] = i #!

@case(SCOPE)
def escape_from_when(x, r):
  y = x + 1
  with tt.when(x > 0): y = y + 1
  r[...] = y #!

@case(SCOPE)
def escape_sibling(x, r):
  with tt.when(x > 0): y = x + 1
  with tt.when(x > 1): r[...] = y #!

@case(SCOPE)
def escape_by_return_of_helper(x, r):
  def f():
    for i in tt.range(4): y = i + 1
    return y
  r[...] = f() #!

@case(SCOPE)
def escape_of_a_reference(x, r):
  with tt.when(x > 0): t = tt.alloc_fragment((), np.int32)
  t[...] = 1 #!

STASH = []

@case("ok")
def leak_make(x, r): STASH.append(x + 1)

@case(SCOPE)
def leak_use(x, r): r[...] = STASH[0] #!
