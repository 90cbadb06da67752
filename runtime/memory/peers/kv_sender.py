"""The sending side: prompts that other engines ask for, and their KV, layer by layer.

    engine's thread   take asks; send_kv after each layer; prove, end
    sender's thread   the socket: pings answered, asks taken in, pieces sent

The sending thread answers pings while a step is computed. What a peer does not take is bounded: at
most `max_pending_bytes` wait, then its streams end. A peer that is silent is gone: whatever it has
asked for is cancelled.
"""

from __future__ import annotations

import logging
import secrets
import threading
import time
from array import array
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import zmq

from ....errors import ProtocolError
from ...sessions.listener import Listener
from ..disk.block_key import BLOCK_TOKENS, BlockLayout
from . import wire
from .bell import Bell
from .nixl_memory import NixlWorker
from .piece_places import places_of
from .transports import opened
from .wire import StreamKey
from .written_memory import OpenedMemory

log = logging.getLogger(__name__)

MAX_PENDING_BYTES = 512 * 2**20
_BUSY_POLL_MS = 2  # while a peer takes no more
_IDLE_POLL_MS = 250
_BIND_S = 10.0  # that an engine which leaves may take to give up its address (guess)


@dataclass(frozen=True, slots=True)
class Asked:
    """A prompt to compute; its KV is to be sent from `start` on."""

    key: StreamKey
    namespace: str
    token_ids: array[int]  # 'i'
    start: int


@dataclass(frozen=True, slots=True)
class Cancelled:
    """A stream that nobody waits for."""

    key: StreamKey


class Backlog(NamedTuple):
    """What a new prompt would wait for, and what a token of it costs; 0: not known."""

    queue_s: float = 0.0
    prompt_token_s: float = 0.0


@dataclass(slots=True, eq=False)
class _Target:
    """The memory that was offered for a stream. The sending thread's."""

    offer: str
    start: int  # token with which its first block begins
    num_blocks: int
    opened: OpenedMemory | None = None
    is_given_up: bool = False


@dataclass(slots=True, eq=False)
class _Stream:
    """Guarded by the sender's lock, but for the target."""

    target: _Target | None  # None: its pieces are sent in messages
    number: int = 0  # of the next message


class _Words(NamedTuple):
    """A message to send. Where there is a target its piece is written there, if that can be."""

    frames: list[Any]
    num_bytes: int = 0  # of a piece
    piece: wire.Piece | None = None
    target: _Target | None = None


@dataclass(slots=True, eq=False)
class _Peer:
    """Guarded by the sender's lock."""

    heard_s: float
    streams: dict[int, _Stream] = field(default_factory=dict)
    outbox: deque[_Words] = field(default_factory=deque)
    num_bytes: int = 0


