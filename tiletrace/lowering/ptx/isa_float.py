"""Arithmetic shared by integers and floats, floating point, and comparison (PTX ISA 9.7.1, 9.7.3 - 9.7.7).

`rnd="rn"` on add, sub and mul forbids ptxas to contract a product and a sum into one fma.
"""
from __future__ import annotations

from tiletrace.lowering.ptx.instr import Mods, row

ARITHMETIC = "9.7.1, 9.7.3, 9.7.4 Integer, Floating-Point and Half Precision Instructions"
FLOAT = "9.7.3 Floating-Point Instructions"
HALF = "9.7.4 Half Precision Floating-Point Instructions"
COMPARE = "9.7.6, 9.7.7 Comparison and Selection Instructions"

_F16 = ("f16", "f16x2")
_BF16 = ("bf16", "bf16x2")
_ROUNDED = ("f32", "f64")


def _legal_add(m: Mods) -> bool:
  type_ = m["type"]
  if m["ftz"] and type_ != "f32" and type_ not in _F16:
    return False
  return m["rnd"] == "" or type_ in _ROUNDED or (m["rnd"] == "rn" and type_ in _F16 + _BF16)


def _legal_minmax(m: Mods) -> bool:
  type_ = m["type"]
  if m["nan"] and type_ not in ("f32", *_F16, *_BF16):
    return False
  return not m["ftz"] or type_ == "f32" or type_ in _F16


def _legal_unary(m: Mods) -> bool:
  return not m["ftz"] or m["type"] == "f32" or m["type"] in _F16


def _legal_fma(m: Mods) -> bool:
  type_ = m["type"]
  if type_ in _ROUNDED:
    return not m["relu"] and (not m["ftz"] or type_ == "f32")
  return m["rnd"] == "rn" and (not m["ftz"] or type_ in _F16)


_NEW_BF16 = {"bf16": "sm_90", "bf16x2": "sm_90"}

ADD = row("add.{rnd}.{ftz}.{type}", "=d:type, a:type, b:type", ARITHMETIC, legal=_legal_add, floors=_NEW_BF16,
          rnd="- rn rz rm rp", ftz="- ftz", type="u16 s16 u32 s32 u64 s64 f32 f64 f16 f16x2 bf16 bf16x2")
SUB = row("sub.{rnd}.{ftz}.{type}", "=d:type, a:type, b:type", ARITHMETIC, legal=_legal_add, floors=_NEW_BF16,
          rnd="- rn rz rm rp", ftz="- ftz", type="u16 s16 u32 s32 u64 s64 f32 f64 f16 f16x2 bf16 bf16x2")
MUL = row("mul.{rnd}.{ftz}.{type}", "=d:type, a:type, b:type", FLOAT, legal=_legal_add, floors=_NEW_BF16,
          rnd="- rn rz rm rp", ftz="- ftz", type="f32 f64 f16 f16x2 bf16 bf16x2")
FMA = row("fma.{rnd}.{ftz}.{relu}.{type}", "=d:type, a:type, b:type, c:type", FLOAT, legal=_legal_fma,
          rnd="rn rz rm rp", ftz="- ftz", relu="- relu", type="f32 f64 f16 f16x2 bf16 bf16x2")
MIN = row("min.{ftz}.{nan}.{type}", "=d:type, a:type, b:type", ARITHMETIC, legal=_legal_minmax, ftz="- ftz",
          nan="- NaN", type="u16 s16 u32 s32 u64 s64 f32 f64 f16 f16x2 bf16 bf16x2")
MAX = row("max.{ftz}.{nan}.{type}", "=d:type, a:type, b:type", ARITHMETIC, legal=_legal_minmax, ftz="- ftz",
          nan="- NaN", type="u16 s16 u32 s32 u64 s64 f32 f64 f16 f16x2 bf16 bf16x2")
ABS = row("abs.{ftz}.{type}", "=d:type, a:!type", ARITHMETIC, legal=_legal_unary, ftz="- ftz",
          type="s16 s32 s64 f32 f64 f16 f16x2 bf16 bf16x2")
NEG = row("neg.{ftz}.{type}", "=d:type, a:!type", ARITHMETIC, legal=_legal_unary, ftz="- ftz",
          type="s16 s32 s64 f32 f64 f16 f16x2 bf16 bf16x2")
COPYSIGN = row("copysign.{type}", "=d:type, a:type, b:type", FLOAT, type="f32 f64")     # |b| with the sign of a
TESTP = row("testp.{op}.{type}", "=p:pred, a:type", FLOAT, op="finite infinite number notanumber normal subnormal",
            type="f32 f64")
