"""A `Channel` whose programs run in this process: one asyncio loop in one background thread.

A program needs no thread: its branches are logs, its calls tasks on the loop. Ops are passed to the
loop as they come and run there. Who is asked for a gen is a subclass's matter.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import threading
import weakref
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from typing import Any

from ...errors import EngineError, StemmaError
from ..client.channel import EventSink
from ..protocol import wire
from ..protocol.interpreter import Emit
from ..protocol.ir import Op
from .client_session import ClientSession

CLOSE_TIMEOUT_S = 5.0


class LocalChannel(ABC):
    """Thread-safe; lives until `close`, or until neither a backend nor a program has it."""

    def __init__(self, info: dict[str, Any], thread_name: str) -> None:
        """`info`: facts about the model, at least its name as `model`."""
        self.info = info
        self._programs: dict[int, _Program] = {}
        self._inbox: deque[Callable[[], None]] = deque()
        self._is_awake = False
        self._is_closed = False
        self._ids = itertools.count(1)
        self._lock = threading.Lock()
        self._pid = os.getpid()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(
            target=_run, args=(self._loop,), name=thread_name, daemon=True
        )
        self._thread.start()
        self._finalizer = weakref.finalize(self, _stop, self._loop, self._pid)
        self._finalizer.atexit = False

    @abstractmethod
    def _session(self, emit: Emit, create: dict[str, object]) -> ClientSession:
        """A new program's session; `create` as `Channel.open_program` has it. Raises
        InvalidProgram."""

    @abstractmethod
    async def _close(self) -> None:
        """Close, on the loop, what else the channel has."""

    # --- for programs -----------------------------------------------------------------------------

    def open_program(self, sink: EventSink, create: dict[str, object]) -> int:
        """Register a program. Raises EngineError, and InvalidProgram for its options."""
        number = next(self._ids)

        def emit(branch: int, seq: int, kind: str, payload: Any) -> None:
            if kind == wire.DONE:
                self._programs.pop(number, None)
            sink.handle_event(branch, seq, kind, payload)

        session = self._session(emit, create)
        with self._lock:
            self._require_open()
            self._programs[number] = _Program(sink, session)
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
        self._finalizer.detach()
        if self._pid != os.getpid():
            return  # the thread is the parent's
        for program in programs:
            self._post(program.cancel)
            program.sink.handle_disconnect(EngineError("the backend was shut down"))
        self._on_loop(self._close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        if threading.current_thread() is not self._thread:
            self._thread.join(CLOSE_TIMEOUT_S)

    # --- the loop's thread ------------------------------------------------------------------------

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


def _run(loop: asyncio.AbstractEventLoop) -> None:
    """The thread's work: it has the loop, and not the channel, which may be forgotten."""
    asyncio.set_event_loop(loop)
    try:
        loop.run_forever()
        loop.run_until_complete(_end_all())
    finally:
        loop.close()


async def _end_all() -> None:
    """Cancel the loop's other tasks, and wait until none is left. One that ends lets go of
    generators, such as a response's; the loop closes each, two steps later, in a task of its own,
    which lets go of the next."""
    for task in _others():
        task.cancel()
    num_idle = 0
    while num_idle < 3:
        if others := _others():
            await asyncio.wait(others)
        num_idle = 0 if others else num_idle + 1
        await asyncio.sleep(0)


def _others() -> list[asyncio.Task[Any]]:
    return [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]


def _stop(loop: asyncio.AbstractEventLoop, pid: int) -> None:
    """End the thread of a channel that was never closed."""
    if pid == os.getpid():  # else it is the parent's
        loop.call_soon_threadsafe(loop.stop)


class _Program:
    """A registered program: its event sink, and the session that runs it."""

    def __init__(self, sink: EventSink, session: ClientSession) -> None:
        self.sink = sink
        self.session = session

    def carry_out(self, work: Callable[[ClientSession], None]) -> None:
        session = self.session
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
        self.session.cancel()
