"""A scripted server of OpenAI's API in a thread: its responses, delays and refusals.

A "token" is a word or a sign with the blanks before it. It cuts at `stop` and `max_tokens` as
OpenAI does, and refuses more than four stop strings.
"""

from __future__ import annotations

import asyncio
import json
import re
import socket
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse

import stemma as st

Answer = Callable[[dict[str, Any]], str]
MAX_STOPS = 4


def tokens_of(text: str) -> list[str]:
    return re.findall(r"\s*\w+|\s*[^\w\s]|\s+$", text)


@dataclass
class StandIn:
    """The script that tests set, and the record that they check."""

    url: str
    answer: Answer = lambda body: "hello"
    calls: list[list[dict[str, Any]]] = field(default_factory=list)  # of chats: popped by one each
    failures: list[Response | str] = field(default_factory=list)  # returned first, one per call;
    # "break": the stream ends early
    chunk_delay_s: float = 0.0
    delay_s: float = 0.0
    logprob: Callable[[str], float] = lambda token: -1.0
    bodies: list[dict[str, Any]] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    paths: list[str] = field(default_factory=list)
    num_open: int = 0
    max_open: int = 0
    num_closed_early: int = 0


def refusal(status: int, message: str = "no", **headers: str) -> Response:
    return JSONResponse({"error": {"message": message}}, status, headers=headers)


@contextmanager
def standing_in() -> Iterator[StandIn]:
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    state = StandIn(f"http://127.0.0.1:{listener.getsockname()[1]}/v1")
    config = uvicorn.Config(_app(state), log_level="error", lifespan="off")
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    while not server.started:
        time.sleep(0.005)
    try:
        yield state
    finally:
        server.should_exit = True
        server.force_exit = True
        thread.join(5)


def _app(state: StandIn) -> FastAPI:
    app = FastAPI()

    @app.post("/v1/chat/completions")
    @app.post("/v1/completions")
    async def complete(request: Request) -> Response:
        body = await request.json()
        is_chat = "chat" in request.url.path
        state.bodies.append(body)
        state.headers.append(dict(request.headers))
        state.paths.append(str(request.url).partition("/v1/")[2])
        failure = state.failures.pop(0) if state.failures else None
        if isinstance(failure, Response):
            return failure
        if len(body.get("stop") or ()) > MAX_STOPS:
            return refusal(400, "stop: at most 4")
        if body.get("stream"):
            events = _events(state, request, body, is_chat, failure == "break")
            return StreamingResponse(events, media_type="text/event-stream")
        with _counted(state):
            state.num_closed_early += not await _waited(request, state.delay_s)
            return JSONResponse(_whole(state, body, is_chat))

    @app.get("/v1/models")
    def models() -> dict[str, Any]:
        return {"object": "list", "data": [{"id": "some", "owned_by": "vllm"}]}

    return app


@contextmanager
def _counted(state: StandIn) -> Iterator[None]:
    state.num_open += 1
    state.max_open = max(state.max_open, state.num_open)
    try:
        yield
    finally:
        state.num_open -= 1


async def _waited(request: Request, delay_s: float) -> bool:
    """Whether the client was there all the time."""
    end = time.monotonic() + delay_s
    while time.monotonic() < end:
        await asyncio.sleep(0.01)
        if await request.is_disconnected():
            return False
    return True


def _cut(state: StandIn, body: dict[str, Any]) -> tuple[list[str], str]:
    text = state.answer(body)
    stop = body.get("stop") or []
    ends = [at for s in ([stop] if isinstance(stop, str) else stop) if (at := text.find(s)) >= 0]
    tokens = tokens_of(text[: min(ends, default=len(text))])
    limit = body.get("max_tokens", body.get("max_completion_tokens", 16))
    return tokens[:limit], "length" if len(tokens) > limit else "stop"


def _whole(state: StandIn, body: dict[str, Any], is_chat: bool) -> dict[str, Any]:
    choices = []
    num_tokens = 0
    for index in range(body.get("n", 1)):
        tokens, reason = _cut(state, body)
        num_tokens += len(tokens)
        choice: dict[str, Any] = {"index": index, "finish_reason": reason}
        if is_chat and state.calls:
            called = {"content": None, "tool_calls": state.calls.pop(0)}
            choice |= {"message": {"role": "assistant", **called}, "finish_reason": "tool_calls"}
        elif is_chat:
            choice["message"] = {"role": "assistant", "content": "".join(tokens)}
        else:
            tokens = [*(tokens_of(body["prompt"]) if body.get("echo") else ()), *tokens]
            choice["text"] = "".join(tokens)
        if body.get("logprobs") is not None:
            choice["logprobs"] = _logprobs(state, tokens, is_chat)
        choices.append(choice)
    usage = {"prompt_tokens": 10, "completion_tokens": num_tokens}
    return {"id": f"id-{len(state.bodies)}", "choices": choices, "usage": usage}


def _logprobs(state: StandIn, tokens: list[str], is_chat: bool) -> dict[str, Any]:
    values = [state.logprob(token) for token in tokens]
    if not is_chat:
        tops = [{token: value} for token, value in zip(tokens, values)]
        return {"tokens": tokens, "token_logprobs": values, "top_logprobs": tops}
    tops = [{"token": token, "logprob": value} for token, value in zip(tokens, values)]
    return {"content": [{**top, "top_logprobs": [top]} for top in tops]}


async def _events(
    state: StandIn, request: Request, body: dict[str, Any], is_chat: bool, breaks: bool
) -> AsyncIterator[bytes]:
    with _counted(state):
        if breaks:
            return
        tokens, reason = _cut(state, body)
        finished = False
        try:
            if not await _waited(request, state.delay_s):
                return
            if is_chat and state.calls:
                tokens, reason = [], "tool_calls"
                for delta in _call_deltas(state.calls.pop(0)):
                    yield _event({"id": "s", "choices": [{"index": 0, "delta": delta}]})
            for token in tokens:
                await asyncio.sleep(state.chunk_delay_s)
                part: dict[str, Any] = {"delta": {"content": token}} if is_chat else {"text": token}
                if body.get("logprobs") is not None:
                    part["logprobs"] = _logprobs(state, [token], is_chat)
                yield _event({"id": "s", "choices": [{"index": 0, **part}]})
            part = {"delta": {}} if is_chat else {"text": ""}
            yield _event({"id": "s", "choices": [{"index": 0, **part, "finish_reason": reason}]})
            usage = {"prompt_tokens": 10, "completion_tokens": len(tokens)}
            yield _event({"id": "s", "choices": [], "usage": usage})
            yield b"data: [DONE]\n\n"
            finished = True
        finally:
            state.num_closed_early += not finished


def _call_deltas(calls: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """As OpenAI streams them: a head, then the arguments in pieces."""
    for index, call in enumerate(calls):
        name, arguments = call["function"]["name"], call["function"]["arguments"]
        head = {**call, "index": index, "function": {"name": name, "arguments": ""}}
        yield {"content": None, "tool_calls": [head]}
        for piece in (arguments[:3], arguments[3:]):
            yield {"tool_calls": [{"index": index, "function": {"arguments": piece}}]}


def _event(payload: object) -> bytes:
    return f"data: {json.dumps(payload)}\n\n".encode()


# --- programs that ask it -------------------------------------------------------------------------


@st.function
def ask(s: st.ProgramState, **options: Any) -> None:
    s += st.system("Be brief.") + st.user("Hi")
    s += st.assistant(st.gen("a", **options))


@st.function
def write(s: st.ProgramState, **options: Any) -> None:
    s += "Once" + st.gen("a", **options)
