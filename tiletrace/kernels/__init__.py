"""Ready JAX functions made of kernels, with references in jax.numpy and, but for three, derivatives."""
from __future__ import annotations

from tiletrace.kernels.dequant_matmul import dequant_matmul, dequant_matmul_reference
from tiletrace.kernels.flash_attention import attention_reference, flash_attention, flash_attention_packed
from tiletrace.kernels.flash_decode import flash_decode, flash_decode_reference
from tiletrace.kernels.grouped_matmul import grouped_matmul, grouped_matmul_reference
from tiletrace.kernels.layer_norm import layer_norm, layer_norm_reference
from tiletrace.kernels.linear_attention import linear_attention, linear_attention_reference
from tiletrace.kernels.matmul import matmul, matmul_reference
from tiletrace.kernels.mla_decode import mla_decode, mla_decode_reference
from tiletrace.kernels.packed_weights import dequantize_weights, pack_weights, quantize_weights
from tiletrace.kernels.rms_norm import rms_norm, rms_norm_reference
from tiletrace.kernels.scaled_matmul import scaled_matmul, scaled_matmul_reference
from tiletrace.kernels.softmax import softmax, softmax_reference

__all__ = [
  "attention_reference", "dequant_matmul", "dequant_matmul_reference", "dequantize_weights", "flash_attention",
  "flash_attention_packed", "flash_decode", "flash_decode_reference", "grouped_matmul", "grouped_matmul_reference",
  "layer_norm", "layer_norm_reference", "linear_attention", "linear_attention_reference", "matmul",
  "matmul_reference", "mla_decode", "mla_decode_reference", "pack_weights", "quantize_weights", "rms_norm",
  "rms_norm_reference", "scaled_matmul", "scaled_matmul_reference", "softmax", "softmax_reference",
]
