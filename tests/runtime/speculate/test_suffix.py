"""Suffix drafts against a plain model that scans all texts, and what a drafter holds."""

from __future__ import annotations

import random
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stemma.runtime.speculate.drafter import NO_DRAFT, Draft
from stemma.runtime.speculate.suffix import (
    MAX_DRAFT,
    MAX_MATCH,
    Place,
    Scope,
    SuffixDrafter,
    SuffixText,
)

ORDERS = (4, 2, 1)
MAX_FOUND = 16  # of a scope
SCOPE_WEIGHTS = {Scope.OWN: 16, Scope.PROGRAM: 2, Scope.OP: 1.5, Scope.NAMESPACE: 1}
HERE = Place("key", "program", "op")


@dataclass(eq=False)
class PlainText:
    place: Place
    prompt: list[int]
    output: list[int] = field(default_factory=list)

    @property
    def tokens(self) -> list[int]:
        return self.prompt + self.output


@dataclass(frozen=True)
class PlainMatch:
    text: PlainText
    position: int  # of the next token
    length: int
    scope: Scope

    @property
    def weight(self) -> np.float32:
        return np.float32(SCOPE_WEIGHTS[self.scope] * 1.5 ** min(self.length, 16))


@dataclass
class PlainDrafter:
    """Scans everything. `written` are all outputs' tokens in the order in which they came."""

    scopes: frozenset[Scope]
    max_match: int
    written: list[tuple[PlainText, int]] = field(default_factory=list)

    def extend(self, text: PlainText, tokens: Sequence[int]) -> None:
        for token in tokens:
            self.written.append((text, len(text.tokens)))
            text.output.append(token)

    def propose(self, text: PlainText, room: int, tail: Sequence[int]) -> list[int]:
        draft: list[int] = []
        matches: list[PlainMatch] = []
        while len(draft) < room:
            matches = matches or self.find(text, [*text.tokens, *tail, *draft])
            if not matches:
                break
            votes: dict[int, np.float32] = {}
            for match in matches:
                token = match.text.tokens[match.position]
                votes[token] = votes.get(token, np.float32(0)) + match.weight
            winner = max(votes, key=lambda token: votes[token])
            draft.append(winner)
            matches = [
                replace(match, position=match.position + 1, length=match.length + 1)
                for match in matches
                if match.text.tokens[match.position] == winner
                and match.position + 1 < len(match.text.tokens)
            ]
        return draft

    def find(self, text: PlainText, context: list[int]) -> list[PlainMatch]:
        own = [(text, at) for at in range(len(text.tokens))] if Scope.OWN in self.scopes else []
        found = self._found(own, context, Scope.OWN)
        for scope in (Scope.PROGRAM, Scope.OP, Scope.NAMESPACE):
            others = [
                (other, at)
                for other, at in self.written
                if other is not text and self.scope_of(other.place, text.place) is scope
            ]
            found += self._found(others, context, scope)
        return found

    def _found(
        self, places: list[tuple[PlainText, int]], context: list[int], scope: Scope
    ) -> list[PlainMatch]:
        """Those of the longest order that has any, the latest first."""
        for order in ORDERS:
            found = []
            for text, at in reversed(places):
                most = min(at, len(context), self.max_match)
                before = zip(reversed(text.tokens[at - most : at]), reversed(context))
                length = next((i for i, (a, b) in enumerate(before) if a != b), most)
                if order <= self.max_match and length >= order:
                    found.append(PlainMatch(text, at, length, scope))
            if found:
                return found[:MAX_FOUND]
        return []

    def scope_of(self, other: Place, own: Place) -> Scope | None:
        if other.namespace != own.namespace:
            return None
        if own.program is not None and other.program == own.program and self.has(Scope.PROGRAM):
            return Scope.PROGRAM
        if own.op is not None and other.op == own.op and self.has(Scope.OP):
            return Scope.OP
        return Scope.NAMESPACE if self.has(Scope.NAMESPACE) else None

    def has(self, scope: Scope) -> bool:
        return scope in self.scopes


