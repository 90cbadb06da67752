"""The wording of OpenAI's answers: however a stream is cut, it adds up to the whole answer."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from openai.types import Completion
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from stemma.server.api.openai.chat import ChatReply
from stemma.server.api.openai.completions import TextReply
from stemma.server.api.openai.reply import CompletionReply, Wanted
from stemma.server.protocol.pieces import Outcome, Piece

WANTED = st.builds(
    Wanted,
    n=st.integers(1, 3),
    includes_usage=st.booleans(),
    has_running_usage=st.booleans(),
    has_token_ids=st.booleans(),
    num_logprobs=st.none() | st.integers(0, 2),
    has_stop_text=st.booleans(),
    has_timing=st.booleans(),
)
TEXTS = st.lists(st.text(max_size=4), max_size=8)  # of each token
COUNTS = {"prompt_tokens": 7, "cached_tokens": 5, "forced_tokens": 1, "drafted_tokens": 6,
          "accepted_tokens": 4}  # fmt: skip
TIMES = dict.fromkeys(
    ("queue_s", "prefill_s", "decode_s", "latency_s", "time_to_first_token_s"), 0.5
)


def entry_of(token_id: int, text: str) -> dict[str, Any]:
    tops = [{"token_id": 90 + i, "token": f"top{i}", "logprob": -0.1 * i} for i in range(2)]
    return {"token_id": token_id, "token": text, "logprob": -0.5, "top": tops}


def outcome_of(index: int, texts: list[str], matched: str | None) -> Outcome:
    ids = list(range(len(texts)))
    meta = {
        **COUNTS,
        **TIMES,
        "completion_tokens": len(texts),
        "output_ids": ids,
        "logprobs": [entry_of(*item) for item in enumerate(texts)],
        "finish_reason": "stop",
    }
    if matched:
        meta["matched_stop"] = matched
    return Outcome(index, "".join(texts), meta)


def pieces_of(outcome: Outcome, cuts: set[int], wanted: Wanted) -> list[Piece]:
    """The outcome's tokens, cut at these places."""
    entries, pieces = outcome.meta["logprobs"], []
    places = sorted({0, len(entries), *(cut for cut in cuts if cut < len(entries))})
    for begin, end in pairwise(places):
        part = entries[begin:end]
        pieces.append(
            Piece(
                outcome.index,
                "".join(entry["token"] for entry in part),
                [entry["token_id"] for entry in part] if wanted.needs_token_ids else None,
                part if wanted.num_logprobs is not None else None,
                COUNTS["prompt_tokens"] if wanted.needs_token_ids and begin == 0 else None,
                COUNTS["cached_tokens"],
            )
        )
    return pieces


def played(
    reply: CompletionReply, outcomes: list[Outcome], pieces: list[Piece]
) -> list[dict[str, Any]]:
    said = b"".join(reply.piece(piece) for piece in pieces)
    said += b"".join(reply.end(outcome) for outcome in outcomes) + reply.close(outcomes, None)
    *events, last, nothing = said.split(b"\n\n")
    assert (last, nothing) == (b"data: [DONE]", b"")
    return [json.loads(event.removeprefix(b"data: ")) for event in events]


def added_up(chunks: list[dict[str, Any]], text_of: Any) -> dict[int, dict[str, Any]]:
    """By index, what the chunks of a choice say together."""
    whole: dict[int, dict[str, Any]] = {}
    for chunk in chunks:
        for part in chunk["choices"]:
            choice = whole.setdefault(part["index"], {"text": "", "ids": [], "logprobs": {}})
            choice["text"] += text_of(part)
            choice["ids"] += part.get("token_ids", [])
            choice["reason"] = part["finish_reason"]
            for name, values in (part["logprobs"] or {}).items():
                if values is not None:
                    choice["logprobs"].setdefault(name, []).extend(values)
    return whole


@settings(max_examples=150, deadline=None)
@given(WANTED, st.lists(TEXTS, min_size=3, max_size=3), st.data())
def test_a_stream_adds_up_to_the_whole_answer(
    wanted: Wanted, texts: list[list[str]], data: st.DataObject
) -> None:
    matched = data.draw(st.none() | st.just("END"))
    outcomes = [outcome_of(i, texts[i], matched) for i in range(wanted.n)]
    cuts = st.sets(st.integers(1, 8))
    pieces = [p for o in outcomes for p in pieces_of(o, data.draw(cuts), wanted)]
    for reply_type, text_of in (
        (ChatReply, lambda part: part["delta"].get("content", "")),
        (TextReply, lambda part: part["text"]),
    ):
        kind: Any = reply_type
        chunks = played(kind("m", wanted=wanted), outcomes, pieces)
        whole = kind("m", wanted=wanted).whole(outcomes, None)
        kind_of_body: Any = ChatCompletion if reply_type is ChatReply else Completion
        kind_of_body.model_validate(whole)
        streamed = added_up(chunks, text_of)
        for choice in whole["choices"]:
            told = streamed[choice["index"]]
            assert told["text"] == choice.get("text", choice.get("message", {}).get("content"))
            assert told["ids"] == choice.get("token_ids", [])
            assert told["reason"] == choice["finish_reason"] == "stop"
            lists = {k: v for k, v in (choice["logprobs"] or {}).items() if v}
            assert {k: v for k, v in told["logprobs"].items() if v} == lists
        if reply_type is ChatReply:
            assert all(ChatCompletionChunk.model_validate(chunk) for chunk in chunks)
        check_usage(wanted, chunks, whole["usage"])


def check_usage(wanted: Wanted, chunks: list[dict[str, Any]], whole: dict[str, Any]) -> None:
    assert whole["prompt_tokens"] == 7 and whole["prompt_tokens_details"]["cached_tokens"] == 5
    assert ("timing" in whole) == wanted.has_timing
    if wanted.includes_usage:
        assert chunks[-1]["choices"] == [] and chunks[-1]["usage"] == whole
        chunks = chunks[:-1]
    if wanted.has_running_usage:
        counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
        assert counts == sorted(counts) and counts[-1] == whole["completion_tokens"]
    else:
        assert all(chunk.get("usage") is None for chunk in chunks)
        assert all(("usage" in chunk) == wanted.includes_usage for chunk in chunks)


def test_a_plain_chunk_is_what_the_slow_way_makes() -> None:
    text = 'quotes " and \\ and \u2028 and 😀'
    for kind in (ChatReply, TextReply):
        chunk: dict[str, Any] = {}
        for wanted in (Wanted(), Wanted(num_logprobs=0)):
            reply = kind("a \0text\0 model", wanted=wanted)
            reply.piece(Piece(0, "first"))
            said = json.loads(reply.piece(Piece(0, text)).removeprefix(b"data: "))
            said.pop("id"), said.pop("created")
            assert chunk in ({}, said)
            chunk = said
