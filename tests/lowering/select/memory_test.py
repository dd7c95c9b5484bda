"""Which variant copies, loads and stores take, and why not a better one."""
from __future__ import annotations

import pytest

import tiletrace as tt
from tests.lowering.kernels import BF16, F16, F32, assemble, count, declined, lower, matmul, notes, struct, variants
from tiletrace.core.errors import LoweringError, TileTypeError
from tiletrace.lowering.options import CompileOptions


def copy_kernel(x, y, *, rows=None, columns=64, fill=0, dispatch=None):
  s = tt.alloc_shared((32, columns), x.dtype)
  tt.copy(x.at[tt.block(tt.program_id(0), 32), tt.ds(0, columns)], s, fill_value=fill, dispatch=dispatch)
  y[tt.block(tt.program_id(0), 32), tt.ds(0, columns)] = s[...]


def copied(columns=64, dtype=BF16, array=None, **static):
  x = struct(64, array or columns, dtype=dtype)
  return lower(copy_kernel, [x], x, grid=2, static=dict(columns=columns, **static))


def test_a_tile_of_16_byte_rows_comes_by_tma():
  lowered = copied()
  assert variants(lowered, "copy") == ["tma"]
  assert count(lowered, "cp.async.bulk.tensor.2d.shared") == 1


@pytest.mark.parametrize(("array", "dtype", "variant", "size", "reason"), [
  (777, BF16, "scalar", 2, "rows of dimension 0 are 1554 bytes apart, not a multiple of 16"),
  (778, BF16, "cp_async", 4, "rows of dimension 0 are 1556 bytes apart, not a multiple of 16"),
  (780, BF16, "cp_async", 8, "rows of dimension 0 are 1560 bytes apart, not a multiple of 16"),
  (333, F32, "cp_async", 4, "rows of dimension 0 are 1332 bytes apart, not a multiple of 16"),
])
def test_rows_that_tma_cannot_take_fall_back_with_the_reason(array, dtype, variant, size, reason):
  lowered = copied(array=array, dtype=dtype)
  assert variants(lowered, "copy") == [variant]
  assert reason in declined(lowered, "copy")["tma"]
  assert reason in lowered.report()
  if variant == "scalar":
    assert "only 2 bytes are provably aligned" in declined(lowered, "copy")["cp_async"]
    assert count(lowered, "ld.global.b16") and count(lowered, "st.shared") and not count(lowered, "cp.async")
  else:
    assert count(lowered, rf"cp.async.ca.shared.global .*, {size}") + count(lowered, f"cp.async.*, {size}[,;]")
  assemble(lowered)


def test_only_zeros_come_from_the_hardware():
  lowered = copied(fill=-1)
  assert declined(lowered, "copy") == {"tma": "the hardware fills with 0, not -1",
                                       "cp_async": "the hardware fills with 0, not -1"} | declined(lowered, "copy")
  assert variants(lowered, "copy") == ["vector"]


@pytest.mark.parametrize("dispatch", ["tma", "cp_async", "vector", "scalar"])
def test_a_copy_may_be_forced(dispatch):
  lowered = copied(dispatch=dispatch)
  assert variants(lowered, "copy") == [dispatch]
  assemble(lowered)


def test_a_forced_copy_that_does_not_fit_is_refused_with_the_reason():
  with pytest.raises(LoweringError) as e:
    copied(array=777, dispatch="tma")
  assert "the forced variant of 'copy' declines" in str(e.value)
  assert "1554 bytes apart" in str(e.value)
  assert "tt.copy(x.at[" in str(e.value) and "^^^^" in str(e.value)


def test_options_force_every_copy():
  x = struct(64, 64)
  lowered = lower(copy_kernel, [x], x, grid=2, options=CompileOptions(force=(("copy", "cp_async"),)))
  assert variants(lowered, "copy") == ["cp_async"]


def test_copies_with_a_fragment_take_no_dispatch():
  def kernel(x, y):
    f = tt.alloc_fragment((32, 64), x.dtype)
    tt.copy(x, f, dispatch="tma")
    y[...] = f[...]

  with pytest.raises(TileTypeError, match=r"dispatch='tma' does not apply.*load and a store"):
    lower(kernel, [struct(32, 64)], struct(32, 64))


