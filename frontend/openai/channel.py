"""A `Channel` whose programs run in this process: one asyncio loop in one background thread.

A program needs no thread: its branches are logs, its calls tasks on the loop. Ops are passed to the
loop as they come and run there.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from ...errors import EngineError, InvalidProgram, StemmaError
from ..client.channel import EventSink
from ..protocol import wire
from ..protocol.ir import Op
from .calls import Caller, TokenUsage
from .client_session import ClientSession
from .client_transcript import ClientTranscript
from .flavors import Flavor
from .http_client import Endpoint, HttpClient

CLOSE_TIMEOUT_S = 5.0
MODELS_TIMEOUT_S = 10.0
MAX_SPEC_TOKENS = 65_536


class OpenAIChannel:
    """Programs on one model of one endpoint; thread-safe; lives until `close`."""

    def __init__(
        self,
        endpoint: Endpoint,
        model: str,
        flavor: Flavor,
        *,
        has_text: bool,
        has_chat: bool,
        info: dict[str, Any] | None = None,
    ) -> None:
        """`has_text`, `has_chat`: whether completions, chat completions serve the model."""
        self.info: dict[str, Any] = {"model": model, "reads_images": has_chat, **(info or {})}
        self.base_url = endpoint.base_url
        self.usage = TokenUsage()
        self._root = ClientTranscript(has_text=has_text, has_chat=has_chat)
        self._programs: dict[int, _Program] = {}
        self._inbox: deque[Callable[[], None]] = deque()
        self._is_awake = False
        self._is_closed = False
        self._ids = itertools.count(1)
        self._lock = threading.Lock()
        self._pid = os.getpid()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="stemma-openai", daemon=True)
        self._thread.start()
        self._client = self._on_loop(_make_client(endpoint))
        self._caller = Caller(self._client, flavor, model, self.usage)

    # --- for programs -----------------------------------------------------------------------------

    def open_program(self, sink: EventSink, create: dict[str, object]) -> int:
        """Register a program. Raises EngineError, and InvalidProgram for its options."""
        num_spec_tokens = _checked_spec_tokens(create.get("num_api_spec_tokens"))
        if create.get("tools") is not None:
            raise InvalidProgram("tools: a program on an endpoint over HTTP has none", "tools")
        if create.get("lora_path") is not None:
            allowed = "left out for an endpoint over HTTP; name the adapter as its model"
            raise InvalidProgram.of("lora_path", create["lora_path"], allowed)
        with self._lock:
            self._require_open()
            number = next(self._ids)
            program = _Program(sink)
            self._programs[number] = program

        def emit(branch: int, seq: int, kind: str, payload: Any) -> None:
            if kind == wire.DONE:
                self._programs.pop(number, None)
            sink.handle_event(branch, seq, kind, payload)

        program.session = ClientSession(
            self._caller,
            self._root.copy(),
            emit,
            seed=int(create["seed"]),  # type: ignore[call-overload]
            instance=int(create["instance"]),  # type: ignore[call-overload]
            is_streaming=bool(create.get("stream")),
            num_spec_tokens=num_spec_tokens,
        )
        return number

    def send_op(self, program: int, op: Op) -> None:
        """Pass an op to the loop."""
        with self._lock:
            self._require_open()
            known = self._programs.get(program)
        if known is not None:
            self._post(lambda: known.carry_out(lambda session: session.receive([op])))

    def flush(self, program: int, *, end: bool = False) -> None:
        """The program waits; `end` means that no op of it follows."""
        known = self._programs.get(program)
        if known is not None:
            self._post(lambda: known.carry_out(lambda session: session.flush(end=end)))

    def close_program(self, program: int) -> None:
        """Remove a program; what still runs is cancelled, its HTTP requests are closed."""
        known = self._programs.pop(program, None)
        if known is not None:
            self._post(known.cancel)

    def call_soon(self, work: Callable[[], None]) -> None:
        """Run `work` on the loop's thread; takes no lock."""
        with contextlib.suppress(RuntimeError):  # the loop has ended
            self._loop.call_soon_threadsafe(work)

    def close(self) -> None:
        """Cancel all programs, close all connections and end the thread; safe to call twice."""
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
            programs, self._programs = list(self._programs.values()), {}
        if self._pid != os.getpid():
            return  # the thread is the parent's
        for program in programs:
            self._post(program.cancel)
            program.sink.handle_disconnect(EngineError("the backend was shut down"))
        self._on_loop(self._client.aclose())
        self._loop.call_soon_threadsafe(self._loop.stop)
        if threading.current_thread() is not self._thread:
            self._thread.join(CLOSE_TIMEOUT_S)

    # --- the loop's thread ------------------------------------------------------------------------

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_forever()
            tasks = asyncio.all_tasks(self._loop)
            for task in tasks:
                task.cancel()
            self._loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
        finally:
            self._loop.close()

    def _post(self, work: Callable[[], None]) -> None:
        """Run `work` on the loop, after what was posted before; one wake-up for many."""
        with self._lock:
            self._inbox.append(work)
            if self._is_awake:
                return
            self._is_awake = True
        self._loop.call_soon_threadsafe(self._drain)

    def _drain(self) -> None:
        with self._lock:
            works, self._inbox = self._inbox, deque()
            self._is_awake = False
        for work in works:
            work()

    def _on_loop(self, work: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(CLOSE_TIMEOUT_S)

    def _require_open(self) -> None:
        if self._pid != os.getpid():
            raise EngineError("a backend cannot be used after fork(); open one in the child")
        if self._is_closed:
            raise EngineError("the backend was shut down")


class _Program:
    """A registered program: its event sink, and the session that runs it."""

    def __init__(self, sink: EventSink) -> None:
        self.sink = sink
        self.session: ClientSession | None = None

    def carry_out(self, work: Callable[[ClientSession], None]) -> None:
        session = self.session
        assert session is not None, "an op came before its program was opened"
        if session.is_done:
            return
        try:
            work(session)
            session.advance()
        except StemmaError as error:
            session.reject(error)
        except Exception as error:  # a bug of ours: the program must not wait forever
            session.reject(EngineError(f"{type(error).__name__}: {error}"))

    def cancel(self) -> None:
        if self.session is not None:
            self.session.cancel()


async def _make_client(endpoint: Endpoint) -> HttpClient:
    return HttpClient(endpoint)


def models_of(endpoint: Endpoint, timeout_s: float = MODELS_TIMEOUT_S) -> list[dict[str, Any]]:
    """The endpoint's list of models, each with at least `id`. Raises EngineError."""

    async def ask() -> dict[str, Any]:
        client = HttpClient(endpoint)
        try:
            return await client.get("models", timeout_s)
        finally:
            await client.aclose()

    # Its own loop in its own thread: the caller's thread may be running another.
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(lambda: asyncio.run(ask())).result()
    models = answer.get("data")
    if not isinstance(models, list) or not all(isinstance(m, dict) and "id" in m for m in models):
        raise EngineError(f"{endpoint.base_url}/models: no list of models: {str(answer)[:300]}")
    return models


def _checked_spec_tokens(value: object) -> int | None:
    is_int = isinstance(value, int) and not isinstance(value, bool)
    if value is not None and not (is_int and 1 <= value <= MAX_SPEC_TOKENS):  # type: ignore[operator]
        allowed = f"an integer in [1, {MAX_SPEC_TOKENS}], or None"
        raise InvalidProgram.of("num_api_spec_tokens", value, allowed)
    return value  # type: ignore[return-value]
