"""Faults put into generated modules, one function for each class, to see whether the simulator finds and names them.

A fault changes structured instructions of a real module in place, found by their rows and by what defines their
operands. It names the subject (`subjects.py`) whose module it breaks and the kinds of findings of which one must name
it: names of `sim.faults.KINDS`, of which "wrong result" is for where nothing but the numbers can tell.
"""
from __future__ import annotations

import dataclasses
from collections.abc import Callable

from tests.sim.edit import Edit, NoSuchPlace
from tests.sim.subjects import module_copy
from tiletrace.lowering.ptx import isa
from tiletrace.lowering.ptx.instr import Inst
from tiletrace.lowering.ptx.module import Module
from tiletrace.lowering.ptx.registers import Addr, Reg

WRONG_RESULT = "wrong result"
NOT_WAITED, OVERWRITTEN = "asynchronous write not waited for", "overwritten while read asynchronously"
RACE, DEADLOCK = "race", "deadlock"


@dataclasses.dataclass(frozen=True)
class Fault:
  """A class of faults.

  Attributes:
    subject: whose module it breaks.
    kinds: of which one must be found; none where the lint refuses the module before it runs.
    lint: the kind of the lint's finding, where the fault is seen without running anything.
    apply: changes the module.
  """
  name: str
  subject: str
  kinds: tuple[str, ...]
  lint: str | None
  apply: Callable[[Edit], None]

  def module(self) -> Module:
    """A copy of the subject's module with the fault.

    Raises:
      NoSuchPlace: the module has nothing that the fault could break.
    """
    module = module_copy(self.subject)
    self.apply(Edit(module))
    return module


FAULTS: dict[str, Fault] = {}


def fault(subject: str, *kinds: str, lint: str | None = None) -> Callable[[Callable[[Edit], None]], Callable]:
  """Registers a fault; one of `kinds` must be found in the subject when it is simulated."""
  def register(f: Callable[[Edit], None]) -> Callable[[Edit], None]:
    FAULTS[f.__name__] = Fault(f.__name__, subject, kinds, lint, f)
    return f
  return register


# ---- waiting for and releasing slots

def _spin(e: Edit, part: str, which: int = 0) -> tuple[Inst, Inst]:
  """(try_wait, the branch back to it)."""
  wait = e.find(isa.MBARRIER_TRY_WAIT, part=part)[which]
  return wait, e.find(isa.BRA, part=part, after=wait)[0]


def _slot(e: Edit, inst: Inst) -> Inst:
  """The mad that makes the address of an mbarrier: slot * 8 + base."""
  return e.definition(e.get(inst, "bar").base, inst)


@fault("gemm", NOT_WAITED)
def full_is_not_waited_for(e):
  """The consumers go on whether the slot's bytes have arrived or not."""
  e.drop(_spin(e, "consumer")[1])


@fault("gemm", OVERWRITTEN, NOT_WAITED, "barrier count")
def empty_is_not_waited_for(e):
  """The producer fills a slot that the consumers may still read."""
  e.drop(_spin(e, "producer")[1])


@fault("gemm", NOT_WAITED)
def consumers_start_with_the_wrong_parity(e):
  """The parity of the phase before the first one: it passes at once."""
  e.change(e.initial(e.get(_spin(e, "consumer")[0], "parity"), "consumer"), a=1)


@fault("gemm", DEADLOCK)
def producer_starts_with_the_wrong_parity(e):
  """A new slot counts as full: nobody ever releases it."""
  e.change(e.initial(e.get(_spin(e, "producer")[0], "parity"), "producer"), a=0)


@fault("gemm", NOT_WAITED, DEADLOCK)
def parity_never_flips(e):
  """The consumers' phase is not toggled where the ring wraps around: they wait for a phase that is over, or to come."""
  parity = e.get(_spin(e, "consumer")[0], "parity")
  e.drop(e.find(isa.MOV, part="consumer", where=lambda i: i.operands[0] is parity)[-1])


@fault("gemm", "barrier count")
def empty_counts_too_few_arrivals(e):
  """One consumer warpgroup's release frees the slot while the other may read it."""
  for init in e.find(isa.MBARRIER_INIT, where=lambda i: e.get(i, "count") == 2):
    e.change(init, count=1)


@fault("gemm", DEADLOCK)
def empty_counts_too_many_arrivals(e):
  """One more than there are consumers: the slot never becomes free."""
  for init in e.find(isa.MBARRIER_INIT, where=lambda i: e.get(i, "count") == 2):
    e.change(init, count=3)