def double_kernel(x, y, *, block):
  r = tt.block(tt.program_id(0), block)
  y[r] = x[r] + x[r]


@pytest.mark.parametrize(("n", "block", "dtype", "load"), [
  (4096, 1024, F32, "v4.f32"), (4096, 1024, BF16, "v4.b32"), (4096, 1024, "bool", "v4.b32"),
  (1000, 1024, F32, "v4.f32"),
  (1001, 1024, F32, "f32"), (1002, 1024, F16, "b32"), (1001, 1024, BF16, "b16"), (999, 512, "bool", "u8"),
])
def test_loads_are_as_wide_as_is_provably_aligned_and_inside(n, block, dtype, load):
  def kernel(x, y):
    r = tt.block(tt.program_id(0), block)
    y[r] = x[r]

  x = struct(n, dtype=dtype)
  lowered = lower(kernel, [x], x, grid=tt.cdiv(n, block))
  assert count(lowered, "ld.global") == count(lowered, f"ld.global.nc.{load}") > 0
  assert count(lowered, "st.global") == count(lowered, f"st.global.{load}".replace(".f32", "..32"))


def test_accesses_that_cannot_overhang_are_unguarded():
  aligned, tail = (lower(double_kernel, [struct(n)], struct(n), grid=4, static={"block": 512}) for n in (2048, 2000))
  assert "@%p" not in aligned.as_text("ptx")
  assert "@%p" in tail.as_text("ptx")


def test_accumulators_of_16_bits_leave_through_stmatrix_and_tma():
  lowered = matmul()
  assert variants(lowered, "store") == ["tma"]
  assert count(lowered, "stmatrix") > 0
  assert count(lowered, "cp.async.bulk.tensor.2d.global") > 0
  assert count(lowered, "st.global") == 0


@pytest.mark.parametrize(("change", "reason"), [
  (dict(to=F32), "stmatrix stages 16-bit elements, these have 32 bits"),
  (dict(n=1000 + 1), "rows of dimension 0 are 2002 bytes apart, not a multiple of 16"),
  (dict(bn=96), "96 columns are not whole 64-column chunks"),
])
def test_other_accumulators_are_stored_directly_with_the_reason(change, reason):
  lowered = matmul(**change)
  assert variants(lowered, "store") == ["direct"]
  assert reason in declined(lowered, "store")["tma"]
  assert count(lowered, "st.global") > 0 and count(lowered, "stmatrix") == 0


def shifted_product_kernel(a, b, y, *, start):
  a_s, b_s = tt.alloc_shared((64, 64), a.dtype), tt.alloc_shared((64, 64), b.dtype)
  acc = tt.alloc_fragment((64, 64), "float32")
  acc[...] = 0
  tt.copy(a, a_s)
  tt.copy(b, b_s)
  tt.gemm(a_s, b_s, acc)
  y[:, tt.ds(start, 64)] = acc[...].astype(y.dtype)


def sending_kernel(x, y, *, start):
  s = tt.alloc_shared((64, 64), x.dtype)
  s[...] = x[...]
  tt.fence("proxy_async_shared")
  tt.sync()
  with tt.elect():
    tt.copy_async(s, y.at[:, tt.ds(start, 64)])
    tt.commit_group(kind="bulk")
    tt.wait_group(0, kind="bulk")


REASON = "the view does not provably start at a multiple of 16 bytes along its contiguous dimension"


@pytest.mark.parametrize(("start", "variant"), [(0, "tma"), (8, "tma"), (56, "tma"), (4, "direct"), (9, "direct"),
                                                  (-8, "direct")])
def test_tma_stores_only_to_multiples_of_16_bytes(start, variant):
  """Elsewhere its instruction is illegal."""
  x = struct(64, 64, dtype=BF16)
  lowered = lower(shifted_product_kernel, [x, x], struct(64, 128, dtype=BF16), static={"start": start})
  assert variants(lowered, "store") == [variant]
  if variant == "direct":
    reason = REASON if start > 0 else "the view does not provably start inside the array"
    assert declined(lowered, "store")["tma"] == reason


