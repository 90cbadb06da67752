"""Text that comes token by token: never half a character, never a part of a stop string."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import pytest
from fakes import ChunkTokenizer
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from stemma.runtime.tokenizer.detokenizer import Detokenizer, StopHit
from stemma.runtime.tokenizer.tokenizer import REPLACEMENT, Tokenizer


@dataclass
class Streamed:
    """What came of one output: its text, the deltas, and the stop string that cut it."""

    text: str
    deltas: list[str]
    hit: StopHit | None


def stream(chunks: list[bytes], stop: tuple[str, ...] = ()) -> Streamed:
    """Feed one token a chunk, as a generation does, and take deltas on the way."""
    detokenizer = Detokenizer(ChunkTokenizer(chunks), stop)  # type: ignore[arg-type]
    deltas = []
    for token_id in range(len(chunks)):
        hit = detokenizer.append(token_id)
        if hit is not None:
            detokenizer.cut(hit)
            deltas.append(detokenizer.take_delta(is_final=True))
            return Streamed(detokenizer.text, deltas, hit)
        deltas.append(detokenizer.take_delta())
    detokenizer.flush()
    deltas.append(detokenizer.take_delta(is_final=True))
    return Streamed(detokenizer.text, deltas, None)


def split(text: str, cuts: set[int]) -> list[bytes]:
    """The text's bytes, cut at these places (also inside characters; some chunks are empty)."""
    data = text.encode()
    places = sorted({0, len(data), *(cut for cut in cuts if cut <= len(data))})
    return [data[a:b] for a, b in pairwise(places)]


TEXTS = st.text(max_size=30) | st.text("abé€😀\ufffd", max_size=30)
CUTS = st.sets(st.integers(1, 120), max_size=80)


@settings(max_examples=300)
@given(TEXTS, CUTS)
def test_any_split_of_any_text_streams_to_exactly_that_text(text: str, cuts: set[int]) -> None:
    streamed = stream(split(text, cuts))
    assert streamed.text == text
    assert "".join(streamed.deltas) == text


@settings(max_examples=200)
@given(st.text("ab é€😀字", max_size=20), CUTS)
def test_a_whole_character_is_never_shown_as_the_replacement_character(
    text: str, cuts: set[int]
) -> None:
    assert not any(REPLACEMENT in delta for delta in stream(split(text, cuts)).deltas)


@settings(max_examples=500)
@given(
    st.text("aab€", max_size=24),
    CUTS,
    st.lists(st.text("ab€", min_size=1, max_size=4), min_size=1, max_size=3),
)
@example("a€b", {1, 2, 3}, ["€"])  # the stop string's first token holds a part of a character
@example("aaab", {1, 2, 3}, ["aab"])
@example("xyz€", {4, 5}, ["€"])
def test_stop_strings_cut_the_text_before_them_and_never_leak(
    text: str, cuts: set[int], stop: list[str]
) -> None:
    chunks = split(text, cuts)
    streamed = stream(chunks, tuple(stop))
    so_far = ""
    for delta in streamed.deltas:
        so_far += delta
        assert streamed.text.startswith(so_far), "a delta had to be taken back"
    assert so_far == streamed.text
    if not any(s in text for s in stop):
        assert streamed.hit is None and streamed.text == text
        return
    hit = streamed.hit
    assert hit is not None and hit.matched in stop
    assert not any(s in streamed.text for s in stop)
    assert text.startswith(streamed.text + hit.matched)
    kept = b"".join(chunks[: hit.num_tokens])
    assert kept.decode() + hit.tail == streamed.text, "kept tokens and tail are not the text"
    longer = b"".join(chunks[: hit.num_tokens + 1])
    assert not _is_whole(longer) or not streamed.text.startswith(longer.decode())


def _is_whole(data: bytes) -> bool:
    try:
        data.decode()
    except UnicodeDecodeError:
        return False
    return True


@settings(max_examples=300)
@given(st.lists(st.binary(min_size=1, max_size=3), max_size=12), st.booleans())
def test_bytes_that_are_no_text_show_as_the_decoder_shows_them(
    chunks: list[bytes], has_stop: bool
) -> None:
    whole = b"".join(chunks).decode("utf-8", "replace")
    stop = ("zz",) if has_stop else ()
    assume("zz" not in whole)
    streamed = stream(chunks, stop)
    assert streamed.text == "".join(streamed.deltas) == whole


@pytest.mark.parametrize(
    ("chunks", "stop", "text", "num_kept", "tail"),
    [
        ([b"Hel", b"lo, wor", b"ld"], ", ", "Hello", 1, "lo"),
        ([b"a", b"b", b"c", b"d"], "bc", "a", 1, ""),
        ([b"stop", b"x"], "stop", "", 0, ""),
        ([b"now stop now"], "stop", "now ", 0, "now "),
        ([b"a", b"\xe2", b"\x82", b"\xac", b"b"], "€", "a", 1, ""),
        ([b"a\xe2", b"\x82\xacb"], "b", "a€", 0, "a€"),
    ],
)
def test_a_stop_string_drops_the_tokens_that_it_touches(
    chunks: list[bytes], stop: str, text: str, num_kept: int, tail: str
) -> None:
    streamed = stream(chunks, (stop,))
    assert streamed.text == text
    assert streamed.hit == StopHit(num_kept, tail, stop)


def test_of_several_stop_strings_the_earliest_in_the_text_wins() -> None:
    streamed = stream([b"one ", b"two three"], ("three", "two"))
    assert streamed.hit is not None and streamed.hit.matched == "two"
    assert streamed.text == "one "


def test_what_may_become_a_stop_string_is_held_back_until_it_cannot() -> None:
    assert stream([b"a<", b"/", b"b", b"<"], ("</s>",)).deltas == ["a", "", "</b", "", "<"]


def test_real_byte_tokens_stream_to_the_text(byte_tokenizer: Tokenizer) -> None:
    text = "naïve 😀 text"
    detokenizer = Detokenizer(byte_tokenizer)
    deltas = []
    for token_id in byte_tokenizer.encode(text):
        assert detokenizer.append(token_id) is None
        deltas.append(detokenizer.take_delta())
    assert "".join(deltas) == text and REPLACEMENT not in "".join(deltas)
