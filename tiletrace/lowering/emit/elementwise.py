"""Elementwise ops: each element computed in f32, s32 or a predicate, and rounded back to its dtype; sums and products
of 16-bit floats in pairs."""
from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np

from tiletrace.core import dtypes
from tiletrace.core.errors import LoweringError
from tiletrace.core.graph import Eqn, Primitive, Var
from tiletrace.core.ops import elementwise as ew
from tiletrace.lowering.emit import exponentials as ex, math_functions as fn, trigonometry as trig
from tiletrace.lowering.emit.context import EmitContext, emit_rules
from tiletrace.lowering.emit.floats import mul
from tiletrace.lowering.emit.packed import PACKED, in_pairs
from tiletrace.lowering.emit.values import Operand, pack, register_class, unpack
from tiletrace.lowering.ptx import isa
from tiletrace.lowering.ptx.module import Builder
from tiletrace.lowering.ptx.registers import Reg


def compute_type(dtype: np.dtype) -> str:
  """The PTX type that elements of `dtype` are computed in."""
  if dtypes.is_float(dtype):
    return "f32"
  if dtype == dtypes.bool_:
    return "pred"
  return "u32" if dtype.kind == "u" else "s32"


def operands(ctx: EmitContext, eqn: Eqn) -> tuple[int, list[list[Operand]]]:
  """(elements per thread, for each operand one register or literal per element)."""
  mask = ctx.mask(eqn)
  lists: list[list[Operand]] = [unpack(ctx.b, ctx.read(v)) if mask is None or isinstance(v, Var) else [mask]
                                for v in eqn.values]
  count = ctx.count(eqn.outvars[0])
  return count, [xs * count if len(xs) == 1 else xs for xs in lists]


def result(ctx: EmitContext, eqn: Eqn, xs: Sequence[Operand]) -> None:
  dtype = eqn.outvars[0].dtype
  register_class(dtype, eqn.loc)
  ctx.bind(eqn.outvars[0], pack(ctx.b, dtype, xs))


def each_element(row_of: Callable[[Builder, str, tuple[Operand, ...]], Operand]) -> Callable[[EmitContext, Eqn], None]:
  """A rule that applies `row_of(builder, compute type, operands)` to each element."""
  def rule(ctx: EmitContext, eqn: Eqn) -> None:
    count, xs = operands(ctx, eqn)
    kind = compute_type(eqn.values[-1].dtype)
    made: dict[tuple, Operand] = {}  # equal operands (a broadcast row) are computed once
    out = []
    for element in zip(*xs, strict=True) if count else ():
      key = tuple(x if isinstance(x, Reg) else (type(x), repr(x)) for x in element)
      if key not in made:
        made[key] = row_of(ctx.b, kind, element)
      out.append(made[key])
    result(ctx, eqn, out)
  return rule


def register(b: Builder, x: Operand, kind: str) -> Reg:
  """A register for an operand that its row takes no literal for."""
  if isinstance(x, Reg):
    return x
  return b.new(isa.MOV, float(x) if kind == "f32" else int(x), type=kind)


def _arithmetic(row) -> Callable:
  return lambda b, kind, xs: b.new(row, *_numbers(kind, xs), type=kind)


def _numbers(kind: str, xs: Sequence[Operand]) -> list[Operand]:
  return [x if isinstance(x, Reg) else float(x) if kind == "f32" else int(x) for x in xs]


def _mul(b: Builder, kind: str, xs: tuple[Operand, ...]) -> Operand:
  return b.new(isa.MUL if kind == "f32" else isa.MUL_LO, *_numbers(kind, xs), type=kind)


def _div(b: Builder, kind: str, xs: tuple[Operand, ...]) -> Operand:
  assert kind == "f32"
  return b.new(isa.DIV_RN, *_numbers(kind, xs), type="f32")


def _extremum(row) -> Callable:
  """min and max: a NaN operand gives NaN, as jnp's do; booleans by and/or."""
  def emit(b: Builder, kind: str, xs: tuple[Operand, ...]) -> Operand:
    if kind == "pred":
      return b.new(isa.AND if row is isa.MIN else isa.OR, *_predicates(b, xs), type="pred")
    if kind == "f32":
      return b.new(row, *_numbers(kind, xs), type=kind, nan="NaN")
    return b.new(row, *_numbers(kind, xs), type=kind)
  return emit


