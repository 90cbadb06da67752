"""How much of a long prompt a step takes while other requests decode.

A chunk makes the step longer for every request in it, and one that decodes waits a step for each
token. A short prompt does that once. A long one would do it for many steps, so beside decode rows
its chunks are kept so small that a step takes at most `slowdown` times what the decode rows alone
take. (Sarathi-Serve, Agrawal et al., OSDI 2024, chooses such a budget by profiling; here it follows
from the steps' own times, on any device, with any model.) Work is not lost: where the arithmetic is
the limit, a token costs the same in a small chunk.
"""

from __future__ import annotations

from ..step import StepPlan

DEFAULT_SLOWDOWN = 1.6  # below 2, so that noise does not carry the 99th percentile past it
_MIN_CHUNK = 8  # tokens
_MIN_PROMPT_TOKENS = 4  # of a step whose time says something of a prompt's token
_MEMORY = 8  # steps that a running mean remembers


class StallLimit:
    """Learns what decode rows and prompt tokens cost; knows nothing until it has seen both."""

    def __init__(self, slowdown: float = DEFAULT_SLOWDOWN) -> None:
        """`slowdown` >= 1, or 0: no limit."""
        self.slowdown = slowdown
        self._decode_s: float | None = None  # a step of decode rows alone
        self._prompt_token_s: float | None = None

    def note(self, plan: StepPlan, duration_s: float) -> None:
        """A step took so long."""
        num_decoding = sum(len(row.input_ids) == 1 for row in plan.rows)
        num_prompt_tokens = plan.num_tokens - num_decoding
        if not num_prompt_tokens:
            self._decode_s = _mean(self._decode_s, duration_s)
        elif num_prompt_tokens >= _MIN_PROMPT_TOKENS:
            decode_s = (self._decode_s or 0.0) if num_decoding else 0.0
            token_s = max(duration_s - decode_s, 0.0) / num_prompt_tokens
            self._prompt_token_s = _mean(self._prompt_token_s, token_s)

    def max_chunk(self) -> int | None:
        """Tokens of long prompts that a step beside decode rows may take; None: no limit."""
        if not self.slowdown or self._decode_s is None or not self._prompt_token_s:
            return None
        room_s = (self.slowdown - 1.0) * self._decode_s
        return max(_MIN_CHUNK, int(room_s / self._prompt_token_s))


def _mean(before: float | None, value: float) -> float:
    return value if before is None else before + (value - before) / _MEMORY
