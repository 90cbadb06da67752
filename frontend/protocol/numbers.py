"""The numbers and flags of a program's calls: what they may be, and what authors give for them as
Python's own.

JSON has neither nan nor infinity, and would carry them as null, and it has no arrays of numpy: they
are refused before that, and so is nothing else, as servers of other makes have ranges of their own.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from decimal import Decimal
from math import isfinite
from numbers import Integral, Real
from typing import Any

from ...errors import InvalidProgram, InvalidRequest

MAX_INT = 2**31 - 1
MAX_SEED = 2**63 - 1
MAX_SAMPLES = 64
MAX_LOGPROBS = 64
MAX_LENGTH_PENALTY = 10.0  # the power of an output's length: a million tokens give 1e60
MAX_REQUEST_PRIORITY = 1000
MAX_DEADLINE_S = 86_400.0


@dataclass(frozen=True, slots=True)
class Range:
    """What a number may be: from `low` to `high`, both among them unless it is above `low`."""

    low: float
    high: float
    is_whole: bool = False
    is_above: bool = False

    @property
    def text(self) -> str:
        """ "an integer in [1, 64]"."""
        if self.is_whole:
            return f"an integer in [{self.low}, {self.high}]"
        return f"a number in {'(' if self.is_above else '['}{self.low:g}, {self.high:g}]"

    def holds(self, value: object) -> bool:
        """Whether it is a number, of the kind and in the range; no bool is one."""
        kinds = int if self.is_whole else int | float
        if not isinstance(value, kinds) or isinstance(value, bool):
            return False
        return self.low <= value <= self.high and not (self.is_above and value == self.low)

    def require(self, field: str, value: object) -> None:
        """Raises InvalidRequest."""
        if not self.holds(value):
            raise InvalidRequest.of(field, value, self.text)

    def checked(self, field: str, value: Any) -> Any:
        """The number as Python's own. Raises InvalidProgram."""
        number = plain(value)
        if not self.holds(number):
            raise InvalidProgram.of(field, value, self.text)
        return number


RANGES: Mapping[str, Range] = {
    "max_tokens": Range(0, MAX_INT, is_whole=True),
    "min_tokens": Range(0, MAX_INT, is_whole=True),
    "temperature": Range(0, 1e4),
    "top_p": Range(0, 1, is_above=True),
    "top_k": Range(1, MAX_INT, is_whole=True),
    "min_p": Range(0, 1),
    "frequency_penalty": Range(-2, 2),
    "presence_penalty": Range(-2, 2),
    "repetition_penalty": Range(0, 10, is_above=True),
    "logit_bias": Range(-100, 100),
    "seed": Range(0, MAX_SEED, is_whole=True),
    "n": Range(1, MAX_SAMPLES, is_whole=True),
    "beam": Range(1, MAX_SAMPLES, is_whole=True),
    "length_penalty": Range(-MAX_LENGTH_PENALTY, MAX_LENGTH_PENALTY),
    "logprobs": Range(0, MAX_LOGPROBS, is_whole=True),
    "logprob_start": Range(0, MAX_INT, is_whole=True),
    "priority": Range(-MAX_REQUEST_PRIORITY, MAX_REQUEST_PRIORITY, is_whole=True),
    "deadline_s": Range(0, MAX_DEADLINE_S, is_above=True),
    "token_ids": Range(0, MAX_INT, is_whole=True),
}
FLAGS: Mapping[str, str] = {
    "ignore_eos": "True or False",
    "jump_forward": "True or False",
    "early_stopping": 'True, False or "never"',
}

_PLAIN = frozenset((int, float, bool, str, type(None)))
_JSON = (int, float, str, type(None), list, tuple, dict)  # bools are ints


def plain(value: Any) -> Any:
    """A scalar of numpy, torch or the like as Python's own; anything else as it is."""
    if type(value) in _PLAIN:
        return value
    if getattr(value, "shape", None) == () and callable(getattr(value, "item", None)):
        return value.item()
    if isinstance(value, Integral):
        return int(value)
    try:
        return float(value) if isinstance(value, Real | Decimal) else value
    except (OverflowError, ValueError):  # a fraction beyond all floats; Decimal("sNaN")
        return value


def finite(field: str, value: Any) -> Any:
    """`plain`, of one of `RANGES` or a flag. Raises InvalidProgram for nan, infinities, and what
    JSON has no word for."""
    number = plain(value)
    is_json = isinstance(number, _JSON)
    if not is_json or (isinstance(number, float) and not isfinite(number)):
        allowed = RANGES[field].text if field in RANGES else FLAGS[field]
        raise InvalidProgram.of(field, number, allowed)
    return number


def token_ids_of(field: str, given: Iterable[Any]) -> tuple[int, ...]:
    """Token ids from a list or an array. Raises InvalidProgram."""
    try:
        ids = tuple(map(plain, given))
    except TypeError:
        raise InvalidProgram.of(field, given, "a list of integers") from None
    if not all(map(RANGES["token_ids"].holds, ids)):
        wrong = next(number for number in ids if not RANGES["token_ids"].holds(number))
        raise InvalidProgram.of(field, wrong, RANGES["token_ids"].text)
    return ids
