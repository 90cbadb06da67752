"""How much of a long prompt a step takes while other requests decode.

A chunk makes the step longer for every request in it, and one that decodes waits a step for each
token. A short prompt does that once. A long one would do it for many steps, so beside decode rows
its chunks are kept so small that a step takes at most `slowdown` times what the decode rows alone
take. (Sarathi-Serve, Agrawal et al., OSDI 2024, chooses such a budget by profiling; here it follows
from the steps' own times, on any device, with any model.) Work is not lost: where the arithmetic is
the limit, a token costs the same in a small chunk.

Under policy `program`, prompts of programs that have had more service than one of those that decode
are kept within `LEVEL_SLOWDOWN` likewise, however short: else a program with many parallel calls
would slow down every token of a short one.
"""

from __future__ import annotations

from .step_costs import StepCosts

LEVEL_SLOWDOWN = 1.6  # by prompts of programs that have had more service
DEFAULT_SLOWDOWN = 1.6  # below 2, so that noise does not carry the 99th percentile past it
_MIN_CHUNK = 8  # tokens


class StallLimit:
    """The limit; there is none until both a decode step's and a prompt token's cost are known."""

    def __init__(self, costs: StepCosts, slowdown: float = DEFAULT_SLOWDOWN) -> None:
        """`slowdown` >= 1, or 0: no limit."""
        self._costs = costs
        self.slowdown = slowdown

    def max_chunk(self, slowdown: float | None = None) -> int | None:
        """Tokens of long prompts, or with another `slowdown` of what that is for, that a step
        beside decode rows may take; None: no limit."""
        slowdown = self.slowdown if slowdown is None else slowdown
        decode_s, token_s = self._costs.decode_step_s, self._costs.prompt_token_s
        if not slowdown or decode_s is None or not token_s:
            return None
        return max(_MIN_CHUNK, int((slowdown - 1.0) * decode_s / token_s))
