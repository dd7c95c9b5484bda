"""Order through global memory: releases, acquires, fences around relaxed accesses (PTX ISA, Memory Consistency Model).

A release pattern is a releasing write, or a fence and a later strong write by the same thread; an acquire pattern is an
acquiring read, or a strong read and a later fence. What was released at an address stays there for whoever reads it.
"""
from __future__ import annotations

import numpy as np

from tiletrace.sim.clocks import Token
from tiletrace.sim.machine import Machine

_WIDE = ("gpu", "sys")


class GlobalOrder:
  """The releases and acquires of a cluster.

  Attributes:
    fenced: thread -> what its last fence released. read: thread -> what its strong reads have found since.
  """

  def __init__(self, m: Machine):
    self.machine = m
    self.fenced: dict[int, Token] = {}
    self.read: dict[int, list[tuple[Token, bool]]] = {}
    m.on_start.append(self.reset)

  def reset(self) -> None:
    self.fenced.clear()
    self.read.clear()

  def write(self, threads: np.ndarray, addresses: np.ndarray, sem: str, scope: str) -> None:
    """A strong write or atomic."""
    races = self.machine.races
    if races is None:
      return
    if sem in ("release", "acq_rel"):
      for address in dict.fromkeys(addresses.tolist()):
        mine = threads[addresses == address]
        self._leave(address, int(mine[0]), races.publish(mine, scope in _WIDE))
    elif self.fenced:
      for t, address in zip(threads.tolist(), addresses.tolist()):
        if t in self.fenced:
          self._leave(address, t, self.fenced[t])

  def _leave(self, address: int, thread: int, token: Token) -> None:
    self.machine.launch.released.setdefault(address, {})[token.cta, thread] = token

  def reads(self, threads: np.ndarray, addresses: np.ndarray, sem: str, scope: str) -> None:
    """A strong read or atomic."""
    races, released = self.machine.races, self.machine.launch.released
    if races is None or not released:
      return
    for address in dict.fromkeys(addresses.tolist()):
      mine = threads[addresses == address]
      for token in released.get(address, {}).values():
        if sem in ("acquire", "acq_rel"):
          races.receive(mine, token, scope in _WIDE)
        else:
          for t in mine.tolist():
            self.read.setdefault(t, []).append((token, scope in _WIDE))

  def fence(self, threads: np.ndarray, scope: str) -> None:
    """fence.acq_rel, fence.sc."""
    races = self.machine.races
    if races is None:
      return
    for t in threads.tolist():
      one = np.array([t])
      for token, wide in self.read.pop(t, ()):
        races.receive(one, token, wide and scope in _WIDE)
      self.fenced[t] = races.publish(one, scope in _WIDE)


def global_order(m: Machine) -> GlobalOrder:
  return m.unit(GlobalOrder)
