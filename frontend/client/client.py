"""A client's connection to a runtime: one session, one I/O thread, many programs.

Ops are collected per program and sent together: when the program first has to wait, when it ends,
or `FLUSH_AFTER_S` after the first of them, whichever comes first. So everything up to a program's
first wait normally travels as one message (its capture). Events arrive on the I/O thread, which
passes each to its program; programs wait on conditions of their own. This file knows no models.

The I/O thread is woken only when somebody waits for a result. While busy it polls every
millisecond, because each wake-up takes the interpreter lock from the author's thread for a while.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import itertools
import os
import socket
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any

import orjson
import zmq

from ...errors import EngineError, InvalidRequest, ModelLoadError, ModelNotFound, StemmaError
from ..protocol import wire
from ..protocol.interning import MAX_CHAT_CHARS, MAX_CHAT_SLOTS, MIN_CHARS, SentTexts
from ..protocol.ir import Chat, Gen, GenParams, Op, Text, message_to_wire
from ..protocol.keys import ClientKeys
from ..protocol.program_log import require_same_model
from .channel import EventSink
from .open_programs import OpenPrograms
from .outbox import Outbox
from .peer_process import PeerProcess
from .transport import SessionLost, Transport

FLUSH_AFTER_S = 0.002
BUSY_S = 0.010  # after a message the I/O thread expects more for this long (guess)
NAP_S = 0.001  # meanwhile it polls this often; ends that nobody waits for share a message
CALL_TIMEOUT_S = 60.0
CONNECT_TIMEOUT_S = 60.0
HEARTBEAT_POLL_S = wire.HEARTBEAT_S / 4

# How deeply the I/O thread sleeps, that is, who has to wake it.
_AWAKE = 0
_NAPPING = 1  # it polls again within NAP_S: only a waiter for a result wakes it
_DOZING = 2  # it polls again within FLUSH_AFTER_S: the end of a program wakes it too
_ASLEEP = 3  # anything does


class Connection:
    """A connection to the runtime at `endpoint`; thread-safe; lives until `close`.

    Raises EngineError if there is no response within `timeout_s`, or the runtime speaks another
    version or rejects the keys.
    """

    def __init__(
        self,
        endpoint: str,
        *,
        context: zmq.Context[zmq.Socket[bytes]] | None = None,
        timeout_s: float = CONNECT_TIMEOUT_S,
        process: PeerProcess | None = None,
        keys: ClientKeys | None = None,
        tenant: str | None = None,
        silence_s: float = wire.RUNTIME_TIMEOUT_S,
        outlives_runtime: bool = False,
        successor: Callable[[], tuple[str, PeerProcess]] | None = None,
    ) -> None:
        """`process`: the runtime's, where it is known beforehand; `tenant`: the tenant that this
        client's work counts for, None: its own; `silence_s`: after which a connected runtime is
        given up, unless its process is stopped. `outlives_runtime`: when the runtime has ended and
        another one with the same model answers at the same endpoint within `timeout_s`, programs
        go on there. `successor`: waits for that one, says where it is; raises EngineError where
        there is none."""
        self.endpoint = endpoint
        self._tenant = tenant
        self._silence_s = silence_s
        self._process = process
        self._keys = keys
        self._lock = threading.RLock()  # a finalizer that sends may run while it is held
        self._has_credit = threading.Condition(self._lock)
        self._credit_bytes = wire.CLIENT_CREDIT_BYTES
        self._outlives_runtime = outlives_runtime
        self._successor = successor
        self._programs = OpenPrograms(have_logs=outlives_runtime)
        self._outbox = Outbox()
        self._texts = SentTexts()
        self._calls: dict[int, _Call] = {}
        self._ids = itertools.count(1)
        self._error: EngineError | None = None
        self._closing = False
        self._sleep = _AWAKE
        self._is_woken = False
        self._posted: deque[Callable[[], None]] = deque()  # work for the I/O thread
        self._is_urgent = False  # somebody waits for what is queued
        self._last_sent_s = 0.0
        self._wake_r, self._wake_w = socket.socketpair()
        self._wake_r.setblocking(False)
        self._wake_w.setblocking(False)
        self._context = context or zmq.Context.instance()
        self._welcome: dict[str, Any] | None = None
        self._welcomed = threading.Event()
        self._pid = os.getpid()
        self._thread = threading.Thread(target=self._run, name="stemma-client", daemon=True)
        self._connect_s = timeout_s
        self._thread.start()
        _open.add(self)
        self._await_welcome()

    # --- for programs -------------------------------------------------------------------------

    @property
    def info(self) -> dict[str, Any]:
        """The runtime's description of itself, from its welcome message."""
        assert self._welcome is not None
        return self._welcome

    @property
    def error(self) -> EngineError | None:
        """Why the connection is dead, or None."""
        return self._error

    @property
    def loss(self) -> EngineError | None:
        """Why it ended though nobody closed it; None where it did not, and in a fork, which has no
        part in it."""
        if self._error is None or self._closing or self._pid != os.getpid():
            return None
        return self._error

    def open_program(
        self,
        sink: EventSink,
        create: dict[str, object],
        begun: Mapping[tuple[int, int], Sequence[int]] | None = None,
    ) -> int:
        """Register a program; `create` (seed, instance, stream) travels with its first ops.
        `begun`: by branch and seq of a gen, the ids with which its output begins, whatever the
        model would say there; it goes on from them.

        Raises InvalidProgram if it cannot be sent.
        """
        given = [[*place, {"begun": list(ids)}] for place, ids in (begun or {}).items()]
        parts = [wire.encode_part("given", given)] if given else []
        with self._lock:
            self._require_open()
            program = next(self._ids)
            self._outbox.open(program, self._programs.open(program, sink, create, given), parts)
        return program

    def send_op(self, program: int, op: Op) -> None:
        """Queue an op; it leaves at the next flush, at the latest after FLUSH_AFTER_S. Blocks while
        the runtime has not acknowledged CLIENT_CREDIT_BYTES of what was sent.

        Raises InvalidProgram, without queueing the op, if it cannot be sent.
        """
        self._add_op(program, op)
        if self._sleep == _ASLEEP:  # it wakes again when the op is due
            self._wake()

    def send_program(self, program: int, ops: Iterable[Op]) -> None:
        """Send all ops of a program and its end at once, as `send_op` and `flush` do; the I/O
        thread is woken once. Somebody waits for the result. Raises InvalidProgram."""
        for op in ops:
            self._add_op(program, op)
        self.flush(program, end=True, is_awaited=True)

    def flush(self, program: int, *, end: bool = False, is_awaited: bool = False) -> None:
        """Send what is queued; `end` means that no op of this program follows. Without `end`, or
        with `is_awaited`, somebody waits for the result: it leaves at once."""
        with self._lock:
            if self._error and not self._closing:
                return
            self._outbox.flush(program, end=end)
            if end:
                self._programs.note_end(program)
            if not self._outbox.has_queued:
                return
            self._is_urgent = self._is_urgent or is_awaited or not end
        if self._sleep >= (_NAPPING if self._is_urgent else _DOZING):
            self._wake()

    def close_program(self, program: int) -> None:
        """Remove a program; if it has not ended, the runtime cancels the rest of it."""
        with self._lock:
            known = self._programs.pop(program) is not None
            self._outbox.forget(program)
            if known and not self._error:
                self._queue("cancel", program=program)

    def cancel_program(self, program: int) -> None:
        """Have the runtime cancel the rest of a program. Unlike `close_program`, its sink receives
        DONE, with what the program has used, if any of it was sent."""
        with self._lock:
            if program not in self._programs or self._error:
                return
            if self._outbox.forget(program):
                self._programs.note_cancelled(program)
                self._queue("cancel", program=program)
            else:
                self._programs.pop(program)

    def end_gens(self, program: int) -> None:
        """End a program's gens now with their output so far, finish reason "abort", and later ones
        with no output; their values still arrive."""
        with self._lock:
            if program in self._programs and not self._error:
                self._programs.note_ended_gens(program)
                self._queue("cancel", program=program, keep=True)

    @property
    def has_credit(self) -> bool:
        """Whether half of the credit is free: ops of that many bytes would be accepted without
        waiting for the runtime."""
        return self._outbox.held_bytes <= self._credit_bytes // 2

    def call_soon(self, work: Callable[[], None]) -> None:
        """Run `work` on the I/O thread; takes no lock."""
        self._posted.append(work)
        if self._sleep:
            self._wake()

    def call(self, method: str, timeout_s: float | None = CALL_TIMEOUT_S, **args: object) -> Any:
        """Ask the runtime (`info`, `tree`, `flush_cache`, ...) and wait for its reply; without a
        time limit where `timeout_s` is None, unless the runtime is given up."""
        pending = self._begin_call(method, args)
        try:
            return pending.result(timeout_s)
        except TimeoutError:
            raise pending.overdue(timeout_s) from None
        finally:
            self._calls.pop(pending.id, None)

    async def acall(
        self, method: str, timeout_s: float | None = CALL_TIMEOUT_S, **args: object
    ) -> Any:
        """`call` that holds no thread while it waits."""
        pending = self._begin_call(method, args)
        try:
            return await asyncio.wait_for(asyncio.wrap_future(pending), timeout_s)
        except TimeoutError:
            raise pending.overdue(timeout_s) from None
        finally:
            self._calls.pop(pending.id, None)

    def _begin_call(self, method: str, args: dict[str, object]) -> _Call:
        with self._lock:
            self._require_open()
            pending = _Call(next(self._ids), method)
            header: dict[str, Any] = {"id": pending.id, "method": method, "args": args}
            wire.encode("call", n=0, ack=0, **header)  # raises here if it cannot be sent
            self._calls[pending.id] = pending
            self._queue("call", **header)
        return pending

    def close(self) -> None:
        """Stop the I/O thread and the socket; programs still open are cancelled by the runtime."""
        with self._lock:
            if self._closing:
                return
            self._closing = True
        self._wake()
        if threading.current_thread() is not self._thread:
            self._thread.join(timeout=5.0)
        self._fail(EngineError("the connection was closed"))

    def abandon(self, error: EngineError) -> None:
        """Give the runtime up: `error` ends all pending and later calls."""
        self._fail(error)
        self._wake()

    def wait_welcomed(self, timeout_s: float) -> bool:
        """Wait until there is a session, or the runtime is given up; False where the time is over
        before."""
        return self._welcomed.wait(timeout_s)

    def wait_ended(self) -> EngineError:
        """Wait until the runtime is given up or the connection closed; returns why."""
        self._thread.join()
        return self._error or EngineError("the connection was closed")

    # --- what is sent -------------------------------------------------------------------------

    def _queue(self, op: str, **header: object) -> None:
        self._outbox.queue(op, header)
        self._is_urgent = True
        if self._sleep:
            self._wake()

    def _encoded(self, op: Op, item: list[Any]) -> bytes:
        """An op, `item` on the wire, encoded: a long text that was sent before is replaced by its
        slot number."""
        if type(op) is Text:
            slot = self._slot(op.kind, op.text)
            if slot is not None:
                item = [*item[:4], slot]
        elif type(op) is Chat:
            item = [*item[:4], self._with_contents_in_slots(op)]
        elif type(op) is Gen:
            item = [*item[:5], self._with_slots(op.params), *item[6:]]
        return wire.encode_op(item)

    def _with_contents_in_slots(self, op: Chat) -> list[list[object]]:
        """NOTE: a slot must not be emptied before the op is queued: it has few of them."""
        written, num_slots, num_chars = [], 0, 0
        for message in op.messages:
            slot, content = None, message.content
            if num_slots < MAX_CHAT_SLOTS and num_chars + len(content) <= MAX_CHAT_CHARS:
                slot = self._slot(op.kind, content)
            if slot is not None:
                num_slots, num_chars = num_slots + 1, num_chars + len(content)
            written.append(message_to_wire(message, slot))
        return written

    def _with_slots(self, params: GenParams) -> dict[str, Any]:
        encoded, constraint = params.to_wire(), params.constraint
        if params.prediction is not None:
            slot = self._slot(Gen.kind, params.prediction)
            if slot is not None:
                encoded = {**encoded, "prediction": slot}
        if constraint is not None:
            slot = self._slot(Gen.kind, constraint.source)
            if slot is not None:
                encoded = {**encoded, "constraint": {**encoded["constraint"], "source": slot}}
        return encoded

    def _slot(self, kind: str, text: str) -> int | None:
        """The slot of a long text, a new one where it comes a second time. Raises InvalidProgram if
        that cannot be sent."""
        if len(text) < MIN_CHARS:
            return None
        slot = self._texts.slot_of(text)
        if slot is not None or not self._texts.is_repeated(text):
            return slot
        encoded = wire.encode_part(kind, text)
        if not self._texts.has_room(text):
            self._outbox.flush_all()  # queued ops may name slots that are about to be reused
        slot, emptied = self._texts.add(text)
        header = {"emptied": emptied, "texts": [[slot, orjson.Fragment(encoded)]]}
        self._outbox.queue("intern", header, len(encoded))
        return slot

    def _add_op(self, program: int, op: Op) -> None:
        with self._lock:
            self._require_open()
            if self._outbox.held_bytes > self._credit_bytes:
                self._await_credit()
            item = op.to_wire()
            if not self._outbox.add(program, self._encoded(op, item)):
                raise EngineError("the program was cancelled or has ended")
            self._programs.note_op(program, item)

    def _await_credit(self) -> None:
        if threading.current_thread() is self._thread:
            return  # this thread itself receives the credit
        while self._outbox.held_bytes > self._credit_bytes:
            self._outbox.flush_all()
            self._is_urgent = True
            if self._sleep:
                self._wake()
            self._has_credit.wait()
            self._require_open()

    # --- the I/O thread -----------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._keep_sessions()
        except EngineError as error:
            self._fail(error)
        except Exception as error:  # the thread must never die without notifying its programs
            self._fail(EngineError(f"connection to {self.endpoint} failed: {error}"))
        finally:
            self._wake_r.close()
            self._wake_w.close()

    def _keep_sessions(self) -> None:
        """One after the other. Raises EngineError where there is no other."""
        loss: SessionLost | None = None
        while not self._closing and self._error is None:
            try:
                self._keep_session()
            except SessionLost as error:
                if self._welcome is None or not self._outlives_runtime:
                    raise
                loss = error
                self._begin_again(loss)
                if self._successor is not None:
                    self.endpoint, self._process = self._successor()
            except EngineError as error:
                if loss is None or self._welcomed.is_set():  # it was another session's
                    raise
                raise EngineError(f"{error}; before: {loss}") from error

    def _begin_again(self, loss: SessionLost) -> None:
        """Have all programs go on in the next session; calls are not asked again."""
        was_there = self._welcomed.is_set()
        self._welcomed.clear()
        with self._lock:
            self._outbox, self._texts = Outbox(), SentTexts()
            over = list(self._programs.go_on(self._outbox, loss, is_new=was_there))
            calls, self._calls = list(self._calls.values()), {}
            self._has_credit.notify_all()
        for sink, kind, payload in over:
            sink.handle_event(0, 0, kind, payload)
        for call in calls:
            call.set_exception(EngineError(f"{call.method}: {loss}"))

    def _keep_session(self) -> None:
        transport = Transport(
            self._context,
            self.endpoint,
            self._keys,
            self._wake_r.fileno(),
            self._process,
            self._tenant,
            self._connect_s,
            self._silence_s,
        )
        try:
            self._loop(transport)
        finally:
            transport.close()

    def _loop(self, transport: Transport) -> None:
        flush_at: float | None = None
        is_welcomed = False
        while not self._closing and self._error is None:
            self._sleep = _ASLEEP  # before checking for work: no wake-up is missed
            messages = transport.poll(self._timeout_s(flush_at))
            self._sleep = _AWAKE
            if self._is_woken:
                self._drain_wake()
            if transport.welcome is not None and not is_welcomed:
                is_welcomed = True
                self._be_welcomed(transport.welcome)
            for message in messages:
                self._dispatch(message)
            self._run_posted()
            flush_at = self._flush_overdue(flush_at)
            self._send(transport)
        self._send(transport)

    def _timeout_s(self, flush_at: float | None) -> float:
        """How long to poll in the current state; also sets the depth of sleep."""
        is_busy = time.monotonic() - self._last_sent_s < BUSY_S
        if self._posted or (self._outbox.has_queued and (self._is_urgent or not is_busy)):
            return 0.0
        if is_busy:
            self._sleep = _NAPPING
            return NAP_S
        if flush_at is not None or self._outbox.dirty:
            self._sleep = _DOZING
            return FLUSH_AFTER_S
        return HEARTBEAT_POLL_S

    def _flush_overdue(self, flush_at: float | None) -> float | None:
        """Flush all outboxes once the oldest op is due; returns the next deadline."""
        with self._lock:
            if not self._outbox.dirty:
                return None
            now = time.monotonic()
            if flush_at is None:
                return now + FLUSH_AFTER_S
            if now < flush_at:
                return flush_at
            self._outbox.flush_all()
        return None

    def _send(self, transport: Transport) -> None:
        with self._lock:
            self._is_urgent = False
            self._outbox.hand_over(transport.link)
            if self._outbox.release(transport.link.num_acked):
                self._has_credit.notify_all()
        if transport.send():
            self._last_sent_s = time.monotonic()

    def _be_welcomed(self, header: dict[str, Any]) -> None:
        if self._welcome is not None:
            try:
                require_same_model(header, self._welcome)
            except EngineError as error:
                raise EngineError(f"another runtime is at {self.endpoint} now: {error}") from error
        self._welcome = header
        self._credit_bytes = int(header.get("credit_bytes", wire.CLIENT_CREDIT_BYTES))
        self._welcomed.set()

    def _dispatch(self, message: wire.Message) -> None:
        header = message.header
        if message.op == "events":
            for number, branch, seq, kind, payload in header["events"]:
                self._pass_on(number, branch, seq, kind, payload)
        elif message.op == "reply":
            with self._lock:  # else `_fail` may complete it too
                call = self._calls.pop(header["id"], None)
            if call is not None:
                call.take(header)

    def _pass_on(self, number: int, branch: int, seq: int, kind: str, payload: Any) -> None:
        program = self._programs.get(number)
        if program is None:
            return
        log = program.log
        if kind == wire.DONE:
            payload = payload if log is None else log.done(payload)
            program.sink.handle_event(branch, seq, kind, payload)
            self._programs.pop(number)
            return
        if log is not None:
            with self._lock:
                payload = log.pass_on(branch, seq, kind, payload)
        if payload is not None:  # else it was seen before
            program.sink.handle_event(branch, seq, kind, payload)

    def _run_posted(self) -> None:
        while self._posted:
            self._posted.popleft()()

    def _fail(self, error: EngineError) -> None:
        with self._lock:
            if self._error is None:
                self._error = error
            programs = self._programs.take_all()
            calls, self._calls = list(self._calls.values()), {}
            self._outbox.clear()
            self._has_credit.notify_all()
        self._welcomed.set()
        for program in programs:
            # To them its cause is all one.
            program.sink.handle_disconnect(EngineError(str(self._error)))
        for call in calls:
            call.set_exception(EngineError(str(self._error)))

    # --- small things ---------------------------------------------------------------------------

    def _require_open(self) -> None:
        if self._pid != os.getpid():
            raise EngineError("a connection cannot be used after fork(); open one in the child")
        if self._error is not None:
            raise EngineError(str(self._error))

    def _await_welcome(self) -> None:
        self._welcomed.wait()
        if self._error is not None:
            raise self._error

    def _wake(self) -> None:
        self._sleep = _AWAKE  # one wake-up is enough
        with contextlib.suppress(BlockingIOError, OSError):
            self._wake_w.send(b"x")
        self._is_woken = True  # behind the byte: none stays that nobody looks for

    def _drain_wake(self) -> None:
        self._is_woken = False
        with contextlib.suppress(BlockingIOError):
            while self._wake_r.recv(4096):
                pass


