"""One answer of an endpoint for several gens with literal text between them.

SGLang's "API speculative execution" (Zheng et al. 2024, arXiv 2312.07104, section 4.2): a call
continues past the first gen's stop string; where the model wrote exactly the text that the program
appends next, the following gens are read from the same answer, which saves their calls.

    program   "Name: " gen(stop="\\n") "\\nJob: " gen(stop="\\n")
    answer    "Name: Ada\\nJob: pilot\\nAge: 30"
               literal  ^^^ literal   ^^^^^
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .stops import Stops

MAX_TRIES = 3  # answers requested before a pattern fails; SGLang's number


@dataclass(frozen=True, slots=True)
class Slot:
    """A gen in a pattern, with the stop strings that end it."""

    stop: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Filled:
    """An answer's text for a slot; `matched_stop` None: the answer, or the slot's end, ended it."""

    text: str
    matched_stop: str | None = None


def matched(terms: Sequence[str | Slot], answer: str) -> list[Filled] | None:
    """The answer's text for each slot of the pattern, or None where it does not match.

    Text must occur in the answer literally, except after the last slot: the program appends that,
    whatever the model would have written. A slot ends before its first stop string; without one,
    before the text that follows it. The last one may also end with the answer.
    """
    last = max((i for i, term in enumerate(terms) if isinstance(term, Slot)), default=-1)
    filled: list[Filled] = []
    for index, term in enumerate(terms[: last + 1]):
        if isinstance(term, str):
            if not answer.startswith(term):
                return None
            answer = answer[len(term) :]
            continue
        behind = terms[index + 1] if index < last else ""
        found = _take(term, answer, behind if isinstance(behind, str) else "", index == last)
        if found is None:
            return None
        filled.append(found)
        answer = answer[len(found.text) :]
    return filled


def _take(slot: Slot, answer: str, behind: str, is_last: bool) -> Filled | None:
    stop = Stops(slot.stop).find(answer)
    if stop is not None:
        return Filled(answer[: stop.position], stop.matched)
    if is_last:
        return Filled(answer)
    end = answer.find(behind) if behind and not slot.stop else -1
    return Filled(answer[:end]) if end >= 0 else None


@dataclass(frozen=True, slots=True)
class Draft:
    """Text that a continuing endpoint wrote beyond what the program has used.

    It is valid only as long as the program appends exactly its beginning.
    """

    text: str
    is_whole: bool  # the model ended there
    sampling: object  # under which it was made

    def after(self, text: str) -> Draft | None:
        """The rest once the program has appended `text`; None: the program wrote something else."""
        if not self.text.startswith(text):
            return None
        return Draft(self.text[len(text) :], self.is_whole, self.sampling)

    def take(self, stop: Sequence[str]) -> Filled | None:
        """A gen's value, where the draft determines its end."""
        found = Stops(stop).find(self.text)
        if found is not None:
            return Filled(self.text[: found.position], found.matched)
        return Filled(self.text) if self.is_whole else None
