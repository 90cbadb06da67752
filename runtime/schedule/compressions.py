"""Requests whose compressed prefix is not there, and those that make one.

A prefix is made by a request of its own, in the same queue: it computes the text as any prompt,
whose exact KV is cached as usual, with its last tokens in one chunk, whose row also chooses what is
kept and copies it to pages of the prefix. Then those that wait for it are queued. What is evicted
before they run, or while they are preempted, is made again.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field
from itertools import count
from typing import Protocol

from .cache.kv_cache import KVCacheManager
from .compression import Compaction, CompressedPrefix
from .plan import RowResult
from .request import FinishReason, Request, Scoring
from .sampling_params import SamplingParams

_Name = tuple[Hashable, int]  # a namespace, and a prefix's id in it


class Queue(Protocol):
    """What the scheduler does for these."""

    def join(self, request: Request) -> None:
        """Count a request as open."""

    def enqueue(self, request: Request, *, is_first: bool) -> None:
        """Have a request wait for its turn, or for its own compressed prefix. `is_first`: before
        all that wait."""

    def finish(self, request: Request, reason: FinishReason) -> None:
        """End a request."""


@dataclass(slots=True)
class _Making:
    """Who makes a prefix, and for whom."""

    maker: Request
    waiting: list[Request] = field(default_factory=list)


class Compressions:
    """Owns the requests that wait for a compressed prefix. It hears of the ends of those that make
    them."""

    def __init__(self, kv_cache: KVCacheManager, queue: Queue) -> None:
        self._kv_cache = kv_cache
        self._queue = queue
        self._ids = count(-1, -1)
        self._making: dict[_Name, _Making] = {}
        self.num_made = 0

    @property
    def num_held(self) -> int:
        """Requests that wait."""
        return sum(len(making.waiting) for making in self._making.values())

    def describe(self) -> dict[str, int]:
        """Prefixes made so far, and requests that wait for one, as plain data."""
        return {"num_prefixes": self.num_made, "num_waiting": self.num_held}

    def must_wait(self, request: Request) -> bool:
        """Whether a request that is not queued lacks its compressed prefix; it is held then, and
        who makes that is queued, or held for the prefix with which it begins itself."""
        is_first, lacking = request.is_admitted, request
        while (prefix := lacking.compressed) and not self._kv_cache.has_compressed(lacking):
            making = self._making.get(_name(lacking, prefix))
            if making is not None:
                making.waiting.append(lacking)
                return True
            maker = _maker(lacking, prefix, self)
            maker.id = next(self._ids)
            maker.is_admitted = is_first  # one that has run already need not be let in again
            self._making[_name(lacking, prefix)] = _Making(maker, [lacking])
            self._queue.join(maker)
            lacking = maker
        if lacking is request:
            return False
        self._queue.enqueue(lacking, is_first=is_first)
        return True

    def forget(self, request: Request) -> None:
        """A request has ended: nobody may need what it waits for, nor what that is made of."""
        useless: list[Request] = []
        while (prefix := request.compressed) is not None:
            making = self._making.get(_name(request, prefix))
            if making is None or request not in making.waiting:
                break
            making.waiting.remove(request)
            if making.waiting:
                break
            del self._making[_name(request, prefix)]
            request = making.maker
            useless.append(request)
        for maker in useless:
            if not maker.is_finished:
                self._queue.finish(maker, FinishReason.ABORT)

    def on_token(self, request: Request, result: RowResult) -> FinishReason | None:
        raise AssertionError("nothing is sampled to compress a prefix")

    def on_finish(self, request: Request) -> None:
        """A prefix has been made, or never will be."""
        assert request.compaction is not None
        prefix = request.compaction.prefix
        making = self._making.pop(_name(request, prefix), None)
        if making is None:  # nobody waits any more
            return
        if request.finish_reason is FinishReason.STOP:
            self.num_made += 1
            num_computed = request.num_text_tokens - request.num_cached_tokens
            for each in making.waiting:
                if not each.is_admitted:
                    each.num_to_compress, num_computed = num_computed, 0
                self._kv_cache.forget_preempted(each)
                self._kv_cache.keep_preempted(each, prefix.ids)
                self._queue.enqueue(each, is_first=each.is_admitted)
            return
        failed = making.waiting
        for each in failed:  # and, as it grows, those who wait for what these were to make
            each.error = request.error or "its prefix could not be compressed"
            each.error_kind = request.error_kind
            if each.compaction is not None:
                lost = self._making.pop(_name(each, each.compaction.prefix))
                failed.extend(lost.waiting)
        for each in failed:
            self._queue.finish(each, FinishReason.ERROR)


def _name(request: Request, prefix: CompressedPrefix) -> _Name:
    """What a prefix is where that request has its KV."""
    return request.namespace, prefix.token_id


def _maker(request: Request, prefix: CompressedPrefix, listener: Compressions) -> Request:
    """The request that makes a prefix for another one; its id is to be given."""
    compaction = Compaction(prefix)
    return Request(
        id=0,
        prompt=prefix.source,
        sampling=SamplingParams(),
        listener=listener,
        namespace=request.namespace,
        adapter=request.adapter,
        client=request.client,
        priority=request.priority,
        program=request.program,
        scoring=Scoring(compaction.first_observed, ()),
        compressed=prefix.behind,
        compaction=compaction,
    )
