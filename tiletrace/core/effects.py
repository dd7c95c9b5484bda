"""What an equation does besides computing its results: the order that passes must keep."""
from __future__ import annotations

import dataclasses
import enum


class Access(enum.Enum):
  READ = "read"
  WRITE = "write"


@dataclasses.dataclass(frozen=True, slots=True)
class RefEffect:
  """The equation reads or writes its `operand`-th reference (counted among `Eqn.refs`)."""
  operand: int
  access: Access


@dataclasses.dataclass(frozen=True, slots=True)
class OrderEffect:
  """The equation may not move across another one with an effect (barriers, waits, fences, roles)."""
  what: str


Effect = RefEffect | OrderEffect


def read(operand: int) -> RefEffect:
  return RefEffect(operand, Access.READ)


def write(operand: int) -> RefEffect:
  return RefEffect(operand, Access.WRITE)
