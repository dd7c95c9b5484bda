"""Logic, shifts and bit fields against the ISA's definitions, bit by bit."""
from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, strategies as st

from tests.sim.arrays import registers
from tests.sim.integers_test import check, number, run
from tiletrace.lowering.ptx import isa
from tiletrace.sim.bits import lop3
from tiletrace.sim.storage import resize, width


@pytest.mark.parametrize("table", range(256))
def test_lop3_has_the_value_that_its_table_says(table):
  a, b, c = (registers("b32", 20, i) for i in range(3))
  want = np.zeros(20, np.uint32)
  for entry in range(8):
    if table >> entry & 1:
      want |= (a if entry & 4 else ~a) & (b if entry & 2 else ~b) & (c if entry & 1 else ~c)

  assert np.array_equal(lop3(a, b, c, table), want)
  assert np.array_equal(run(isa.LOP3.form(), a, b, c, table), want)


@pytest.mark.parametrize("type_", ["pred", "b16", "b32", "b64"])
def test_logic_works_on_every_width(type_):
  a, b = registers(type_, 50, 1), registers(type_, 50, 2)
  assert np.array_equal(run(isa.AND.form(type=type_), a, b), a & b)
  assert np.array_equal(run(isa.OR.form(type=type_), a, b), a | b)
  assert np.array_equal(run(isa.XOR.form(type=type_), a, b), a ^ b)
  assert np.array_equal(run(isa.NOT.form(type=type_), a), ~a)


AMOUNTS = np.array([0, 1, 2, 5, 15, 16, 17, 31, 32, 33, 47, 63, 64, 65, 255, 256, 2**31, 2**32 - 1], np.uint32)


@pytest.mark.parametrize("type_", ["b16", "b32", "b64", "u16", "u32", "u64", "s16", "s32", "s64"])
def test_shifts_beyond_the_width_are_clamped(type_):
  a = np.tile(registers(f"b{width(type_)}", 20, 3), len(AMOUNTS))
  n = np.repeat(AMOUNTS, 20)
  check(isa.SHR.form(type=type_), lambda x, s: x >> min(s, 64), [type_, "u32"], type_, args=[a, n])
  if type_[0] == "b":
    check(isa.SHL.form(type=type_), lambda x, s: x << min(s, 64), [type_, "u32"], type_, args=[a, n])


@pytest.mark.parametrize("mode", ["clamp", "wrap"])
def test_funnel_shifts_take_64_bits(mode):
  a, b = (np.tile(registers("b32", 20, i), len(AMOUNTS)) for i in range(2))
  args = [a, b, np.repeat(AMOUNTS, 20)]

  def amount(c: int) -> int:
    return min(c, 32) if mode == "clamp" else c % 32

  check(isa.SHF.form(dir="l", mode=mode), lambda x, y, c: (y << 32 | x) << amount(c) >> 32, ["u32"] * 3, "u32",
        args=args)
  check(isa.SHF.form(dir="r", mode=mode), lambda x, y, c: (y << 32 | x) >> amount(c), ["u32"] * 3, "u32", args=args)


def extracted(x: int, pos: int, length: int, type_: str) -> int:
  """PTX ISA 9.7.1, bfe, as it is written there."""
  top, pos, length = width(type_) - 1, pos & 255, length & 255
  sign = 0 if type_[0] == "u" or length == 0 else x >> min(pos + length - 1, top) & 1
  return sum((x >> pos + i & 1 if i < length and pos + i <= top else sign) << i for i in range(top + 1))


@pytest.mark.parametrize("type_", ["u32", "s32", "u64", "s64"])
@given(pos=st.integers(0, 300), length=st.integers(0, 300), seed=st.integers(0, 100))
def test_bit_fields_are_extracted(type_, pos, length, seed):
  a = registers(f"b{width(type_)}", 4, seed)
  args = [a, np.array([pos] * 4, np.uint32), np.array([length] * 4, np.uint32)]
  check(isa.BFE.form(type=type_), lambda x, p, n: extracted(x, p, n, type_), [type_, "u32", "u32"], type_, args=args)


