"""The XLA handler and the launcher without JAX, on a driver that writes down what it is asked."""
from __future__ import annotations

import ctypes
import pathlib
import re

import jax
import jax.numpy as jnp
import pytest

from tests.ffi.scenarios import IMAGES
from tiletrace.core.errors import LaunchError
from tiletrace.ffi import launch

KERNEL = r"tiletrace kernel 'triple' \(triple\.py:8\)"


@pytest.mark.parametrize("name", [name for name in IMAGES if name != "empty"])
def test_both_launchers_ask_the_driver_the_same(scenarios, name):
  assert scenarios["xla"][name] == scenarios["direct"][name]
  assert "launch grid" in scenarios["xla"][name]


def _launch(scenarios, name: str) -> str:
  return scenarios["xla"][name].splitlines()[-1]


def test_parameters_are_pointers_and_scalars_in_the_image_s_order(scenarios):
  assert scenarios["xla"]["plain"].splitlines() == [
      "load \x7fELFplai", "entry triple", "attribute 8 = 1024",
      "launch grid 3 1 1 block 128 1 1 smem 1024 cluster 0 0 0 stream (nil) params INPUT OUTPUT -7"]


def test_tensor_maps_are_encoded_for_the_addresses_of_the_call(scenarios):
  lines = scenarios["xla"]["mapped"].splitlines()
  assert lines[-1].endswith("params OUTPUT+16 OUTPUT INPUT+16")
  assert lines.count("encode 7 0 1 2 0 | 8 4 | 32 | 8/1 2/1") == 2


def test_a_tensor_map_of_rank_one_has_no_strides(scenarios):
  assert "encode 7 0 1 2 0 | 32 | | 8/1\n" in scenarios["xla"]["vector"]


def test_a_tensor_map_without_extent_is_not_encoded(scenarios):
  assert "encode" not in scenarios["xla"]["no extent"]
  assert _launch(scenarios, "no extent").endswith("params 0x0")


def test_sizes_strides_and_the_grid_are_those_of_the_call_s_arrays(scenarios):
  text = scenarios["xla"]["any size"]
  assert "encode 7 0 1 2 0 | 8 4 | 128 | 8/1 2/1" in text
  assert "launch grid 48 1 1" in text and text.endswith("params OUTPUT 8 2 INPUT+16\n")


def test_one_exported_program_of_symbolic_shapes_launches_for_every_size(scenarios):
  if scenarios["exported"] is None:
    pytest.skip("needs ptxas")
  assert scenarios["exported"] == [
      "encode 7 0 3 3 0 | 4 1 | 16 | 32/1 64/1; launch grid 1 1 1 params 1 1 1",
      "encode 7 0 3 3 0 | 64 100 | 256 | 32/1 64/1; launch grid 2 1 1 params 100 16 2",
      "encode 7 0 3 3 0 | 200 300 | 800 | 32/1 64/1; launch grid 5 1 1 params 300 50 5"]


def test_each_call_of_a_program_that_takes_its_programs_begins_with_a_counter_of_zero(scenarios):
  """XLA copies the constant for each call, also in a loop, and when an executable runs again."""
  if scenarios["counted"] is None:
    pytest.skip("needs ptxas")
  assert scenarios["counted"]["calls"] == 2 * 5 * ["launch grid 4, counter 0"]
  assert scenarios["counted"]["any size"] == 2 * ["launch grid 4, counter 0"]


def test_the_launcher_makes_a_counter_for_each_launch_on_its_stream(scenarios):
  lines = scenarios["counted by the launcher"].splitlines()
  assert [line.split(" grid")[0] for line in lines[-8:]] == 2 * [
      "allocate 4 on (nil)", "set 0 1 on (nil)", "launch", "free on (nil)"]
  assert [line for line in lines if "params INPUT counter 0 OUTPUT" in line] == [lines[-6], lines[-2]]


def test_an_empty_grid_launches_nothing(scenarios):
  assert "launch" not in scenarios["xla"]["empty"] + scenarios["direct"]["empty"]


@pytest.mark.parametrize("name, launched", [
    ("persistent", "grid 100 1 1"), ("persistent clusters", "grid 99 1 1"), ("persistent, small", "grid 50 1 1"),
    ("clusters", "grid 4 6 1")])
def test_a_persistent_grid_is_clamped_to_the_device_s_100_sms(scenarios, name, launched):
  assert launched in _launch(scenarios, name)


def test_clusters_are_a_launch_attribute(scenarios):
  assert "cluster 2 3 1" in _launch(scenarios, "clusters")
  assert "attribute 14 = 1" not in scenarios["xla"]["clusters"]


def test_an_overlapping_launch_is_an_attribute_beside_clusters(scenarios):
  assert "cluster 0 0 0 overlap 1 stream" in _launch(scenarios, "overlap")
  assert "cluster 2 3 1 overlap 1 stream" in _launch(scenarios, "overlapping clusters")