class KVSender:
    """The streams that this engine sends. Owns the socket. Lifetime: the engine's."""

    def __init__(
        self,
        endpoint: str,
        layout: BlockLayout,
        *,
        vocab_size: int,
        nixl: NixlWorker | None = None,
        context: zmq.Context[zmq.Socket[bytes]] | None = None,
        max_pending_bytes: int = MAX_PENDING_BYTES,
        silence_s: float = wire.SILENCE_S,
    ) -> None:
        """`vocab_size`: token ids of prompts are in [0, vocab_size). `nixl`: what writes where
        receivers offer that; the sender's from here on. Raises ProtocolError for an
        endpoint that cannot be bound."""
        self.epoch = secrets.token_hex(8)
        self.accepts = True
        self.backlog: Callable[[], Backlog] = Backlog  # called by the sender's thread
        self.num_refused = 0  # asks of another layout
        self.num_malformed = 0  # messages
        self.num_sent_bytes = 0
        self._vocab_size = vocab_size
        self._layout = layout
        self._digest = layout.digest.hex()
        self._places = places_of(layout)
        self._nixl = nixl
        self._max_pending = max_pending_bytes
        self._silence_s = silence_s
        self._listener = _listening(context or zmq.Context.instance(), endpoint)
        self._socket = self._listener.router
        self._socket.setsockopt(zmq.ROUTER_HANDOVER, 1)  # a peer may connect anew
        self._lock = threading.Lock()
        self._peers: dict[bytes, _Peer] = {}
        self._taken: deque[Asked | Cancelled] = deque()
        self._is_closing = False
        self._wake = Bell()  # of the sender's thread
        self._told = Bell()  # of the engine's
        self._thread = threading.Thread(target=self._run, name="stemma-kv-sender", daemon=True)
        self._thread.start()

    # --- the engine's side ------------------------------------------------------------------------

    def fileno(self) -> int:
        """Readable when `take` may return something."""
        return self._told.fileno()

    def take(self) -> list[Asked | Cancelled]:
        """What has been asked for, and cancelled, since the last call."""
        self._told.hush()
        taken = []
        with suppress(IndexError):
            while True:
                taken.append(self._taken.popleft())
        return taken

    def send_kv(self, key: StreamKey, piece: int, start: int, kv: npt.NDArray[np.uint8]) -> None:
        """Send a piece of the tokens from `start` on, [num_vectors, length, vector_bytes],
        contiguous; it is the sender's from here on."""

        def message(number: int) -> wire.OfStream:
            return wire.Piece(
                self.epoch, key.number, number, piece, start, kv.shape[1], time.time()
            )

        self._queue(key, message, kv)

    def prove(self, key: StreamKey, end: int) -> None:
        """What was sent of the tokens before `end` is right."""
        self._queue(key, lambda n: wire.Proved(self.epoch, key.number, n, end))

    def end(self, key: StreamKey, error: str | None) -> None:
        """No more comes of a stream; `error`: why it is not whole."""
        self._queue(key, lambda n: wire.Done(self.epoch, key.number, n, error))
        with self._lock:
            if (peer := self._peers.get(key.peer)) is not None:
                peer.streams.pop(key.number, None)

    def close(self) -> None:
        """End all streams: peers notice that their connections have ended."""
        self._is_closing = True
        self._wake.ring()
        self._thread.join()
        if self._nixl is not None:
            self._nixl.close()
        self._wake.close()
        self._told.close()

    def describe(self) -> dict[str, Any]:
        """State and counters as plain data."""
        with self._lock:
            return {
                "num_peers": len(self._peers),
                "num_streams": sum(len(peer.streams) for peer in self._peers.values()),
                "num_sent_bytes": self.num_sent_bytes,
                "num_refused": self.num_refused,
                "num_malformed": self.num_malformed,
            }

    def _queue(
        self,
        key: StreamKey,
        message: Callable[[int], wire.OfStream],
        kv: npt.NDArray[np.uint8] | None = None,
    ) -> None:
        num_bytes = 0 if kv is None else kv.nbytes
        with self._lock:
            peer = self._peers.get(key.peer)
            if peer is None or key.number not in peer.streams:
                return  # it was cancelled
            if peer.num_bytes + num_bytes > self._max_pending:
                log.warning("a peer takes no KV: its streams are ended")
                self._end_all(key.peer, peer, f"more than {self._max_pending} bytes waited for you")
            else:
                stream = peer.streams[key.number]
                said = message(stream.number)
                stream.number += 1
                piece = said if isinstance(said, wire.Piece) else None
                target = None if piece is None else stream.target
                peer.outbox.append(_Words(wire.frames_of(said, kv), num_bytes, piece, target))
                peer.num_bytes += num_bytes
        self._wake.ring()

    def _end_all(self, name: bytes, peer: _Peer, error: str) -> None:
        """A peer is to compute for itself what it has asked for. Called under the lock."""
        peer.outbox.clear()
        peer.num_bytes = 0
        for number, stream in peer.streams.items():
            done = wire.Done(self.epoch, number, stream.number, error)
            peer.outbox.append(_Words(wire.frames_of(done)))
            self._tell(Cancelled(StreamKey(name, number)))
        peer.streams.clear()

    def _forget(self, name: bytes) -> None:
        """A peer is gone, as far as its streams go. Called under the lock."""
        peer = self._peers.pop(name, None)
        for number in () if peer is None else peer.streams:
            self._tell(Cancelled(StreamKey(name, number)))

    def _tell(self, news: Asked | Cancelled) -> None:
        self._taken.append(news)
        self._told.ring()

    # --- the thread's side ------------------------------------------------------------------------

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        poller.register(self._wake, zmq.POLLIN)
        patience_ms = _IDLE_POLL_MS
        while not self._is_closing:
            ready = dict(poller.poll(patience_ms))
            if self._wake.fileno() in ready:
                self._wake.hush()
            if self._socket in ready:
                self._receive()
            patience_ms = _IDLE_POLL_MS if self._send() else _BUSY_POLL_MS
            self._look_for_silence()
        self._listener.close()

    def _receive(self) -> None:
        while True:
            try:
                name, *frames = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            try:
                message, data = wire.message_of(frames)
                self._take(name, message, data)
            except wire.MalformedMessage as error:
                self.num_malformed += 1
                level = logging.WARNING if self.num_malformed == 1 else logging.DEBUG
                log.log(level, "a peer is not understood: %s", error)

    def _take(self, name: bytes, message: wire.Message, data: memoryview) -> None:
        with self._lock:
            peer = self._peers.setdefault(name, _Peer(time.monotonic()))
            peer.heard_s = time.monotonic()
            if isinstance(message, wire.Ping):
                pong = wire.Pong(self.epoch, self._digest, self.accepts, *self.backlog())
                peer.outbox.appendleft(_Words(wire.frames_of(pong)))
            elif isinstance(message, wire.Cancel):
                if peer.streams.pop(message.stream, None) is not None:
                    self._tell(Cancelled(StreamKey(name, message.stream)))
            elif isinstance(message, wire.Ask):
                self._take_ask(peer, name, message, data)
            else:
                raise wire.MalformedMessage(f"{type(message).__name__} of a receiver")

    def _take_ask(self, peer: _Peer, name: bytes, ask: wire.Ask, data: memoryview) -> None:
        if not data.nbytes or data.nbytes % 4 or 4 * ask.start >= data.nbytes:
            raise wire.MalformedMessage(f"{data.nbytes} bytes of token ids from {ask.start} on")
        if ask.stream in peer.streams:
            raise wire.MalformedMessage(f"stream {ask.stream} is on its way")
        refusal = None
        if ask.layout != self._digest:
            refusal = "its KV has another layout: model, dtype, layers or heads differ"
        elif not self.accepts:
            refusal = "it computes no prompts for others now"
        elif not _are_within(data, self._vocab_size):
            refusal = f"token ids are not in [0, {self._vocab_size})"
        if refusal is not None:
            self.num_refused += 1
            done = wire.Done(self.epoch, ask.stream, 0, refusal)
            peer.outbox.append(_Words(wire.frames_of(done)))
            return
        num_blocks = -(-(data.nbytes // 4 - ask.start) // BLOCK_TOKENS)
        target = None if ask.offer is None else _Target(ask.offer, ask.start, num_blocks)
        peer.streams[ask.stream] = _Stream(target)
        token_ids = array("i")
        token_ids.frombytes(data)
        self._tell(Asked(StreamKey(name, ask.stream), ask.namespace, token_ids, ask.start))

    def _send(self) -> bool:
        """Hand over what peers take; False if one of them takes no more now."""
        is_empty = True
        with self._lock:
            names = [name for name, peer in self._peers.items() if peer.outbox]
        for name in names:
            while True:
                with self._lock:
                    peer = self._peers.get(name)
                    if peer is None or not peer.outbox:
                        break
                    words = peer.outbox.popleft()
                    peer.num_bytes -= words.num_bytes
                words = self._written(words)
                try:
                    self._socket.send_multipart([name, *words.frames], zmq.NOBLOCK, copy=False)
                    self.num_sent_bytes += words.num_bytes
                except zmq.Again:
                    with self._lock:
                        peer.outbox.appendleft(words)
                        peer.num_bytes += words.num_bytes
                    is_empty = False
                    break
                except zmq.ZMQError as error:  # its connection has ended
                    log.info("a peer has gone: %s", error)
                    with self._lock:
                        self._forget(name)
                    break
        return is_empty

    def _written(self, words: _Words) -> _Words:
        """What is left to say of a piece: without its bytes where they are at their place."""
        piece, target = words.piece, words.target
        if piece is None or target is None or target.is_given_up:
            return words
        head, fields, kv = words.frames
        try:
            if target.opened is None:
                target.opened = opened(target.offer, self._layout, target.num_blocks, self._nixl)
            place, token = self._places[piece.piece], piece.start - target.start
            if token >= 0 and target.opened.write(place, token, kv):
                return _Words([head, fields], words.num_bytes)
            raise ValueError("a write has failed")
        except (OSError, ValueError) as error:
            target.is_given_up, target.opened = True, None
            log.info("KV goes by ZeroMQ to a peer that offers memory: %s", error)
        return words

    def _look_for_silence(self) -> None:
        """Forget who is silent; a peer that was stopped for a while is told so, and does not wait
        for what nobody sends."""
        least_s = time.monotonic() - self._silence_s
        for name in [name for name, peer in self._peers.items() if peer.heard_s < least_s]:
            with self._lock:
                peer = self._peers.pop(name)
                self._end_all(name, peer, "you were silent")
            with suppress(zmq.ZMQError):
                for words in peer.outbox:
                    self._socket.send_multipart([name, *words.frames], zmq.NOBLOCK)


def _are_within(token_ids: memoryview, vocab_size: int) -> bool:
    """Whether these bytes of an int32 array are token ids."""
    ids = np.frombuffer(token_ids, np.int32)
    return bool(ids.min() >= 0 and ids.max() < vocab_size)


def _listening(context: zmq.Context[zmq.Socket[bytes]], endpoint: str) -> Listener:
    """Where an engine has been that is started anew, once that has gone. Raises ProtocolError."""
    until_s = time.monotonic() + _BIND_S
    while True:
        try:
            return Listener(context, [endpoint], None)
        except ProtocolError:
            if time.monotonic() > until_s:
                raise
            time.sleep(0.1)