@pytest.mark.parametrize("n", [1024, 1003])
def test_tma_stores_no_rows_that_end_within_16_bytes(n):
  """It would write past the array."""
  def kernel(x, y):
    s = tt.alloc_shared((256,), x.dtype)
    s[...] = x[:256]
    with tt.warpgroup(0), tt.elect():
      tt.copy_async(s, y.at[tt.block(tt.program_id(0), 256)], dispatch="tma")

  if n % 4 == 0:
    assert lower(kernel, [struct(n, dtype=F32)], struct(n, dtype=F32), grid=4)
    return
  with pytest.raises(tt.TileTraceError, match="rows end at 4012 bytes, no multiple of 16"):
    lower(kernel, [struct(n, dtype=F32)], struct(n, dtype=F32), grid=4)


@pytest.mark.parametrize(("start", "variant"), [(0, "tma"), (8, "tma"), (4, "cp_async"), (9, "scalar")])
def test_tma_loads_only_from_multiples_of_16_bytes(start, variant):
  def kernel(x, y, *, dispatch=None):
    s = tt.alloc_shared((64, 64), x.dtype)
    for _ in tt.pipelined(1, num_stages=2):
      tt.copy(x.at[:, tt.ds(start, 64)], s, dispatch=dispatch)
      y[...] = s[...]

  x, y = struct(64, 128, dtype=BF16), struct(64, 64, dtype=BF16)
  assert variants(lower(kernel, [x], y, persistent=True), "copy") == [variant]
  if variant != "tma":
    with pytest.raises(LoweringError, match=REASON):
      lower(kernel, [x], y, persistent=True, static={"dispatch": "tma"})


def test_a_start_that_is_read_from_memory_is_not_proven():
  def kernel(x, at, y):
    s = tt.alloc_shared((64, 64), x.dtype)
    for _ in tt.pipelined(1, num_stages=2):
      tt.copy(x.at[:, tt.ds(at[0], 64)], s)
      y[...] = s[...]

  lowered = lower(kernel, [struct(64, 128, dtype=BF16), struct(1, dtype="int32")], struct(64, 64, dtype=BF16))
  assert variants(lowered, "copy")[0] != "tma"


def test_the_author_may_not_start_a_tma_store_elsewhere():
  x, y = struct(64, 64, dtype=BF16), struct(64, 128, dtype=BF16)
  assert count(lower(sending_kernel, [x], y, static={"start": 8}), "cp.async.bulk.tensor.2d.global") == 1
  with pytest.raises(LoweringError, match=REASON):
    lower(sending_kernel, [x], y, static={"start": 4})


def test_a_fragment_that_stmatrix_does_not_fit_is_stored_directly():
  def kernel(x, y):
    y[...] = x[...].astype(y.dtype)

  lowered = lower(kernel, [struct(64, 64)], struct(64, 64, dtype=BF16))
  assert variants(lowered, "store") == ["direct"]
  assert declined(lowered, "store")["tma"] == "the fragment's 8x8 blocks are not those of stmatrix"


def test_indices_of_shared_memory_must_be_in_range():
  def kernel(x, n, y, *, rows):
    s = tt.alloc_shared((4, 64), x.dtype)
    s[...] = x[...]
    y[...] = s[n[...] % rows, :]

  inputs, out = [struct(4, 64), struct(dtype="int32")], struct(64)
  assemble(lower(kernel, inputs, out, static={"rows": 4}))
  with pytest.raises(LoweringError) as e:
    lower(kernel, inputs, out, static={"rows": 5})
  assert "the index of s Ref<shared>{f32[4,64]} along dimension 0 is not provably from 0 to 3" in str(e.value)
  assert "it runs from 0 to 4" in str(e.value)
  assert "s[n[...] % rows, :]" in str(e.value)


def test_copies_that_stay_with_the_consumers_are_reported():
  assert "one slot, filled by the consumers" in notes(matmul(n=777, num_stages=1))
