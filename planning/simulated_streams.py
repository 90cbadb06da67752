"""Engines of a simulated fleet that compute prompts for the others, and the links between them.

When it pays to ask, whom, and who waits meanwhile is decided by what decides it in an engine
(schedule/cache/coming_prefixes.py, gateway/prefills.py); only the wire is modelled. A step's layers
take equal parts of it, and each layer's KV leaves when it is computed, in turn over the sender's
link. Left out: the host's copies, and the limit on the memory for what comes.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import count
from math import inf
from typing import Any, cast

import numpy as np

from ..runtime.gateway.prefills import Prefills
from ..runtime.memory.disk.block_key import BLOCK_TOKENS, BlockLayout
from ..runtime.memory.peers.kv_receiver import ComingPrefix, KVReceiver, Peer
from ..runtime.memory.peers.kv_sender import Asked, Backlog, KVSender
from ..runtime.memory.peers.wire import PING_S, Pong, StreamKey
from ..runtime.schedule.cache.coming_prefixes import ComingPrefixes
from ..runtime.schedule.plan import StreamedKV
from .devices import Link
from .fleet_simulation import FleetSimulation

_NO_PAYLOAD = np.empty(0, np.uint8)


@dataclass(frozen=True, slots=True)
class Apart:
    """Prefill and decode apart: how many engines compute prompts, and what they send."""

    num_prefill: int
    link: Link
    layout: BlockLayout


class SimulatedStreams:
    """The wire of a fleet. Lifetime: the fleet's."""

    def __init__(self, apart: Apart, num_replicas: int) -> None:
        self.apart = apart
        self.num_prefill = apart.num_prefill
        self._num_replicas = num_replicas
        self.senders: dict[int, _Sender] = {}
        self.receivers: dict[int, _Receiver] = {}

    def join(self, fleet: FleetSimulation) -> None:
        """See Streams, as of all below."""
        first = self._num_replicas - self.num_prefill
        self.senders |= {n: _Sender(fleet, n, self) for n in range(first, self._num_replicas)}
        self.receivers |= {n: _Receiver(fleet, n, self) for n in range(first)}

    def coming(self, number: int) -> ComingPrefixes | None:
        receiver = self.receivers.get(number)
        return None if receiver is None else ComingPrefixes(cast(KVReceiver, receiver), 1)

    def send(self, number: int, streams: Sequence[StreamedKV], duration_s: float) -> None:
        self.senders[number].send(streams, duration_s)

    @property
    def num_asked(self) -> int:
        """Prompts that were computed for others."""
        return sum(receiver.num_asked for receiver in self.receivers.values())

    @property
    def hidden_share(self) -> float:
        """Of the seconds of sending, those in which more of the prompt was computed."""
        sent_s = sum(sender.sent_s for sender in self.senders.values())
        return 1.0 - sum(s.exposed_s for s in self.senders.values()) / sent_s if sent_s else 1.0


