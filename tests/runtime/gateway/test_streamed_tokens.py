"""A stream with token ids and log probabilities: nothing of them is lost, doubled or too early."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import orjson
from fakes import ChunkTokenizer, FakeQueue
from hypothesis import example, given, settings
from hypothesis import strategies as st

from stemma.frontend.protocol import wire
from stemma.runtime.programs.calls import Delta, GenCall
from stemma.runtime.schedule.request import Request
from stemma.runtime.schedule.sampling_params import SamplingParams
from stemma.runtime.sessions.event_outbox import EventOutbox

CHUNKS = st.tuples(st.text("aab€ ", max_size=24), st.sets(st.integers(1, 80), max_size=60))
STOP = st.lists(st.text("ab€", min_size=1, max_size=4), max_size=3)
PATTERNS = st.sampled_from([(), ("a+b",), ("€",)])


class Played:
    """One gen of which each token is a chunk of bytes; its deltas pass an outbox that is emptied
    whenever `takes` says so."""

    def __init__(self, chunks: list[bytes], takes: Callable[[], bool], **fields: Any) -> None:
        self.payload: dict[str, Any] = {}
        self.deltas: list[Any] = []
        self._outbox, self._takes = EventOutbox(), takes
        ids, logprobs = fields.pop("has_token_ids"), fields.pop("logprobs")
        sampling = SamplingParams(logprobs=logprobs, **fields)
        tokenizer: Any = ChunkTokenizer(chunks)
        call = GenCall(self, sampling, tokenizer, is_streaming=True, has_token_ids=ids)
        request = Request(1, array("i", [7, 8, 9]), sampling, call)
        FakeQueue().generate(request, range(len(chunks)))
        self._take()

    def delta(self, delta: Delta) -> None:
        self._outbox.append(1, 0, 0, wire.DELTA, delta)
        if self._takes():
            self._take()

    def finished(self, ids: array[int], tail: str, payload: dict[str, Any]) -> None:
        self.payload = payload

    def failed(self, message: str, kind: str) -> None:
        raise AssertionError(message)

    def _take(self) -> None:
        while self._outbox:
            self.deltas += [orjson.loads(event)[4] for event in self._outbox.take(100)]
        assert self._outbox.num_bytes == 0


def split(text: str, cuts: set[int]) -> list[bytes]:
    data = text.encode()
    places = sorted({0, len(data), *(cut for cut in cuts if cut <= len(data))})
    return [data[a:b] for a, b in pairwise(places)]


@settings(max_examples=300, deadline=None)
@given(CHUNKS, STOP, PATTERNS, st.booleans(), st.none() | st.just(0), st.randoms())
@example(("a€b", {1, 2, 3}), ["€"], (), True, 0, None)
@example(("aab aab", {1, 2, 3, 4, 5}), ["b a"], (), True, 0, None)
def test_a_stream_has_the_tokens_of_the_whole_answer_each_behind_its_text(
    chunks: tuple[str, set[int]],
    stop: list[str],
    patterns: tuple[str, ...],
    has_token_ids: bool,
    logprobs: int | None,
    random: Any,
) -> None:
    pieces = split(*chunks)
    played = Played(
        pieces,
        lambda: random is None or random.random() < 0.5,
        stop=tuple(stop),
        stop_regex=patterns,
        has_token_ids=has_token_ids,
        logprobs=logprobs,
    )
    meta, text, ids = played.payload["meta"], "", []
    assert "".join(map(wire.text_of_delta, played.deltas)) == played.payload["text"]
    if not has_token_ids and logprobs is None:
        assert all(isinstance(delta, str) for delta in played.deltas)
        return
    for delta in played.deltas:
        text += delta["text"]
        ids += delta.get("token_ids", ())
        told = b"".join(pieces[i] for i in ids).decode()  # whole characters only
        assert text.startswith(told)
    if has_token_ids:
        assert ids == meta["output_ids"]
        counts = [delta["prompt_tokens"] for delta in played.deltas if "prompt_tokens" in delta]
        assert counts == [3] * bool(played.deltas)
    if logprobs is not None:
        entries = [entry for delta in played.deltas for entry in delta["logprobs"]]
        assert entries == meta["logprobs"]
        assert [entry["token_id"] for entry in entries] == meta["output_ids"]


def test_a_slow_clients_logprobs_count_for_what_waits() -> None:
    outbox = EventOutbox()
    entry = {"token_id": 1, "token": "a", "logprob": -1.5, "top": [{"token": "b"}] * 9}
    for _ in range(1000):
        outbox.append(1, 0, 0, wire.DELTA, {"text": "a", "logprobs": [entry]})
    assert outbox.num_bytes > 1000 * 9 * 50
    sent = [orjson.loads(event)[4] for event in outbox.take(10**9)]
    assert 1 < len(sent) < 10 and sum(len(delta["logprobs"]) for delta in sent) == 1000