def _predicates(b: Builder, xs: Sequence[Operand]) -> list[Reg]:
  return [x if isinstance(x, Reg) else b.new(isa.MOV_PRED, int(x)) for x in xs]


def _bitwise(row) -> Callable:
  def emit(b: Builder, kind: str, xs: tuple[Operand, ...]) -> Operand:
    if kind == "pred":
      return b.new(row, *_predicates(b, xs), type="pred")
    return b.new(row, *_numbers(kind, xs), type="b32")
  return emit


def _shift(b: Builder, kind: str, xs: tuple[Operand, ...], *, left: bool) -> Operand:
  return b.new(isa.SHL, *_numbers(kind, xs), type="b32") if left else b.new(isa.SHR, *_numbers(kind, xs), type=kind)


def _neg(b: Builder, kind: str, xs: tuple[Operand, ...]) -> Operand:
  return b.new(isa.NEG, register(b, xs[0], kind), type="s32" if kind == "u32" else kind)


def _abs(b: Builder, kind: str, xs: tuple[Operand, ...]) -> Operand:
  return xs[0] if kind == "u32" else b.new(isa.ABS, register(b, xs[0], kind), type=kind)


def _sign(b: Builder, kind: str, xs: tuple[Operand, ...]) -> Operand:
  x = register(b, xs[0], kind)
  if kind == "f32":  # sign(0) = 0 with its sign, sign(nan) = nan
    one = b.new(isa.COPYSIGN, x, 1.0, type="f32")
    keep = b.new(isa.SETP, b.new(isa.ABS, x, type="f32"), 0.0, cmp="gtu", type="f32")
    nan = b.new(isa.SETP, x, x, cmp="nan", type="f32")
    return b.new(isa.SELP, x, b.new(isa.SELP, one, x, keep, type="f32"), nan, type="f32")
  return b.new(isa.MAX, b.new(isa.MIN, x, 1, type=kind), 0 if kind == "u32" else -1, type=kind)


def _not(b: Builder, kind: str, xs: tuple[Operand, ...]) -> Operand:
  if kind == "pred":
    return b.new(isa.NOT, *_predicates(b, xs), type="pred")
  return b.new(isa.NOT, register(b, xs[0], kind), type="b32")


def _compare(cmp: str) -> Callable:
  def emit(b: Builder, kind: str, xs: tuple[Operand, ...]) -> Operand:
    if kind == "pred":
      x, y = (b.new(isa.SELP, 1, 0, p, type="s32") for p in _predicates(b, xs))
      return b.new(isa.SETP, x, y, cmp=cmp, type="s32")
    name = "neu" if cmp == "ne" and kind == "f32" else cmp  # nan != anything is true
    x, y = _numbers(kind, xs)
    return b.new(isa.SETP, register(b, x, kind), y, cmp=name, type=kind)
  return emit


def _int_division(ctx: EmitContext, eqn: Eqn, *, quotient: bool) -> None:
  """Floor division or its remainder. Non-negative operands with a literal power of two become a shift or a mask."""
  count, (xs, ys) = operands(ctx, eqn)
  b, kind = ctx.b, compute_type(eqn.outvars[0].dtype)
  if kind not in ("s32", "u32"):
    raise LoweringError(f"{eqn.primitive} of floats has no PTX form yet", loc=eqn.loc,
                        hint="write tt.floor(x / y), and x - y * tt.floor(x / y) for the remainder")
  positive = kind == "u32" or (count == 1 and ctx.facts[eqn.values[0]].lo >= 0 and ctx.facts[eqn.values[1]].lo > 0)
  out = []
  for x, y in zip(xs, ys, strict=True):
    if isinstance(y, int) and y > 0 and y & (y - 1) == 0:
      out.append(b.new(isa.SHR, x, y.bit_length() - 1, type="u32" if positive else "s32") if quotient
                 else b.new(isa.AND, x, y - 1, type="b32"))
    elif positive:
      out.append(b.new(isa.DIV if quotient else isa.REM, x, y, type="u32"))
    else:
      out.append(_floor_division(b, x, y, quotient))
  result(ctx, eqn, out)


