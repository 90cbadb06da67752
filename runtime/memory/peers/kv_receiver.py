"""The receiving side: KV of prompts that other engines compute, as it comes, layer by layer.

    engine's thread     best peer, ask, release: no I/O, no waiting
    receiver's thread   the sockets, one a peer; writes pieces into blocks

The bytes come in messages, or the sender writes them itself into the blocks that a stream was
given (written_memory.py), and says that it has.

What comes lies in memory of its own, in blocks as those of a store (block_key.py), and takes no
page of the pool: pages are given when all is there, by the plan that admits the request. So a
prefix on its way needs no place in the pool's accounts, and one that never comes leaves nothing
behind. NOTE: a stream's blocks are written by the thread until `is_done`, and never after.

Nothing here raises, and any doubt ends a stream: a message lost, a piece out of place, another
epoch than the one that was asked, a connection that ends, silence. What was proved before that
counts all the same.
"""

from __future__ import annotations

import logging
import math
import secrets
import threading
import time
from array import array
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Any

import numpy as np
import zmq
from zmq.utils.monitor import recv_monitor_message

from ..disk.block_file import Payload
from ..disk.block_key import BLOCK_TOKENS, BlockLayout
from . import wire
from .bell import Bell
from .piece_places import places_of, put_piece
from .written_memory import Offers, StreamMemory

__all__ = ["ComingPrefix", "KVReceiver", "Peer"]

log = logging.getLogger(__name__)

MAX_COMING_BYTES = 512 * 2**20  # of prefixes that come, or have come and are not yet released
MIN_PATIENCE_S = 10.0  # for the first word of a stream, and between two (guess)
PATIENCE = 4.0  # times what a prompt is expected to take
SPARE_S = 10.0  # that memory of a stream is kept for the next one (guess)
_POLL_MS = 100
_MEMORY = 32  # pieces that the mean cost of a byte remembers


@dataclass(slots=True, eq=False)
class ComingPrefix:
    """The KV of a prompt's tokens [start, end), on its way from a peer."""

    namespace: str
    token_ids: array[int]  # 'i', [end]
    start: int  # a multiple of BLOCK_TOKENS
    payloads: list[Payload]  # of the blocks from `start` on; the last one may be partly unused
    num_there: int  # leading tokens whose KV is there and proved; at first `start`
    patience_s: float  # without a word of it
    heard_s: float  # time.monotonic()
    epoch: str  # of the sender when it was asked
    memory: StreamMemory | None = None  # that the payloads lie in, while the sender may write there
    num_written: list[int] = field(default_factory=list)  # of each piece: leading tokens
    is_done: bool = False  # final: nothing more is written
    error: str | None = None
    num_messages: int = 0
    num_bytes: int = 0
    transfer_s: float = 0.0  # that its pieces were on their way, added up
    last_s: float = 0.0  # the same of the last one, behind which nothing was computed

    @property
    def end(self) -> int:
        """The number of tokens that were asked for."""
        return len(self.token_ids)


@dataclass(slots=True, eq=False)
class Peer:
    """An engine that may compute prompts for this one. The thread's, but for what is read."""

    endpoint: str
    pong: wire.Pong | None = None  # the last one; None while it is gone
    heard_s: float = 0.0
    is_strange: bool = False  # it has said what is no message
    way: str = ""  # that its last piece took
    streams: dict[int, ComingPrefix] = field(default_factory=dict)  # guarded by the lock

    def queue_s(self) -> float:
        """Until it would begin with another prompt, as far as is known."""
        if self.pong is None:
            return 0.0
        num_asked = sum(each.end - each.num_there for each in list(self.streams.values()))
        return max(self.pong.queue_s, num_asked * self.pong.prompt_token_s)


