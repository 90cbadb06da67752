"""Prefixes that come from another engine: whole and proved, or not at all, whatever the peer does.

The peer is a KVSender in this process, or frames of a socket that say what no sender would.
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zmq
from nixl_worker import skip_without_nixl
from waiting import ready, wait_until

from stemma.runtime.memory.disk.block_key import BLOCK_TOKENS, BlockLayout
from stemma.runtime.memory.kv_layout import KVLayout, KVPart
from stemma.runtime.memory.peers import wire
from stemma.runtime.memory.peers.kv_receiver import ComingPrefix, KVReceiver
from stemma.runtime.memory.peers.kv_sender import Asked, Cancelled, KVSender
from stemma.runtime.memory.peers.nixl_memory import NixlOffers, NixlWorker
from stemma.runtime.memory.peers.transports import offers_by

PART = KVPart("kv", 2, 2, "bfloat16")
LAYOUT = BlockLayout("tiny", "bfloat16", KVLayout(3, (PART,)))
OTHERS = {
    "revision": replace(LAYOUT, model_revision="other"),
    "dtype": replace(LAYOUT, arithmetic="float32"),
    "heads": BlockLayout("tiny", "bfloat16", KVLayout(3, (replace(PART, num_vectors=4),))),
    "layers": BlockLayout("tiny", "bfloat16", KVLayout(2, (PART,))),
    "quantized": BlockLayout("tiny", "bfloat16", KVLayout(3, (replace(PART, dtype="int8"),))),
}
LONG_S = 60.0  # that a busy machine may take over a word
IDS = array("i", range(600))
VOCAB = 600


@pytest.fixture
def endpoint(tmp_path: Path) -> str:
    return f"ipc://{tmp_path}/kv"


@pytest.fixture
def way(request: pytest.FixtureRequest) -> str:
    """A `kv_transport`: "zmq", but where a test asks for others."""
    way = str(getattr(request, "param", "zmq"))
    if way == "nixl":
        skip_without_nixl()
    return way


all_ways = pytest.mark.parametrize("way", ["zmq", "auto", "nixl"], indirect=True)


@pytest.fixture
def sender(endpoint: str, way: str) -> Iterator[KVSender]:
    nixl = NixlWorker() if way == "nixl" else None
    sender = KVSender(endpoint, LAYOUT, vocab_size=VOCAB, nixl=nixl, silence_s=LONG_S)
    yield sender
    sender.close()


@pytest.fixture
def receiver(endpoint: str, way: str) -> Iterator[KVReceiver]:
    receiver = KVReceiver([endpoint], LAYOUT, offers=offers_by(way), silence_s=LONG_S)
    yield receiver
    receiver.close()
    assert not receiver._num_blocks, "memory of a prefix was not given back"


def asked(receiver: KVReceiver, start: int = 0) -> ComingPrefix:
    wait_until(lambda: receiver.best_peer() is not None)
    peer = receiver.best_peer()
    assert peer is not None
    prefix = receiver.ask(peer, "mine", IDS, start, expected_s=0.0)
    assert prefix is not None
    return prefix


def taken(sender: KVSender, kind: type) -> Any:
    """The next news, which is of this kind."""
    assert ready([sender], 30.0)
    (news,) = sender.take()
    assert isinstance(news, kind)
    return news


def kv_of(piece: int, start: int, end: int) -> np.ndarray[Any, Any]:
    """[2, length, 4]: bytes that tell the piece, the vector and the token."""
    tokens = np.arange(start, end)[None, :, None] * 7
    vectors = np.arange(2)[:, None, None] * 3
    return (tokens + vectors + 50 * piece + np.arange(4)).astype(np.uint8)


def send(sender: KVSender, key: wire.StreamKey, start: int, end: int) -> None:
    for piece in range(3):
        sender.send_kv(key, piece, start, kv_of(piece, start, end))


def ended(receiver: KVReceiver, prefix: ComingPrefix) -> str | None:
    """How it ended, awaited as an event loop would; nothing is left of it but what came."""
    while not prefix.is_done:
        assert ready([receiver], 30.0), "nothing ended in 30 s"
        receiver.collect()
    assert receiver.describe()["num_coming"] == 0
    return prefix.error


def assert_right(prefix: ComingPrefix) -> None:
    """All that counts as there has the bytes that were sent."""
    for token in range(prefix.start, prefix.num_there):
        index, at = divmod(token - prefix.start, BLOCK_TOKENS)
        block = prefix.payloads[index].reshape(3, 2, BLOCK_TOKENS, 4)
        for piece in range(3):
            assert (block[piece, :, at] == kv_of(piece, token, token + 1)[:, 0]).all(), token


@all_ways
@pytest.mark.parametrize("start", [0, 256])
def test_chunks_of_any_length_land_where_they_belong(
    sender: KVSender, receiver: KVReceiver, start: int, way: str
) -> None:
    prefix = asked(receiver, start)
    news = taken(sender, Asked)
    assert (news.namespace, news.token_ids, news.start) == ("mine", IDS, start)
    edges = [start, start + 1, start + 50, *(e for e in (300, 560) if e > start + 50), 600]
    for first, last in pairwise(edges):
        send(sender, news.key, first, last)
        sender.prove(news.key, last)
    sender.end(news.key, None)
    assert ended(receiver, prefix) is None and prefix.num_there == 600
    assert_right(prefix)
    num_written = 0 if way == "zmq" else prefix.num_bytes
    assert receiver.describe()["num_written_bytes"] == num_written
    receiver.release(prefix)


@pytest.mark.parametrize("way", ["nixl"], indirect=True)
def test_a_stream_goes_on_in_messages_when_its_memory_cannot_be_written(
    sender: KVSender, receiver: KVReceiver
) -> None:
    prefix = asked(receiver)
    key = taken(sender, Asked).key
    send(sender, key, 0, 300)
    sender.prove(key, 300)
    wait_until(lambda: prefix.num_there == 300)
    assert isinstance(receiver._offers, NixlOffers)
    process = receiver._offers._worker._process
    assert process is not None
    process.kill()
    wait_until(lambda: process.has_ended)
    send(sender, key, 300, 600)
    sender.prove(key, 600)
    sender.end(key, None)
    assert ended(receiver, prefix) is None and prefix.num_there == 600
    assert_right(prefix)
    assert receiver.describe()["num_written_bytes"] == prefix.num_bytes // 2
    receiver.release(prefix)


@pytest.mark.parametrize("way", ["auto", "nixl"], indirect=True)
def test_memory_is_used_again_after_the_senders_last_word_alone(
    sender: KVSender, receiver: KVReceiver
) -> None:
    """Else a late write would change another stream."""
    first = asked(receiver)
    memory = first.memory
    key = taken(sender, Asked).key
    send(sender, key, 0, 600)
    sender.prove(key, 600)
    sender.end(key, None)
    assert ended(receiver, first) is None
    receiver.release(first)
    wait_until(lambda: receiver._spare == [memory])
    second = asked(receiver)
    assert second.memory is memory is not None and receiver._spare == []
    send(sender, taken(sender, Asked).key, 0, 300)
    receiver.release(second)  # amid it
    taken(sender, Cancelled)
    third = asked(receiver)
    assert third.memory is not memory and receiver._spare == []
    receiver.release(third)


@all_ways
def test_what_was_not_proved_does_not_count(sender: KVSender, receiver: KVReceiver) -> None:
    """A step that failed, or whose sender ended amid it, has sent what may be wrong."""
    prefix = asked(receiver)
    key = taken(sender, Asked).key
    send(sender, key, 0, 300)
    sender.prove(key, 300)
    send(sender, key, 300, 600)
    sender.end(key, "the step failed")
    assert ended(receiver, prefix) == "the step failed" and prefix.num_there == 300
    assert_right(prefix)
    receiver.release(prefix)


def test_a_stream_that_ends_short_is_an_error(sender: KVSender, receiver: KVReceiver) -> None:
    prefix = asked(receiver)
    sender.end(taken(sender, Asked).key, None)
    assert ended(receiver, prefix) == "it is short" and prefix.num_there == 0
    receiver.release(prefix)


@pytest.mark.parametrize("how", OTHERS)
def test_another_layout_is_refused_on_both_sides(endpoint: str, how: str) -> None:
    sender, receiver = (
        KVSender(endpoint, OTHERS[how], vocab_size=VOCAB),
        KVReceiver([endpoint], LAYOUT),
    )
    (peer,) = receiver._peers
    wait_until(lambda: peer.pong is not None)
    assert receiver.best_peer() is None
    prefix = receiver.ask(peer, "", IDS, 0, expected_s=0.0)  # as one that does not look
    assert prefix is not None
    assert "another layout" in str(ended(receiver, prefix)) and sender.num_refused == 1
    assert sender.take() == []
    receiver.release(prefix)
    receiver.close()
    sender.close()


def test_a_role_that_computes_for_nobody_is_not_asked(
    sender: KVSender, receiver: KVReceiver
) -> None:
    wait_until(lambda: receiver.best_peer() is not None)
    sender.accepts = False
    wait_until(lambda: receiver.best_peer() is None)
    sender.accepts = True
    wait_until(lambda: receiver.best_peer() is not None)


@all_ways
def test_what_nobody_waits_for_is_cancelled(sender: KVSender, receiver: KVReceiver) -> None:
    prefix = asked(receiver)
    key = taken(sender, Asked).key
    receiver.release(prefix)
    assert taken(sender, Cancelled).key == key
    send(sender, key, 0, 600)  # it has not heard of it yet: nothing happens
    sender.end(key, None)
    assert sender.describe()["num_streams"] == 0


def test_a_receiver_that_is_gone_is_noticed(endpoint: str) -> None:
    sender = KVSender(endpoint, LAYOUT, vocab_size=VOCAB, silence_s=2.0)
    receiver = KVReceiver([endpoint], LAYOUT)
    prefix = asked(receiver)
    key = taken(sender, Asked).key
    receiver.close()
    assert taken(sender, Cancelled).key == key
    assert sender.describe()["num_peers"] == 0
    assert prefix.is_done and prefix.num_there == 0, "somebody would wait for it"
    sender.close()


def test_a_peer_that_takes_nothing_ends_its_own_streams(endpoint: str) -> None:
    sender = KVSender(endpoint, LAYOUT, vocab_size=VOCAB, max_pending_bytes=1000)
    receiver = KVReceiver([endpoint], LAYOUT)
    prefix = asked(receiver)
    key = taken(sender, Asked).key
    send(sender, key, 0, 600)  # 4,800 bytes a piece
    assert "more than 1000 bytes" in str(ended(receiver, prefix))
    assert taken(sender, Cancelled).key == key
    receiver.release(prefix)
    receiver.close()
    sender.close()


def test_no_more_comes_than_there_is_memory_for(endpoint: str, sender: KVSender) -> None:
    receiver = KVReceiver([endpoint], LAYOUT, max_coming_bytes=5 * LAYOUT.block_bytes)
    first = asked(receiver)  # three blocks
    peer = receiver.best_peer()
    assert peer is not None and receiver.ask(peer, "", IDS, 0, 0.0) is None
    second = receiver.ask(peer, "", IDS, 256, 0.0)
    assert second is not None
    receiver.release(first)
    receiver.release(second)
    again = receiver.ask(peer, "", IDS, 0, 0.0)
    assert again is not None
    receiver.release(again)
    receiver.close()


class Liar:
    """A sender that says what it is told to."""

    def __init__(self, endpoint: str, epoch: str = "one") -> None:
        self.socket = zmq.Context.instance().socket(zmq.ROUTER)
        self.socket.setsockopt(zmq.RCVTIMEO, 30_000)
        self.socket.bind(endpoint)
        self.name = b""
        self.epoch = epoch

    def answer_pings(self) -> wire.Ask:
        """Until something is asked for."""
        while True:
            self.name, *frames = self.socket.recv_multipart()
            message, _ = wire.message_of(frames)
            if isinstance(message, wire.Ask):
                return message
            self.say(wire.Pong(self.epoch, LAYOUT.digest.hex(), True, 0.0, 0.0))

    def say(self, message: wire.Message, data: bytes | None = None) -> None:
        self.socket.send_multipart([self.name, *wire.frames_of(message, data)])


@pytest.fixture
def liar(endpoint: str) -> Iterator[Liar]:
    liar = Liar(endpoint)
    yield liar
    liar.socket.close(0)


def begun(receiver: KVReceiver, liar: Liar) -> tuple[ComingPrefix, int]:
    """A prefix that was asked of it, and its number."""
    (peer,) = receiver._peers
    liar.name, *_ = liar.socket.recv_multipart()
    liar.say(wire.Pong(liar.epoch, LAYOUT.digest.hex(), True, 0.0, 0.0))
    wait_until(lambda: peer.pong is not None)
    prefix = receiver.ask(peer, "", IDS, 0, 0.0)
    assert prefix is not None
    return prefix, liar.answer_pings().stream


GOOD = kv_of(0, 0, 10).tobytes()
LIES = {
    "beyond the end": (wire.Piece("one", 0, 0, 0, 595, 10, 0.0), GOOD),
    "no such layer": (wire.Piece("one", 0, 0, 3, 0, 10, 0.0), GOOD),
    "too short": (wire.Piece("one", 0, 0, 0, 0, 10, 0.0), GOOD[:-1]),
    "too long": (wire.Piece("one", 0, 0, 0, 0, 10, 0.0), GOOD + b"x"),
    "not the next": (wire.Piece("one", 0, 0, 0, 10, 10, 0.0), GOOD),
    "of no bytes, without memory": (wire.Piece("one", 0, 0, 0, 0, 10, 0.0), b""),
    "of no tokens": (wire.Piece("one", 0, 0, 0, 0, 0, 0.0), b""),
    "one was lost": (wire.Piece("one", 0, 1, 0, 0, 10, 0.0), GOOD),
}  # fmt: skip


@pytest.mark.parametrize("lie", LIES)
def test_a_piece_in_doubt_ends_the_stream(receiver: KVReceiver, liar: Liar, lie: str) -> None:
    prefix, number = begun(receiver, liar)
    piece, data = LIES[lie]
    liar.say(replace(piece, stream=number), data)
    assert ended(receiver, prefix) and prefix.num_there == 0
    receiver.release(prefix)


@pytest.mark.parametrize("num_layers", [0, 2])
def test_what_has_not_come_in_all_layers_is_not_proved(
    receiver: KVReceiver, liar: Liar, num_layers: int
) -> None:
    """Its memory is not even cleared."""
    prefix, number = begun(receiver, liar)
    for piece in range(num_layers):
        liar.say(wire.Piece("one", number, piece, piece, 0, 10, 0.0), GOOD)
    liar.say(wire.Proved("one", number, num_layers, 10))
    assert ended(receiver, prefix) and prefix.num_there == 0
    receiver.release(prefix)


def test_late_words_of_another_epoch_are_refused(receiver: KVReceiver, liar: Liar) -> None:
    prefix, number = begun(receiver, liar)
    liar.say(wire.Piece("before", number, 0, 0, 0, 10, 0.0), GOOD)
    liar.say(wire.Proved("before", number, 0, 600))
    liar.say(wire.Done("before", number, 0, None))
    wait_until(lambda: receiver.num_late == 3)
    assert not prefix.is_done and prefix.num_there == 0
    for piece in range(3):
        liar.say(wire.Piece("one", number, piece, piece, 0, 10, 0.0), GOOD)
    liar.say(wire.Proved("one", number, 3, 10))
    wait_until(lambda: prefix.num_there == 10)
    liar.say(wire.Pong("two", LAYOUT.digest.hex(), True, 0.0, 0.0))  # it was started anew
    assert ended(receiver, prefix) == "it was started anew" and prefix.num_there == 10
    liar.say(wire.Proved("one", number, 4, 600))
    wait_until(lambda: receiver.num_late == 4)
    assert prefix.num_there == 10
    receiver.release(prefix)


def test_silence_ends_a_stream(endpoint: str, liar: Liar) -> None:
    receiver = KVReceiver([endpoint], LAYOUT, silence_s=2.0)
    prefix, _ = begun(receiver, liar)
    assert ended(receiver, prefix) == "it is silent" and receiver.best_peer() is None
    receiver.release(prefix)
    receiver.close()


def test_a_peer_that_talks_of_nothing_else_is_not_waited_for_either(
    endpoint: str, sender: KVSender
) -> None:
    receiver = KVReceiver([endpoint], LAYOUT, min_patience_s=0.5)
    prefix = asked(receiver)
    assert ended(receiver, prefix) == "nothing has come of it for too long"
    receiver.release(prefix)
    receiver.close()


def test_frames_that_are_no_message_change_nothing(receiver: KVReceiver, liar: Liar) -> None:
    prefix, number = begun(receiver, liar)
    good = wire.frames_of(wire.Done("one", number, 0, "over"))
    for frames in (
        [b"kv"], [b"kv", b"{}"], [b"kv", b"\xff"], [b"what", b"{}"], [b"done", b"[1]"],
        [b"done", json.dumps([*json.loads(good[1])]).encode()],
        [b"done", good[1].replace(b'"over"', b'"\\ud800"')],
        [b"done", good[1].replace(b'"number": 0', b'"number": "0"')],
        [b"done", good[1].replace(b'"number": 0', b'"number": -1')],
        wire.frames_of(wire.Cancel(number)),
    ):  # fmt: skip
        liar.socket.send_multipart([liar.name, *frames])
    liar.socket.send_multipart([liar.name, *good])
    assert ended(receiver, prefix) == "over"
    receiver.release(prefix)


class Asker:
    """A receiver that says what it is told to."""

    def __init__(self, endpoint: str) -> None:
        self.socket = zmq.Context.instance().socket(zmq.DEALER)
        self.socket.setsockopt(zmq.RCVTIMEO, 30_000)
        self.socket.connect(endpoint)

    def say(self, message: wire.Message, data: bytes | None = None) -> None:
        self.socket.send_multipart(wire.frames_of(message, data))

    def ask(self, number: int, ids: array[int] = IDS) -> None:
        self.say(wire.Ask(number, LAYOUT.digest.hex(), "", 0), ids.tobytes())

    def answer(self) -> wire.Message:
        return wire.message_of(self.socket.recv_multipart())[0]


@pytest.fixture
def asker(endpoint: str) -> Iterator[Asker]:
    asker = Asker(endpoint)
    yield asker
    asker.socket.close(0)


@pytest.mark.parametrize("wrong", [-1, VOCAB])
def test_ids_that_are_no_tokens_are_refused(sender: KVSender, asker: Asker, wrong: int) -> None:
    """They would be rows beyond the embedding, in a step with others' prompts."""
    asker.ask(1, array("i", [*IDS[:-1], wrong]))
    answer = asker.answer()
    assert isinstance(answer, wire.Done) and answer.error is not None
    assert "not in [0, 600)" in answer.error and sender.take() == []