def _floor_division(b: Builder, x: Operand, y: Operand, quotient: bool) -> Reg:
  """PTX truncates: one less, and a divisor more, where the remainder is not zero and the signs differ."""
  q = b.new(isa.DIV, x, y, type="s32")
  r = b.new(isa.SUB, x, b.new(isa.MUL_LO, q, y, type="s32"), type="s32")
  differ = b.new(isa.SETP, b.new(isa.XOR, r, y, type="b32"), 0, cmp="lt", type="s32")
  nonzero = b.new(isa.SETP, r, 0, cmp="ne", type="s32")
  fix = b.new(isa.AND, differ, nonzero, type="pred")
  if quotient:
    return b.new(isa.ADD, q, b.new(isa.SELP, -1, 0, fix, type="s32"), type="s32")
  return b.new(isa.ADD, r, b.new(isa.SELP, y, 0, fix, type="s32"), type="s32")


def _select(ctx: EmitContext, eqn: Eqn) -> None:
  _, (ps, xs, ys) = operands(ctx, eqn)
  b, kind = ctx.b, compute_type(eqn.outvars[0].dtype)
  out: list[Operand] = []
  for p, x, y in zip(ps, xs, ys, strict=True):
    if not isinstance(p, Reg):
      out.append(x if p else y)
    elif kind == "pred":
      x, y = (b.new(isa.SELP, 1, 0, v, type="s32") for v in _predicates(b, (x, y)))
      out.append(b.new(isa.SETP, b.new(isa.SELP, x, y, p, type="s32"), 0, cmp="ne", type="s32"))
    else:
      out.append(b.new(isa.SELP, *_numbers(kind, (x, y)), p, type="b32" if kind == "u32" else kind))
  result(ctx, eqn, out)


def _pow(b: Builder, kind: str, xs: tuple[Operand, ...]) -> Operand:
  """x ** n for a literal whole n up to 16, by repeated squaring; x ** 0.5; else by the logarithm."""
  x, n = xs
  if isinstance(n, Reg) or (n != 0.5 and not (float(n).is_integer() and abs(n) <= 16)):
    return ex.power(b, register(b, x, kind), register(b, n, kind))
  if n == 0.5:
    return b.new(isa.SQRT_RN, register(b, x, kind), type="f32")
  acc, square, left = None, x, abs(int(n))
  while left:
    if left & 1:
      acc = square if acc is None else _mul(b, kind, (acc, square))
    left >>= 1
    if left:
      square = _mul(b, kind, (square, square))
  acc = 1.0 if acc is None else acc
  return acc if n >= 0 else b.new(isa.RCP_RN, register(b, acc, kind), type="f32")


def _cast(ctx: EmitContext, eqn: Eqn) -> None:
  to, source = eqn.params["dtype"], eqn.values[0].dtype
  register_class(to, eqn.loc)
  if to == source:
    ctx.bind(eqn.outvars[0], ctx.read(eqn.values[0]))
    return
  _, (xs,) = operands(ctx, eqn)
  b, kind, was = ctx.b, compute_type(to), compute_type(source)
  if kind != was:
    numbers = {x: _predicates(b, [x])[0] if was == "pred" else register(b, x, was)
               for x in dict.fromkeys(xs) if not isinstance(x, Reg)}  # several: a thread's elements of an iota
    xs = [x if isinstance(x, Reg) else numbers[x] for x in xs]
  result(ctx, eqn, [_convert(b, x, was, to) for x in xs])


def _convert(b: Builder, x: Operand, was: str, to: np.dtype) -> Operand:
  kind = compute_type(to)
  if was == kind:
    return x
  if was == "pred":
    return b.new(isa.SELP, 1.0, 0.0, x, type="f32") if kind == "f32" else b.new(isa.SELP, 1, 0, x, type="s32")
  if kind == "pred":
    return b.new(isa.SETP, x, 0.0 if was == "f32" else 0, cmp="neu" if was == "f32" else "ne", type=was)
  if was == "f32":  # NaN becomes 0, what is too large the nearest: cvt to 32 bits does so, narrower types here
    whole = b.new(isa.CVT, x, rnd="rzi", to=kind, source="f32")
    if to.itemsize == 4:
      return whole
    low, high = dtypes.range_of(to)
    whole = b.new(isa.MIN, whole, high, type=kind)
    return whole if kind == "u32" else b.new(isa.MAX, whole, low, type=kind)
  if kind == "f32":
    return b.new(isa.CVT, x, rnd="rn", to="f32", source=was)
  return x  # s32 <-> u32: the same bits