@fault("gemm", NOT_WAITED)
def too_few_bytes_expected(e):
  """The phase completes before the last box has arrived."""
  [arrive] = e.find(isa.MBARRIER_ARRIVE_EXPECT_TX, part="producer")
  e.change(arrive, tx=e.get(arrive, "tx") // 2)


@fault("gemm", DEADLOCK)
def too_many_bytes_expected(e):
  """Bytes that nobody sends."""
  [arrive] = e.find(isa.MBARRIER_ARRIVE_EXPECT_TX, part="producer")
  e.change(arrive, tx=e.get(arrive, "tx") + 16)


@fault("gemm", NOT_WAITED)
def no_bytes_expected(e):
  """A plain arrival where expect_tx belongs: the phase does not wait for the copies."""
  [arrive] = e.find(isa.MBARRIER_ARRIVE_EXPECT_TX, part="producer")
  e.replace(arrive, isa.MBARRIER_ARRIVE, e.get(arrive, "bar"))


@fault("gemm", DEADLOCK)
def slots_are_never_released(e):
  """The consumers' arrival is missing in the loop."""
  e.drop(e.find(isa.MBARRIER_ARRIVE, part="consumer")[0])


@fault("gemm", DEADLOCK)
def slots_are_released_twice(e):
  """Each consumer arrives twice: two arrivals of one make up for the other one."""
  e.repeat(e.find(isa.MBARRIER_ARRIVE, part="consumer")[0])


@fault("gemm", OVERWRITTEN)
def slots_are_released_too_early(e):
  """Each iteration releases the slot that its own wgmma reads, instead of the one before."""
  arrive, last = e.find(isa.MBARRIER_ARRIVE, part="consumer")
  e.change(_slot(e, arrive), a=e.get(_slot(e, _spin(e, "consumer")[0]), "a"))
  e.change(arrive, guard=(last.pred, False))
  e.drop(last)


@fault("gemm", DEADLOCK)
def the_arrival_is_on_the_wrong_slot(e):
  """The producer announces its bytes on the next slot's barrier, the copies complete on this one's."""
  [arrive] = e.find(isa.MBARRIER_ARRIVE_EXPECT_TX, part="producer")
  e.change(arrive, bar=e.shifted(e.get(arrive, "bar"), 8))


@fault("gemm", DEADLOCK)
def the_ring_is_one_slot_short(e):
  """The consumers wrap around one slot before the producer does."""
  wait = _spin(e, "consumer")[0]
  wrap = e.find(isa.SETP, part="consumer", after=wait, where=lambda i: e.get(i, "b") == 3)[0]
  e.change(wrap, b=2)


# ---- wgmma

def _descriptor(e: Edit, operand: str) -> tuple[Inst, Inst, Inst]:
  """(OR with the low word's constants, mov of the high word, pack) of a descriptor of the first wgmma."""
  first = e.find(isa.WGMMA_SS)[0]
  pack = e.definition(e.get(first, operand), first)
  low, high = e.get(pack, "a")
  return e.definition(low, pack), e.definition(high, pack), pack


def _signed(word: int) -> int:
  return word - (1 << 32) if word >= 1 << 31 else word


@fault("gemm", NOT_WAITED)
def the_next_slot_is_read(e):
  """B's descriptor starts one slot too far: off by one stage."""
  low, _, pack = _descriptor(e, "b_desc")
  address = e.definition(e.get(e.definition(e.get(low, "a"), pack), "a"), pack)
  e.change(address, b=e.get(address, "b") + 64 * 128 * 2)


@fault("gemm", WRONG_RESULT)
def lbo_and_sbo_are_swapped(e):
  """The strides of B, which is MN-major: bytes between its chunks of 64 columns, and of 8 rows."""
  low, high, _ = _descriptor(e, "b_desc")
  lbo, word = e.get(low, "b") >> 16, e.get(high, "a") & 0xFFFFFFFF
  if lbo == word & 0x3FFF:
    raise NoSuchPlace("both strides are equal")
  e.change(low, b=(word & 0x3FFF) << 16)
  e.change(high, a=_signed(word & ~0x3FFF | lbo))


@fault("gemm", "descriptor")
def the_swizzle_is_wrong(e):
  """A is read with the pattern of 64 bytes, TMA wrote it with that of 128 bytes."""
  _, high, _ = _descriptor(e, "a_desc")
  e.change(high, a=_signed(e.get(high, "a") & 0x3FFFFFFF | 2 << 30))


@fault("gemm", "descriptor")
def the_descriptor_has_a_base_offset(e):
  """The pattern's phase is shifted although the buffer is aligned to it."""
  _, high, _ = _descriptor(e, "a_desc")
  e.change(high, a=_signed(e.get(high, "a") & 0xFFFFFFFF | 1 << 17))


@fault("gemm", OVERWRITTEN)
def the_wait_for_wgmma_is_too_shallow(e):
  """Two groups may be in flight where the slot of the one before is released."""
  [wait] = e.find(isa.WGMMA_WAIT, part="consumer", where=lambda i: e.get(i, "n") == 1)
  e.change(wait, n=2)


@fault("gemm", "register in flight")
def the_last_wgmma_is_not_waited_for(e):
  """The epilogue reads accumulators that the last group is still writing."""
  e.drop(e.find(isa.WGMMA_WAIT, part="consumer", where=lambda i: e.get(i, "n") == 0)[-1])


@fault("gemm", "register in flight")
def the_wait_comes_after_the_read(e):
  """The wait stands below the first conversion of an accumulator."""
  wait = e.find(isa.WGMMA_WAIT, part="consumer", where=lambda i: e.get(i, "n") == 0)[-1]
  store = e.find(isa.STMATRIX, part="consumer", after=wait)[0]
  e.move([wait], before=store)


@fault("gemm", "register in flight", OVERWRITTEN)
def wgmma_is_not_committed(e):
  """Waits are for groups: what is in none is never waited for."""
  e.drop(*e.find(isa.WGMMA_COMMIT))


@fault("gemm_from_registers", "missing wgmma fence")
def wgmma_fence_is_missing(e):
  """Threads wrote the fragment of A just before."""
  e.drop(*e.find(isa.WGMMA_FENCE))


@fault("gemm_from_registers", "register in flight", OVERWRITTEN)
def a_fragment_is_overwritten_in_flight(e):
  """The next iteration loads A's registers while wgmma may still read them."""
  e.drop(*e.find(isa.WGMMA_WAIT))


@fault("gemm", "uninitialised register")
def the_accumulator_is_not_zeroed(e):
  """The first wgmma adds to whatever the registers hold."""
  first = e.find(isa.WGMMA_SS, where=lambda i: isinstance(e.get(i, "scale_d"), Reg))[0]
  e.change(first, scale_d=1)


# ---- TMA and its mbarriers

@fault("gemm", WRONG_RESULT)
def a_box_has_the_wrong_coordinates(e):
  """Row and column of A's box are swapped."""
  load = e.find(isa.TMA_LOAD, part="producer")[0]
  e.change(load, coords=e.get(load, "coords")[::-1])


@fault("gemm", "misaligned")
def a_box_lands_on_a_misaligned_address(e):
  """TMA's side in shared memory is aligned to 128 bytes."""
  load = e.find(isa.TMA_LOAD, part="producer")[0]
  e.change(load, dst=e.shifted(e.get(load, "dst"), 16))


@fault("gemm", "barrier count")
def every_thread_issues_the_copies(e):
  """The election of one thread of the producer is missing."""
  e.drop(e.find(isa.BRA, part="producer", after=e.find(isa.SETMAXNREG)[0])[0])


@fault("gemm", "mbarrier initialisation not visible")
def mbarriers_are_not_fenced(e):
  """The asynchronous proxy need not see the initialisation."""
  e.drop(*e.find(isa.FENCE_MBARRIER_INIT, part="prologue"), *e.find(isa.FENCE_PROXY_ASYNC, part="prologue"))


@fault("gemm", "mbarrier initialisation not visible")
def mbarriers_are_used_before_they_are_initialised(e):
  """Nothing makes the other threads wait for the initialisation."""
  e.drop(*e.find(isa.BAR_SYNC_ALL, part="prologue"))


# ---- the epilogue

def _staging(e: Edit) -> tuple[Inst, Inst]:
  """(first stmatrix, first TMA store after it)."""
  first = e.find(isa.STMATRIX, part="consumer")[0]
  return first, e.find(isa.TMA_STORE, part="consumer", after=first)[0]


@fault("gemm", "missing proxy fence")
def staged_results_are_not_fenced(e):
  """TMA reads what stmatrix wrote, through the other proxy."""
  first, store = _staging(e)
  e.drop(*e.find(isa.FENCE_PROXY_ASYNC, part="consumer", after=first, before=store))


@fault("gemm", RACE)
def staged_results_are_not_synchronised(e):
  """One thread starts the store before the others have written their part."""
  first, store = _staging(e)
  e.drop(*e.find(isa.BAR_SYNC, part="consumer", after=first, before=store))


@fault("persistent_gemm", OVERWRITTEN)
def staging_is_reused_before_its_store_has_read_it(e):
  """The next tile's results overwrite the buffer that TMA may still read."""
  e.drop(*e.find(isa.BULK_WAIT, part="consumer", before=e.find(isa.STMATRIX, part="consumer")[-1]))


@fault("persistent_gemm", OVERWRITTEN)
def bulk_stores_are_not_committed(e):
  """Waits are for groups: what is in none is never waited for."""
  e.drop(*e.find(isa.BULK_COMMIT))


@fault("gemm", "asynchronous at exit")
def the_kernel_ends_before_its_store_has_read(e):
  """Shared memory is gone when the CTA has ended."""
  e.drop(e.find(isa.BULK_WAIT, part="consumer")[-1])


@fault("gemm", lint="undefined")
def results_are_stored_before_they_are_converted(e):
  """stmatrix stands above the conversions that make its operands."""
  store = e.find(isa.STMATRIX, part="consumer")[0]
  e.move([store], before=e.definition(e.get(store, "b")[0], store))
  e.change(store, a=Addr(e.get(e.find(isa.MOV_SYMBOL)[0], "d"), e.get(store, "a").offset))


# ---- threads: barriers, votes, registers

@fault("gemm", DEADLOCK)
def a_named_barrier_counts_too_many_threads(e):
  """Two warpgroups' threads, where each has a barrier of its own."""
  for bar in e.find(isa.BAR_SYNC, part="consumer"):
    e.change(bar, threads=256)


@fault("gemm", "barrier count")
def two_warpgroups_share_a_named_barrier(e):
  """The barrier's number does not depend on the warpgroup: any four warps complete it."""
  for bar in e.find(isa.BAR_SYNC, part="consumer"):
    e.change(bar, id=1)


@fault("gemm", "register budget")
def registers_are_overcommitted(e):
  """The producer keeps more than the consumers leave."""
  [dec] = e.find(isa.SETMAXNREG, part="producer")
  e.change(dec, n=56)


@fault("gemm", "not uniform")
def an_aligned_instruction_is_executed_by_some(e):
  """The leader alone commits, where all threads of a warpgroup must."""
  leader = e.find(isa.MBARRIER_ARRIVE, part="consumer")[-1].pred
  e.change(e.find(isa.WGMMA_COMMIT)[0], guard=(leader, False))


@fault("rows", RACE)
def a_shuffle_takes_the_wrong_lane(e):
  """A step of the tree over a warp's lanes is done twice, another one left out: lanes that store one place disagree."""
  shuffles = e.find(isa.SHFL, where=lambda i: i.mods["mode"] == "bfly")
  e.change(next(i for i in shuffles if e.get(i, "b") == 16), b=8)


@fault("rows", "not uniform")
def a_shuffle_names_lanes_that_do_not_take_part(e):
  """The mask has half of the lanes that execute it."""
  e.change(e.find(isa.SHFL, where=lambda i: i.mods["mode"] == "bfly")[0], mask=0xFFFF)


@fault("rows", RACE)
def the_exchange_is_not_synchronised(e):
  """Warps read the partial sums of others that may not have written them."""
  store = e.find(isa.ST_SHARED)[0]
  e.drop(e.find(isa.BAR_SYNC_ALL, isa.BAR_SYNC, after=store)[0])


@fault("rotation", RACE)
def a_buffer_is_overwritten_before_others_have_read_it(e):
  """The sync before the stores of the next iteration is missing."""
  e.drop(e.find(isa.BAR_SYNC_ALL, before=e.find(isa.ST_SHARED)[0])[-1])


@fault("gemm_from_registers", RACE)
def a_slot_is_released_while_others_read_it(e):
  """One lane arrives for its warp, whose others may still load from the slot."""
  load = e.find(isa.LD_SHARED, isa.LDMATRIX, part="consumer")[-1]
  e.drop(e.find(isa.BAR_WARP_SYNC, part="consumer", after=load)[0])


@fault("gemm_from_registers", "missing proxy fence")
def a_slot_that_threads_read_is_released_without_a_fence(e):
  """TMA refills the slot through the other proxy while loads from it may be on their way."""
  load = e.find(isa.LD_SHARED, isa.LDMATRIX, part="consumer")[-1]
  e.drop(e.find(isa.FENCE_PROXY_ASYNC, part="consumer", after=load)[0])


@fault("gemm_of_written_operands", "missing proxy fence")
def written_operands_are_not_fenced(e):
  """wgmma reads through the asynchronous proxy what threads stored."""
  e.drop(*e.find(isa.FENCE_PROXY_ASYNC))


@fault("gemm_of_written_operands", RACE)
def written_operands_are_not_synchronised(e):
  """wgmma reads what the warpgroup's other threads may not have stored."""
  store = e.find(isa.ST_SHARED)[-1]
  e.drop(e.find(isa.BAR_SYNC_ALL, isa.BAR_SYNC, after=store)[0])


# ---- cp.async

@fault("gemm_by_cp_async", NOT_WAITED)
def the_wait_for_cp_async_is_too_shallow(e):
  """One more group may be in flight than the arrival stands for."""
  [wait] = e.find(isa.CP_ASYNC_WAIT_GROUP, part="producer", where=lambda i: e.get(i, "n") > 0)
  e.change(wait, n=e.get(wait, "n") + 1)


@fault("gemm_by_cp_async", NOT_WAITED)
def cp_async_is_not_committed(e):
  """Waits are for groups: what is in none is never waited for."""
  e.drop(*e.find(isa.CP_ASYNC_COMMIT))


@fault("gemm_by_cp_async", "missing proxy fence")
def copied_operands_are_not_fenced(e):
  """cp.async writes through the generic proxy, wgmma reads through the other one."""
  e.drop(*e.find(isa.FENCE_PROXY_ASYNC, part="producer"))


@fault("gemm_by_cp_async", NOT_WAITED)
def copies_of_other_threads_are_not_waited_for(e):
  """The producer's leader arrives for threads that have not waited for their copies."""
  e.drop(*e.find(isa.BAR_SYNC, part="producer"))


@fault("gemm_by_cp_async", "out of bounds")
def copies_past_the_edge_are_not_cut(e):
  """The source size is the full size past the array's end."""
  for copy in e.find(isa.CP_ASYNC_ZFILL, isa.CP_ASYNC_CG_ZFILL):
    e.change(copy, src_size=e.get(copy, "size"))


# ---- global memory, addresses, registers

def _unguarded(e: Edit, row) -> None:
  for inst in e.find(row, where=lambda i: i.pred is not None):
    e.change(inst, guard=(None, False))


@fault("tails", "out of bounds")
def loads_past_the_edge_are_not_guarded(e):
  """The tile hangs over the array."""
  _unguarded(e, isa.LD_GLOBAL)


@fault("tails", "out of bounds", "race between CTAs")
def stores_past_the_edge_are_not_guarded(e):
  """The tile hangs over the array."""
  _unguarded(e, isa.ST_GLOBAL)


@fault("tails", "misaligned")
def a_vector_is_misaligned(e):
  """The address of a vector is a multiple of its element only."""
  load = e.find(isa.LD_GLOBAL, where=lambda i: i.mods["vec"] != "")[0]
  e.change(load, a=e.shifted(e.get(load, "a"), 4))


@fault("tails", "uninitialised register")
def what_lies_past_the_edge_is_not_filled(e):
  """The registers of a guarded load have no value where the guard is false."""
  load = e.find(isa.LD_GLOBAL, where=lambda i: i.pred is not None)[0]
  d = e.get(load, "d")
  for reg in d if isinstance(d, tuple) else (d,):
    e.drop(e.definition(reg, load))


@fault("tails", "race between CTAs")
def tiles_of_two_ctas_overlap(e):
  """Tiles of the result are half as far apart as they are high."""
  start = e.find(isa.MAD_WIDE, where=lambda i: e.get(i, "b") == 400)[-1]
  e.change(start, b=200)


@fault("rotation", RACE)
def two_threads_store_to_one_place(e):
  """The lane's part of an address is masked by one bit too few: two lanes with different values."""
  store = e.find(isa.ST_SHARED)[0]
  lanes = e.find(isa.AND, before=store, where=lambda i: e.get(i, "b") == 31)[-1]
  e.change(lanes, b=15)


@fault("rotation", "out of bounds")
def a_store_lies_outside_of_shared_memory(e):
  """An offset beyond what the launch gives."""
  store = e.find(isa.ST_SHARED)[0]
  e.change(store, a=e.shifted(e.get(store, "a"), 1 << 17))


@fault("rotation", "uninitialised register")
def a_register_is_never_written(e):
  """The loop's sums start from nothing."""
  e.drop(e.find(isa.MOV, before=e.find(isa.LD_GLOBAL)[0])[0])


@fault("rotation", "step limit")
def the_loop_never_ends(e):
  """Its counter does not count."""
  end = e.find(isa.SETP, where=lambda i: i.mods["cmp"] == "lt")[-1]
  e.change(e.definition(e.get(end, "a"), end), b=0)