@settings(max_examples=150, deadline=None)
@given(st.integers(0, 2**32), st.sets(st.sampled_from(list(Scope))), st.integers(1, 4))
def test_drafts_are_those_of_a_scan_of_all_texts(
    seed: int, scopes: set[Scope], num_names: int
) -> None:
    """As long as no chain is too long to be followed to its end."""
    rng = random.Random(seed)
    max_match = rng.choice([1, 3, MAX_MATCH])
    num_tokens = rng.randint(2, 5)
    drafter = SuffixDrafter(scopes=scopes, max_match=max_match, min_survival=0)
    plain = PlainDrafter(frozenset(scopes), max_match)
    texts: list[tuple[SuffixText, PlainText]] = []

    def some_tokens(most: int) -> list[int]:
        return [rng.randrange(num_tokens) for _ in range(rng.randint(0, most))]

    def name() -> int | None:
        return rng.randrange(num_names) or None

    while len(plain.written) < 25 * num_tokens:
        if len(texts) < 3 or rng.random() < 0.2:
            place = Place(rng.random() < 0.2, name(), name())
            prompt = some_tokens(10)
            texts.append((drafter.open_at(place, array("i", prompt)), PlainText(place, prompt)))
        text, scanned = rng.choice(texts)
        tail = some_tokens(6) if rng.random() < 0.3 else []
        assert [*text.propose(8, tail).tokens] == plain.propose(scanned, 8, tail)
        tokens = some_tokens(8)
        text.extend(tokens)
        plain.extend(scanned, tokens)
        if len(texts) > 5 or len(scanned.tokens) > 40:
            text.close()
            texts.remove((text, scanned))


def written(drafter: SuffixDrafter, tokens: Sequence[int], place: Place = HERE) -> None:
    """A call that has ended."""
    text = drafter.open_at(place, array("i", [0]))
    text.extend(tokens)
    text.close()


def proposed(
    drafter: SuffixDrafter, prompt: Sequence[int], place: Place = HERE, room: int = 8
) -> Draft:
    """For a call that is never heard of again."""
    text = drafter.open_at(place, array("i", prompt))
    draft = text.propose(room)
    text.close()
    return draft


def test_a_text_that_repeats_itself_is_continued_beyond_its_end() -> None:
    draft = proposed(SuffixDrafter(), [1, 2, 3, 1, 2, 3, 1], room=7)
    assert draft.tokens == (2, 3, 1, 2, 3, 1, 2)
    assert draft.source == "own"
    assert len(draft.confidences) == 7 and all(0 < c < 1 for c in draft.confidences)


def test_the_own_text_is_a_better_witness_than_all_others() -> None:
    drafter = SuffixDrafter()
    for _ in range(3):
        written(drafter, [7, 8, 1])
    assert proposed(drafter, [7, 8, 2, 7, 8], room=1).tokens == (2,)


@pytest.mark.parametrize(
    "scope, place",
    [
        (Scope.PROGRAM, HERE),
        (Scope.OP, Place("key", "another", "op")),
        (Scope.NAMESPACE, Place("key", "another", "another")),
        (Scope.NAMESPACE, Place("key")),
    ],
)
def test_each_scope_is_known_and_can_be_turned_off(scope: Scope, place: Place) -> None:
    for scopes, is_found in ((set(Scope), True), ({scope}, True), (set(), False)):
        drafter = SuffixDrafter(scopes=scopes)
        written(drafter, [5, 6, 7], place)
        draft = proposed(drafter, [4, 5])
        assert draft.tokens == ((6, 7) if is_found else ())
        assert draft.source == (scope.name.lower() if is_found else "")


def test_another_namespace_has_no_part_in_a_draft() -> None:
    drafter = SuffixDrafter()
    written(drafter, [5, 6, 7], replace(HERE, namespace="another key"))
    written(drafter, [5, 6, 7], replace(HERE, namespace=None))
    assert proposed(drafter, [4, 5]) == NO_DRAFT


def test_a_sibling_is_drafted_from_while_it_is_written() -> None:
    drafter = SuffixDrafter()
    one, other = (drafter.open_at(HERE, array("i", [1])) for _ in range(2))
    assert other.propose(4).tokens == ()
    one.extend([2, 3])
    assert other.propose(4).tokens == (2, 3)
    one.extend([4])
    assert other.propose(4).tokens == (2, 3, 4)


def test_a_tail_counts_as_if_it_had_been_appended() -> None:
    drafter = SuffixDrafter()
    written(drafter, [5, 6, 7, 8])
    text = drafter.open_at(HERE, array("i", [9]))
    assert text.propose(4, (5, 6)).tokens == (7, 8)
    assert text.propose(4).tokens == ()


def test_the_longest_match_is_found_in_a_prompt_of_8k_tokens() -> None:
    rng = random.Random(0)
    prompt = [rng.randrange(40) for _ in range(8192)]
    draft = proposed(SuffixDrafter(min_survival=0), prompt + prompt[100:108], room=MAX_DRAFT + 1)
    assert draft.tokens == tuple(prompt[108 : 108 + MAX_DRAFT])


