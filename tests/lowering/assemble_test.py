"""ptxas: found, asked, understood; its complaints become errors at the user's line."""
from __future__ import annotations

import os

import jax
import jax.numpy as jnp
import pytest

import tiletrace as tt
from tiletrace.core.errors import AssembleError
from tiletrace.core.source import user_loc
from tiletrace.lowering import assemble as assemble_module, pipeline
from tiletrace.lowering.assemble import AssembleOptions, Cubin, assemble, find_ptxas, ptxas_version, sass
from tiletrace.lowering.ptx import Module, Param, isa


def store_kernel(value: float) -> Module:
  m = Module()
  e = m.entry("store", [Param("out", "u64")], 128)
  b = e.builder()
  with b.at(user_loc()):
    b(isa.ST_GLOBAL, b.addr(b.new(isa.LD_PARAM, b.addr(e.param("out")), type="u64")), value, type="f32")
  b(isa.RET)
  return m


def spilling_kernel(n: int = 96) -> Module:
  m = Module()
  e = m.entry("spill", [Param("out", "u64")], 1024, max_registers=32)
  b = e.builder()
  out = b.new(isa.LD_PARAM, b.addr(e.param("out")), type="u64")
  loaded = [b.new(isa.LD_SYNC, b.addr(out, 4 * i), sem="relaxed", scope="gpu", type="b32") for i in range(n)]
  for i, x in enumerate(reversed(loaded)):
    b(isa.ST_SYNC, b.addr(out, 4 * i), x, sem="relaxed", scope="gpu", type="b32")
  b(isa.RET)
  return m


def serialised_kernel() -> Module:
  """Reads an accumulator before any wait."""
  m = Module()
  e = m.entry("serial", [Param("out", "u64")], 128, min_ctas=1)
  b = e.builder()
  out = b.new(isa.LD_PARAM, b.addr(e.param("out")), type="u64")
  acc = [b.new(isa.MOV, 0, type="f32") for _ in range(4)]
  desc = b.new(isa.LD_GLOBAL, b.addr(out), type="b64")
  b(isa.WGMMA_FENCE)
  b(isa.WGMMA_SS, acc, desc, desc, 1, 1, 1, 0, 0, shape="m64n8k16", d="f32", a="bf16", b="bf16")
  with b.at(user_loc()):
    b(isa.ST_GLOBAL, b.addr(out), acc, type="f32", vec="v4")
  b(isa.WGMMA_COMMIT)
  b(isa.WGMMA_WAIT, 0)
  b(isa.RET)
  return m


def locations(m: Module):
  return [loc for _, loc in m.lines()]


def test_a_kernel_becomes_an_elf_image_with_its_facts():
  cubin = assemble(store_kernel(1.5).render(), "sm_90a")
  assert cubin.image[:4] == b"\x7fELF"
  assert cubin.entry == "store"
  assert 0 < cubin.registers <= 32
  assert (cubin.spill_stores, cubin.spill_loads, cubin.stack, cubin.smem, cubin.warnings) == (0, 0, 0, 0, ())
  assert 0 < cubin.seconds < 30
  assert "Compiling entry function 'store'" in cubin.log


def test_the_same_text_gives_the_same_image():
  text = store_kernel(0.25).render()
  assert assemble(text, "sm_90a").image == assemble(text, "sm_90a").image != assemble(
      store_kernel(0.5).render(), "sm_90a").image


def test_spills_are_an_error_unless_allowed():
  text = spilling_kernel().render()
  with pytest.raises(AssembleError, match="spill: registers spill to local memory") as e:
    assemble(text, "sm_90a")
  assert e.value.code == "TT403"
  cubin = assemble(text, "sm_90a", AssembleOptions(allow_spills=True))
  assert cubin.spill_stores > 0
  assert cubin.spill_loads > 0
  assert cubin.stack > 0


