"""Integer arithmetic, bits, shifts (PTX ISA 9.7.1, 9.7.8), and the moves and conversions between types (9.7.9)."""
from __future__ import annotations

from tiletrace.lowering.ptx.instr import Mods, row

INTEGER = "9.7.1 Integer Arithmetic Instructions"
LOGIC = "9.7.8 Logic and Shift Instructions"
MOVE = "9.7.9 Data Movement and Conversion Instructions"

_WIDE = {"u16": "u32", "s16": "s32", "u32": "u64", "s32": "s64"}


def _wide(mods: Mods) -> Mods:
  return {"wide": _WIDE[mods["type"]]}


MUL_LO = row("mul.lo.{type}", "=d:type, a:type, b:type", INTEGER, type="u16 s16 u32 s32 u64 s64")
MUL_HI = row("mul.hi.{type}", "=d:type, a:type, b:type", INTEGER, type="u16 s16 u32 s32 u64 s64")
MUL_WIDE = row("mul.wide.{type}", "=d:wide, a:type, b:type", INTEGER, derive=_wide, type="u16 s16 u32 s32")
MAD_LO = row("mad.lo.{type}", "=d:type, a:type, b:type, c:type", INTEGER, type="u16 s16 u32 s32 u64 s64")
MAD_HI = row("mad.hi.{type}", "=d:type, a:type, b:type, c:type", INTEGER, type="u16 s16 u32 s32 u64 s64")
MAD_WIDE = row("mad.wide.{type}", "=d:wide, a:type, b:type, c:wide", INTEGER, derive=_wide, type="u16 s16 u32 s32")
ADD_SAT = row("add.sat.s32", "=d:s32, a:s32, b:s32", INTEGER)
SUB_SAT = row("sub.sat.s32", "=d:s32, a:s32, b:s32", INTEGER)
DIV = row("div.{type}", "=d:type, a:type, b:type", INTEGER, type="u16 s16 u32 s32 u64 s64")
REM = row("rem.{type}", "=d:type, a:type, b:type", INTEGER, type="u16 s16 u32 s32 u64 s64")
POPC = row("popc.{type}", "=d:u32, a:type", INTEGER, type="b32 b64")
CLZ = row("clz.{type}", "=d:u32, a:type", INTEGER, type="b32 b64")
BFIND = row("bfind.{type}", "=d:u32, a:type", INTEGER, type="u32 s32 u64 s64")
BREV = row("brev.{type}", "=d:type, a:type", INTEGER, type="b32 b64")
BFE = row("bfe.{type}", "=d:type, a:type, pos:u32, len:u32", INTEGER, type="u32 s32 u64 s64")
BFI = row("bfi.{type}", "=d:type, a:type, b:type, pos:u32, len:u32", INTEGER, type="b32 b64")
DP4A = row("dp4a.{a}.{b}", "=d:s32, a:b32, b:b32, c:s32", INTEGER, a="u32 s32", b="u32 s32")

AND = row("and.{type}", "=d:type, a:type, b:type", LOGIC, type="pred b16 b32 b64")
OR = row("or.{type}", "=d:type, a:type, b:type", LOGIC, type="pred b16 b32 b64")
XOR = row("xor.{type}", "=d:type, a:type, b:type", LOGIC, type="pred b16 b32 b64")
NOT = row("not.{type}", "=d:type, a:type", LOGIC, type="pred b16 b32 b64")
LOP3 = row("lop3.b32", "=d:b32, a:b32, b:b32, c:b32, lut:0..255", LOGIC)
SHL = row("shl.{type}", "=d:type, a:type, b:u32", LOGIC, type="b16 b32 b64")
SHR = row("shr.{type}", "=d:type, a:type, b:u32", LOGIC, type="b16 b32 b64 u16 u32 u64 s16 s32 s64")
SHF = row("shf.{dir}.{mode}.b32", "=d:b32, a:b32, b:b32, c:u32", LOGIC, dir="l r", mode="clamp wrap")

# ---- moves

MOV = row("mov.{type}", "=d:type, a:type", MOVE, type="b16 b32 b64 u16 u32 u64 s16 s32 s64 f32 f64")
MOV_PRED = row("mov.pred", "=d:pred, a:?pred", MOVE)
MOV_SREG = row("mov.{type}", "=d:type, a:sreg", MOVE, type="u32 u64")
MOV_SYMBOL = row("mov.{type}", "=d:type, a:symbol", MOVE, type="u32 u64 b32 b64")