def test_the_oldest_is_overwritten_and_the_bound_on_memory_holds() -> None:
    max_bytes = 1 << 16
    drafter = SuffixDrafter(max_bytes)
    num_entries = []
    for first in range(0, 40_000, 20):
        written(drafter, range(first, first + 20))
        counts = drafter.describe()
        assert counts.history_bytes <= max_bytes
        num_entries.append(counts.num_entries)
    assert num_entries[-1] == max(num_entries) > 1000
    assert drafter.describe().num_closed_texts < 20
    assert proposed(drafter, [39_990], room=3).tokens == (39_991, 39_992, 39_993)
    assert proposed(drafter, [10]).tokens == ()


def test_many_short_texts_stay_within_the_bound() -> None:
    drafter = SuffixDrafter(1 << 16)
    for token in range(5000):
        written(drafter, [token, token])
        assert drafter.describe().history_bytes <= 1 << 16


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 2**32), st.sampled_from([1 << 9, 1 << 12]))
def test_in_a_history_that_is_always_full_drafts_still_come_from_their_own_namespace(
    seed: int, max_bytes: int
) -> None:
    """Each namespace has tokens of its own, which go round in a circle."""
    rng = random.Random(seed)
    drafter = SuffixDrafter(max_bytes, [Scope.PROGRAM, Scope.OP, Scope.NAMESPACE])
    texts: list[tuple[int, SuffixText]] = []
    num_drafted = 0
    for _ in range(300):
        base = 100 * rng.randrange(3)
        if len(texts) < 4 or rng.random() < 0.2:
            place = Place(base, rng.randrange(3), rng.choice([None, 1]))
            texts.append((base, drafter.open_at(place, array("i", [base]))))
        base, text = rng.choice(texts)
        draft = text.propose(6)
        num_drafted += len(draft.tokens)
        assert all(base <= token < base + 5 for token in draft.tokens)
        text.note(draft, rng.randint(0, len(draft.tokens)))
        text.extend([base + (rng.randrange(5)) for _ in range(rng.randrange(8))])
        if len(texts) > 6:
            texts.pop(rng.randrange(len(texts)))[1].close()
    assert num_drafted


def test_a_closed_text_without_output_leaves_nothing() -> None:
    drafter = SuffixDrafter()
    proposed(drafter, [1, 2, 1])
    counts = drafter.describe()
    assert (counts.num_open_texts, counts.num_closed_texts, counts.num_entries) == (0, 0, 0)
    assert counts.open_text_bytes == 0


@pytest.mark.parametrize("num_tokens", [4096, 4097, 6000, 8191])
@pytest.mark.parametrize("num_generated", [0, 1, 200])
def test_an_open_text_takes_28_to_56_bytes_a_token(num_tokens: int, num_generated: int) -> None:
    drafter = SuffixDrafter()
    text = drafter.open_at(HERE, array("i", range(num_tokens - num_generated)))
    text.extend([1] * num_generated)
    text.propose(1)
    num_bytes = drafter.describe().open_text_bytes
    assert 28 <= num_bytes / num_tokens <= 56.1


def test_confidence_falls_where_drafts_are_wrong_and_comes_back_where_none_is_tried() -> None:
    drafter = SuffixDrafter()
    circle = [1, 2, 3, 4] * 4

    def confidence(op: str) -> float:
        return proposed(drafter, circle, replace(HERE, op=op), room=1).confidences[0]

    before = confidence("random")
    text = drafter.open_at(replace(HERE, op="random"), array("i", circle))
    for _ in range(20):
        draft = text.propose(4)
        text.note(draft, 0)
        text.extend([1, 2, 3, 4])
    fallen = confidence("random")
    assert fallen < before / 4
    assert confidence("circle") > 1.5 * fallen, "another op has its own record"
    for _ in range(300):
        text.propose(4)
    assert confidence("random") > 1.5 * fallen


def test_confidence_rises_where_drafts_are_right() -> None:
    drafter = SuffixDrafter()
    text = drafter.open_at(HERE, array("i", [1, 2] * 2))
    before = text.propose(1).confidences[0]
    for _ in range(50):
        draft = text.propose(1)
        text.note(draft, 1)
        text.extend(draft.tokens)
    assert text.propose(1).confidences[0] > before


def test_a_draft_ends_where_it_will_hardly_be_reached() -> None:
    drafter = SuffixDrafter(min_survival=0.5)
    circle = [1, 2, 3, 4] * 4
    draft = proposed(drafter, circle, room=MAX_DRAFT)
    assert 0 < len(draft.tokens) < MAX_DRAFT
    assert np.prod(draft.confidences) >= 0.5
    longer = proposed(SuffixDrafter(min_survival=0), circle, room=MAX_DRAFT)
    assert np.prod(longer.confidences[: len(draft.tokens) + 1]) < 0.5