@pytest.mark.parametrize("type_", ["b32", "b64"])
@given(pos=st.integers(0, 300), length=st.integers(0, 300), seed=st.integers(0, 100))
def test_bit_fields_are_inserted(type_, pos, length, seed):
  def want(a: int, b: int, pos: int, length: int) -> int:
    for i in range(length & 255):
      at = (pos & 255) + i
      b = b & ~(1 << at) | (a >> i & 1) << at
    return b

  args = [registers(type_, 4, seed), registers(type_, 4, seed + 1), *(np.array([x] * 4, np.uint32)
                                                                      for x in (pos, length))]
  check(isa.BFI.form(type=type_), want, [type_, type_, "u32", "u32"], type_, args=args)


@pytest.mark.parametrize("bits", [32, 64])
def test_bits_are_counted_found_and_reversed(bits):
  type_ = f"b{bits}"
  args = [np.concatenate([registers(type_, 100, 1), np.array([(1 << i) - 1 for i in range(bits)], f"u{bits // 8}"),
                          np.array([1 << i for i in range(bits)], f"u{bits // 8}")])]
  check(isa.POPC.form(type=type_), lambda x: x.bit_count(), [type_], "u32", args=args)
  check(isa.CLZ.form(type=type_), lambda x: bits - x.bit_length(), [type_], "u32", args=args)
  check(isa.BREV.form(type=type_), lambda x: int(f"{x:0{bits}b}"[::-1], 2), [type_], type_, args=args)
  check(isa.BFIND.form(type=f"u{bits}"), lambda x: x.bit_length() - 1, [type_], "u32", args=args)
  check(isa.BFIND.form(type=f"s{bits}"), lambda x: (~x if x < 0 else x).bit_length() - 1, [f"s{bits}"], "u32",
        args=args)


def picked(a: int, b: int, selector: int) -> int:
  """PTX ISA 9.7.9, prmt, default mode."""
  out = 0
  for i in range(4):
    nibble = selector >> 4 * i & 15
    byte = (b << 32 | a) >> 8 * (nibble & 7) & 255
    out |= (byte if nibble < 8 else 255 * (byte >> 7)) << 8 * i
  return out


def test_prmt_takes_bytes_by_a_selector_of_each_lane():
  check(isa.PRMT.form(), picked, ["u32"] * 3, "u32")


@given(selector=st.one_of(st.integers(0, 0xFFFF), st.sampled_from([0x5410, 0x7632, 0x1032])))
def test_prmt_takes_bytes_by_one_selector(selector):
  a, b = registers("b32", 8, 1), registers("b32", 8, 2)
  want = [picked(x, y, selector) for x, y in zip(a.tolist(), b.tolist())]
  assert run(isa.PRMT.form(), a, b, np.array([selector], np.uint32)).tolist() == want


def test_a_literal_may_be_any_operand_of_prmt():
  a, s = np.array([0x80FF_1234], np.uint32), registers("b32", 30, 3)
  want = [picked(0x80FF_1234, 0x80FF_1234, x) for x in s.tolist()]
  assert run(isa.PRMT.form(), a, a, s).tolist() == want


@pytest.mark.parametrize("type_", ["b32", "b64"])
def test_pack_is_the_inverse_of_unpack_and_has_the_low_half_first(type_):
  half = f"b{width(type_) // 2}"
  low, high = registers(half, 20, 1), registers(half, 20, 2)
  both = run(isa.PACK.form(type=type_), low, high)
  assert both.tolist() == [x | y << width(half) for x, y in zip(low.tolist(), high.tolist())]
  back = run(isa.UNPACK.form(type=type_), both)
  assert np.array_equal(back[0], low) and np.array_equal(back[1], high)
  assert back[0].dtype == low.dtype


@pytest.mark.parametrize("type_", ["u8", "s8", "u16", "s16", "u32", "s32", "b16"])
@pytest.mark.parametrize("cls", ["b16", "b32", "b64"])
def test_values_in_other_registers_are_cut_or_extended(type_, cls):
  a = registers(f"b{max(16, width(type_))}", 40, 3)
  if width(type_) == 8:
    a = a.view(np.int16) % 256 if type_ == "u8" else a.astype(np.int8).astype(np.int16)
    a = a.astype(np.int16).view(np.uint16)
  want = [number(x, type_) & (1 << width(cls)) - 1 for x in a.tolist()]
  assert resize(a, type_, cls).tolist() == want