def test_a_stream_is_asked_for_once(sender: KVSender, asker: Asker) -> None:
    asker.ask(1)
    asker.ask(1)
    asker.ask(2)
    asker.say(wire.Ping(LAYOUT.digest.hex()))
    assert isinstance(asker.answer(), wire.Pong)
    numbers = [news.key.number for news in sender.take() if isinstance(news, Asked)]
    assert numbers == [1, 2] and sender.num_malformed == 1


def test_a_peer_that_was_stopped_for_a_while_is_told_so(endpoint: str, asker: Asker) -> None:
    """Else it would wait for what nobody sends."""
    sender = KVSender(endpoint, LAYOUT, vocab_size=VOCAB, silence_s=0.5)
    asker.ask(1)
    key = taken(sender, Asked).key
    assert taken(sender, Cancelled).key == key
    answer = asker.answer()
    assert isinstance(answer, wire.Done) and (answer.stream, answer.error) == (1, "you were silent")
    sender.close()


def test_a_sender_that_is_gone_is_noticed_at_once(endpoint: str, liar: Liar) -> None:
    """By the end of its connection, as after `kill -9`, and not by its silence."""
    receiver = KVReceiver([endpoint], LAYOUT, silence_s=LONG_S, min_patience_s=LONG_S)
    prefix, _ = begun(receiver, liar)
    liar.socket.close(0)
    assert ended(receiver, prefix) == "its connection has ended" and receiver.best_peer() is None
    receiver.release(prefix)
    receiver.close()


def test_garbage_of_a_receiver_changes_nothing(sender: KVSender, asker: Asker) -> None:
    ask = wire.frames_of(wire.Ask(1, LAYOUT.digest.hex(), "", 0), IDS.tobytes())
    names = json.dumps([*json.loads(ask[1])]).encode()
    for frames in (
        [b""], [b"ask"], [b"ask", names, b"1234"], [b"ask", b"[" * 100_000],
        [b"cancel", b'["stream"]'],
        [b"ask", ask[1].replace(b'""', b'"\\ud800"'), ask[2]],
        [b"ask", ask[1].replace(b'"start": 0', b'"start": 600'), ask[2]], [*ask[:2], b"123"],
    ):  # fmt: skip
        asker.socket.send_multipart(frames)
    asker.say(wire.Ping(LAYOUT.digest.hex()))
    assert isinstance(asker.answer(), wire.Pong) and sender.take() == []
    assert sender.num_malformed == 8
