"""Layout notation for authors: `from tiletrace.layout import S, R, lane, warp, wg, reg`.

Example::

  S[(8, 2, 4, 2):(4@lane, 1@warp, 1@lane, 1@reg)] + R[2:4@warp] + 5@warp
"""
from __future__ import annotations

from tiletrace.lowering.layouts.notation import R, S, cta, lane, off, reg, stage, warp, wg

__all__ = ["R", "S", "cta", "lane", "off", "reg", "stage", "warp", "wg"]
