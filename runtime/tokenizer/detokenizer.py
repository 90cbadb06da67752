"""Token ids to text, incrementally: never half a character, never part of a stop string or of a
stop pattern's match.

    output tokens   t0      t1     t2         t3
    text            |Hel    |lo    |, wor     |ld          `ends[i]`: characters that are final
                                                            once t0..ti are known
A stop string that begins inside t2 drops t2 and all later tokens; the rest of their text (between
the end of t1 and the stop string) becomes a text segment of its own.

Method: decode a window that starts a few tokens back, hold back a trailing U+FFFD (an unfinished
character), as vLLM and TGI do. Cost: one decode of a short window a token.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass
from operator import attrgetter

from ...constrained.stop_patterns import PatternHit, StopPatterns
from .tokenizer import REPLACEMENT, Tokenizer


@dataclass(frozen=True, slots=True)
class StopHit:
    """Where a stop string or a pattern's match cut the output: the tokens kept, and the remaining
    text after them."""

    num_tokens: int
    tail: str
    matched: str


class Detokenizer:
    """The text of one growing output. Stop strings and patterns that end within the first
    `min_tokens` tokens are ignored."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        stop: Sequence[str] = (),
        stop_regex: Sequence[str] = (),
        *,
        min_tokens: int = 0,
    ) -> None:
        self._tokenizer = tokenizer
        self._patterns = StopPatterns(stop_regex) if stop_regex else None
        self._stop = tuple(stop)
        self._min_tokens = min_tokens
        self._longest_stop = max((len(text) for text in self._stop), default=0)
        self._ids: list[int] = []
        self._window = 0  # the window's first token
        self._read = 0  # tokens whose text is final
        self._ends: list[int] = []  # per token: len(text) after it was decoded
        self._clean: list[bool] = []  # per token: whether no text was held back after it
        self._pieces: list[str] = []
        self._length = 0
        self._tail = ""  # the last characters, for stop strings across tokens
        self._num_emitted = 0
        self._num_settled = 0
        self._text: str | None = ""

    @property
    def text(self) -> str:
        """All final text."""
        if self._text is None:
            self._text = "".join(self._pieces)
            self._pieces = [self._text]
        return self._text

    def fork(self) -> Detokenizer:
        """Another one with the same output so far."""
        other = copy(self)
        other._ids, other._ends, other._clean = self._ids[:], self._ends[:], self._clean[:]
        other._pieces = self._pieces[:]
        other._patterns = None if self._patterns is None else self._patterns.fork()
        return other

    def append(self, token_id: int) -> StopHit | None:
        """Add one token; returns the stop string that it completes, if any."""
        self._ids.append(token_id)
        fresh = self._decode_window()
        self._extend(fresh)
        self._ends.append(self._length)
        self._clean.append(self._read == len(self._ids))
        can_stop = bool(fresh) and len(self._ids) > self._min_tokens
        string = self._find_stop(len(fresh)) if can_stop and self._stop else None
        match = None
        if self._patterns is not None:
            match = self._patterns.feed(fresh, can_stop=can_stop)
        found = [place for place in (string, match) if place is not None]
        return self._hit(min(found, key=attrgetter("start"))) if found else None

    def flush(self) -> None:
        """End the output: bytes that are no whole character become U+FFFD."""
        if self._read < len(self._ids):
            decode = self._tokenizer.decode
            before = decode(self._ids[self._window : self._read])
            self._extend(decode(self._ids[self._window :])[len(before) :])
            self._read = len(self._ids)
            self._ends[-1] = self._length

    def take_delta(self, *, is_final: bool = False) -> str:
        """Text not returned before; holds back what may become part of a stop string."""
        until = self._length if is_final else self._length - self._held_back()
        if until <= self._num_emitted:
            return ""
        delta = self.text[self._num_emitted : until]
        self._num_emitted = until
        return delta

    def num_settled(self) -> int:
        """How many leading tokens have had their text emitted: no stop string can drop them."""
        for index in range(self._num_settled, len(self._ends)):
            if self._ends[index] > self._num_emitted:
                break
            if self._clean[index]:
                self._num_settled = index + 1
        return self._num_settled

    def cut(self, hit: StopHit) -> None:
        """Drop everything from the stop string on."""
        start = (self._ends[hit.num_tokens - 1] if hit.num_tokens else 0) + len(hit.tail)
        self._text = self.text[:start]
        self._pieces, self._length = [self._text], start

    def _extend(self, fresh: str) -> None:
        if fresh:
            self._pieces.append(fresh)
            self._length += len(fresh)
            self._text = None
            if self._longest_stop:
                self._tail = (self._tail + fresh)[-(self._longest_stop + len(fresh)) :]

    def _decode_window(self) -> str:
        """Text that the last token made final."""
        decode = self._tokenizer.decode
        whole = decode(self._ids[self._window :])
        if whole.endswith(REPLACEMENT):
            return ""
        before = decode(self._ids[self._window : self._read])
        self._window, self._read = self._read, len(self._ids)
        return whole[len(before) :]

    def _find_stop(self, num_fresh: int) -> PatternHit | None:
        """The earliest stop string that ends in the new characters."""
        best: PatternHit | None = None
        for stop in self._stop:
            region = num_fresh + len(stop) - 1
            at = self._tail.find(stop, max(0, len(self._tail) - region))
            start = self._length - len(self._tail) + at
            if at >= 0 and (best is None or start < best.start):
                best = PatternHit(start, start + len(stop))
        return best

    def _hit(self, place: PatternHit) -> StopHit:
        start = place.start
        first = next(i for i, end in enumerate(self._ends) if end > start)
        while first > 0 and not self._clean[first - 1]:
            first -= 1  # its first bytes are in the token before: drop that one too
        begin = self._ends[first - 1] if first else 0
        return StopHit(first, self.text[begin:start], self.text[start : place.end])

    def _held_back(self) -> int:
        """Length of the longest suffix that may become a stop string or a pattern's match."""
        by_pattern = 0 if self._patterns is None else self._patterns.num_held_back
        return max(by_pattern, self._held_back_for_strings())

    def _held_back_for_strings(self) -> int:
        for size in range(min(self._longest_stop - 1, len(self._tail)), 0, -1):
            suffix = self._tail[-size:]
            if any(len(stop) > size and stop.startswith(suffix) for stop in self._stop):
                return size
        return 0
