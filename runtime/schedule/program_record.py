"""What the scheduler knows of a program: all its requests share one record.

The program's session makes it and says what is to come; the scheduler adds up what it has had.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass


@dataclass(slots=True, eq=False)
class ProgramRecord:
    """One program, from its first op to its end.

    `service` is what its calls have cost so far, in tokens computed; `num_calls_left` is how many
    more calls are known to follow each other at least (the longest chain in what was captured).
    """

    label: str = ""  # for people: who it is in reports
    tenant: Hashable = ""  # whose share of the engine it uses
    created_s: float = 0.0
    service: float = 0.0
    num_calls_left: int = 0
    num_calls_started: int = 0
    is_cancelled: bool = False