def test_serialised_wgmma_is_an_error_at_the_line_unless_allowed():
  m = serialised_kernel()
  with pytest.raises(AssembleError, match="C75") as e:
    assemble(m.render(), m.target, locations=locations(m))
  assert e.value.code == "TT402" and "tt.wgmma_wait(0)" in str(e.value)
  cubin = assemble(m.render(), m.target, AssembleOptions(allow_serialized_wgmma=True))
  assert any("C75" in w for w in cubin.warnings)


def _either(k, n, gemm, p, q):
  with tt.when(k % 2 == 0) as w:
    gemm(p)
  with w.otherwise():
    gemm(q)


def _exchanged(k, n, gemm, p, q):
  p[...], q[...] = q[...], p[...]
  gemm(p)


def _switched(k, n, gemm, p, q):
  gemm(p)
  p[...] = tt.switch(n[k], [lambda: p[...], lambda: tt.maximum(p[...], 0), lambda: p[...] * 2])


def _sometimes(k, n, gemm, p, q):
  with tt.when(n[k] > 2):
    with tt.when(n[0] > 1):
      gemm(p)
    p[...] = p[...] + 1
  q[...] = q[...] + p[...]


@pytest.mark.parametrize("body", [_either, _exchanged, _switched, _sometimes])
def test_accumulators_that_branches_and_other_code_touch_are_waited_for(body):
  """No wgmma is serialised: tt.gemm places its waits."""
  def kernel(a, b, n, y):
    a_s, b_s = tt.alloc_shared((128, 64), a.dtype), tt.alloc_shared((64, 64), b.dtype)
    p, q = tt.alloc_fragment((128, 64), jnp.float32), tt.alloc_fragment((128, 64), jnp.float32)
    p[...], q[...] = 0, 0
    for k in tt.pipelined(8, num_stages=3):
      tt.copy(a.at[:, tt.block(k, 64)], a_s)
      tt.copy(b.at[tt.block(k, 64), :], b_s)
      body(k, n, lambda acc: tt.gemm(a_s, b_s, acc), p, q)
    y[...] = (p[...] - q[...]).astype(y.dtype)

  struct = jax.ShapeDtypeStruct
  lowered = tt.tile_call(kernel, struct((128, 64), jnp.bfloat16), grid=1).lower(
      struct((128, 512), jnp.bfloat16), struct((512, 64), jnp.bfloat16), struct((8,), jnp.int32))
  assert not pipeline.assemble(lowered.lowering).warnings


def test_an_ignored_setmaxnreg_is_an_error():
  m = Module()
  b = m.entry("k", [], 128).builder()
  b(isa.SETMAXNREG, 24, dir="dec")
  b(isa.RET)
  with pytest.raises(AssembleError, match=r"C7508.*setmaxnreg"):
    assemble(m.render(), m.target)


def test_a_refusal_shows_the_ptx_and_the_python_line():
  m = store_kernel(1.0)
  text = m.render().replace("st.global.f32", "st.global.f33")
  line = 1 + text.splitlines().index(next(x for x in text.splitlines() if "f33" in x))
  with pytest.raises(AssembleError) as e:
    assemble(text, "sm_90a", locations=locations(m))
  assert e.value.code == "TT401"
  assert f"line {line}: " in str(e.value)
  assert "st.global.f33 [%rd0]" in str(e.value)
  assert "with b.at(user_loc()):" in str(e.value)
  assert e.value.loc is not None
  assert e.value.loc.filename == __file__


def test_a_parse_error_is_located_too():
  m = store_kernel(1.0)
  with pytest.raises(AssembleError, match=r"line \d+: .*\n.*%rd0\+\+"):
    assemble(m.render().replace("[%rd0]", "[%rd0++]"), "sm_90a", locations=locations(m))


@pytest.fixture
def fresh_search():
  assemble_module._find.cache_clear()
  yield
  assemble_module._find.cache_clear()


