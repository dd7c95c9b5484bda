"""tiletrace: a tile-level GPU kernel language and compiler for JAX. `import tiletrace as tt`."""
from __future__ import annotations

from tiletrace.api import TileCall, tile_call
from tiletrace.core.errors import (
  AssembleError,
  ControlFlowError,
  DebugCheckError,
  ForeignFunctionError,
  LaunchError,
  LayoutError,
  LoweringError,
  ResourceError,
  ScheduleError,
  ScopeError,
  SimulationError,
  TileAttributeError,
  TileIndexError,
  TileTraceError,
  TileTypeError,
)
from tiletrace.core.ops import (
  control as _control,
  elementwise as _elementwise,
  reduce as _reduce,
  transcendental as _transcendental,
)
from tiletrace.core.ops.assume import assume
from tiletrace.core.ops.atomic import (
  atomic_add,
  atomic_and,
  atomic_cas,
  atomic_exchange,
  atomic_max,
  atomic_min,
  atomic_or,
  atomic_xor,
)
from tiletrace.core.ops.barrier import alloc_barrier, fence, sync
from tiletrace.core.ops.bitwise import (
  bitwise_and,
  bitwise_or,
  bitwise_xor,
  left_shift,
  logical_and,
  logical_or,
  right_shift,
)
from tiletrace.core.ops.control import cond, fori_loop, parallel, pipelined, switch, when, while_loop
from tiletrace.core.ops.copies import commit_group, copy, copy_async, wait_group
from tiletrace.core.ops.cumulative import cummax, cummin, cumprod, cumsum
from tiletrace.core.ops.debug import debug_check, debug_print
from tiletrace.core.ops.elementwise import (
  add,
  align_to,
  cdiv,
  ceil,
  clip,
  divide,
  equal,
  floor,
  floor_divide,
  greater,
  greater_equal,
  invert,
  isnan,
  less,
  less_equal,
  logical_not,
  maximum,
  minimum,
  mod,
  multiply,
  negative,
  not_equal,
  power,
  sign,
  square,
  subtract,
  where,
)
from tiletrace.core.ops.floats import cos, erf, exp, exp2, log, log2, logistic, rsqrt, sigmoid, silu, sin, sqrt, tanh
from tiletrace.core.ops.grid import cta_id, lookup, num_ctas, num_programs, program_id, raster, warpgroup_id
from tiletrace.core.ops.memory import alloc_fragment, alloc_shared, load, store, swizzle
from tiletrace.core.ops.mma import FULL_COL, FULL_ROW, SQUARE, gemm, gemm_async, wgmma_wait
from tiletrace.core.ops.pipeline_state import PipelineState
from tiletrace.core.ops.prefetch import prefetch
from tiletrace.core.ops.profile import profile
from tiletrace.core.ops.random import philox_4x32, random_bits, random_uniform
from tiletrace.core.ops.reduce import argmax, argmin, mean, prod
from tiletrace.core.ops.roles import elect, warpgroup
from tiletrace.core.ops.shape import (
  arange,
  broadcast_to,
  concatenate,
  expand_dims,
  full,
  ones,
  reshape,
  transpose,
  zeros,
)
from tiletrace.core.ops.step import step
from tiletrace.core.ops.take import take
from tiletrace.core.ops.transcendental import (
  acos,
  acosh,
  asin,
  asinh,
  atan,
  atan2,
  atanh,
  bitcast_convert_type,
  cbrt,
  clz,
  copysign,
  cosh,
  erfc,
  expm1,
  fmod,
  hypot,
  isfinite,
  isinf,
  log1p,
  log10,
  logaddexp,
  mul_hi,
  population_count,
  reciprocal,
  signbit,
  sinh,
  tan,
  trunc,
)
from tiletrace.core.ref import Ref, block, ds
from tiletrace.core.tile import Tile
from tiletrace.jaxpr import call_jax
from tiletrace.lowering.options import CompileOptions
from tiletrace.report.plot import plot_layout
from tiletrace.timeline import timeline

# Python's own names: reached through the module only, left out of __all__.
range = _control.range_
abs, pow, round = _elementwise.abs_, _elementwise.power, _transcendental.round_
all, any, max, min, sum = _reduce.all_, _reduce.any_, _reduce.max_, _reduce.min_, _reduce.sum_

__all__ = [
  "FULL_COL", "FULL_ROW", "SQUARE", "AssembleError", "CompileOptions", "ControlFlowError", "DebugCheckError",
  "ForeignFunctionError", "LaunchError", "LayoutError", "LoweringError", "PipelineState", "Ref", "ResourceError",
  "ScheduleError", "ScopeError", "SimulationError", "Tile", "TileAttributeError", "TileCall", "TileIndexError",
  "TileTraceError", "TileTypeError", "acos", "acosh", "add", "align_to", "alloc_barrier", "alloc_fragment",
  "alloc_shared", "arange", "argmax", "argmin", "asin", "asinh", "assume", "atan", "atan2", "atanh", "atomic_add",
  "atomic_and", "atomic_cas", "atomic_exchange", "atomic_max", "atomic_min", "atomic_or", "atomic_xor",
  "bitcast_convert_type", "bitwise_and", "bitwise_or", "bitwise_xor", "block", "broadcast_to", "call_jax", "cbrt",
  "cdiv", "ceil", "clip", "clz", "commit_group", "concatenate", "cond", "copy", "copy_async", "copysign", "cos",
  "cosh", "cta_id", "cummax", "cummin", "cumprod", "cumsum", "debug_check", "debug_print", "divide", "ds", "elect",
  "equal", "erf", "erfc", "exp", "exp2", "expand_dims", "expm1", "fence", "floor", "floor_divide", "fmod",
  "fori_loop", "full", "gemm", "gemm_async", "greater", "greater_equal", "hypot", "invert", "isfinite", "isinf",
  "isnan", "left_shift", "less", "less_equal", "load", "log", "log1p", "log2", "log10", "logaddexp", "logical_and",
  "logical_not", "logical_or", "logistic", "lookup", "maximum", "mean", "minimum", "mod", "mul_hi", "multiply",
  "negative", "not_equal", "num_ctas", "num_programs", "ones", "parallel", "philox_4x32", "pipelined", "plot_layout",
  "population_count", "power", "prefetch", "prod", "profile", "program_id", "random_bits", "random_uniform", "raster",
  "reciprocal", "reshape", "right_shift", "rsqrt", "sigmoid", "sign", "signbit", "silu", "sin", "sinh", "sqrt",
  "square", "step", "store", "subtract", "switch", "swizzle", "sync", "take", "tan", "tanh", "tile_call", "timeline",
  "transpose", "trunc", "wait_group", "warpgroup", "warpgroup_id", "wgmma_wait", "when", "where", "while_loop",
  "zeros",
]
