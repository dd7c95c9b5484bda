"""Loads, stores, atomics, addresses, cache hints (PTX ISA 9.7.9, 9.7.13)."""
from __future__ import annotations

from tiletrace.lowering.ptx.instr import Mods, row

DATA = "9.7.9 Data Movement and Conversion Instructions"
ATOMIC = "9.7.13 Parallel Synchronization and Communication Instructions"

_TYPES = "b8 b16 b32 b64 u8 u16 u32 u64 s8 s16 s32 s64 f32 f64"


def _fits_16_bytes(m: Mods) -> bool:
  return int(m["vec"].strip("v") or 1) * int(m["type"][1:]) <= 128


LD_GLOBAL = row("ld.global.{nc}.{l1}.{l2}.{vec}.{type}", "=d:~type*vec, [a:b64]", DATA, legal=_fits_16_bytes,
                nc="- nc", l1="- L1::no_allocate L1::evict_first L1::evict_last L1::evict_unchanged",
                l2="- L2::64B L2::128B L2::256B", vec="- v2 v4", type=_TYPES)
ST_GLOBAL = row("st.global.{l1}.{vec}.{type}", "[a:b64], b:~type*vec", DATA, legal=_fits_16_bytes,
                l1="- L1::no_allocate L1::evict_first L1::evict_last", vec="- v2 v4", type=_TYPES)
# With a policy that CREATEPOLICY made.
LD_GLOBAL_HINT = row("ld.global.{nc}.L2::cache_hint.{vec}.{type}", "=d:~type*vec, [a:b64], policy:^!b64", DATA,
                     legal=_fits_16_bytes, nc="- nc", vec="- v2 v4", type="b8 b16 b32 u8 f32")
ST_GLOBAL_HINT = row("st.global.L2::cache_hint.{vec}.{type}", "[a:b64], b:~type*vec, policy:^!b64", DATA,
                     legal=_fits_16_bytes, vec="- v2 v4", type="b8 b16 b32 u8 f32")
LD_SHARED = row("ld.shared.{vec}.{type}", "=d:~type*vec, [a:b32]", DATA, legal=_fits_16_bytes, vec="- v2 v4",
                type=_TYPES)
ST_SHARED = row("st.shared.{vec}.{type}", "[a:b32], b:~type*vec", DATA, legal=_fits_16_bytes, vec="- v2 v4",
                type=_TYPES)
LD_PARAM = row("ld.param.{vec}.{type}", "=d:~type*vec, [a:b64]", DATA, legal=_fits_16_bytes, vec="- v2 v4",
               type=_TYPES)
# The address comes from MAPA: another CTA of the cluster.
LD_CLUSTER = row("ld.shared::cluster.{vec}.{type}", "=d:~type*vec, [a:b32]", DATA, arch="sm_90",
                 legal=_fits_16_bytes, vec="- v2 v4", type=_TYPES)
ST_CLUSTER = row("st.shared::cluster.{vec}.{type}", "[a:b32], b:~type*vec", DATA, arch="sm_90",
                 legal=_fits_16_bytes, vec="- v2 v4", type=_TYPES)
LD_SYNC = row("ld.{sem}.{scope}.global.{type}", "=d:type, [a:b64]", DATA, sem="relaxed acquire",
              scope="cta cluster gpu sys", type="b32 b64 u32 u64 s32 s64 f32", floors={"cluster": "sm_90"})
ST_SYNC = row("st.{sem}.{scope}.global.{type}", "[a:b64], b:type", DATA, sem="relaxed release",
              scope="cta cluster gpu sys", type="b32 b64 u32 u64 s32 s64 f32", floors={"cluster": "sm_90"})

CVTA = row("cvta.{space}.u64", "=d:u64, a:u64", DATA, space="global shared param local")
CVTA_TO = row("cvta.to.{space}.u64", "=d:u64, a:u64", DATA, space="global shared local")
MAPA = row("mapa.shared::cluster.u32", "=d:u32, a:u32, rank:u32", DATA, arch="sm_90")
PREFETCH = row("prefetch.global.{level}", "[a:b64]", DATA, level="L1 L2")
PREFETCH_TENSORMAP = row("prefetch.{space}.tensormap", "[a:b64]", DATA, arch="sm_90", space="- param")
CREATEPOLICY = row("createpolicy.fractional.{l2}.b64", "=d:^b64, fraction:f32", DATA,
                   l2="L2::evict_first L2::evict_last L2::evict_normal L2::evict_unchanged")

# ---- atomics. One op takes the types that the ISA lists for it.

_OP_TYPES = {
    "add": "u32 s32 u64 f32 f64", "min": "u32 s32 u64 s64", "max": "u32 s32 u64 s64", "inc": "u32", "dec": "u32",
    "and": "b32 b64", "or": "b32 b64", "xor": "b32 b64", "exch": "b32 b64",
}


def _legal_atom(m: Mods) -> bool:
  return m["type"] in _OP_TYPES[m["op"]].split()


def _address(m: Mods) -> Mods:
  return {"address": "b64" if m["space"] == "global" else "b32"}


ATOM = row("atom.{sem}.{scope}.{space}.{op}.{type}", "=d:type, [a:address], b:type", ATOMIC, legal=_legal_atom,
           derive=_address, sem="relaxed acquire release acq_rel", scope="cta cluster gpu sys", space="global shared",
           op=" ".join(_OP_TYPES), type="b32 b64 u32 s32 u64 s64 f32 f64", floors={"cluster": "sm_90"})
ATOM_CAS = row("atom.{sem}.{scope}.{space}.cas.{type}", "=d:type, [a:address], b:type, c:type", ATOMIC,
               derive=_address, sem="relaxed acquire release acq_rel", scope="cta cluster gpu sys",
               space="global shared", type="b32 b64", floors={"cluster": "sm_90"})
ATOM_HALF = row("atom.{sem}.{scope}.global.add.noftz.{type}", "=d:type, [a:b64], b:type", ATOMIC,
                sem="relaxed acquire release acq_rel", scope="cta gpu sys", type="f16 f16x2 bf16 bf16x2",
                floors={"bf16": "sm_90", "bf16x2": "sm_90"})
RED = row("red.{sem}.{scope}.{space}.{op}.{type}", "[a:address], b:type", ATOMIC,
          legal=lambda m: m["op"] != "exch" and _legal_atom(m), derive=_address, sem="relaxed release",
          scope="cta cluster gpu sys", space="global shared", op="add min max inc dec and or xor",
          type="b32 b64 u32 s32 u64 s64 f32 f64", floors={"cluster": "sm_90"})
RED_HALF = row("red.{sem}.{scope}.global.add.noftz.{type}", "[a:b64], b:type", ATOMIC, sem="relaxed release",
               scope="cta gpu sys", type="f16 f16x2 bf16 bf16x2", floors={"bf16": "sm_90", "bf16x2": "sm_90"})
RED_VECTOR = row("red.{sem}.{scope}.global.add.{vec}.f32", "[a:b64], b:!f32*vec", ATOMIC, arch="sm_90",
                 sem="relaxed release", scope="cta gpu sys", vec="v2 v4")
