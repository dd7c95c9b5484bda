"""Branches, barriers, warp-wide exchange, and the rest (PTX ISA 9.7.9, 9.7.12, 9.7.13, 9.7.19)."""
from __future__ import annotations

from tiletrace.lowering.ptx.instr import row

CONTROL = "9.7.12 Control Flow Instructions"
SYNC = "9.7.13 Parallel Synchronization and Communication Instructions"
SHUFFLE = "9.7.9 Data Movement and Conversion Instructions: shfl.sync"
MISC = "9.7.19 Miscellaneous Instructions"

BRA = row("bra.{uni}", "target:label", CONTROL, uni="- uni")
RET = row("ret", "", CONTROL)
EXIT = row("exit", "", CONTROL)
TRAP = row("trap", "", MISC)
NANOSLEEP = row("nanosleep.u32", "ns:u32", MISC)
SETMAXNREG = row("setmaxnreg.{dir}.sync.aligned.u32", f"n:{'/'.join(map(str, range(24, 257, 8)))}", MISC,
                 arch="sm_90a", dir="inc dec")
GRIDDEPCONTROL = row("griddepcontrol.{op}", "", SYNC, arch="sm_90", op="wait launch_dependents")

# A named barrier: id 0..15 and a number of threads, a multiple of 32.
BAR_SYNC = row("bar.sync", "id:u32, threads:u32", SYNC)
BAR_SYNC_ALL = row("bar.sync", "id:u32", SYNC)
BAR_ARRIVE = row("bar.arrive", "id:u32, threads:u32", SYNC)
BAR_WARP_SYNC = row("bar.warp.sync", "mask:b32", SYNC)
CLUSTER_ARRIVE = row("barrier.cluster.arrive.{sem}.{aligned}", "", SYNC, arch="sm_90", sem="- release relaxed",
                     aligned="- aligned")
CLUSTER_WAIT = row("barrier.cluster.wait.{sem}.{aligned}", "", SYNC, arch="sm_90", sem="- acquire",
                   aligned="- aligned")

ELECT = row("elect.sync", "_|=p:pred, mask:b32", SYNC, arch="sm_90")
SHFL = row("shfl.sync.{mode}.b32", "=d:b32, a:!b32, b:b32, c:b32, mask:b32", SHUFFLE, mode="up down bfly idx")
# p: whether the source lane is in range
SHFL_P = row("shfl.sync.{mode}.b32", "=d:b32, |=p:pred, a:!b32, b:b32, c:b32, mask:b32", SHUFFLE,
             mode="up down bfly idx")
VOTE = row("vote.sync.{mode}.pred", "=d:pred, a:pred, mask:b32", SYNC, mode="all any uni")
VOTE_BALLOT = row("vote.sync.ballot.b32", "=d:b32, a:pred, mask:b32", SYNC)
MATCH_ANY = row("match.any.sync.{type}", "=d:^b32, a:^type, mask:b32", SYNC, type="b32 b64")
ACTIVEMASK = row("activemask.b32", "=d:b32", SYNC)
REDUX = row("redux.sync.{op}.{type}", "=d:^type, a:^!type, mask:b32", SYNC, op="add min max and or xor",
            type="u32 s32 b32", legal=lambda m: (m["op"] in ("and", "or", "xor")) == (m["type"] == "b32"))