DIV_APPROX = row("div.{mode}.{ftz}.f32", "=d:f32, a:f32, b:f32", FLOAT, mode="approx full", ftz="- ftz")
DIV_RN = row("div.rn.{ftz}.{type}", "=d:type, a:type, b:type", FLOAT, ftz="- ftz", type="f32 f64",
             legal=_legal_unary)
RCP_RN = row("rcp.rn.{ftz}.{type}", "=d:type, a:type", FLOAT, ftz="- ftz", type="f32 f64", legal=_legal_unary)
SQRT_RN = row("sqrt.rn.{ftz}.{type}", "=d:type, a:type", FLOAT, ftz="- ftz", type="f32 f64", legal=_legal_unary)
RCP = row("rcp.approx.{ftz}.f32", "=d:f32, a:f32", FLOAT, ftz="- ftz")
SQRT = row("sqrt.approx.{ftz}.f32", "=d:f32, a:f32", FLOAT, ftz="- ftz")
RSQRT = row("rsqrt.approx.{ftz}.f32", "=d:f32, a:f32", FLOAT, ftz="- ftz")
EX2 = row("ex2.approx.{ftz}.f32", "=d:f32, a:f32", FLOAT, ftz="- ftz")
LG2 = row("lg2.approx.{ftz}.f32", "=d:f32, a:f32", FLOAT, ftz="- ftz")
SIN = row("sin.approx.{ftz}.f32", "=d:f32, a:f32", FLOAT, ftz="- ftz")
COS = row("cos.approx.{ftz}.f32", "=d:f32, a:f32", FLOAT, ftz="- ftz")
TANH = row("tanh.approx.{type}", "=d:type, a:type", FLOAT, type="f32 f16 f16x2 bf16 bf16x2", floors=_NEW_BF16)
EX2_F16 = row("ex2.approx.{type}", "=d:type, a:type", HALF, type="f16 f16x2")
EX2_BF16 = row("ex2.approx.ftz.{type}", "=d:type, a:type", HALF, type="bf16 bf16x2", arch="sm_90")

# ---- comparison and selection

_ORDERED = ("eq", "ne", "lt", "le", "gt", "ge")
_UNORDERED = ("equ", "neu", "ltu", "leu", "gtu", "geu", "num", "nan")
_CMP = " ".join(_ORDERED + _UNORDERED)
_IS_FLOAT = frozenset({"f32", "f64", "f16", "bf16", "f16x2", "bf16x2"})


def _legal_cmp(m: Mods) -> bool:
  type_ = m["type"]
  if type_ in _IS_FLOAT:
    return _legal_unary(m)
  return not m["ftz"] and m["cmp"] in (("eq", "ne") if type_[0] == "b" else _ORDERED)


SETP = row("setp.{cmp}.{ftz}.{type}", "=p:pred, a:type, b:type", COMPARE, legal=_legal_cmp, cmp=_CMP, ftz="- ftz",
           type="b16 b32 b64 u16 u32 u64 s16 s32 s64 f32 f64 f16 bf16", floors={"bf16": "sm_90"})
SETP_BOOL = row("setp.{cmp}.{bool}.{ftz}.{type}", "=p:pred, a:type, b:type, c:pred", COMPARE, legal=_legal_cmp,
                cmp=_CMP, bool="and or xor", ftz="- ftz", type="u32 s32 u64 s64 f32")
# p: low halves, q: high halves
SETP_X2 = row("setp.{cmp}.{ftz}.{type}", "=p:pred, |=q:pred, a:type, b:type", COMPARE, legal=_legal_cmp, cmp=_CMP,
              ftz="- ftz", type="f16x2 bf16x2", floors=_NEW_BF16)
# 1.0 or 0.0 in a float destination, all ones or zero in an integer one
SET = row("set.{cmp}.{ftz}.{to}.{type}", "=d:to, a:type, b:type", COMPARE, legal=_legal_cmp, cmp=_CMP, ftz="- ftz",
          to="u32 s32 f32", type="u32 s32 f32")
SET_X2 = row("set.{cmp}.{ftz}.{to}.{type}", "=d:to, a:type, b:type", COMPARE,
             legal=lambda m: m["to"] == m["type"] and _legal_cmp(m), cmp=_CMP, ftz="- ftz", to="f16x2 bf16x2",
             type="f16x2 bf16x2", floors=_NEW_BF16)
SELP = row("selp.{type}", "=d:type, a:type, b:type, c:pred", COMPARE,
           type="b16 b32 b64 u16 u32 u64 s16 s32 s64 f32 f64")
