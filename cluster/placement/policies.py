"""Placement policies: which replica a new program runs on.

    round_robin      one after the other
    least_load       the one with the fewest calls in flight
    consistent_hash  by the caller's key, else by the beginning of the text, on a ring
    prefix           the one that has most of the prompt cached, unless the load is far apart; what
                     SGLang's router does per request ("cache_aware"), here per program
    program          the least expected time: what is not cached there, what its open programs are
                     expected to compute, and what would be displaced

Each is a function of what is known, and changes nothing.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_left
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Protocol

# SGLang's defaults: below this share of the prompt a match counts for nothing; loads are far apart
# when they differ by so many calls and by this factor.
MATCH_SHARE = 0.3
FAR_APART, FAR_APART_FACTOR = 64, 1.5
_RING_POINTS = 64  # of a replica
DEFAULT_PLACEMENT = "program"


class Candidate(Protocol):
    """A replica that takes programs."""

    @property
    def number(self) -> int:
        """Its name; it keeps it over restarts."""

    @property
    def num_calls(self) -> int:
        """Calls in flight."""

    @property
    def expected_tokens(self) -> float:
        """What its open programs are expected to have it compute."""

    def expected_before(self, tenant: Hashable, num_tokens: float) -> float:
        """Of these, what it computes before so many more of a tenant's."""

    @property
    def room_tokens(self) -> float:
        """KV that its open programs do not want again; below 0: they want more than it holds."""

    @property
    def prompt_token_s(self) -> float:
        """Seconds to compute one token of a prompt."""


@dataclass(frozen=True, slots=True)
class Newcomer:
    """A program that is to be placed."""

    num_tokens: float  # of its first prompt
    cached: Mapping[int, float] = field(default_factory=dict)  # of these, by replicas' numbers
    key: Hashable = None  # its caller's name for what belongs together
    text: bytes = b""
    expected_tokens: float = 0.0  # what its calls are expected to compute beside that
    tenant: Hashable = ""


Policy = Callable[[Newcomer, Sequence[Candidate]], Candidate]


def least_load(newcomer: Newcomer, candidates: Sequence[Candidate]) -> Candidate:
    """Ties go to the lowest number."""
    return min(candidates, key=lambda each: (each.num_calls, each.number))


def consistent_hash(newcomer: Newcomer, candidates: Sequence[Candidate]) -> Candidate:
    """A replica that comes or goes moves only its own share of the keys."""
    ring = _ring(tuple(each.number for each in candidates))
    name = newcomer.text[:1024] if newcomer.key is None else repr(newcomer.key).encode()
    place = bisect_left(ring, (_point(name), -1)) % len(ring)
    chosen = ring[place][1]
    return next(each for each in candidates if each.number == chosen)


def prefix(newcomer: Newcomer, candidates: Sequence[Candidate]) -> Candidate:
    """Where nothing is cached, the one with the most room."""
    loads = [each.num_calls for each in candidates]
    if max(loads) - min(loads) > FAR_APART and max(loads) > FAR_APART_FACTOR * min(loads):
        return least_load(newcomer, candidates)
    best = max(candidates, key=lambda each: newcomer.cached.get(each.number, 0.0))
    if newcomer.cached.get(best.number, 0.0) > MATCH_SHARE * newcomer.num_tokens:
        return best
    return max(candidates, key=lambda each: (each.room_tokens, -each.number))


def program(newcomer: Newcomer, candidates: Sequence[Candidate]) -> Candidate:
    """The least expected time until the program's first call has its first token, with what others
    lose by it."""
    return min(candidates, key=lambda each: (expected_s(newcomer, each), each.number))


def expected_s(newcomer: Newcomer, candidate: Candidate) -> float:
    """What placing it there costs, in seconds."""
    missing = newcomer.num_tokens - newcomer.cached.get(candidate.number, 0.0)
    missing = missing if missing > 0.0 else 0.0  # not max(): it is half of what this takes
    wanted, room = missing + newcomer.expected_tokens, candidate.room_tokens
    displaced = wanted - room if room > 0.0 else wanted
    expected = missing + candidate.expected_before(newcomer.tenant, wanted)
    return candidate.prompt_token_s * (expected + displaced if displaced > 0.0 else expected)


class RoundRobin:
    """Remembers whose turn it is."""

    def __init__(self) -> None:
        self._last = -1

    def __call__(self, newcomer: Newcomer, candidates: Sequence[Candidate]) -> Candidate:
        later = [each for each in candidates if each.number > self._last]
        chosen = min(later or candidates, key=lambda each: each.number)
        self._last = chosen.number
        return chosen


PLACEMENTS = ("program", "prefix", "least_load", "consistent_hash", "round_robin")


def policy_of(name: str) -> Policy:
    """A policy of PLACEMENTS."""
    if name == "round_robin":
        return RoundRobin()
    return {
        "program": program,
        "prefix": prefix,
        "least_load": least_load,
        "consistent_hash": consistent_hash,
    }[name]


@lru_cache(maxsize=256)
def _ring(numbers: tuple[int, ...]) -> list[tuple[int, int]]:
    points = range(_RING_POINTS)
    return sorted((_point(f"{number}/{i}".encode()), number) for number in numbers for i in points)


def _point(name: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(name, digest_size=8).digest(), "big")