class _Sender:
    """Of a replica that computes prompts; a KVSender to `Prefills`."""

    def __init__(self, fleet: FleetSimulation, number: int, streams: SimulatedStreams) -> None:
        self.backlog: Any = Backlog
        self.sent_s = self.exposed_s = 0.0
        self._fleet = fleet
        self._number = number
        self._receivers = streams.receivers
        self._apart = streams.apart
        self._asked: list[Asked] = []
        self._free_s = 0.0  # when the link is free
        self._there_s: dict[StreamKey, float] = {}  # when all that was sent will have come
        self._prefills: Prefills | None = None  # its replica is made after this

    @property
    def prefills(self) -> Prefills:
        if self._prefills is None:
            engine = self._fleet.replicas[self._number].engine
            self._prefills = Prefills(engine, cast(KVSender, self))
        return self._prefills

    def ask(self, asked: Asked) -> None:
        """A prompt was asked for."""
        self._asked.append(asked)
        self.prefills.collect()
        self._fleet.replicas[self._number].begin_step()

    def send(self, streams: Sequence[StreamedKV], duration_s: float) -> None:
        """See SimulatedStreams."""
        kv, link = self._apart.layout.kv, self._apart.link
        layer_bytes = kv.bytes_per_token / kv.num_layers
        for layer in range(1, kv.num_layers + 1):
            computed_s = self._fleet.now_s + duration_s * layer / kv.num_layers
            for stream in streams:
                way_s = (stream.end - stream.start) * layer_bytes / link.bytes_s
                self._free_s = max(self._free_s, computed_s) + way_s
                self._there_s[stream.key] = self._free_s + link.delay_s
                self.sent_s += way_s
        ended_s = self._fleet.now_s + duration_s
        self.exposed_s += sum(self._there_s[each.key] - link.delay_s - ended_s for each in streams)

    # --- what Prefills calls ----------------------------------------------------------------------

    def take(self) -> list[Asked]:
        """What was asked for since the last call."""
        asked, self._asked = self._asked, []
        return asked

    def prove(self, key: StreamKey, end: int) -> None:
        """What was sent of the tokens before `end` is right."""
        self._say(key, partial(_Receiver.prove, number=key.number, end=end))

    def end(self, key: StreamKey, error: str | None) -> None:
        """No more comes of a stream."""
        assert error is None, error
        self._say(key, partial(_Receiver.end, number=key.number))
        self._there_s.pop(key, None)

    def _say(self, key: StreamKey, what: Any) -> None:
        receiver = self._receivers[int(key.peer)]
        at_s = max(self._fleet.now_s + self._apart.link.delay_s, self._there_s.get(key, 0.0))
        self._fleet.at(at_s, partial(what, receiver))


class _Receiver:
    """Of a replica that decodes; a KVReceiver to `ComingPrefixes`."""

    def __init__(self, fleet: FleetSimulation, number: int, streams: SimulatedStreams) -> None:
        self.layout = streams.apart.layout
        self.byte_s = 1.0 / streams.apart.link.bytes_s
        self.num_ended = 0
        self.num_asked = 0
        self._fleet = fleet
        self._number = number
        self._delay_s = streams.apart.link.delay_s
        self._senders = streams.senders
        self._peers = {n: Peer(str(n), heard_s=-inf) for n in streams.senders}
        self._streams: dict[int, ComingPrefix] = {}
        self._numbers = count(1)

    def best_peer(self) -> Peer:
        """The one that would begin first, as far as its last answer to a ping says."""
        for number, peer in self._peers.items():
            if self._fleet.now_s - peer.heard_s >= PING_S:
                peer.heard_s = self._fleet.now_s
                peer.pong = Pong("", "", True, *self._senders[number].backlog())
        return min(self._peers.values(), key=Peer.queue_s)

    def ask(
        self, peer: Peer, namespace: str, token_ids: array[int], start: int, expected_s: float
    ) -> ComingPrefix:
        """Have a peer compute these tokens."""
        num_blocks = -(-(len(token_ids) - start) // BLOCK_TOKENS)
        payloads = [_NO_PAYLOAD] * num_blocks
        prefix = ComingPrefix(namespace, token_ids, start, payloads, start, expected_s, 0.0, "")
        number = next(self._numbers)
        self._streams[number] = peer.streams[number] = prefix
        self.num_asked += 1
        key = StreamKey(str(self._number).encode(), number)
        asked = Asked(key, namespace, token_ids, start)
        sender = self._senders[int(peer.endpoint)]
        self._fleet.at(self._fleet.now_s + self._delay_s, partial(sender.ask, asked))
        return prefix

    def release(self, prefix: ComingPrefix) -> None:
        """Nobody waits for it: here only once it is done."""
        assert prefix.is_done, "no call is aborted"

    def prove(self, number: int, end: int) -> None:
        """So many tokens are there."""
        self._streams[number].num_there = end

    def end(self, number: int) -> None:
        """All of it is there."""
        self._streams.pop(number).is_done = True
        for peer in self._peers.values():
            peer.streams.pop(number, None)
        self.num_ended += 1
        self._fleet.replicas[self._number].begin_step()
