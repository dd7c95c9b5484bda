"""call_jax: functions of jax as tile operations. What each jax primitive becomes stands in the file of its family."""
from __future__ import annotations

from tiletrace.jaxpr import control, elementwise, products, reduce, shape, special
from tiletrace.jaxpr.record import call_jax

__all__ = ["call_jax", "control", "elementwise", "products", "reduce", "shape", "special"]
