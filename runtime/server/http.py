"""The HTTP face of a runtime: health, models, and OpenAI's completion endpoints with streaming.

Runs in its own process beside the engine and talks to it as any client does. No state of its own.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from contextlib import ExitStack
from functools import partial
from itertools import accumulate
from typing import Any

import orjson
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response, StreamingResponse
from starlette.exceptions import HTTPException

from ...errors import EngineError, InvalidRequest
from ...frontend import wire
from ...frontend.backend import Backend
from ...frontend.ir import GenParams
from .completion import Completion, CompletionFailed, Message, Outcome
from .kv_hints import HintEnvelope
from .openai_schema import ChatReply, ChatRequest, CompletionRequest, Reply, TextReply, usage

Prompt = str | Sequence[int] | Sequence[Message]
Item = tuple[int, str | Outcome]  # index of the choice, and text or its end
TENANT_HEADER = "x-stemma-tenant"
_DISCONNECT_POLL_S = 0.2
_GRAMMAR_KINDS = ("InvalidGrammar", "UnsupportedSchema")
_INVALID_KINDS = (
    "InvalidRequest",
    "InvalidProgram",
    "PromptTooLong",
    *_GRAMMAR_KINDS,
)


def create_app(backend: Backend) -> FastAPI:
    """The application that serves `backend`'s model."""
    app = FastAPI(title="Stemma", docs_url=None, redoc_url=None)
    server = _Server(backend)
    app.get("/health")(server.health)
    app.get("/v1/models")(server.models)
    app.post("/v1/chat/completions")(server.chat_completions)
    app.post("/v1/completions")(server.completions)
    app.post("/kv_hints")(server.kv_hints)
    app.exception_handler(RequestValidationError)(_on_invalid_body)
    app.exception_handler(InvalidRequest)(_on_invalid_request)
    app.exception_handler(CompletionFailed)(_on_completion_failed)
    app.exception_handler(EngineError)(_on_engine_error)
    app.exception_handler(HTTPException)(_on_http_exception)
    return app


class _Server:
    """The routes."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._connection = backend.connection
        self._model: str = self._connection.info["model"]
        self._created = int(time.time())

    async def health(self) -> Response:
        """200 when the engine answers, else 503 with the reason."""
        try:
            await asyncio.to_thread(self._connection.call, "info", 5.0)
        except EngineError as error:
            return _error(503, str(error), "server_error")
        return JSONResponse({"status": "ok"})

    async def models(self) -> dict[str, Any]:
        """The one model that is served."""
        model = {
            "id": self._model,
            "object": "model",
            "created": self._created,
            "owned_by": "stemma",
            "max_model_len": self._connection.info["max_model_len"],
        }
        return {"object": "list", "data": [model]}

    async def chat_completions(self, body: ChatRequest, request: Request) -> Response:
        """OpenAI's chat completions."""
        self._require_model(body.model)
        prompts: list[Prompt] = [[message.plain() for message in body.messages]]
        tool_use = body.tool_use(bool(self._connection.info["template_knows_tools"]))
        params = body.params(tool_use)
        make = ChatReply(self._model, tool_use)
        return await self._answer(body, params, request, prompts, make, tools=tool_use.for_template)

    async def completions(self, body: CompletionRequest, request: Request) -> Response:
        """OpenAI's text completions."""
        self._require_model(body.model)
        make = TextReply(self._model, has_token_ids=body.return_token_ids)
        return await self._answer(body, body.params(), request, body.prompts(), make)

    async def kv_hints(self, body: HintEnvelope) -> dict[str, Any]:
        """Actions on the KV cache, outside of any request."""
        body.check(needs_targets=True)
        return await body.carry_out(self._connection)

    async def _answer(
        self,
        body: ChatRequest | CompletionRequest,
        params: GenParams,
        request: Request,
        prompts: Sequence[Prompt],
        make: Reply,
        *,
        tools: str | None = None,
    ) -> Response:
        if body.kv_hints is not None:
            body.kv_hints.check(needs_targets=False)
        seed = secrets.randbits(62)
        tenant = request.headers.get(TENANT_HEADER) or None
        if tenant is not None and len(tenant) > wire.MAX_TENANT_CHARS:
            allowed = f"at most {wire.MAX_TENANT_CHARS} characters"
            raise InvalidRequest.of(TENANT_HEADER, f"{tenant[:20]}...", allowed)
        calls = [
            Completion(
                self._connection,
                prompt,
                params,
                n=body.n,
                seed=seed,
                instance=instance,
                stream=body.stream,
                tools=tools,
                response_id=None if instance else make.id,
                tenant=tenant,
            )
            for instance, prompt in enumerate(prompts)
        ]
        of_tools = None if params.constraint is None else "tools"
        items = _merged(calls, body.constraint_field or of_tools)
        if not body.stream:
            outcomes = await _collect(items, len(prompts) * body.n, request)
            choices = [make.choice(index, outcome) for index, outcome in enumerate(outcomes)]
            whole = make.whole(choices, usage(outcomes, len(prompts)))
            if body.kv_hints is not None:
                whole["kv_hints"] = await body.kv_hints.carry_out(self._connection, make.id)
            return JSONResponse(whole)
        first = await anext(
            items
        )  # a refusal comes before the first byte, with a status of its own
        hints = None
        if body.kv_hints is not None:
            hints = partial(body.kv_hints.carry_out, self._connection, make.id)
        events = _sse(first, items, make, len(prompts) if body.includes_usage else None, hints)
        return StreamingResponse(events, media_type="text/event-stream")

    def _require_model(self, name: str | None) -> None:
        if name not in (None, "", "default", self._model):
            raise HTTPException(404, f"model {name!r} does not exist; this is {self._model!r}")