def of_float(function: Callable[[Builder, Reg], Operand]) -> Callable:
  def emit(b: Builder, kind: str, xs: tuple[Operand, ...]) -> Operand:
    assert kind == "f32", kind
    return function(b, register(b, xs[0], kind))
  return emit


def _isnan(b: Builder, kind: str, xs: tuple[Operand, ...]) -> Operand:
  x = register(b, xs[0], kind)
  return b.new(isa.SETP, x, x, cmp="nan", type="f32")


EACH = {
    ew.add_p: _arithmetic(isa.ADD), ew.sub_p: _arithmetic(isa.SUB), ew.mul_p: _mul, ew.div_p: _div,
    ew.min_p: _extremum(isa.MIN), ew.max_p: _extremum(isa.MAX), ew.neg_p: _neg, ew.abs_p: _abs, ew.sign_p: _sign,
    ew.and_p: _bitwise(isa.AND), ew.or_p: _bitwise(isa.OR), ew.xor_p: _bitwise(isa.XOR), ew.not_p: _not,
    ew.shift_left_p: lambda b, k, xs: _shift(b, k, xs, left=True),
    ew.shift_right_p: lambda b, k, xs: _shift(b, k, xs, left=False),
    ew.eq_p: _compare("eq"), ew.ne_p: _compare("ne"), ew.lt_p: _compare("lt"), ew.le_p: _compare("le"),
    ew.gt_p: _compare("gt"), ew.ge_p: _compare("ge"), ew.isnan_p: _isnan,
    ew.exp_p: of_float(ex.exp), ew.exp2_p: of_float(lambda b, x: b.new(isa.EX2, x)),
    ew.log_p: of_float(ex.log), ew.log2_p: of_float(ex.log2),
    ew.sqrt_p: of_float(lambda b, x: b.new(isa.SQRT_RN, x, type="f32")),
    ew.rsqrt_p: of_float(lambda b, x: b.new(isa.RSQRT, x)),
    ew.tanh_p: of_float(ex.tanh), ew.logistic_p: of_float(ex.logistic), ew.erf_p: of_float(fn.erf),
    ew.pow_p: _pow, ew.sin_p: of_float(trig.sin), ew.cos_p: of_float(trig.cos),
    ew.floor_p: of_float(lambda b, x: b.new(isa.CVT, x, rnd="rmi", to="f32", source="f32")),
    ew.ceil_p: of_float(lambda b, x: b.new(isa.CVT, x, rnd="rpi", to="f32", source="f32")),
}
_APPROXIMATE: dict[Primitive, Callable[[Builder, Reg], Operand]] = {
    ew.exp_approx_p: lambda b, x: b.new(isa.EX2, mul(b, x, math.log2(math.e)), ftz="ftz"),
    ew.exp2_approx_p: lambda b, x: b.new(isa.EX2, x, ftz="ftz"),
    ew.log_approx_p: lambda b, x: mul(b, b.new(isa.LG2, x, ftz="ftz"), math.log(2)),
    ew.log2_approx_p: lambda b, x: b.new(isa.LG2, x, ftz="ftz"),
    ew.sqrt_approx_p: lambda b, x: b.new(isa.SQRT, x, ftz="ftz"),
    ew.tanh_approx_p: lambda b, x: b.new(isa.TANH, x, type="f32"), ew.logistic_approx_p: ex.logistic_approx,
    ew.sin_approx_p: lambda b, x: b.new(isa.SIN, x, ftz="ftz"),
    ew.cos_approx_p: lambda b, x: b.new(isa.COS, x, ftz="ftz"),
}
EACH.update({primitive: of_float(function) for primitive, function in _APPROXIMATE.items()})
for _primitive, _row_of in EACH.items():
  _rule = each_element(_row_of)
  emit_rules.register(_primitive)(in_pairs(PACKED[_primitive], _rule) if _primitive in PACKED else _rule)
emit_rules.register(ew.floordiv_p)(lambda ctx, eqn: _int_division(ctx, eqn, quotient=True))
emit_rules.register(ew.mod_p)(lambda ctx, eqn: _int_division(ctx, eqn, quotient=False))
emit_rules.register(ew.select_p)(_select)
emit_rules.register(ew.cast_p)(_cast)