_HALF = {"b32": "b16", "b64": "b32"}


def _half(mods: Mods) -> Mods:
  return {"half": _HALF[mods["type"]]}


# The first element of the vector is the low half.
PACK = row("mov.{type}", "=d:type, a:!half*2", MOVE, derive=_half, type="b32 b64")
UNPACK = row("mov.{type}", "=d:half*2, a:type", MOVE, derive=_half, type="b32 b64")
PRMT = row("prmt.b32", "=d:b32, a:b32, b:b32, c:b32", MOVE)

# ---- conversions

_INTS = ("u8", "s8", "u16", "s16", "u32", "s32", "u64", "s64")
_FLOATS = {"f16": 16, "bf16": 16, "f32": 32, "f64": 64}


def _narrows(to: str, source: str) -> bool:
  """Whether `to` lacks a value of `source`; `.sat` is illegal elsewhere."""
  bits, source_bits = int(to[1:]), int(source[1:])
  if to[0] == source[0]:
    return bits < source_bits
  return to[0] == "u" or bits <= source_bits


def _cvt(m: Mods) -> Mods:
  """Registers may be wider than their type, except beside bf16 (measured with ptxas 13.0)."""
  pair = {m["to"], m["source"]}
  if "bf16" not in pair:
    return {"d": f"~{m['to']}", "a": f"~{m['source']}"}
  return {"d": m["to"], "a": m["source"], "arch": "sm_80" if "f32" in pair else "sm_90"}


def _legal_cvt(m: Mods) -> bool:
  """The rounding modifier is mandatory exactly where rounding may happen (PTX ISA, cvt)."""
  to, source, rnd = m["to"], m["source"], m["rnd"]
  if "bf16" in (to, source) and ("8" in (to[1:], source[1:]) or to == source):
    return False
  if m["sat"] and not (to in _INTS and source in _INTS and _narrows(to, source)):
    return False
  if source in _INTS:
    if to in _INTS:
      return rnd == "" and (to != source or to not in ("u8", "s8"))
    return rnd in (("rn", "rz", "rm", "rp") if to != "bf16" else ("rn", "rz"))
  if to in _INTS:
    return rnd in ("rni", "rzi", "rmi", "rpi")
  if to == source:
    return rnd in ("rni", "rzi", "rmi", "rpi")
  if _FLOATS[to] > _FLOATS[source]:
    return rnd == ""
  return _FLOATS[to] < _FLOATS[source] and rnd in ("rn", "rz")


CVT = row("cvt.{rnd}.{sat}.{to}.{source}", "=d:d, a:!a", MOVE, legal=_legal_cvt,
          derive=_cvt, rnd="- rn rz rm rp rni rzi rmi rpi", sat="- sat",
          to="u8 s8 u16 s16 u32 s32 u64 s64 f16 bf16 f32 f64", source="u8 s8 u16 s16 u32 s32 u64 s64 f16 bf16 f32 f64")
# d = {low: b, high: a}
CVT_PACK = row("cvt.{rnd}.{relu}.{to}.f32", "=d:to, a:f32, b:f32", MOVE, rnd="rn rz", relu="- relu",
               to="f16x2 bf16x2")
CVT_TF32 = row("cvt.{rnd}.tf32.f32", "=d:^b32, a:f32", MOVE, rnd="rna rn rz", floors={"rn": "sm_90", "rz": "sm_90"})
CVT_F8_PACK = row("cvt.rn.satfinite.{relu}.{to}.f32", "=d:b16, a:f32, b:f32", MOVE, arch="sm_89", relu="- relu",
                  to="e4m3x2 e5m2x2")
CVT_F8_FROM_F16 = row("cvt.rn.satfinite.{relu}.{to}.f16x2", "=d:b16, a:f16x2", MOVE, arch="sm_89", relu="- relu",
                      to="e4m3x2 e5m2x2")
CVT_F8_TO_F16 = row("cvt.rn.{relu}.f16x2.{source}", "=d:f16x2, a:!b16", MOVE, arch="sm_89", relu="- relu",
                    source="e4m3x2 e5m2x2")