# The caller's own fault, by the name of the error's class.
_REFUSALS: dict[str, type[StemmaError]] = {
    error.__name__: error for error in (InvalidRequest, ModelLoadError, ModelNotFound)
}


class _Call(Future[Any]):
    """One `call` waiting for its reply; never cancelled, as the runtime would not learn of it."""

    def __init__(self, call_id: int, method: str) -> None:
        super().__init__()
        self.id = call_id
        self.method = method
        self.set_running_or_notify_cancel()

    def overdue(self, timeout_s: float | None) -> EngineError:
        """The error for a reply that did not come in time."""
        return EngineError(f"{self.method}: no reply within {timeout_s:g} s")

    def take(self, reply: dict[str, Any]) -> None:
        """Complete it with its reply."""
        if reply.get("ok"):
            self.set_result(reply.get("result"))
            return
        refusal = _REFUSALS.get(str(reply.get("kind")))
        if refusal is not None:
            self.set_exception(refusal(str(reply.get("error"))))
        else:
            self.set_exception(EngineError(f"{self.method}: {reply.get('error')}"))


_open: weakref.WeakSet[Connection] = weakref.WeakSet()


def _close_all() -> None:
    """At the interpreter's end: a runtime that hears nothing lets programs run on for a while."""
    for connection in list(_open):
        if connection._pid == os.getpid():  # else a parent's
            connection.close()


atexit.register(_close_all)
