"""One prompt's completion by a cascade of models (`frontend/cascade`): like `Completion`, but on
several engines, one after the other."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from concurrent.futures import Future
from typing import Any

from ...errors import InvalidRequest, StemmaError
from ...frontend.cascade.cascade import Cascade, CascadeCall
from ...frontend.cascade.engine_calls import Ask, CallFailed
from ...frontend.protocol import wire
from ..protocol.caller import Caller
from ..protocol.task import Prompt, Task
from .completion import Post, prompt_ops


def require_plain(n: int, hints: object, prompts: Iterable[Prompt]) -> None:
    """Raises InvalidRequest for what a cascade cannot do; these as a `Task` has them."""
    if n != 1:
        raise InvalidRequest.of("n", n, "1 for a cascade: one answer is passed on")
    if hints is not None:
        raise InvalidRequest.of("kv_hints", "some", "left out for a cascade, of several engines")
    for prompt in prompts:
        if prompt and isinstance(prompt[0], int):
            allowed = "text for a cascade: each of its models has tokens of its own"
            raise InvalidRequest.of("prompt", "token ids", allowed)


class CascadeCompletion:
    """The programs of one prompt. Lifetime: until it has ended."""

    def __init__(
        self,
        cascade: Cascade,
        loop: asyncio.AbstractEventLoop,
        task: Task,
        caller: Caller,
        *,
        number: int,
        post: Post,
        seed: int,
    ) -> None:
        """`number`: of the task's prompt, and of its only sample."""
        create: dict[str, object] = {"seed": seed, "instance": number}
        given = {
            "token_ids": task.has_token_ids or None,
            "tools": task.tools,
            "template_kwargs": task.template_kwargs,
            "tenant": caller.tenant,
            "namespace": caller.namespace or None,
        }
        create.update((name, value) for name, value in given.items() if value is not None)
        ops = tuple(prompt_ops(task.prompts[number]))
        ask = Ask(ops, task.params_of(number), create, "")
        self._call = CascadeCall(cascade, ask, self._add_used)
        self._loop = loop
        self._is_streaming = task.stream
        self._number = number
        self._post = post
        self._used = dict.fromkeys(("num_requests", "prompt_tokens", "completion_tokens"), 0)
        self._future: Future[None] | None = None

    def send(self) -> None:
        """Begin, from any thread."""
        self._future = asyncio.run_coroutine_threadsafe(self._carry_out(), self._loop)

    def end_now(self) -> None:
        """Have it end with what it has; its value still comes."""
        self._call.end_now()

    def cancel(self) -> None:
        """Nothing more is wanted but the report of its end."""
        if self._future is not None:
            self._future.cancel()

    def _add_used(self, used: Mapping[str, int]) -> None:
        for name in self._used:
            self._used[name] += used.get(name, 0)

    async def _carry_out(self) -> None:
        def on_delta(delta: Any) -> None:
            self._post(self._number, wire.DELTA, delta)

        try:
            value = await self._call.answer(on_delta if self._is_streaming else None)
            self._post(self._number, wire.VALUE, value)
        except CallFailed as error:
            self._fail(str(error), error.kind, error.field)
        except StemmaError as error:
            self._fail(str(error), type(error).__name__, getattr(error, "field", None))
        finally:
            self._post(self._number, wire.DONE, self._used)

    def _fail(self, message: str, kind: str, field: str | None) -> None:
        failure = {"message": message, "kind": kind, "field": field}
        self._post(self._number, wire.FAILED, failure)
