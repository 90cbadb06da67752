"""Masks against the truth: every token, byte by byte."""

from __future__ import annotations

import random

import numpy as np
import pytest
from grammars import alive_tokens, expressions, ids_of, vocabularies, vocabulary_of
from hypothesis import given, settings
from hypothesis import strategies as st

from stemma.constrained.grammar import And, Concat, Expression, Grammar, Literal, Not, alt
from stemma.constrained.mask_cache import ROW_BYTES, MaskCache
from stemma.constrained.native.bindings import library, why_not_native
from stemma.constrained.regular.build import build_dfa
from stemma.constrained.regular.regex_parser import parse_regex
from stemma.constrained.token_masks import native_walk, numpy_walk
from stemma.constrained.vocabulary import Vocabulary

TEXTUAL = [  # states in which any plain text may follow, or so many characters of it
    r'"[^"\\]*"', r'"[^"\\]{0,3}"', r'"[^"\\]{2,5}a"', r".*", r"[^a]*", r"(.|\n){0,4}",
    r"é{1,3}.{2}", r'"([^"\\]|\\["n]){0,6}"', r"(..)*", r".é", r".{3}(é|東)b", r".*ab.*",
    r"[\x20-\x7e]*", r"[^\x00-\x1f]{0,2}",
]  # fmt: skip
RUNS = [  # states in which many characters, but not all, may follow each other
    r"[a-z]+@([a-z0-9]+\.)+[a-z]{2}", r"([a-z]([a-z0-9-]{0,8}[a-z0-9])?\.)*x", r"[a-z ]{3,40}: .*",
    r"https?://[a-z0-9.-]+(:[0-9]{1,5})?(/[a-z0-9._~%-]*)*(\?[a-z0-9=&]*)?(#[a-z0-9]*)?",
    r"\[[^\]\n]{1,9}\]", r"([a-m]|[h-z][a-z])*0", r"[a-zA-Z_]{1,3}", r"([a-z]{2})*;", r"[^é]{0,3}z",
]  # fmt: skip


EXCLUDED = [  # beginnings of texts that may not follow where any other may
    ["a"], ["aehm", "aexz", "aéh", "é", "h9"], ["aeh z", "aeh/", "mmm", "mm", "zé0:", "9"],
    [f"{a}{b}{c}" for a in "aehm" for b in "xz09" for c in "ahx"],
]  # fmt: skip


def textual() -> st.SearchStrategy[Expression]:
    return st.sampled_from(TEXTUAL).map(lambda text: parse_regex(text, anchored=True))


@settings(max_examples=60, deadline=None)
@given(expressions(), vocabularies())
def test_numpy_masks_are_those_of_brute_force(
    expression: Expression, vocabulary: Vocabulary
) -> None:
    dfa = build_dfa(Grammar.of(expression))
    walk, out = numpy_walk(dfa, vocabulary), np.empty(vocabulary.num_words, np.uint32)
    for state in range(1, min(dfa.num_states, 12)):
        walk(state, out)
        assert ids_of(out) == alive_tokens(dfa, state, vocabulary)


@settings(max_examples=60, deadline=None)
@given(expressions() | textual(), vocabularies())
def test_compiled_masks_are_those_of_numpy(expression: Expression, vocabulary: Vocabulary) -> None:
    native = library()
    if native is None:
        pytest.skip(f"no compiled code: {why_not_native()}")
    dfa = build_dfa(Grammar.of(expression))
    fast, slow = native_walk(native, dfa, vocabulary), numpy_walk(dfa, vocabulary)
    mask, truth = (np.empty(vocabulary.num_words, np.uint32) for _ in range(2))
    for state in range(1, min(dfa.num_states, 40)):
        fast(state, mask)
        slow(state, truth)
        assert ids_of(mask) == ids_of(truth), state


def random_texts(seed: str) -> Vocabulary:
    rng = random.Random(seed)
    letters = "aehmxz09.-@:/ ]é" + '"'
    tokens = ["".join(rng.choices(letters, k=rng.randint(2, 14))) for _ in range(3000)]
    return vocabulary_of([*(bytes([i]) for i in range(256)), *(t.encode() for t in tokens)])


@pytest.mark.parametrize("most", [r'[^"\\\x00-\x1f]*"?', r'[^"\\\x00-\x1f]{0,80}'])
@pytest.mark.parametrize("excluded", EXCLUDED)
def test_exclusions_leave_no_token_out(excluded: list[str], most: str) -> None:
    native = library()
    if native is None:
        pytest.skip(f"no compiled code: {why_not_native()}")
    vocabulary = random_texts(f"{excluded}")
    text = parse_regex(most, anchored=True)
    begun = Concat((alt(*map(Literal, excluded)), text))
    dfa = build_dfa(Grammar.of(And((text, Not(begun)))))
    fast, slow = native_walk(native, dfa, vocabulary), numpy_walk(dfa, vocabulary)
    mask, truth = (np.empty(vocabulary.num_words, np.uint32) for _ in range(2))
    states = list(range(1, dfa.num_states))
    random.Random(0).shuffle(states)
    for state in states:
        fast(state, mask)
        slow(state, truth)
        assert ids_of(mask) == ids_of(truth), state


@pytest.mark.parametrize("text", RUNS)
def test_runs_of_some_characters_leave_no_token_out(text: str) -> None:
    native = library()
    if native is None:
        pytest.skip(f"no compiled code: {why_not_native()}")
    vocabulary = random_texts(text)
    dfa = build_dfa(Grammar.of(parse_regex(text, anchored=True)))
    fast, slow = native_walk(native, dfa, vocabulary), numpy_walk(dfa, vocabulary)
    mask, truth = (np.empty(vocabulary.num_words, np.uint32) for _ in range(2))
    for state in range(1, dfa.num_states):
        fast(state, mask)
        slow(state, truth)
        assert ids_of(mask) == ids_of(truth), state


def test_the_cache_of_masks_keeps_its_bound_and_the_latest() -> None:
    cache = MaskCache(max_bytes=4 * (100 + ROW_BYTES))
    first = cache.new_grammar()
    assert cache.new_grammar() - first >= 2**31  # room for every state
    for state in range(10):
        cache.put(first + state, np.zeros(25, np.uint32))
        assert cache.get(first) is not None  # used all the time
    assert len(cache) == 4 and cache.num_bytes == cache.max_bytes
    assert [s for s in range(10) if cache.get(first + s) is not None] == [0, 7, 8, 9]


def test_a_kept_mask_is_read_only() -> None:
    cache = MaskCache(max_bytes=400)
    cache.put(1, np.zeros(4, np.uint32))
    row = cache.get(1)
    assert row is not None
    with pytest.raises(ValueError, match="read-only"):
        row[0] = 1