async def _merged(
    calls: Sequence[Completion], constraint_field: str | None
) -> AsyncGenerator[Item, None]:
    """What comes of several prompts, as it comes, with all samples numbered through. Leaving early
    cancels them all. `constraint_field`: what the client called a grammar that may be refused."""
    queue: asyncio.Queue[Item | BaseException] = asyncio.Queue()

    async def forward(first: int, call: Completion) -> None:
        try:
            async for index, item in call.deltas():
                queue.put_nowait((first + index, item))
        except CompletionFailed as error:
            if error.kind in _GRAMMAR_KINDS:
                error.field = constraint_field
            queue.put_nowait(error)

    with ExitStack() as stack:
        for call in calls:
            stack.enter_context(call)
        firsts = accumulate((call.n for call in calls), initial=0)
        tasks = [asyncio.create_task(forward(first, call)) for first, call in zip(firsts, calls)]
        num_open = sum(call.n for call in calls)
        try:
            while num_open:
                item = await queue.get()
                if isinstance(item, BaseException):
                    raise item
                yield item
                num_open -= isinstance(item[1], Outcome)
        finally:
            for task in tasks:
                task.cancel()


async def _collect(
    items: AsyncGenerator[Item, None], num_choices: int, request: Request
) -> list[Outcome]:
    """All outcomes in order; given up when the client goes away."""
    outcomes: dict[int, Outcome] = {}

    async def drain() -> None:
        async for index, item in items:
            if isinstance(item, Outcome):
                outcomes[index] = item

    task = asyncio.create_task(drain())
    try:
        while not (await asyncio.wait({task}, timeout=_DISCONNECT_POLL_S))[0]:
            if await request.is_disconnected():
                raise HTTPException(499, "the client went away")
        task.result()
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await items.aclose()
    return [outcomes[index] for index in range(num_choices)]


async def _sse(
    first: Item,
    rest: AsyncGenerator[Item, None],
    make: Reply,
    num_prompts: int | None,
    hints: Callable[[], Awaitable[dict[str, Any]]] | None,
) -> AsyncIterator[bytes]:
    """Server-sent events; with `hints` a chunk says what became of them, with `num_prompts` a last
    one carries the usage."""
    outcomes: dict[int, Outcome] = {}

    def chunks(item: Item) -> bytes:
        index, value = item
        if isinstance(value, Outcome):
            outcomes[index] = value
        return b"".join(_event(chunk) for chunk in make.chunks(index, value))

    try:
        yield chunks(first)
        async for item in rest:
            yield chunks(item)
        if hints is not None:
            yield _event(make.hints_chunk(await hints()))
        if num_prompts is not None:
            in_order = [outcomes[index] for index in sorted(outcomes)]
            yield _event(make.usage_chunk(usage(in_order, num_prompts)))
        yield b"data: [DONE]\n\n"
    except CompletionFailed as error:
        yield _event(_error_body(str(error), "server_error"))
    finally:
        await rest.aclose()


def _event(payload: object) -> bytes:
    return b"data: " + orjson.dumps(payload) + b"\n\n"


def _error_body(message: str, kind: str, field: str | None = None) -> dict[str, Any]:
    return {"error": {"message": message, "type": kind, "param": field, "code": None}}


def _error(status: int, message: str, kind: str, field: str | None = None) -> JSONResponse:
    return JSONResponse(_error_body(message, kind, field), status)


async def _on_invalid_body(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, RequestValidationError)
    first = error.errors()[0]
    field = ".".join(str(part) for part in first["loc"] if part != "body")
    return _error(400, f"{field}: {first['msg']}", "invalid_request_error", field or None)


async def _on_invalid_request(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, InvalidRequest)
    return _error(400, str(error), "invalid_request_error", error.field)


async def _on_completion_failed(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, CompletionFailed)
    if error.kind in _INVALID_KINDS:
        has_name = error.field is None or str(error).startswith(f"{error.field}:")
        named = str(error) if has_name else f"{error.field}: {error}"
        return _error(400, named, "invalid_request_error", error.field)
    status = 503 if error.kind == EngineError.__name__ else 500
    return _error(status, str(error), "server_error")


async def _on_engine_error(request: Request, error: Exception) -> JSONResponse:
    return _error(503, str(error), "server_error")


async def _on_http_exception(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, HTTPException)
    kind = "not_found_error" if error.status_code == 404 else "invalid_request_error"
    return _error(error.status_code, str(error.detail), kind)
