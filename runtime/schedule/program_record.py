"""What the scheduler knows of a program: all its requests share one record.

The program's session makes it and says what is to come; the scheduler adds up what it has had.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field

LEVEL_SERVICE = 512  # tokens: programs that have had less are at level 0
# Each further level has so much more; docs/decisions/0010-whole-programs.md says what 4 does.
LEVEL_FACTOR = 16


@dataclass(slots=True, eq=False)
class ProgramRecord:
    """One program, from its first op to its end.

    `service` is what its calls have cost so far, in tokens computed; it only grows.
    """

    label: str = ""  # for people: who it is in reports
    tenant: Hashable = ""  # whose share of the engine it uses
    created_s: float = 0.0
    service: float = 0.0
    num_calls_started: int = 0
    number: int = 0  # in order of first calls, from 1 on; 0: there was none
    num_context_tokens: int = 0  # of its longest call so far
    num_shared_tokens: int = 0  # of them, those that others had computed before it began
    num_requests: int = 0  # that have ended, however they did
    num_prompt_tokens: int = 0  # of these
    num_output_tokens: int = 0  # of these
    _level: int = field(init=False, default=0)
    level_end: int = field(init=False, default=LEVEL_SERVICE)  # the service at which `level` rises

    def note_used(self, num_prompt_tokens: int, num_output_tokens: int) -> None:
        """One of its requests has ended."""
        self.num_requests += 1
        self.num_prompt_tokens += num_prompt_tokens
        self.num_output_tokens += num_output_tokens

    @property
    def used(self) -> dict[str, int]:
        """What its requests have had, as it is reported at its end."""
        return {
            "num_requests": self.num_requests,
            "prompt_tokens": self.num_prompt_tokens,
            "completion_tokens": self.num_output_tokens,
        }

    @property
    def level(self) -> int:
        """How much it has had, coarsely: programs of one level are not interleaved (a multi-level
        feedback queue, as in Autellix, arXiv:2502.13965)."""
        while self.service >= self.level_end:
            self._level, self.level_end = self._level + 1, self.level_end * LEVEL_FACTOR
        return self._level
