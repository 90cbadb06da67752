"""Suffix drafts: what followed where the end of a text has occurred before.

SuffixDecoding (Oliaro et al. 2024, arXiv:2411.04975); with `Scope.OWN` alone it is prompt lookup
(Saxena 2023). Texts are token ids; of programs it knows only which texts are near each other
(`Place`). The work is done in C++ (native/src): a text is open while its request runs, and its
output stays as history afterwards.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from enum import IntEnum

from .drafter import NO_DRAFT, Draft, Subject
from .native.bindings import library

DEFAULT_MAX_BYTES = 48 << 20
MAX_MATCH = 32  # tokens; native/src/texts.h has the same
MAX_DRAFT = 64  # tokens; native/src/drafter.cpp has the same
MIN_SURVIVAL = 0.02
_MAX_NAMES = 1 << 14


class Scope(IntEnum):
    """Where an earlier occurrence stands, the best witness first. Whatever it is, it is of the
    same namespace."""

    OWN = 0  # in the request's own prompt and output
    PROGRAM = 1  # in outputs of the same program
    OP = 2  # in outputs of the same op of the same function
    NAMESPACE = 3  # in any output


@dataclass(frozen=True, slots=True)
class Place:
    """Where a call stands. No text is ever drafted from another namespace's."""

    namespace: Hashable
    program: Hashable | None = None  # that makes the call
    op: Hashable | None = None  # of its function


@dataclass(frozen=True, slots=True)
class DraftingCounts:
    """What a drafter holds."""

    num_open_texts: int
    num_closed_texts: int
    num_entries: int  # of the histories' index
    open_text_bytes: int
    history_bytes: int  # at most the drafter's max_bytes


class SuffixDrafter:
    """Owns all texts and one history for all namespaces, of at most `max_bytes`: what is oldest is
    overwritten, whoever's it is. An open text takes 28 to 56 bytes a token beside that.

    One thread uses it. Lifetime: the engine's.
    """

    def __init__(
        self,
        max_bytes: int = DEFAULT_MAX_BYTES,
        scopes: Iterable[Scope] = tuple(Scope),
        max_match: int = MAX_MATCH,
        min_survival: float = MIN_SURVIVAL,
    ) -> None:
        """`max_match` tokens of a match count at most. A draft ends where the chance that it is
        right so far falls below `min_survival`. Raises BuildError where there is no compiler."""
        assert 1 <= max_match <= MAX_MATCH, f"max_match is {max_match}"
        self._native = library()
        bits = sum({1 << scope for scope in scopes})
        self._drafter = self._native.stemma_new_drafter(max_bytes, bits, max_match, min_survival)
        self._names = _Names()
        self._place = array("q", (0, 0, 0))
        self._tokens = array("i", bytes(4 * MAX_DRAFT))
        self._confidences = array("f", bytes(4 * MAX_DRAFT))
        self._cells = array("i", bytes(4 * MAX_DRAFT))
        self._results = [_address(a) for a in (self._tokens, self._confidences, self._cells)]

    def __del__(self) -> None:
        """Frees everything; no text is used afterwards."""
        if hasattr(self, "_drafter"):
            self._native.stemma_free_drafter(self._drafter)

    def open(self, subject: Subject) -> SuffixText:
        """The text of a request that begins."""
        place = Place(subject.history, subject.program_key, subject.op_key)
        return self.open_at(place, subject.prompt)

    def open_at(self, place: Place, prompt: array[int]) -> SuffixText:
        """The text of a request that begins there; `prompt` is of type 'i'."""
        number = self._names.number
        numbers = array("q", (number(place.namespace), number(place.program), number(place.op)))
        text = self._native.stemma_open_text(
            self._drafter, _address(numbers), _address(prompt), len(prompt)
        )
        return SuffixText(self, text)

    def describe(self) -> DraftingCounts:
        """Counts and bytes."""
        counts = array("q", bytes(8 * 5))
        self._native.stemma_describe_drafter(self._drafter, _address(counts))
        return DraftingCounts(*counts)

    def _extend(self, text: int, tokens: Sequence[int]) -> None:
        ids = tokens if isinstance(tokens, array) else array("i", tokens)
        self._native.stemma_extend_text(self._drafter, text, _address(ids), len(ids))

    def _propose(self, text: int, room: int, tail: Sequence[int]) -> Draft:
        ids = array("i", tail)
        count = self._native.stemma_propose(
            self._drafter, text, _address(ids), len(ids), room, *self._results
        )
        if count == 0:
            return NO_DRAFT
        return Draft(
            tuple(self._tokens[:count]),
            tuple(self._confidences[:count]),
            Scope(self._cells[0] >> 8).name.lower(),
            tuple(self._cells[:count]),
        )

    def _note(self, text: int, evidence: Sequence[int], num_accepted: int) -> None:
        cells = array("i", evidence)
        self._native.stemma_note_draft(
            self._drafter, text, _address(cells), len(cells), num_accepted
        )

    def _close(self, text: int) -> None:
        self._native.stemma_close_text(self._drafter, text)


class SuffixText:
    """One request's text, while it runs."""

    __slots__ = ("_drafter", "_text")

    def __init__(self, drafter: SuffixDrafter, text: int) -> None:
        self._drafter = drafter
        self._text: int | None = text

    def extend(self, tokens: Sequence[int]) -> None:
        """Append to the output; other texts may draw on it at once."""
        self._drafter._extend(self._number, tokens)

    def propose(self, room: int, tail: Sequence[int] = ()) -> Draft:
        """At most `room` tokens for behind the text, or behind `tail` if that came next."""
        return self._drafter._propose(self._number, room, tail)

    def note(self, draft: Draft, num_accepted: int) -> None:
        """A draft was verified, all of it (else note `draft.first(n)`): its first `num_accepted`
        tokens were right, and the one behind these, if it has one, was wrong."""
        if draft.evidence:
            self._drafter._note(self._number, draft.evidence, num_accepted)

    def close(self) -> None:
        """The request has ended; what it has put out stays as history. Does nothing if closed."""
        if self._text is not None:
            self._drafter._close(self._text)
            self._text = None

    @property
    def _number(self) -> int:
        assert self._text is not None, "the text is closed"
        return self._text


class _Names:
    """A number for each name, given to no other name ever. Names unused for long are forgotten:
    coming back, they have no history."""

    def __init__(self) -> None:
        self._numbers: OrderedDict[Hashable, int] = OrderedDict()
        self._num_given = 0

    def number(self, name: Hashable) -> int:
        """Positive; 0 is that of None."""
        if name is None:
            return 0
        number = self._numbers.get(name)
        if number is None:
            self._num_given += 1
            number = self._numbers[name] = self._num_given
            if len(self._numbers) > _MAX_NAMES:
                self._numbers.popitem(last=False)
        self._numbers.move_to_end(name)
        return number


def _address(numbers: array[int] | array[float]) -> int:
    return numbers.buffer_info()[0]