class KVReceiver:
    """The streams that come to this engine. Lifetime: the engine's."""

    def __init__(
        self,
        endpoints: Sequence[str],
        layout: BlockLayout,
        *,
        offers: Offers | None = None,
        context: zmq.Context[zmq.Socket[bytes]] | None = None,
        max_coming_bytes: int = MAX_COMING_BYTES,
        silence_s: float = wire.SILENCE_S,
        min_patience_s: float = MIN_PATIENCE_S,
    ) -> None:
        """`offers`: how senders may write into this engine's memory, its own from here on; None:
        they do not."""
        self.layout = layout
        self.num_ended = 0  # streams; changes before `fileno` is readable
        self.byte_s = 0.0  # seconds that a byte takes, measured; 0: not known yet
        self.num_streams = self.num_failed = self.num_late = self.num_bytes = 0
        self.num_written_bytes = 0  # of them, by senders themselves
        self.transfer_s = self.exposed_s = 0.0  # of it: the last layer's, which nothing hides
        self._digest = layout.digest.hex()
        self._max_blocks = max_coming_bytes // layout.block_bytes
        self._silence_s = silence_s
        self._min_patience_s = min_patience_s
        self._places = places_of(layout)
        self._offers = offers
        self._over: deque[StreamMemory] = deque()  # to be withdrawn
        self._released: deque[StreamMemory] = deque()  # then nobody reads it any more either
        self._spare: list[StreamMemory] = []  # in which nothing is written; guarded by the lock
        self._context = context or zmq.Context.instance()
        self._lock = threading.Lock()  # of streams, and of what is written into their blocks
        self._peers = [Peer(endpoint) for endpoint in endpoints]
        self._num_blocks = 0  # in use
        self._outbox: deque[tuple[Peer, wire.Ask | wire.Cancel, Any]] = deque()  # with its data
        self._numbers = count(1)
        self._is_closing = False
        self._bell = Bell()  # of the engine's thread
        self._wake = Bell()  # of the receiver's
        self._thread = threading.Thread(target=self._run, name="stemma-kv-receiver", daemon=True)
        self._thread.start()

    # --- the engine's side ------------------------------------------------------------------------

    def fileno(self) -> int:
        """Readable when a stream has ended; then call `collect`."""
        return self._bell.fileno()

    def collect(self) -> None:
        """Make `fileno` unreadable until another stream ends."""
        self._bell.hush()

    def best_peer(self) -> Peer | None:
        """The one that would begin first; None: nobody is there who could."""
        if not self._thread.is_alive():
            return None
        least_s = time.monotonic() - self._silence_s
        able = [p for p in self._peers if self._is_able(p.pong) and p.heard_s >= least_s]
        return min(able, key=Peer.queue_s, default=None)

    def ask(
        self, peer: Peer, namespace: str, token_ids: array[int], start: int, expected_s: float
    ) -> ComingPrefix | None:
        """Have a peer compute these tokens, and send their KV from `start` on, a multiple of
        BLOCK_TOKENS; None if there is no memory for them. `expected_s`: that this will take."""
        num_blocks = -(-(len(token_ids) - start) // BLOCK_TOKENS)
        pong = peer.pong
        if pong is None or self._num_blocks + num_blocks > self._max_blocks:
            return None
        block_bytes = self.layout.block_bytes
        memory = None
        if self._offers is None:
            blocks = [np.empty(block_bytes, np.uint8) for _ in range(num_blocks)]
        else:
            try:
                memory = self._stream_memory(num_blocks)
            except OSError as error:
                log.warning("a prompt is computed here: %s", error)
                return None
            blocks = memory.blocks[:num_blocks]
        self._num_blocks += num_blocks
        prefix = ComingPrefix(
            namespace,
            token_ids,
            start,
            blocks,
            start,
            max(self._min_patience_s, PATIENCE * expected_s),
            time.monotonic(),
            pong.epoch,
            memory,
            [start] * len(self._places),
        )
        number = next(self._numbers)
        with self._lock:
            self.num_streams += 1
            peer.streams[number] = prefix
        ask = wire.Ask(number, self._digest, namespace, start)
        self._outbox.append((peer, ask, token_ids.tobytes()))
        self._wake.ring()
        return prefix

    def release(self, prefix: ComingPrefix) -> None:
        """Its blocks are not needed; before it is done: cancel it. Called once."""
        self._num_blocks -= len(prefix.payloads)
        with self._lock:
            prefix.is_done = True
            prefix.payloads = []
            if prefix.memory is not None:
                self._released.append(prefix.memory)
                prefix.memory = None
            for peer in self._peers:
                for number in [n for n, each in peer.streams.items() if each is prefix]:
                    del peer.streams[number]
                    self._outbox.append((peer, wire.Cancel(number), None))
        self._wake.ring()

    def close(self) -> None:
        """Ask and take no more."""
        self._is_closing = True
        self._wake.ring()
        self._thread.join()
        self._end_offers()
        for memory in self._spare:
            memory.close()
        if self._offers is not None:
            self._offers.close()
        self._wake.close()
        self._bell.close()

    def describe(self) -> dict[str, Any]:
        """State and counters as plain data."""
        with self._lock:
            return {
                "num_peers": len(self._peers),
                "num_able_peers": sum(self._is_able(peer.pong) for peer in self._peers),
                "num_coming": sum(len(peer.streams) for peer in self._peers),
                "num_bytes_held": self._num_blocks * self.layout.block_bytes,
                "num_streams": self.num_streams,
                "num_failed": self.num_failed,
                "num_late_writes": self.num_late,
                "num_bytes": self.num_bytes,
                "num_written_bytes": self.num_written_bytes,
                "transfer_s": self.transfer_s,
                "exposed_s": self.exposed_s,
            }

    def _stream_memory(self, num_blocks: int) -> StreamMemory:
        """What an earlier stream has left, whose pages are there, or what the system gives. Raises
        OSError."""
        with self._lock:
            fitting = [each for each in self._spare if len(each.blocks) >= num_blocks]
            if fitting:
                memory = min(fitting, key=lambda each: len(each.blocks))
                self._spare.remove(memory)
                return memory
        return StreamMemory(num_blocks, self.layout.block_bytes)

    def _is_able(self, pong: wire.Pong | None) -> bool:
        return pong is not None and pong.accepts and pong.layout == self._digest

    # --- the thread's side ------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._serve()
        except Exception:  # a bug: nobody may wait for what this thread would have brought
            log.exception("no more prompts are computed by other engines")
        with self._lock:
            for peer in self._peers:
                self._lose(peer, "this engine takes no more")
        self._end_offers()

    def _serve(self) -> None:
        sockets = {self._connect(peer): peer for peer in self._peers}
        poller = zmq.Poller()
        poller.register(self._wake, zmq.POLLIN)
        monitors = {each.get_monitor_socket(zmq.EVENT_DISCONNECTED): each for each in sockets}
        for socket in (*sockets, *monitors):
            poller.register(socket, zmq.POLLIN)
        of_peer = {peer: socket for socket, peer in sockets.items()}
        ping = wire.frames_of(wire.Ping(self._digest))
        pinged_s = 0.0
        while not self._is_closing:
            ready = dict(poller.poll(_POLL_MS))
            if self._wake.fileno() in ready:
                self._wake.hush()
            for socket in sockets:
                if socket in ready:
                    self._receive(socket, sockets[socket])
            for monitor, socket in monitors.items():
                if monitor in ready:
                    recv_monitor_message(monitor)
                    with self._lock:
                        self._lose(sockets[socket], "its connection has ended")
            self._end_offers()
            while self._outbox:
                peer, message, data = self._outbox.popleft()
                if isinstance(message, wire.Ask):
                    message = self._with_offer(peer, message)
                if not _sent(of_peer[peer], wire.frames_of(message, data)):
                    with self._lock:
                        self._end(peer, message.stream, "there is no connection to it")
            now_s = time.monotonic()
            if now_s - pinged_s >= wire.PING_S:
                pinged_s = now_s
                for socket in sockets:
                    _sent(socket, ping)
            self._look_for_silence(now_s)
            self._give_back(now_s)
        for socket in sockets:
            socket.disable_monitor()
            socket.close(0)

    def _connect(self, peer: Peer) -> zmq.Socket[bytes]:
        socket = self._context.socket(zmq.DEALER)
        socket.setsockopt(zmq.ROUTING_ID, b"kv-" + secrets.token_hex(8).encode())
        socket.setsockopt(zmq.IMMEDIATE, 1)  # nothing waits for a peer that is not there
        socket.setsockopt(zmq.RECONNECT_IVL_MAX, 1000)
        socket.setsockopt(zmq.LINGER, 0)
        socket.connect(peer.endpoint)
        return socket

    def _with_offer(self, peer: Peer, ask: wire.Ask) -> wire.Ask:
        """The same, with the memory that its stream has."""
        prefix = peer.streams.get(ask.stream)
        memory = None if prefix is None else prefix.memory
        if memory is None or self._offers is None:
            return ask
        memory.offer = self._offers.offer(memory)
        return replace(ask, offer=memory.offer)

    def _end_offers(self) -> None:
        """Of streams that have ended."""
        while self._over:
            self._end_offer(self._over.popleft())
        while self._released:
            memory = self._released.popleft()
            self._end_offer(memory)
            with self._lock:
                num_spare = sum(len(each.blocks) for each in (memory, *self._spare))
                is_spare = memory.is_over and num_spare <= self._max_blocks
                if is_spare:
                    memory.is_over, memory.spare_s = False, time.monotonic()
                    self._spare.append(memory)
            if not is_spare:
                memory.close()

    def _give_back(self, now_s: float) -> None:
        """Memory that no stream has needed for a while."""
        with self._lock:
            unused = [each for each in self._spare if now_s - each.spare_s > SPARE_S]
            self._spare = [each for each in self._spare if each not in unused]
        for memory in unused:
            memory.close()

    def _end_offer(self, memory: StreamMemory) -> None:
        if memory.offer is not None and self._offers is not None:
            self._offers.withdraw(memory.offer)
        memory.offer = None

    def _receive(self, socket: zmq.Socket[bytes], peer: Peer) -> None:
        while True:
            try:
                frames = socket.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                return
            try:
                message, data = wire.message_of([frame.buffer for frame in frames])
                with self._lock:
                    self._take(peer, message, data)
            except wire.MalformedMessage as error:
                level = logging.DEBUG if peer.is_strange else logging.WARNING
                log.log(level, "%s is not understood: %s", peer.endpoint, error)
                peer.is_strange = True

    def _take(self, peer: Peer, message: wire.Message, data: memoryview) -> None:
        peer.heard_s = time.monotonic()
        if isinstance(message, wire.Pong):
            self._take_pong(peer, message)
        elif isinstance(message, wire.OfStream):
            prefix = peer.streams.get(message.stream)
            if prefix is None or prefix.is_done or prefix.epoch != message.epoch:
                self.num_late += 1
            elif prefix.num_messages != message.number:
                self._end(peer, message.stream, "a part of it was lost")
            else:
                prefix.num_messages += 1
                prefix.heard_s = peer.heard_s
                self._follow(peer, prefix, message, data)
        else:
            raise wire.MalformedMessage(f"{type(message).__name__} of a sender")

    def _follow(
        self, peer: Peer, prefix: ComingPrefix, message: wire.OfStream, data: memoryview
    ) -> None:
        if isinstance(message, wire.Piece):
            if not self._write(peer, prefix, message, data):
                self._end(peer, message.stream, "a piece has no place in it")
        elif isinstance(message, wire.Proved):
            if not prefix.num_there <= message.end <= min(prefix.num_written):
                self._end(peer, message.stream, "not all that it proves has come")
                return
            prefix.num_there = message.end
            if message.end == prefix.end:
                self.exposed_s += prefix.last_s
                self.transfer_s += prefix.transfer_s
        else:
            if prefix.memory is not None:
                prefix.memory.is_over = True
            is_whole = message.error is None and prefix.num_there == prefix.end
            self._end(peer, message.stream, None if is_whole else message.error or "it is short")

    def _take_pong(self, peer: Peer, pong: wire.Pong) -> None:
        if pong.layout != self._digest and (peer.pong is None or peer.pong.layout != pong.layout):
            log.warning(
                "%s computes no prompts for this engine: its KV has another layout (model, dtype, "
                "layers or heads differ)", peer.endpoint,
            )  # fmt: skip
        peer.pong = pong
        for number in [n for n, each in peer.streams.items() if each.epoch != pong.epoch]:
            self._end(peer, number, "it was started anew")

    def _write(self, peer: Peer, prefix: ComingPrefix, piece: wire.Piece, data: memoryview) -> bool:
        """Put a piece into its blocks; False if it does not go on where that piece has ended, or at
        what was proved, as after a step that has failed."""
        if piece.piece >= len(self._places) or not piece.length:
            return False
        place = self._places[piece.piece]
        end = piece.start + piece.length
        if not prefix.num_there <= piece.start <= prefix.num_written[piece.piece]:
            return False
        if end > prefix.end:
            return False
        shape = (place.num_vectors, piece.length, place.vector_bytes)
        num_bytes = math.prod(shape)
        is_written = not data.nbytes and prefix.memory is not None and prefix.memory.offer
        if is_written:
            self.num_written_bytes += num_bytes
        elif data.nbytes == num_bytes:
            kv = np.frombuffer(data, np.uint8).reshape(shape)
            put_piece(prefix.payloads, place, piece.start - prefix.start, kv)
        else:
            return False
        prefix.num_written[piece.piece] = end
        self._note_way(peer, prefix, bool(is_written))
        self._note_time(prefix, piece, num_bytes)
        return True

    def _note_way(self, peer: Peer, prefix: ComingPrefix, is_written: bool) -> None:
        """Once for each that a peer takes."""
        way, why = "zmq", "no memory is offered to it"
        if is_written and self._offers is not None:
            way, why = self._offers.kind, "it can write there"
        elif prefix.memory is not None:
            why = "it cannot write into memory of this engine"
        if way != peer.way:
            peer.way = way
            log.info("KV from %s comes by %s: %s", peer.endpoint, way, why)

    def _note_time(self, prefix: ComingPrefix, piece: wire.Piece, num_bytes: int) -> None:
        """NOTE: by the clocks of two machines, where there are two: it is a cost, and no proof."""
        took_s = max(0.0, time.time() - piece.sent_s)
        prefix.transfer_s += took_s
        prefix.last_s = took_s
        prefix.num_bytes += num_bytes
        self.num_bytes += num_bytes
        byte_s = took_s / num_bytes
        self.byte_s += (byte_s - self.byte_s) / (_MEMORY if self.byte_s else 1)

    def _end(self, peer: Peer, number: int, error: str | None) -> None:
        """Nothing more comes of a stream. Called under the lock."""
        prefix = peer.streams.pop(number, None)
        if prefix is None:
            return
        if error is not None:
            log.info("a prompt that %s was to compute is computed here: %s", peer.endpoint, error)
            self.num_failed += 1
            self._outbox.append((peer, wire.Cancel(number), None))
        prefix.error = error
        prefix.is_done = True
        if prefix.memory is not None:
            self._over.append(prefix.memory)
        self.num_ended += 1
        self._bell.ring()

    def _lose(self, peer: Peer, why: str) -> None:
        """A peer is gone, until it answers a ping. Called under the lock."""
        peer.pong = None
        for number in list(peer.streams):
            self._end(peer, number, why)

    def _look_for_silence(self, now_s: float) -> None:
        with self._lock:
            for peer in self._peers:
                if peer.pong is not None and now_s - peer.heard_s > self._silence_s:
                    self._lose(peer, "it is silent")
                waiting = list(peer.streams.items())
                for number in [n for n, p in waiting if now_s - p.heard_s > p.patience_s]:
                    self._end(peer, number, "nothing has come of it for too long")


def _sent(socket: zmq.Socket[bytes], frames: list[Any]) -> bool:
    """False where nobody is connected, or takes no more."""
    try:
        socket.send_multipart(frames, zmq.NOBLOCK)
    except zmq.ZMQError:
        return False
    return True
