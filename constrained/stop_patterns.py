"""Regular expressions that end an output: matched as the text comes, in linear time.

Each pattern becomes an automaton (constrained/regular), and all starting points that may still
become a match are followed together, so no pattern can make the engine hang: with S states a
character costs at most S steps. Of two starts in one state only the earlier matters, since the
following text has the same effect on both.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

from ..errors import InvalidGrammar, InvalidRequest

if TYPE_CHECKING:
    from .regular.dfa import Dfa

MAX_STOP_PATTERNS = 16
MAX_PATTERN_CHARS = 512
MAX_PATTERN_STATES = 2000
COMPILE_TIMEOUT_S = 0.1

_DEAD = 0  # the dead state of every automaton


@dataclass(frozen=True, slots=True)
class PatternHit:
    """The first match: characters [start, end) of the text."""

    start: int
    end: int


@lru_cache(maxsize=256)
def stop_automaton(pattern: str) -> Dfa:
    """The automaton of one pattern, in Python's syntax. Raises InvalidRequest with the pattern's
    fault."""
    if not isinstance(pattern, str) or not 0 < len(pattern) <= MAX_PATTERN_CHARS:
        allowed = f"a string of 1 to {MAX_PATTERN_CHARS} characters"
        raise InvalidRequest.of("stop_regex", pattern, allowed)
    # Loaded by the first pattern: an engine without patterns starts without it.
    from .grammar import Grammar
    from .regular.build import NotRegular, TooManyStates, build_dfa
    from .regular.regex_parser import parse_regex

    try:
        grammar = Grammar.of(parse_regex(pattern, dialect="python", anchored=True))
        dfa = build_dfa(grammar, max_states=MAX_PATTERN_STATES, max_cpu_s=COMPILE_TIMEOUT_S)
    except (InvalidGrammar, NotRegular) as error:
        raise InvalidRequest.of("stop_regex", pattern, f"a regular expression: {error}") from error
    except TooManyStates as error:
        allowed = f"a pattern of at most {MAX_PATTERN_STATES} states ({error})"
        raise InvalidRequest.of("stop_regex", pattern, allowed) from error
    if dfa.is_empty or dfa.accepting[dfa.start]:
        raise InvalidRequest.of("stop_regex", pattern, "a pattern that matches, but not nothing")
    return dfa


class StopPatterns:
    """Follows several patterns over one growing text."""

    def __init__(self, patterns: Sequence[str]) -> None:
        """Raises InvalidRequest."""
        self._automata = [stop_automaton(pattern) for pattern in patterns]
        self._starts: list[dict[int, int]] = [{} for _ in patterns]  # state -> earliest start
        self._length = 0

    def fork(self) -> StopPatterns:
        """Another one that has taken the same text."""
        other = StopPatterns(())
        other._automata, other._length = self._automata, self._length
        other._starts = [alive.copy() for alive in self._starts]
        return other

    @property
    def num_held_back(self) -> int:
        """Characters at the end of the text that may be the beginning of a match."""
        starts = (start for alive in self._starts for start in alive.values())
        return self._length - min(starts, default=self._length)

    def feed(self, text: str, *, can_stop: bool = True) -> PatternHit | None:
        """Take more text; returns the match that ends first in it, on a tie the one that begins
        first. With `can_stop` False a match that ends here does not count."""
        for character in text:
            hit = self._step(character.encode("utf-8", "surrogatepass"))
            if hit is not None and can_stop:
                return hit
        return None

    def _step(self, data: bytes) -> PatternHit | None:
        best: int | None = None
        for index, dfa in enumerate(self._automata):
            alive = self._starts[index]
            alive.setdefault(dfa.start, self._length)
            moved: dict[int, int] = {}
            for state, start in alive.items():
                after = dfa.walk(state, data)
                if after != _DEAD and start < moved.get(after, self._length + 1):
                    moved[after] = start
            self._starts[index] = moved
            ended = [start for state, start in moved.items() if dfa.accepting[state]]
            best = min(ended, default=best) if best is None else min([best, *ended])
        self._length += 1
        return None if best is None else PatternHit(best, self._length)
