"""A running task: its programs on the engine, and their output that was not taken yet.

Lives on one asyncio loop. Events come from the connection's I/O thread through an event queue.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from starlette.types import Receive

from ...errors import EngineError
from ...frontend.cascade.cascade import Cascade
from ...frontend.client.client import Connection
from ...frontend.protocol import wire
from ..protocol.caller import Caller
from ..protocol.disconnect import disconnected
from ..protocol.pieces import GRAMMAR_KINDS, GenerationFailed, Outcome, Piece, Used
from ..protocol.task import Task
from .cascade_completion import CascadeCompletion, require_plain
from .completion import Completion
from .event_queue import EventQueue


class Generation:
    """The programs of a task. Ends with all outcomes, with a failure, or closed: exactly one.

    Only one coroutine at a time awaits `wait`. Lifetime: until `close`, which cancels what has not
    ended.
    """

    def __init__(
        self,
        events: EventQueue,
        task: Task,
        caller: Caller,
        reply_id: str,
        on_outcome: Callable[[Outcome], None],
        on_used: Callable[[Used], None],
    ) -> None:
        """`on_used`: called for each program at its end, also after `close`."""
        self.task = task
        self.caller = caller
        self.reply_id = reply_id
        self.outcomes: dict[int, Outcome] = {}
        self.failure: GenerationFailed | None = None
        self.is_closed = False
        self.num_waiting_bytes = 0  # estimate of what `take` would return
        self._events = events
        self._on_outcome = on_outcome
        self._on_used = on_used
        self._fresh: list[Piece | Outcome] = []
        self._waiter: asyncio.Future[None] | None = None
        self._completions: list[Completion | CascadeCompletion] = []
        self._watcher: asyncio.Task[None] | None = None

    @property
    def is_over(self) -> bool:
        """Whether nothing more comes."""
        return (
            self.is_closed
            or self.failure is not None
            or len(self.outcomes) == self.task.num_samples
        )

    def watch(self, receive: Receive) -> None:
        """Close it when the client goes away. The request's body has been read."""
        self._watcher = self._events.loop.create_task(self._await_disconnect(receive))

    async def _await_disconnect(self, receive: Receive) -> None:
        await disconnected(receive)
        self.close()

    async def start(self, connection: Connection, cascade: Cascade | None = None) -> None:
        """Send the programs; with `cascade` to its models, one after the other. On EngineError and
        InvalidRequest it has cancelled them."""
        try:
            if cascade is not None:
                self._start_cascade(cascade)
            elif connection.has_credit and not self.task.is_large:
                self._start(connection)
            else:  # it takes its time, or waits for the engine: others must not
                await asyncio.to_thread(self._start, connection)
        except BaseException:
            self.close()
            raise

    def _start(self, connection: Connection) -> None:
        seed = secrets.randbits(62)
        for number, op_key in enumerate(self.task.op_keys):
            completion = Completion(
                connection,
                self.task,
                self.caller,
                number=number,
                post=self._post,
                seed=seed,
                op_key=op_key,
                response_id=None if number else self.reply_id,
            )
            self._completions.append(completion)
            completion.send()
        if self.is_closed:  # while another thread was sending
            self._cancel()

    def _start_cascade(self, cascade: Cascade) -> None:
        require_plain(self.task.n, self.task.hints, self.task.prompts)
        seed, loop = secrets.randbits(62), self._events.loop
        for number in range(len(self.task.prompts)):
            completion = CascadeCompletion(
                cascade, loop, self.task, self.caller, number=number, post=self._post, seed=seed
            )
            self._completions.append(completion)
            completion.send()

    def abort(self) -> None:
        """End all samples now with their output so far, finish reason "abort"."""
        for completion in self._completions:
            completion.end_now()

    def close(self) -> None:
        """The output is no longer wanted: cancel what has not ended."""
        if not self.is_closed:
            self.is_closed = True
            self._cancel()
            self.wake()
            if self._watcher is not None:
                self._watcher.cancel()

    def _cancel(self) -> None:
        for completion in self._completions:
            completion.cancel()

    # --- what came --------------------------------------------------------------------------------

    async def wait(self, timeout_s: float | None = None) -> None:
        """Wait until there is something to take, it is over, `wake` was called, or timeout."""
        if self._fresh or self.is_over:
            return
        loop = self._events.loop
        self._waiter = waiter = loop.create_future()
        timer = None if timeout_s is None else loop.call_later(timeout_s, self.wake)
        try:
            await waiter
        finally:
            self._waiter = None
            if timer is not None:
                timer.cancel()

    def wake(self) -> None:
        """End a `wait`."""
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def take(self) -> list[Piece | Outcome]:
        """Everything since the last call; waiting pieces of one sample are joined."""
        fresh, self._fresh = self._fresh, []
        self.num_waiting_bytes = 0
        return fresh if len(fresh) < 2 else _joined(fresh)

    async def finish(self) -> list[Outcome]:
        """All outcomes, in order; fewer if it was closed. Raises GenerationFailed."""
        while not self.is_over:
            await self.wait()
            self._fresh.clear()
        if self.failure is not None:
            raise self.failure
        return [self.outcomes[index] for index in sorted(self.outcomes)]

    def _post(self, index: int, kind: str, payload: Any) -> None:
        """On the connection's I/O thread."""
        self._events.post(self._take_event, index, kind, payload)

    def _take_event(self, index: int, kind: str, payload: Any) -> None:
        if kind == wire.DONE:
            self._on_used(Used.of(payload))
        if self.is_over or kind == wire.DONE:
            return
        if kind == wire.DELTA:
            piece = Piece.of(index, payload)
            self._fresh.append(piece)
            self.num_waiting_bytes += piece.num_bytes
        elif kind == wire.VALUE:
            outcome = Outcome(index, payload["text"], self._reworded(payload["meta"]))
            self.outcomes[index] = outcome
            self._fresh.append(outcome)
            self._on_outcome(outcome)
        else:
            self._take_failure(index, payload)
        self.wake()

    def _reworded(self, meta: dict[str, Any]) -> dict[str, Any]:
        """The meta with its warnings in the client's words."""
        warnings, words = meta.get("warnings"), self.task.words
        if not warnings or words is None:
            return meta
        return {**meta, "warnings": list(map(words.reworded, warnings))}

    def _take_failure(self, index: int, payload: Mapping[str, Any]) -> None:
        """A failure of one sample, or of all: where the request is refused, where the engine or a
        whole program is lost, and where every remaining sample has failed."""
        message, kind, field = payload["message"], payload["kind"], payload.get("field")
        if kind in GRAMMAR_KINDS:
            field = self.task.constraint_field
            if self.task.words is not None:
                message = self.task.words.reworded(message)
        error = GenerationFailed(message, kind, field)
        is_of_sample = payload.get("op") not in (None, "program") and kind == EngineError.__name__
        if self.task.fails_apart and is_of_sample:
            if index in self.outcomes:  # its prompt's branch was reported, too
                return
            self.outcomes[index] = outcome = Outcome(index, "", {}, error)
            num_failed = sum(each.error is not None for each in self.outcomes.values())
            if num_failed < self.task.num_samples:
                self._fresh.append(outcome)
                return
        self.failure = error
        self._cancel()


def _joined(items: Sequence[Piece | Outcome]) -> list[Piece | Outcome]:
    """Joins the pieces before a sample's outcome into one, per sample."""
    waiting: dict[int, list[Piece]] = {}
    joined: list[Piece | Outcome] = []
    for item in items:
        if isinstance(item, Piece):
            waiting.setdefault(item.index, []).append(item)
            continue
        if item.index in waiting:
            joined.append(Piece.joined(waiting.pop(item.index)))
        joined.append(item)
    joined += [Piece.joined(pieces) for pieces in waiting.values()]
    return joined
