"""A client's connection to a runtime: one DEALER socket, one I/O thread, many programs.

Ops are collected per program and leave together: when the program first has to wait, when it ends,
or `FLUSH_AFTER_S` after the first of them, whichever comes first. So everything up to a program's
first wait normally travels as one message (its capture). Events come back on the I/O thread, which
hands each to its program; programs wait on conditions of their own. Nothing here knows of models.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

import zmq

from ..errors import EngineError, ProtocolError
from . import wire
from .channel import EventSink
from .ir import Op

FLUSH_AFTER_S = 0.002
FLUSH_AFTER_BYTES = 1024 * 1024  # guess: enough for one message to be worth it
CALL_TIMEOUT_S = 60.0
CONNECT_TIMEOUT_S = 60.0
HEARTBEAT_POLL_S = wire.HEARTBEAT_S / 4


class _Outbox:
    """Ops of one program that have not been sent yet."""

    __slots__ = ("create", "first", "num_bytes", "ops")

    def __init__(self, create: dict[str, object] | None) -> None:
        self.create = create
        self.ops: list[bytes] = []  # encoded
        self.num_bytes = 0
        self.first = 0


class Connection:
    """A connection to the runtime at `endpoint`; thread-safe; lives until `close`.

    Raises EngineError if nothing answers within `timeout_s` or the runtime speaks another version.
    """

    def __init__(
        self,
        endpoint: str,
        *,
        context: zmq.Context[zmq.Socket[bytes]] | None = None,
        timeout_s: float = CONNECT_TIMEOUT_S,
        is_alive: Callable[[], str | None] | None = None,
    ) -> None:
        """`is_alive` returns why the runtime's process is dead, or None (asked while waiting)."""
        self.endpoint = endpoint
        self._is_alive = is_alive or (lambda: None)
        self._lock = threading.Lock()
        self._programs: dict[int, EventSink] = {}
        self._outboxes: dict[int, _Outbox] = {}
        self._dirty: dict[int, _Outbox] = {}  # those of _outboxes that hold ops
        self._calls: dict[int, _Call] = {}
        self._ready: deque[list[bytes]] = deque()
        self._ids = itertools.count(1)
        self._error: EngineError | None = None
        self._closing = False
        self._wake_r, self._wake_w = socket.socketpair()
        self._wake_r.setblocking(False)
        self._wake_w.setblocking(False)
        self._context = context or zmq.Context.instance()
        self._welcome: dict[str, Any] | None = None
        self._welcomed = threading.Event()
        self._pid = os.getpid()
        self._thread = threading.Thread(target=self._run, name="stemma-client", daemon=True)
        self._thread.start()
        self._await_welcome(timeout_s)

    # --- for programs -------------------------------------------------------------------------

    @property
    def info(self) -> dict[str, Any]:
        """What the runtime said of itself when it welcomed this client."""
        assert self._welcome is not None
        return self._welcome

    @property
    def error(self) -> EngineError | None:
        """Why the connection is dead, or None."""
        return self._error

    def open_program(self, sink: EventSink, create: dict[str, object]) -> int:
        """Register a program; `create` (seed, instance, stream) travels with its first ops."""
        with self._lock:
            self._require_open()
            program = next(self._ids)
            self._programs[program] = sink
            self._outboxes[program] = _Outbox(create)
        return program

    def send_op(self, program: int, op: Op) -> None:
        """Queue an op; it leaves at the next flush, at the latest after FLUSH_AFTER_S.

        Raises InvalidProgram, and has then queued nothing, if it cannot be sent.
        """
        encoded = wire.encode_op(op.to_wire())
        with self._lock:
            self._require_open()
            outbox = self._outboxes[program]
            if outbox.ops and outbox.num_bytes + len(encoded) > FLUSH_AFTER_BYTES:
                self._ready.append(self._take(program, outbox))
            outbox.ops.append(encoded)
            outbox.num_bytes += len(encoded)
            self._dirty[program] = outbox
            is_first = len(outbox.ops) == 1
        if is_first:
            self._wake()

    def flush(self, program: int, *, end: bool = False) -> None:
        """Send what is queued; `end` says that no op of this program follows."""
        with self._lock:
            outbox = self._outboxes.get(program)
            if outbox is None or (self._error and not self._closing):
                return
            if outbox.ops or end:
                self._ready.append(self._take(program, outbox, end=end))
            if end:
                del self._outboxes[program]
        self._wake()

    def close_program(self, program: int) -> None:
        """Forget a program; if it has not ended, the runtime cancels what is left of it."""
        with self._lock:
            known = self._programs.pop(program, None) is not None
            self._outboxes.pop(program, None)
            self._dirty.pop(program, None)
            if known and not self._error:
                self._ready.append(wire.encode("cancel", program=program))
        if known:
            self._wake()

    def call(self, method: str, timeout_s: float = CALL_TIMEOUT_S, **args: object) -> Any:
        """Ask the runtime (`info`, `tree`, `flush_cache`, ...) and wait for its answer."""
        pending = _Call()
        with self._lock:
            self._require_open()
            call_id = next(self._ids)
            self._calls[call_id] = pending
            self._ready.append(wire.encode("call", id=call_id, method=method, args=args))
        self._wake()
        try:
            return pending.wait(method, timeout_s)
        finally:
            with self._lock:
                self._calls.pop(call_id, None)

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

    # --- the I/O thread -----------------------------------------------------------------------

    def _run(self) -> None:
        dealer = self._context.socket(zmq.DEALER)
        dealer.setsockopt(zmq.LINGER, 500)
        dealer.setsockopt(zmq.SNDHWM, 0)
        dealer.setsockopt(zmq.RCVHWM, 0)
        try:
            dealer.connect(self.endpoint)
            dealer.send_multipart(wire.encode("hello", client="stemma"))
            self._loop(dealer)
        except Exception as error:  # the thread must never die without telling its programs
            self._fail(EngineError(f"connection to {self.endpoint} failed: {error}"))
        finally:
            dealer.close()
            self._wake_r.close()

    def _loop(self, dealer: zmq.Socket[bytes]) -> None:
        poller = zmq.Poller()
        poller.register(dealer, zmq.POLLIN)
        poller.register(self._wake_r, zmq.POLLIN)
        last_sent = last_heard = time.monotonic()
        flush_at: float | None = None
        while not self._closing and self._error is None:
            wait_s = HEARTBEAT_POLL_S if flush_at is None else FLUSH_AFTER_S
            ready = dict(poller.poll(int(wait_s * 1000)))
            now = time.monotonic()
            if self._wake_r.fileno() in ready:
                self._drain_wake()
            if dealer in ready:
                last_heard = now
                self._receive(dealer)
            flush_at = self._flush_overdue(flush_at, now)
            if self._send_ready(dealer):
                last_sent = now
            elif now - last_sent > wire.HEARTBEAT_S:
                dealer.send_multipart(wire.encode("ping"))
                last_sent = now
            self._check_peer(now - last_heard)
        self._send_ready(dealer)

    def _flush_overdue(self, flush_at: float | None, now: float) -> float | None:
        """Flush all outboxes once the oldest op has waited long enough; when to look again."""
        with self._lock:
            if not self._dirty:
                return None
            if flush_at is None:
                return now + FLUSH_AFTER_S
            if now < flush_at:
                return flush_at
            for program, outbox in list(self._dirty.items()):
                self._ready.append(self._take(program, outbox))
        return None

    def _take(self, program: int, outbox: _Outbox, *, end: bool = False) -> list[bytes]:
        ops = [wire.embedded(op) for op in outbox.ops]
        header: dict[str, Any] = {"program": program, "ops": ops, "first": outbox.first}
        if outbox.create is not None:
            header["create"] = outbox.create
        if end:
            header["end"] = True
        self._dirty.pop(program, None)
        outbox.create = None
        outbox.first += len(ops)
        outbox.ops, outbox.num_bytes = [], 0
        return wire.encode("ops", **header)

    def _send_ready(self, dealer: zmq.Socket[bytes]) -> bool:
        sent = False
        while self._ready:
            dealer.send_multipart(self._ready.popleft(), copy=False)
            sent = True
        return sent

    def _receive(self, dealer: zmq.Socket[bytes]) -> None:
        while True:
            try:
                parts = dealer.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            message = wire.decode(parts, wire.RUNTIME_OPS)
            self._dispatch(message)

    def _dispatch(self, message: wire.Message) -> None:
        header = message.header
        if message.op == "events":
            for program, branch, seq, kind, payload in header["events"]:
                sink = self._programs.get(program)
                if sink is not None:
                    sink.handle_event(branch, seq, kind, payload)
                if kind == wire.DONE:
                    self._programs.pop(program, None)
        elif message.op == "reply":
            call = self._calls.get(header["id"])
            if call is not None:
                call.set(header)
        elif message.op == "welcome":
            self._welcome = header
            self._welcomed.set()
        elif message.op == "error":
            raise ProtocolError(str(header.get("message")))

    def _check_peer(self, silent_s: float) -> None:
        reason = self._is_alive()
        if reason is None and self._welcome is not None and silent_s > wire.RUNTIME_TIMEOUT_S:
            reason = f"the runtime has been silent for {silent_s:.0f} s"
        if reason is not None:
            self._fail(EngineError(reason))

    def _fail(self, error: EngineError) -> None:
        with self._lock:
            if self._error is None:
                self._error = error
            programs, self._programs = list(self._programs.values()), {}
            calls, self._calls = list(self._calls.values()), {}
            self._outboxes.clear()
            self._dirty.clear()
        self._welcomed.set()
        for sink in programs:
            sink.handle_disconnect(self._error)
        for call in calls:
            call.fail(self._error)

    # --- small things ---------------------------------------------------------------------------

    def _require_open(self) -> None:
        if self._pid != os.getpid():
            raise EngineError("a connection cannot be used after fork(); open one in the child")
        if self._error is not None:
            raise EngineError(str(self._error))

    def _await_welcome(self, timeout_s: float) -> None:
        if not self._welcomed.wait(timeout_s):
            self.close()
            raise EngineError(f"no runtime answered at {self.endpoint} within {timeout_s:g} s")
        if self._error is not None:
            raise EngineError(str(self._error))

    def _wake(self) -> None:
        with contextlib.suppress(BlockingIOError, OSError):
            self._wake_w.send(b"x")

    def _drain_wake(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while self._wake_r.recv(4096):
                pass


class _Call:
    """One `call` waiting for its reply."""

    def __init__(self) -> None:
        self._done = threading.Event()
        self._reply: dict[str, Any] = {}
        self._error: EngineError | None = None

    def set(self, reply: dict[str, Any]) -> None:
        self._reply = reply
        self._done.set()

    def fail(self, error: EngineError) -> None:
        self._error = error
        self._done.set()

    def wait(self, method: str, timeout_s: float) -> Any:
        if not self._done.wait(timeout_s):
            raise EngineError(f"{method}: no reply within {timeout_s:g} s")
        if self._error is not None:
            raise EngineError(str(self._error))
        if not self._reply.get("ok"):
            raise EngineError(f"{method}: {self._reply.get('error')}")
        return self._reply.get("result")
