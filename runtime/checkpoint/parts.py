"""Which part of a weight a rank takes, where several processes hold a model together; no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

Range = tuple[int, int]
"""First and end."""

Rows = Sequence[Range]
"""Of a tensor's first axis, ascending and apart."""


@dataclass(frozen=True, slots=True)
class Part:
    """Of the weight of a linear layer made of one or more modules."""

    outputs: Sequence[Rows] | None = None  # of each module; None: all
    inputs: Range | None = None  # of all modules; None: all


WHOLE = Part()


def num_rows(rows: Rows) -> int:
    """How many that are."""
    return sum(end - first for first, end in rows)
