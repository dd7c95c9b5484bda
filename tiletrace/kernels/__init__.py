"""Ready JAX functions made of kernels, each with its derivative and a reference in jax.numpy."""
from __future__ import annotations

from tiletrace.kernels.rms_norm import rms_norm, rms_norm_reference

__all__ = ["rms_norm", "rms_norm_reference"]
