"""Asynchronous copies, TMA, mbarriers, proxies and fences (PTX ISA 9.7.9, 9.7.13)."""
from __future__ import annotations

from tiletrace.lowering.ptx.instr import row

COPY = "9.7.9 Data Movement and Conversion Instructions: asynchronous copy"
TENSOR = "9.7.9 Data Movement and Conversion Instructions: tensor copy"
BARRIER = "9.7.13 Parallel Synchronization and Communication Instructions: mbarrier"
FENCE_SECTION = "9.7.13 Parallel Synchronization and Communication Instructions: membar, fence"

# ---- cp.async (non-bulk)

CP_ASYNC = row("cp.async.ca.shared.global.{l2}", "[dst:b32], [src:b64], size:4/8/16", COPY,
               l2="- L2::64B L2::128B L2::256B")
CP_ASYNC_ZFILL = row("cp.async.ca.shared.global.{l2}", "[dst:b32], [src:b64], size:4/8/16, src_size:u32", COPY,
                     l2="- L2::64B L2::128B L2::256B")
CP_ASYNC_CG = row("cp.async.cg.shared.global.{l2}", "[dst:b32], [src:b64], size:16", COPY,
                  l2="- L2::64B L2::128B L2::256B")
CP_ASYNC_CG_ZFILL = row("cp.async.cg.shared.global.{l2}", "[dst:b32], [src:b64], size:16, src_size:u32", COPY,
                        l2="- L2::64B L2::128B L2::256B")
CP_ASYNC_HINT = row("cp.async.ca.shared.global.L2::cache_hint", "[dst:b32], [src:b64], size:4/8/16, policy:^!b64", COPY)
CP_ASYNC_ZFILL_HINT = row("cp.async.ca.shared.global.L2::cache_hint",
                          "[dst:b32], [src:b64], size:4/8/16, src_size:u32, policy:^!b64", COPY)
CP_ASYNC_CG_HINT = row("cp.async.cg.shared.global.L2::cache_hint", "[dst:b32], [src:b64], size:16, policy:^!b64", COPY)
CP_ASYNC_CG_ZFILL_HINT = row("cp.async.cg.shared.global.L2::cache_hint",
                             "[dst:b32], [src:b64], size:16, src_size:u32, policy:^!b64", COPY)
CP_ASYNC_COMMIT = row("cp.async.commit_group", "", COPY)
CP_ASYNC_WAIT_GROUP = row("cp.async.wait_group", "n:0..63", COPY)
CP_ASYNC_WAIT_ALL = row("cp.async.wait_all", "", COPY)
CP_ASYNC_MBARRIER_ARRIVE = row("cp.async.mbarrier.arrive.{noinc}.shared.b64", "[bar:b32]", BARRIER, noinc="- noinc")

# ---- bulk copies without a tensor map

BULK_LOAD = row("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes",
                "[dst:b32], [src:b64], size:u32, [bar:b32]", COPY, arch="sm_90")
BULK_STORE = row("cp.async.bulk.global.shared::cta.bulk_group", "[dst:b64], [src:b32], size:u32", COPY, arch="sm_90")
BULK_TO_CLUSTER = row("cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes",
                      "[dst:b32], [src:b32], size:u32, [bar:b32]", COPY, arch="sm_90")
BULK_PREFETCH = row("cp.async.bulk.prefetch.L2.global", "[src:b64], size:u32", COPY, arch="sm_90")
BULK_COMMIT = row("cp.async.bulk.commit_group", "", COPY, arch="sm_90")
BULK_WAIT = row("cp.async.bulk.wait_group.{read}", "n:0..63", COPY, arch="sm_90", read="- read")

# ---- tensor copies. `map` is the generic address of the tensor map; coordinates are innermost first.

_LOAD = "cp.async.bulk.tensor.{dim}.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
_DIM = "1d 2d 3d 4d 5d"
TMA_LOAD = row(_LOAD, "[dst:b32], [map:^!b64, coords:s32*dim], [bar:b32]", TENSOR, arch="sm_90", dim=_DIM)
TMA_LOAD_HINT = row(_LOAD + ".L2::cache_hint",
                    "[dst:b32], [map:^!b64, coords:s32*dim], [bar:b32], policy:^!b64", TENSOR,
                    arch="sm_90", dim=_DIM)
TMA_LOAD_MULTICAST = row(_LOAD + ".multicast::cluster",
                         "[dst:b32], [map:^!b64, coords:s32*dim], [bar:b32], mask:!b16", TENSOR, arch="sm_90", dim=_DIM)
TMA_LOAD_MULTICAST_HINT = row(_LOAD + ".multicast::cluster.L2::cache_hint",
                              "[dst:b32], [map:^!b64, coords:s32*dim], [bar:b32], mask:!b16, policy:^!b64", TENSOR,
                              arch="sm_90", dim=_DIM)
