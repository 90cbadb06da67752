"""Stop conditions that the endpoint does not support: found here, in the text."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from ...errors import InvalidProgram


@dataclass(frozen=True, slots=True)
class Stop:
    """Where an output ends, and what ended it."""

    position: int
    matched: str


class Stops:
    """Stop strings and patterns. The earliest match ends the output and is not part of it."""

    def __init__(self, texts: Sequence[str] = (), patterns: Sequence[str] = ()) -> None:
        """Raises InvalidProgram for an invalid pattern, or an empty text."""
        if not all(isinstance(text, str) and text for text in texts):
            raise InvalidProgram.of("stop", texts, "non-empty strings")
        self._texts = tuple(texts)
        try:
            self._patterns = tuple(re.compile(pattern) for pattern in patterns)
        except (re.error, TypeError) as error:
            raise InvalidProgram.of("stop_regex", patterns, f"regular expressions ({error})") from (
                error
            )

    def __bool__(self) -> bool:
        return bool(self._texts or self._patterns)

    def find(self, text: str) -> Stop | None:
        """The earliest match in `text`."""
        found = [Stop(at, stop) for stop in self._texts if (at := text.find(stop)) >= 0]
        hits = [pattern.search(text) for pattern in self._patterns]
        found += [Stop(hit.start(), hit.group()) for hit in hits if hit is not None]
        return min(found, key=lambda stop: stop.position, default=None)

    def num_sure(self, text: str) -> int:
        """How many characters of an unfinished `text`, which has no stop yet, are final."""
        if self._patterns:
            return 0  # a match may still begin anywhere
        return len(text) - max((_overlap(text, stop) for stop in self._texts), default=0)


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that `stop` may begin with."""
    sizes = range(min(len(stop) - 1, len(text)), 0, -1)
    return next((size for size in sizes if text.endswith(stop[:size])), 0)
