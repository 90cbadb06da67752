"""How many new tokens running requests are expected to need: what admission keeps free for them.

Source: the new-token ratio of SGLang's scheduler. A request may generate up to max_tokens and
seldom does; to keep room for all of it leaves the pool half empty, to keep none makes requests
preempt each other. So a share of it is kept: it decays while nothing is preempted and rises when
something is.
"""

from __future__ import annotations

INITIAL_RATIO = 0.7
MIN_RATIO = 0.1
DECAY = 0.001  # a step: from the initial to the least ratio in 600 steps, as in SGLang
RISE = 0.1  # a preemption


class NewTokenRatio:
    """The share, in [MIN_RATIO, 1], of the tokens that running requests may still generate."""

    def __init__(self) -> None:
        self.value = INITIAL_RATIO

    def note_step(self) -> None:
        """A step went by."""
        self.value = max(MIN_RATIO, self.value - DECAY)

    def note_preemption(self) -> None:
        """The estimate was too low."""
        self.value = min(1.0, self.value + RISE)
