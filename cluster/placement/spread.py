"""Which branches of a fork run on other replicas than the rest of their program.

They stay where their prefix lies unless they have so much to do that computing the prefix once
more elsewhere (or fetching it) pays. Everything is in tokens of a prompt (`load.py`); a row of a
branch counts with what one more row adds to a step there, which engines measure: a step that reads
all weights for eight rows takes little longer for sixteen, and then nothing is gained.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from .policies import Candidate

# All of it must end so much sooner (guesses; less than for a move, which is between programs: here
# both sides are the same branches).
MARGIN = 1.2
MIN_GAIN_TOKENS = 256.0


class Home(Candidate, Protocol):
    """A replica on which branches may run."""

    @property
    def row_tokens(self) -> float:
        """What one more row adds to a step, in tokens of a prompt; 0: it is not known yet."""


@dataclass(frozen=True, slots=True)
class ForkedWork:
    """What a fork's branches will compute."""

    prefix_tokens: float  # that all of them begin with
    prompt_tokens: Sequence[float]  # of each branch's own texts
    rows: Sequence[float]  # tokens that each branch generates
    cached: Mapping[int, float] = field(default_factory=dict)  # of the prefix, by replicas' numbers


def spread(work: ForkedWork, home: Home, others: Sequence[Home]) -> list[Home]:
    """Where each branch runs: `home` for all, unless ending much sooner pays for the prefix."""
    stays = [home] * len(work.rows)
    if not others or not home.row_tokens:
        return stays
    ready = {each.number: each.expected_tokens for each in (home, *others)}
    for each in others:
        missing = max(0.0, work.prefix_tokens - work.cached.get(each.number, 0.0))
        ready[each.number] += missing + max(0.0, missing - max(0.0, each.room_tokens))
    chosen: list[Home] = []
    for own, rows in zip(work.prompt_tokens, work.rows, strict=True):
        ends = {c.number: ready[c.number] + own + rows * _row(c, home) for c in (home, *others)}
        least = min((home, *others), key=lambda c: ends[c.number])
        ready[least.number] = ends[least.number]
        chosen.append(least)
    if all(each is home for each in chosen):
        return stays
    alone = home.expected_tokens + sum(work.prompt_tokens) + sum(work.rows) * home.row_tokens
    last = max(ready[each.number] for each in chosen)
    return chosen if alone > MARGIN * last + MIN_GAIN_TOKENS else stays


def _row(candidate: Home, home: Home) -> float:
    return candidate.row_tokens or home.row_tokens  # its own is not measured yet


Spread = Callable[[ForkedWork, Home, Sequence[Home]], Sequence[Home]]
