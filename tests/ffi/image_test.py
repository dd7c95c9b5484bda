"""Kernel images: deterministic bytes, launch arithmetic, refusal of what no GPU could run."""
from __future__ import annotations

import dataclasses
import os
import pathlib
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, strategies as st

from tiletrace.ffi.image import KernelImage, TensorMapSpec

ROOT = pathlib.Path(__file__).parents[2]
MAP = TensorMapSpec(operand=1, dtype="bfloat16", dims=(512, 300), strides=(1024,), box=(64, 128), swizzle=128,
                    l2_promotion=256, offset_bytes=32)
IMAGE = KernelImage(
    name="matmul_relu", cubin=bytes(range(256)) * 3, grid=(77, 1, 1), block=384, cluster=None, smem_bytes=200_000,
    params=(("operand", 0), ("tensormap", 0), ("scalar_i32", -7)), tensor_maps=(MAP,), persistent=True,
    source="p01.py:8", fingerprint="1a6cfb4d55")


def test_bytes_round_trip():
  assert KernelImage.from_bytes(IMAGE.to_bytes()) == IMAGE


def test_bytes_do_not_depend_on_the_process():
  script = ("import hashlib; from tests.ffi.image_test import IMAGE;"
            "print(hashlib.sha256(IMAGE.to_bytes()).hexdigest())")
  digests = {
      subprocess.run([sys.executable, "-c", script], env={**os.environ, "PYTHONHASHSEED": seed}, cwd=ROOT, check=True,
                     capture_output=True, text=True).stdout
      for seed in ("1", "2")}
  assert len(digests) == 1


@pytest.mark.parametrize("damage", [
    lambda b: b[:-1], lambda b: b + b"x", lambda b: b"TTIMAGE2" + b[8:], lambda b: b[:60] + b"\x00" + b[61:],
    lambda b: b""])
def test_damaged_bytes_are_refused(damage):
  with pytest.raises(ValueError, match="damaged"):
    KernelImage.from_bytes(damage(IMAGE.to_bytes()))


def test_persistent_grid_is_clamped_to_the_device():
  assert IMAGE.launch_grid(132) == (77, 1, 1)
  assert IMAGE.launch_grid(64) == (64, 1, 1)
  assert dataclasses.replace(IMAGE, persistent=False).launch_grid(64) == (77, 1, 1)


@given(st.integers(1, 200), st.sampled_from([1, 2, 4, 8]), st.integers(1, 400))
def test_persistent_grid_is_whole_clusters(num_sms, cluster, clusters):
  image = dataclasses.replace(IMAGE, grid=(cluster * clusters, 1, 1), cluster=(cluster, 1, 1))
  x, y, z = image.launch_grid(num_sms)
  assert (y, z) == (1, 1) and x % cluster == 0 and cluster <= x <= max(cluster, num_sms)


def test_attributes_have_the_decoder_s_types():
  attrs = IMAGE.attributes()
  assert attrs["grid"].dtype == attrs["cluster"].dtype == np.int32
  assert attrs["params"].tolist() == [0, 0, 1, 0, 2, -7] and attrs["params"].dtype == np.int64
  assert attrs["tensor_maps"].tolist() == [1, 9, 2, 3, 3, 32, 512, 300, 1024, 64, 128]
  assert attrs["cluster"].tolist() == [0, 0, 0]


@pytest.mark.parametrize("change", [
    dict(dims=(512,) * 6), dict(strides=(1000,)), dict(strides=(2**40,)), dict(box=(64, 257)), dict(box=(128, 64)),
    dict(box=(7, 64)), dict(swizzle=16), dict(dtype="complex64"), dict(offset_bytes=8), dict(dims=(2**32 + 1, 3))])
def test_a_map_that_the_driver_would_refuse_cannot_be_made(change):
  with pytest.raises(AssertionError):
    dataclasses.replace(MAP, **change)


@pytest.mark.parametrize("change", [
    dict(grid=(2**31, 1, 1)), dict(grid=(1, 65536, 1), persistent=False), dict(grid=(1, 2, 1)), dict(block=1025),
    dict(block=0), dict(smem_bytes=232_449), dict(cluster=(2, 1, 1)), dict(grid=(17, 1, 1), cluster=(17, 1, 1)),
    dict(params=(("tensormap", 1),)), dict(params=(("scalar_i32", 2**31),)), dict(params=(("pointer", 0),))])
def test_an_image_that_no_gpu_could_launch_cannot_be_made(change):
  with pytest.raises(AssertionError):
    dataclasses.replace(IMAGE, **change)
