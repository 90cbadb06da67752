"""Prompts that other engines have asked for (memory/peers/), as requests of this engine.

A request of these samples nothing: its KV is sent as its steps compute it, and stays cached here
like any other's.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from ...errors import StemmaError
from ..engine import Engine
from ..memory.peers.kv_sender import Asked, Backlog, KVSender
from ..memory.peers.wire import StreamKey
from ..schedule.plan import RowResult
from ..schedule.request import FinishReason, HiddenSum, KVStream, Request
from ..schedule.sampling_params import SamplingParams


class Prefills:
    """The requests for other engines, by stream. Belongs to the engine's thread."""

    def __init__(self, engine: Engine, sender: KVSender) -> None:
        self._engine = engine
        self._sender = sender
        self._requests: dict[StreamKey, Request] = {}
        self.num_tokens = 0  # that were computed or cached for others
        sender.backlog = self._backlog

    def fileno(self) -> int:
        """Readable when `collect` has something to do."""
        return self._sender.fileno()

    def collect(self) -> None:
        """Begin what has been asked for, end what has been cancelled."""
        for news in self._sender.take():
            if isinstance(news, Asked):
                self._begin(news)
            elif (request := self._requests.get(news.key)) is not None:
                self._engine.abort(request)

    def close(self) -> None:
        """Send no more."""
        self._sender.close()

    def describe(self) -> dict[str, Any]:
        """State and counters as plain data."""
        return {
            **self._sender.describe(),
            "num_requests": len(self._requests),
            "num_tokens": self.num_tokens,
        }

    def _begin(self, asked: Asked) -> None:
        key = asked.key
        request = Request(
            self._engine.next_request_id(),
            asked.token_ids,
            SamplingParams(temperature=0.0),
            _Listener(self),
            namespace=asked.namespace,
            hidden=HiddenSum(is_mean=False),
            stream=KVStream(key, asked.start, partial(self._sender.prove, key)),
        )
        self._requests[key] = request
        try:
            self._engine.submit(request)
        except StemmaError as error:  # too long for this engine: the other one may be larger
            del self._requests[key]
            self._sender.end(key, str(error))

    def end(self, request: Request) -> None:
        """A request of these has ended."""
        assert request.stream is not None
        key = request.stream.key
        self._requests.pop(key, None)
        is_whole = request.finish_reason is FinishReason.STOP
        self.num_tokens += request.num_prompt_tokens if is_whole else 0
        self._sender.end(key, None if is_whole else request.error or "it was cancelled")

    def _backlog(self) -> Backlog:
        """Called by the sender's thread: it reads what the engine's may change meanwhile."""
        token_s = self._engine.scheduler.costs.prompt_token_s or 0.0
        missing = [r.num_prompt_tokens - r.num_computed_tokens for r in [*self._requests.values()]]
        return Backlog(sum(missing) * token_s, token_s)


class _Listener:
    """Of each request here."""

    def __init__(self, prefills: Prefills) -> None:
        self._prefills = prefills

    def on_token(self, request: Request, result: RowResult) -> FinishReason | None:
        raise AssertionError("nothing is sampled for another engine")

    def on_finish(self, request: Request) -> None:
        self._prefills.end(request)
