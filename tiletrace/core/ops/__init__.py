"""The operations: a primitive with its rules, and the function that users call."""
from __future__ import annotations

from tiletrace.core.ops import fold as fold  # rules that nobody calls by name
