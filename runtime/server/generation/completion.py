"""One prompt's completions asked for over HTTP, as a program on the engine's connection.

One sample is a branch that ends in a `Gen`; several are forks of that branch, so that the prompt is
tokenized once and its KV shared. The HTTP process is a client of the engine like any other. A
completion is awaited on an asyncio loop; events come from the connection's I/O thread.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from types import TracebackType
from typing import Any, Self

from ....errors import EngineError
from ....frontend import ir, wire
from ....frontend.client import Connection
from ...sampling_params import seed_of_sample
from .pieces import GenerationFailed, Outcome, Piece
from .task import Message, Prompt


class Completion:
    """The running completions of one prompt; use it as a context manager, so that leaving early
    cancels them."""

    def __init__(
        self,
        connection: Connection,
        prompt: Prompt,
        params: ir.GenParams,
        *,
        n: int = 1,
        seed: int,
        instance: int = 0,
        stream: bool = False,
        has_token_ids: bool = False,
        tools: str | None = None,
        template_kwargs: str | None = None,
        response_id: str | None = None,
        tenant: str | None = None,
        namespace: str = "",
    ) -> None:
        """`prompt`: raw text, token ids, or the messages of a chat; `n` >= 1 samples of it;
        `has_token_ids`: a stream has them, too; `tools`: what the chat template is to tell the
        model of, as JSON; `response_id`: by which KV hints may name the first sample; `tenant`:
        on whose account it runs; `namespace`: within which its KV is shared."""
        self.n = n
        self._loop = asyncio.get_running_loop()
        self._events: asyncio.Queue[tuple[int, str, Any]] = asyncio.Queue()
        self._connection = connection
        create: dict[str, object] = {"seed": seed, "instance": instance, "stream": stream}
        if has_token_ids:
            create["token_ids"] = True
        if tools is not None:
            create["tools"] = tools
        if template_kwargs is not None:
            create["template_kwargs"] = template_kwargs
        if response_id is not None:
            create["response_id"] = response_id
        if tenant is not None:
            create["tenant"] = tenant
        if namespace:
            create["namespace"] = namespace
        self._program = connection.open_program(self, create)
        ops = prompt_ops(prompt)
        for op in (*ops, *_gen_ops(len(ops), params, n)):
            connection.send_op(self._program, op)
        connection.flush(self._program, end=True)

    async def pieces(self, first: int = 0) -> AsyncIterator[Piece | Outcome]:
        """Each sample's text as it comes (with `stream`), then its outcome; samples are numbered
        from `first`. Raises GenerationFailed."""
        num_open = self.n
        while num_open:
            index, kind, payload = await self._events.get()
            if kind == wire.DELTA:
                yield _piece(first + index, payload)
            elif kind == wire.VALUE:
                yield Outcome(first + index, payload["text"], payload["meta"])
                num_open -= 1
            elif kind == wire.FAILED:
                raise GenerationFailed(payload["message"], payload["kind"], payload.get("field"))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._connection.close_program(self._program)

    # --- on the connection's I/O thread -----------------------------------------------------------

    def handle_event(self, branch: int, seq: int, kind: str, payload: Any) -> None:
        if kind in (wire.DELTA, wire.VALUE, wire.FAILED):
            self._post(max(0, branch - 1), kind, payload)

    def handle_disconnect(self, error: EngineError) -> None:
        self._post(0, wire.FAILED, {"message": str(error), "kind": type(error).__name__})

    def _post(self, index: int, kind: str, payload: Any) -> None:
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._events.put_nowait, (index, kind, payload))


def _piece(index: int, delta: str | dict[str, Any]) -> Piece:
    if isinstance(delta, str):
        return Piece(index, delta)
    return Piece(
        index,
        delta["text"],
        delta.get("token_ids"),
        delta.get("logprobs"),
        delta.get("prompt_tokens"),
        delta.get("cached_tokens", 0),
    )


def prompt_ops(prompt: Prompt) -> Sequence[ir.Op]:
    """What makes a program's first branch begin with `prompt`."""
    if isinstance(prompt, str):
        return (ir.Text(0, 0, None, prompt),)
    if all(isinstance(item, int) for item in prompt):
        token_ids = tuple(int(item) for item in prompt)  # type: ignore[arg-type]
        return (ir.Tokens(0, 0, None, token_ids),)
    return _chat_ops([m for m in prompt if isinstance(m, Message)])


def _chat_ops(messages: Sequence[Message]) -> Sequence[ir.Op]:
    """An assistant's earlier turn is a replay: its ids may be known. A last message of the
    assistant's is continued."""
    ops: list[ir.Op] = []
    for index, message in enumerate(messages):
        is_replay = message.role == "assistant"
        is_open = is_replay and index == len(messages) - 1
        ops.append(ir.RoleBegin(0, len(ops), None, message.role, message.fields))
        if message.content:
            ops.append(ir.Text(0, len(ops), None, message.content, is_replay and not is_open))
        if not is_open:
            ops.append(ir.RoleEnd(0, len(ops), None))
    if not messages or messages[-1].role != "assistant":
        ops.append(ir.RoleBegin(0, len(ops), None, "assistant"))
    return ops


def _gen_ops(seq: int, params: ir.GenParams, n: int) -> Sequence[ir.Op]:
    """Sample i is generated on branch i + 1, a single one on the prompt's own branch."""
    if n == 1:
        return (ir.Gen(0, seq, None, "completion", params),)
    branches = tuple(range(1, n + 1))
    gens = [ir.Gen(b, 0, None, "completion", _of_sample(params, b - 1)) for b in branches]
    return (ir.Fork(0, seq, None, branches), *gens)


def _of_sample(params: ir.GenParams, index: int) -> ir.GenParams:
    """Under a seed that was asked for each sample draws by its own; else forks differ anyhow. The
    prompt is scored once."""
    if index:
        params = replace(params, logprob_start=None)
    if params.seed is None:
        return params
    return replace(params, seed=seed_of_sample(params.seed, index))
