"""When a program that waits for no call should go on elsewhere.

It runs where its KV is until that replica has more to do, or more to hold, than moving costs: its
tokens are computed once more there, or fetched where replicas share a store. Everything is in
tokens of a prompt (`load.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf
from typing import TypeVar

from .load import ProgramLoad
from .policies import Candidate

C = TypeVar("C", bound=Candidate)

MARGIN = 1.5  # loads are estimates: what a move brings must be well above what it costs
MIN_GAIN_TOKENS = 512.0
FETCHED_SHARE = 0.1  # of computing a token, to fetch it (guess)


def is_crowded(here: Candidate, others: Sequence[Candidate]) -> bool:
    """Whether a program there can have a `better_home` at all."""
    least = min((each.expected_tokens for each in others), default=inf)
    stays = here.expected_tokens + max(0.0, -here.room_tokens)
    return stays > MARGIN * least + MIN_GAIN_TOKENS


def better_home(
    load: ProgramLoad, here: C, others: Sequence[C], token_share: float = 1.0
) -> C | None:
    """Where it would wait less, all that others lose counted; None: here. `token_share`: the cost
    of a token that is moved, as a share of computing it."""
    if not others:
        return None
    held = load.held_tokens

    def expected_there(each: C) -> float:
        displaced = max(0.0, held - max(0.0, each.room_tokens))
        return each.expected_tokens + held * token_share + displaced

    there = min(others, key=lambda each: (expected_there(each), each.number))
    overcommitted = min(held, max(0.0, -here.room_tokens))
    stays = here.expected_tokens - load.expected_tokens + overcommitted
    return there if stays > MARGIN * expected_there(there) + MIN_GAIN_TOKENS else None
