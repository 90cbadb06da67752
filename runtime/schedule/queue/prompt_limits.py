"""How many tokens of which prompts a step may take beside decode rows; see `stall`.

Two kinds are limited: long prompts, under each policy, and under policy `program` those of programs
that have had more service than one of those that decode.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..request import Request
from .policy import level_of
from .stall import LEVEL_SLOWDOWN, StallLimit

LATE_LEVELS = 1  # of service between a prompt and a decode row, from which on the prompt gives way


class PromptLimits:
    """What the step that is being planned may still take of each kind; None: no limit."""

    def __init__(self, stall: StallLimit) -> None:
        self._stall = stall
        self._token_budget = 0
        self._long: int | None = None
        self._late: int | None = None
        self._level = 0  # the least of the programs that decode

    def begin_step(self, token_budget: int, decoding: Sequence[Request], *, by_level: bool) -> None:
        """A step is being planned, with these rows; `by_level`: programs' levels count."""
        self._token_budget = token_budget
        self._long = self._stall.max_chunk() if decoding else None
        self._late = None
        if decoding and by_level:
            self._level = min(map(level_of, decoding))
            self._late = self._stall.max_chunk(LEVEL_SLOWDOWN)

    def max_chunk(self, request: Request, budget: int) -> int:
        """What is left of `budget` for a request's prompt."""
        if self._long is not None and self._is_long(request):
            budget = min(budget, self._long)
        if self._late is not None and self._is_late(request):
            budget = min(budget, self._late)
        return max(budget, 0)

    def take(self, request: Request, num_tokens: int) -> None:
        """The step computes so much of the request."""
        if self._long is not None and self._is_long(request):
            self._long -= num_tokens
        if self._late is not None and self._is_late(request):
            self._late -= num_tokens

    def _is_late(self, request: Request) -> bool:
        if request.num_scheduled_tokens >= request.num_prompt_tokens:
            return False
        return level_of(request) >= self._level + LATE_LEVELS

    def _is_long(self, request: Request) -> bool:
        """Whether a request's prompt, but for what was cached, fills more than half a step; a
        forced run behind it counts as decoding."""
        if request.num_scheduled_tokens >= request.num_prompt_tokens:
            return False
        if request.is_admitted:
            num_uncached = request.num_tokens - request.num_cached_tokens
        else:
            num_uncached = request.num_missing
        return num_uncached > self._token_budget // 2