def test_a_cluster_of_more_than_eight_is_asked_for(scenarios):
  assert "attribute 14 = 1" in scenarios["xla"]["large cluster"]


@pytest.mark.parametrize("launcher", ["xla", "direct"])
@pytest.mark.parametrize("name, text", [
    ("older GPU", "was compiled for sm_90a, but device 0, Fake GPU, is sm_80"),
    ("newer GPU", "was compiled for sm_90a, but device 0, Fake GPU, is sm_100"),
    ("newer GPU, plain target", "was compiled for sm_80, but device 0, Fake GPU, is sm_90"),
    ("no cubin", r"cannot load the cubin: fake failure \(CUDA error 1\)"),
    ("no entry", "the cubin has no entry 'triple': fake failure"),
    ("no launch", r"launch of grid \(3, 1, 1\) by 128 threads, cluster .*, 1024 bytes: fake failure"),
    ("no map", "tensor map .*: fake failure")])
def test_a_failure_names_the_kernel_its_line_and_the_cause(scenarios, launcher, name, text):
  assert re.search(f"{KERNEL}:? {text}", scenarios[launcher][name])


@pytest.mark.parametrize("name, text", [
    ("missing", "attribute 'grid': missing"),
    ("wrong type", "attribute 'block': Wrong scalar data type: expected S32 but got S64"),
    ("cut short", "attribute 'grid': three extents are expected"),
    ("map cut short", "attribute 'tensor_maps': cut short"),
    ("unknown parameter", "attribute 'params': unknown kind, or no such tensor map"),
    ("no such map", "attribute 'params': unknown kind, or no such tensor map"),
    ("no such product", "attribute 'grid': three extents are expected"),
    ("products cut short", "attribute 'products': cut short"),
    ("no such size", "attribute 'products': no such size"),
    ("no such product of a map", "attribute 'tensor_maps': no such product"),
    ("no such dimension", "the image reads a dimension that the call does not have"),
    ("no multiple", "dimension 0 of input 0 is 4, no multiple of 3"),
    ("too large", "dimension 0 of input 0 is 4, which is not from 1 to 3"),
    ("no such operand", "the image refers to more operands than the 2 of the call"),
    ("unknown target", "unknown target 'gfx90a'")])
def test_a_bad_attribute_is_named(scenarios, name, text):
  assert scenarios["attributes"][name] == f"INVALID_ARGUMENT: tiletrace kernel 'triple' (triple.py:8): {text}"


def test_a_misaligned_operand_is_named(scenarios):
  assert "(triple.py:8): input 0 starts at 0x" in scenarios["shifted"]["xla"]
  assert "(triple.py:8): operand 1 starts at 0x408, which is not a multiple of 16" in scenarios["shifted"]["direct"]


def test_executables_with_one_cubin_share_its_module_and_the_last_unloads_it(scenarios):
  lines = [line for line in scenarios["shared module"].splitlines() if "unload" not in line or "ELFshar" in line]
  assert [line.split()[0] for line in lines] == ["load", "entry", "attribute", "launch", "launch", "unload"]


def test_execute_declares_api_0_3_and_command_buffers(scenarios):
  assert scenarios["metadata"] == 301     # major * 10000 + minor * 100 + traits


def test_without_a_driver_the_call_says_so(host_handler: pathlib.Path):
  try:
    ctypes.CDLL("libcuda.so.1")
    pytest.skip("this machine has a driver")
  except OSError:
    pass
  handler = ctypes.CDLL(str(host_handler))
  jax.ffi.register_ffi_target("launch_without_driver", {
      "instantiate": jax.ffi.pycapsule(handler.tt_instantiate),
      "execute": jax.ffi.pycapsule(handler.tt_execute_on_host)}, platform="cpu")
  call = jax.ffi.ffi_call("launch_without_driver", jax.ShapeDtypeStruct((4,), jnp.float32))
  with pytest.raises(jax.errors.JaxRuntimeError, match=f"FAILED_PRECONDITION: {KERNEL}: there is no NVIDIA driver: "
                     "libcuda.so.1: cannot open"):
    jax.block_until_ready(call(jnp.arange(4.0), **IMAGES["plain"].attributes()))


def test_launching_without_jax_and_without_a_driver_says_so(monkeypatch):
  def missing(flags: int) -> None:
    raise RuntimeError("libcuda is not on this machine")

  launch._open.cache_clear()
  monkeypatch.setattr(launch.cuda, "cuInit", missing)
  with pytest.raises(LaunchError, match="there is no NVIDIA driver: libcuda is not on this machine"):
    launch.Launcher(IMAGES["plain"])


def test_launching_without_jax_and_without_cuda_python_says_so(monkeypatch):
  launch._open.cache_clear()
  monkeypatch.setattr(launch, "cuda", None)
  with pytest.raises(LaunchError, match="needs the package cuda-python") as error:
    launch.Launcher(IMAGES["plain"])
  assert error.value.hint == "pip install 'tiletrace[cuda13]'"
