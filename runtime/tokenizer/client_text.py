"""Clients' texts within what a chat template renders: they must produce no special token.

Before rendering, a text's special tokens are put between two marks, and a text that ends like the
beginning of one is followed by a mark. Behind it the rendered text is cut at the marks where that
matters: what is between two is plain text, and no special token begins on one side of a mark and
ends on the other. The marks have a number that no text can guess.
"""

from __future__ import annotations

import re
import secrets
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from typing import Any


class ClientTextGuard:
    """Marks clients' texts, and cuts what was rendered from them."""

    def __init__(self, special_texts: Iterable[str], free_texts: Iterable[str] = ()) -> None:
        """Ignores letter case: a template may change it. `free_texts`: of the special ones, those
        that an assistant's own words may have."""
        secret = secrets.randbits(64)
        self._open, self._close = f"\ue002{secret}\ue003", f"\ue004{secret}\ue003"
        self._marks = re.compile(f"[\ue002\ue004]{secret}\ue003")
        texts = [text for text in special_texts if len(text) > 1]
        free = frozenset(free_texts)
        self._all = _Finder(texts)
        self._unfree = _Finder([text for text in texts if text not in free])
        self._exact = compiled_any_of(texts, re.S) if texts else None
        self._longest = max(map(len, texts), default=0)

    def guarded(self, value: Any, *, is_own_word: bool = False) -> Any:
        """A JSON value with all its texts guarded; `is_own_word`: it is what an assistant wrote."""
        if isinstance(value, str):
            return self._guarded_text(value, self._unfree if is_own_word else self._all)
        if isinstance(value, list):
            return [self.guarded(item) for item in value]
        if isinstance(value, dict):
            return {self._guarded_name(name): self.guarded(item) for name, item in value.items()}
        return value

    def shown(self, text: str) -> str:
        """A rendered text without marks."""
        return self._marks.sub("", text)

    def unescaped(self, text: str) -> str:
        """JSON whose writer has escaped letters, with the marks as they were."""
        for mark in (self._open, self._close):
            text = text.replace(f"\\u{ord(mark[0]):04x}{mark[1:-1]}\\ue003", mark)
        return text

    def pieces(self, text: str) -> list[tuple[str, bool]]:
        """The parts of a rendered text that are to be tokenized apart, each with whether it is
        plain: nothing in it is special. Usually there is one, which is not."""
        if self._marks.search(text) is None:
            return [(text, False)]
        parts = self._marks.split(text)
        whole = "".join(parts)
        cuts = dict(self._cuts(whole, text))
        ends = [*cuts, len(whole)]
        begins = [0, *cuts]
        plain = [False, *cuts.values()]
        found = zip(begins, ends, plain, strict=True)
        return [(whole[begin:end], is_plain) for begin, end, is_plain in found if begin < end]

    def _cuts(self, whole: str, text: str) -> Iterator[tuple[int, bool]]:
        """Where `whole`, which is `text` without marks, is cut, and whether what follows is
        plain. A template may have cut one of two marks away."""
        place, last, done = 0, 0, 0
        for mark in self._marks.finditer(text):
            place += mark.start() - last
            last = mark.end()
            if place < done:
                continue
            is_open = mark[0] == self._open
            for begin, end in self._around(whole, done, place):
                if begin == place if is_open else end == place:
                    yield from ((begin, True), (end, False))
                    done = end
                    break
                if begin < place < end:
                    yield place, False
                    done = place
                    break

    def _around(self, whole: str, begin: int, place: int) -> Iterator[tuple[int, int]]:
        """The special tokens that a place is in or beside."""
        if self._exact is not None:
            for start in range(max(begin, place - self._longest), place + 1):
                match = self._exact.match(whole, start)
                if match is not None and match.end() >= place:
                    yield match.span()

    def _guarded_name(self, name: str) -> str:
        """Leaves identifiers as they are: a template looks things up by them."""
        return name if name.isidentifier() else self._guarded_text(name, self._all)

    def _guarded_text(self, text: str, finder: _Finder) -> str:
        if finder.inner is not None:
            text = finder.inner.sub(f"{self._open}\\g<0>{self._close}", text)
        if finder.ends_like_one(text):
            text += self._close
        return text


class _Finder:
    """Special tokens within a text, and the beginning of one at its end."""

    def __init__(self, texts: Sequence[str]) -> None:
        self.inner = compiled_any_of(texts, re.I | re.S) if texts else None
        self._delimiters = sorted(text.lower() for text in texts if not text[0].isalnum())
        self._longest = max(map(len, self._delimiters), default=1) - 1

    def ends_like_one(self, text: str) -> bool:
        end = text[max(0, len(text) - self._longest) :].lower()
        return any(self._begins_one(end[start:]) for start in range(len(end)))

    def _begins_one(self, text: str) -> bool:
        place = bisect_left(self._delimiters, text)
        return place < len(self._delimiters) and self._delimiters[place].startswith(text)


def compiled_any_of(texts: Iterable[str], flags: int = 0) -> re.Pattern[str]:
    """Finds any of these texts, the longest that fits."""
    try:
        return re.compile(any_of(texts), flags)
    except RecursionError:  # a thousand texts that each begin with the one before
        longest_first = sorted(texts, key=len, reverse=True)
        return re.compile("|".join(map(re.escape, longest_first)), flags)


def any_of(texts: Iterable[str]) -> str:
    """A pattern for any of these texts, the longest that fits; common beginnings are tried once, so
    that a thousand texts cost little more than one."""
    ordered = sorted({text for text in texts if text})
    return "|".join(_after_common(list(group)) for _, group in groupby(ordered, lambda t: t[0]))


def _after_common(texts: Sequence[str]) -> str:
    common = _common_beginning(texts[0], texts[-1])
    rests = [text[len(common) :] for text in texts]
    inner = any_of(rests)
    if not inner:
        return re.escape(common)
    return f"{re.escape(common)}(?:{inner}){'?' if '' in rests else ''}"


def _common_beginning(one: str, other: str) -> str:
    """The first and the last of sorted texts share what all of them share."""
    pairs = enumerate(zip(one, other, strict=False))
    return one[: next((i for i, (a, b) in pairs if a != b), min(len(one), len(other)))]
