"""Stop patterns: the match that ends first, found as the text comes."""

from __future__ import annotations

import re
import time

import pytest
from fakes import ChunkTokenizer
from hypothesis import given, settings
from hypothesis import strategies as st

from stemma.constrained.stop_patterns import PatternHit, StopPatterns, stop_automaton
from stemma.errors import InvalidRequest
from stemma.runtime.tokenizer.detokenizer import Detokenizer

PATTERNS = ["b+c", "[ab]c", "a.?c", "é+", "(ab|ba)+c", "c{2,3}", r"\d+\.", "aXb|b"]


def first_match(patterns: list[str], text: str) -> PatternHit | None:
    """By trying all substrings."""
    for end in range(1, len(text) + 1):
        for start in range(end):
            if any(re.fullmatch(pattern, text[start:end]) for pattern in patterns):
                return PatternHit(start, end)
    return None


@settings(max_examples=300)
@given(
    st.lists(st.sampled_from(PATTERNS), min_size=1, max_size=3),
    st.text("abcéX1.", max_size=14),
    st.integers(0, 14),
)
def test_the_match_that_ends_first_is_found_however_the_text_comes(
    patterns: list[str], text: str, cut: int
) -> None:
    followed = StopPatterns(patterns)
    hit = followed.feed(text[:cut]) or followed.feed(text[cut:])
    assert hit == first_match(patterns, text)


@settings(max_examples=200)
@given(st.sampled_from(PATTERNS), st.text("abc", max_size=12))
def test_what_is_not_held_back_is_never_cut(pattern: str, text: str) -> None:
    followed = StopPatterns([pattern])
    shown = 0
    for index, character in enumerate(text):
        hit = followed.feed(character)
        if hit is not None:
            assert hit.start >= shown
            return
        shown = index + 1 - followed.num_held_back


def test_an_output_ends_before_the_match_and_drops_the_tokens_it_touches() -> None:
    detokenizer = Detokenizer(ChunkTokenizer([b"one ", b"two", b" 12", b"3. x"]), (), (r"\d+\.",))  # type: ignore[arg-type]
    hits = [detokenizer.append(index) for index in range(4)]
    assert hits[:3] == [None] * 3 and hits[3] is not None
    assert (hits[3].num_tokens, hits[3].tail, hits[3].matched) == (2, " ", "123.")
    detokenizer.cut(hits[3])
    assert detokenizer.text == "one two "


def test_no_match_counts_that_ends_within_min_tokens() -> None:
    tokenizer = ChunkTokenizer([b"a1", b"b2", b"c"])
    detokenizer = Detokenizer(tokenizer, (), (r"\d",), min_tokens=1)  # type: ignore[arg-type]
    assert detokenizer.append(0) is None
    hit = detokenizer.append(1)
    assert hit is not None and hit.matched == "2"


def test_a_pattern_that_makes_others_hang_takes_linear_time() -> None:
    started = time.process_time()
    followed = StopPatterns(["(a|a)*(a|a)*b"])
    assert followed.feed("a" * 20_000) is None
    assert time.process_time() - started < 5.0


@pytest.mark.parametrize(
    ("pattern", "message"),
    [
        ("", "a string of 1 to 512 characters"),
        ("x" * 513, "a string of 1 to 512 characters"),
        ("a(", "a regular expression: "),
        (r"(a)\1", "a regular expression: "),
        ("a*", "but not nothing"),
        (".*[ab].{40}", "a pattern of at most"),
    ],
)
def test_a_bad_pattern_is_refused_with_the_reason(pattern: str, message: str) -> None:
    with pytest.raises(InvalidRequest, match=re.escape(message)):
        stop_automaton(pattern)