def fake_ptxas(path, version: str = "12.9.41"):
  path.write_text(f"#!/bin/sh\necho 'Cuda compilation tools, release 12.9, V{version}'\n")
  path.chmod(0o755)
  return str(path)


def test_tt_ptxas_comes_first(monkeypatch, tmp_path, fresh_search):
  fake = fake_ptxas(tmp_path / "my_ptxas")
  monkeypatch.setenv("TT_PTXAS", fake)
  assert find_ptxas() == fake
  assert ptxas_version() == "12.9.41"
  monkeypatch.delenv("TT_PTXAS")
  assert find_ptxas() != fake


def test_the_wheel_comes_before_path_and_path_before_the_toolkit(monkeypatch, tmp_path, fresh_search):
  wheel, on_path = tmp_path / "wheel", tmp_path / "bin"
  wheel.mkdir()
  on_path.mkdir()
  fake_ptxas(on_path / "ptxas")
  monkeypatch.setenv("PATH", str(on_path), prepend=os.pathsep)
  monkeypatch.setattr(assemble_module, "_wheel_directories", lambda: [str(wheel)])
  assert find_ptxas() == str(on_path / "ptxas")
  fake_ptxas(wheel / "ptxas")
  assemble_module._find.cache_clear()
  assert find_ptxas() == str(wheel / "ptxas")


def test_a_missing_ptxas_lists_every_place_and_the_remedy(monkeypatch, tmp_path, fresh_search):
  monkeypatch.setenv("PATH", str(tmp_path / "nothing"))
  monkeypatch.setattr(assemble_module, "_wheel_directories", lambda: [str(tmp_path / "wheel")])
  monkeypatch.setattr(assemble_module, "_TOOLKITS", str(tmp_path / "cuda*"))
  with pytest.raises(AssembleError) as e:
    find_ptxas()
  assert e.value.code == "TT404"
  for place in ("nothing", "wheel", "cuda*"):
    assert str(tmp_path / place) in str(e.value)
  assert "pip install nvidia-cuda-nvcc" in str(e.value)
  assert "TT_PTXAS" in str(e.value)


def test_a_wrong_tt_ptxas_is_an_error_and_not_passed_over(monkeypatch, tmp_path, fresh_search):
  monkeypatch.setenv("TT_PTXAS", str(tmp_path))
  with pytest.raises(AssembleError, match="is not an executable file"):
    find_ptxas()


def test_a_program_that_is_not_ptxas_is_an_error(monkeypatch, tmp_path, fresh_search):
  path = tmp_path / "ptxas"
  path.write_text("#!/bin/sh\necho hello\n")
  path.chmod(0o755)
  monkeypatch.setenv("TT_PTXAS", str(path))
  with pytest.raises(AssembleError, match=r"(?s)does not answer like ptxas.*hello"):
    ptxas_version()


def test_sass_asks_nvdisasm_beside_ptxas_and_says_so_when_there_is_none(monkeypatch, tmp_path, fresh_search):
  cubin = Cubin(b"\x7fELF of a kernel", "k", 8, 0, 0, 0, 0, (), "", 0.1)
  tool = tmp_path / "nvdisasm"
  tool.write_text('#!/bin/sh\necho "HGMMA in $(cat "$2")"\n')
  tool.chmod(0o755)
  monkeypatch.setenv("TT_PTXAS", fake_ptxas(tmp_path / "ptxas"))
  assert sass(cubin) == "HGMMA in \x7fELF of a kernel\n"
  tool.unlink()
  assemble_module._find.cache_clear()
  monkeypatch.setenv("PATH", str(tmp_path))
  monkeypatch.setattr(assemble_module, "_wheel_directories", list)
  monkeypatch.setattr(assemble_module, "_TOOLKITS", str(tmp_path / "cuda*"))
  with pytest.raises(AssembleError, match=r"(?s)nvdisasm was not found.*pip install nvidia-cuda-nvdisasm"):
    sass(cubin)
