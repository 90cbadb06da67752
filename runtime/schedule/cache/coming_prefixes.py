"""Prompts that other engines compute for this one, as the scheduler uses them.

    arrival      if that pays, an engine whose role it is is asked for what the pool lacks of the
                 prompt; the request is held back meanwhile, and holds no page
    admission    what has come is copied into its pages by the plan that admits it; the rest, the
                 last token at least, is computed here

It pays if fewer seconds are waited, by all together: here the prompt waits for those before it, and
while it is computed all who run wait with it; there it waits for that engine's queue, and then for
its way. Its own time is the same on both sides, and counts here alone, where it takes the place of
other work. All is measured. Requests that begin alike wait
for one stream. A stream that ends early, for whatever reason, has no other effect than that the
request computes the rest itself.

NOTE: a request is admitted when all layers are in, not the first. While a step waits for a layer,
nobody decodes; and of a prompt's transfer only the last layer comes after it was computed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from ...memory.copies import BlockRestore
from ...memory.disk.block_key import BLOCK_TOKENS
from ..request import Request

if TYPE_CHECKING:  # it needs ZeroMQ, which plans and benchmarks do without
    from ...memory.peers.kv_receiver import ComingPrefix, KVReceiver, Peer

MIN_ASKED_TOKENS = 128  # fewer are computed: the way there and back costs a step's delay (guess)


class Here(NamedTuple):
    """What it costs to compute a prompt on this engine, when a request arrives."""

    prompt_token_s: float | None = None  # None: nothing was measured
    num_ahead_tokens: int = 0  # of prompts that wait, those that come from elsewhere among them
    num_running: int = 0  # requests that would wait meanwhile

    def waited_s(self, num_tokens: int, num_coming_tokens: int, token_s: float) -> float:
        """Seconds that it and others wait for its tokens; `token_s`: where nothing was measured."""
        token_s = self.prompt_token_s or token_s
        num_ahead = max(0, self.num_ahead_tokens - num_coming_tokens)
        return token_s * (num_ahead + num_tokens * (1 + self.num_running))


@dataclass(slots=True, eq=False)
class _Stream:
    """A prefix on its way, and the number of requests that wait for it or may read it."""

    prefix: ComingPrefix
    num_users: int = 0


class ComingPrefixes:
    """Owns which request waits for which stream, and nothing of the pool."""

    def __init__(self, receiver: KVReceiver, page_size: int) -> None:
        """`page_size`: a divisor of BLOCK_TOKENS."""
        assert BLOCK_TOKENS % page_size == 0, "blocks are whole pages"
        self.receiver = receiver
        self.is_on = True  # False: it computes all its prompts itself
        self.num_restored_tokens = 0
        self._page_size = page_size
        self._streams: dict[Request, tuple[_Stream, int]] = {}  # with the tokens in common
        self._held: dict[Request, None] = {}  # in order of arrival
        self._num_ended_seen = 0  # streams, when no held request was ready

    @property
    def num_held(self) -> int:
        """Requests that wait for a stream."""
        return len(self._held)

    @property
    def has_ready(self) -> bool:
        """Whether `take_ready` would return any. Called between all steps."""
        num_ended = self.receiver.num_ended
        if not self._held or num_ended == self._num_ended_seen:
            return False
        if any(self._is_ready(request) for request in self._held):
            return True
        self._num_ended_seen = num_ended
        return False

    def look_up(self, request: Request, num_cached_tokens: int, here: Here) -> bool:
        """Have another engine compute the request's tokens beyond the cached ones, if that pays;
        whether the request must wait until `take_ready` returns it."""
        limit = request.match_limit
        if limit - num_cached_tokens < MIN_ASKED_TOKENS or not self.is_on or not _can_go(request):
            return False
        stream = self._like(request, num_cached_tokens)
        stream = stream or self._asked(request, num_cached_tokens, here)
        if stream is None:
            return False
        stream.num_users += 1
        common = _num_common(request.token_ids[:limit], stream.prefix.token_ids)
        self._streams[request] = stream, common
        self._held[request] = None
        return True

    def take_ready(self) -> list[Request]:
        """Requests that no longer wait, in order of arrival."""
        ready = [request for request in self._held if self._is_ready(request)]
        for request in ready:
            del self._held[request]
        return ready

    def forget(self, request: Request) -> None:
        """Drop the stream, if any, of a request that was restored or has ended."""
        self._held.pop(request, None)
        stream, _ = self._streams.pop(request, (None, 0))
        if stream is not None:
            stream.num_users -= 1
            if not stream.num_users:
                self.receiver.release(stream.prefix)

    def restorable_end(self, request: Request, num_cached_tokens: int) -> int:
        """How many leading tokens the request has from the pool and what has come together, in
        whole pages."""
        stream, num_common = self._streams.get(request, (None, 0))
        if stream is None or num_cached_tokens < stream.prefix.start:
            return num_cached_tokens
        end = min(stream.prefix.num_there, num_common, request.match_limit)
        return max(num_cached_tokens, end - end % self._page_size)

    def restore(self, request: Request, start: int, end: int) -> list[BlockRestore]:
        """The copies that put the tokens [start, end) into the request's pages; `end` is at most
        `restorable_end`. This ends the request's use of its stream."""
        prefix = self._streams[request][0].prefix
        restores = []
        for index in range(start // BLOCK_TOKENS, -(-end // BLOCK_TOKENS)):
            payload = prefix.payloads[index - prefix.start // BLOCK_TOKENS]
            first = max(start, index * BLOCK_TOKENS)
            last = min(end, (index + 1) * BLOCK_TOKENS)
            pages = request.pages[first // self._page_size : last // self._page_size]
            restores.append(BlockRestore(payload, first % BLOCK_TOKENS, pages))
        self.num_restored_tokens += end - start
        self.forget(request)
        return restores

    def describe(self) -> dict[str, Any]:
        """State and counters as plain data."""
        return {
            **self.receiver.describe(),
            "num_held_requests": len(self._held),
            "num_restored_tokens": self.num_restored_tokens,
        }

    def _is_ready(self, request: Request) -> bool:
        return self._streams[request][0].prefix.is_done

    def _like(self, request: Request, num_cached_tokens: int) -> _Stream | None:
        """A stream that brings enough of the request's tokens."""
        wanted = request.token_ids[: request.match_limit]
        best, most = None, num_cached_tokens + MIN_ASKED_TOKENS - 1
        for stream in {id(stream): stream for stream, _ in self._streams.values()}.values():
            prefix = stream.prefix
            if prefix.is_done or prefix.namespace != request.namespace:
                continue
            if prefix.start <= num_cached_tokens and prefix.end > most:
                num_common = _num_common(wanted, prefix.token_ids)
                if num_common > most:
                    best, most = stream, num_common
        return best

    def _asked(self, request: Request, num_cached_tokens: int, here: Here) -> _Stream | None:
        """A new stream, if a peer is there and that pays."""
        peer = self.receiver.best_peer()
        if peer is None or peer.pong is None:
            return None
        num_tokens = request.match_limit - num_cached_tokens
        num_coming = sum(each.num_prompt_tokens for each in self._held)
        here_s = here.waited_s(num_tokens, num_coming, peer.pong.prompt_token_s)
        there_s = self._delay_s(peer, num_tokens)
        if here_s and here_s <= there_s:
            return None
        start = num_cached_tokens - num_cached_tokens % BLOCK_TOKENS
        token_ids = request.token_ids[: request.match_limit]
        assert isinstance(request.namespace, str)
        expected_s = there_s + num_tokens * peer.pong.prompt_token_s
        prefix = self.receiver.ask(peer, request.namespace, token_ids, start, expected_s)
        return None if prefix is None else _Stream(prefix)

    def _delay_s(self, peer: Peer, num_tokens: int) -> float:
        """Until the tokens would be here, beside the time of computing them."""
        num_bytes = num_tokens * self.receiver.layout.kv.bytes_per_token
        return peer.queue_s() + num_bytes * self.receiver.byte_s


def _can_go(request: Request) -> bool:
    """Whether its prompt means the same on another engine: token ids of one vocabulary, under the
    model's own weights."""
    is_plain = request.adapter is None and not request.images and request.stream is None
    return is_plain and request.encoding is None and isinstance(request.namespace, str)


def _num_common(one: Sequence[int], other: Sequence[int]) -> int:
    """How many leading token ids two arrays of type 'i' share."""
    length = min(len(one), len(other))
    first = np.frombuffer(one, np.int32)[:length]  # type: ignore[call-overload]
    differs = first != np.frombuffer(other, np.int32)[:length]  # type: ignore[call-overload]
    return int(differs.argmax()) if differs.any() else length