TMA_STORE = row("cp.async.bulk.tensor.{dim}.global.shared::cta.tile.bulk_group",
                "[map:^!b64, coords:s32*dim], [src:b32]", TENSOR, arch="sm_90", dim=_DIM)
TMA_STORE_HINT = row("cp.async.bulk.tensor.{dim}.global.shared::cta.tile.bulk_group.L2::cache_hint",
                     "[map:^!b64, coords:s32*dim], [src:b32], policy:^!b64", TENSOR, arch="sm_90", dim=_DIM)
TMA_REDUCE = row("cp.reduce.async.bulk.tensor.{dim}.global.shared::cta.{op}.tile.bulk_group",
                 "[map:^!b64, coords:s32*dim], [src:b32]", TENSOR, arch="sm_90", dim=_DIM, op="add min max and or xor")
TMA_PREFETCH = row("cp.async.bulk.prefetch.tensor.{dim}.L2.global.tile", "[map:^!b64, coords:s32*dim]", TENSOR,
                   arch="sm_90", dim=_DIM)

# ---- mbarriers

MBARRIER_INIT = row("mbarrier.init.shared::cta.b64", "[bar:b32], count:u32", BARRIER, arch="sm_90")
MBARRIER_INVAL = row("mbarrier.inval.shared::cta.b64", "[bar:b32]", BARRIER, arch="sm_90")
MBARRIER_ARRIVE = row("mbarrier.arrive.{sem}.{scope}.shared::cta.b64", "_, [bar:b32]", BARRIER, arch="sm_90",
                      sem="- release", scope="- cta cluster", legal=lambda m: bool(m["sem"]) == bool(m["scope"]))
MBARRIER_ARRIVE_COUNT = row("mbarrier.arrive.shared::cta.b64", "_, [bar:b32], count:u32", BARRIER, arch="sm_90")
MBARRIER_ARRIVE_EXPECT_TX = row("mbarrier.arrive.expect_tx.shared::cta.b64", "_, [bar:b32], tx:u32", BARRIER,
                                arch="sm_90")
MBARRIER_EXPECT_TX = row("mbarrier.expect_tx.relaxed.cta.shared::cta.b64", "[bar:b32], tx:u32", BARRIER, arch="sm_90")
# `bar` comes from MAPA: a barrier of another CTA of the cluster.
MBARRIER_ARRIVE_REMOTE = row("mbarrier.arrive.release.cluster.shared::cluster.b64", "_, [bar:b32]", BARRIER,
                             arch="sm_90")
# Released to the own CTA only: for readers that have written nothing. `.release.cluster` makes ptxas put a
# MEMBAR.ALL.GPU before every arrival, with which a GEMM ran at 0.7 of its rate.
MBARRIER_ARRIVE_CLUSTER = row("mbarrier.arrive.shared::cluster.b64", "_, [bar:b32]", BARRIER, arch="sm_90")
MBARRIER_ARRIVE_REMOTE_COUNT = row("mbarrier.arrive.release.cluster.shared::cluster.b64", "_, [bar:b32], count:u32",
                                   BARRIER, arch="sm_90")
MBARRIER_ARRIVE_EXPECT_TX_REMOTE = row("mbarrier.arrive.expect_tx.release.cluster.shared::cluster.b64",
                                       "_, [bar:b32], tx:u32", BARRIER, arch="sm_90")
# May return false before the phase completes: always in a loop.
MBARRIER_TRY_WAIT = row("mbarrier.try_wait.parity.{sem}.{scope}.shared::cta.b64", "=p:pred, [bar:b32], parity:u32",
                        BARRIER, arch="sm_90", sem="- acquire", scope="- cta cluster",
                        legal=lambda m: bool(m["sem"]) == bool(m["scope"]))
MBARRIER_TEST_WAIT = row("mbarrier.test_wait.parity.{sem}.{scope}.shared::cta.b64", "=p:pred, [bar:b32], parity:u32",
                         BARRIER, arch="sm_90", sem="- acquire", scope="- cta cluster",
                         legal=lambda m: bool(m["sem"]) == bool(m["scope"]))

# ---- fences

FENCE = row("fence.{sem}.{scope}", "", FENCE_SECTION, sem="sc acq_rel", scope="cta cluster gpu sys",
            floors={"cluster": "sm_90"})
FENCE_MBARRIER_INIT = row("fence.mbarrier_init.release.cluster", "", FENCE_SECTION, arch="sm_90")
FENCE_PROXY_ASYNC = row("fence.proxy.async.{space}", "", FENCE_SECTION, arch="sm_90",
                        space="- shared::cta shared::cluster global")
FENCE_PROXY_TENSORMAP = row("fence.proxy.tensormap::generic.acquire.{scope}", "[map:b64], size:128", FENCE_SECTION,
                            arch="sm_90", scope="cta cluster gpu sys")
FENCE_PROXY_TENSORMAP_RELEASE = row("fence.proxy.tensormap::generic.release.{scope}", "", FENCE_SECTION,
                                    arch="sm_90", scope="cta cluster gpu sys")
