"""The engine's loop: messages in from ZeroMQ, programs advanced, one step, events out.

One ROUTER socket, one thread. A client is known by the identity that its DEALER socket got; all of
its programs are cancelled when it has been silent too long. A malformed message gets an error reply
and nothing else happens; a program's error is an event of that program.
"""

from __future__ import annotations

import logging
import math
import secrets
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import orjson
import zmq

from ...errors import EngineError, InvalidProgram, ProtocolError, StemmaError
from ...frontend import wire
from ...frontend.ir import op_from_wire
from ..engine import LoadedModel
from ..programs.session import ProgramSession
from ..programs.world import Replays, World

log = logging.getLogger(__name__)

MAX_EVENTS_A_MESSAGE = 2048
MAX_MESSAGES_A_STEP = 1000  # a flood of messages delays a step, it never stops it
IDLE_POLL_MS = 500


@dataclass(slots=True)
class _Client:
    """A connected client: its programs and the events that wait for it."""

    identity: bytes
    session: str
    last_heard_s: float
    is_lost: bool = False  # a message to it could not be sent: it must not go on without
    programs: dict[int, ProgramSession] = field(default_factory=dict)
    events: list[list[Any]] = field(default_factory=list)


class Gateway:
    """Serves one loaded model at `endpoint`; `run` returns when `stop` says so."""

    def __init__(
        self,
        loaded: LoadedModel,
        endpoints: Sequence[str],
        *,
        context: zmq.Context[zmq.Socket[bytes]] | None = None,
        stop_fd: int | None = None,
        peer_timeout_s: float = wire.PEER_TIMEOUT_S,
    ) -> None:
        """`stop_fd`: a descriptor whose end of file stops the loop (the parent has gone).

        Raises ProtocolError for an endpoint that cannot be bound.
        """
        self._loaded = loaded
        self._engine = loaded.engine
        self._stop_fd = stop_fd
        self._peer_timeout_s = peer_timeout_s
        self._clients: dict[bytes, _Client] = {}
        self._ready: dict[ProgramSession, None] = {}
        self._should_stop = False
        self._calls: dict[str, Callable[..., Any]] = {
            "info": self._info,
            "tree": self._tree,
            "flush_cache": self._engine.flush_cache,
            "tokenize": lambda text: loaded.tokenizer.encode(str(text)),
            "detokenize": lambda ids: loaded.tokenizer.decode([int(i) for i in ids]),
        }
        self._world = World(
            tokenizer=loaded.tokenizer,
            vocab_size=loaded.model_config.vocab_size,
            template=loaded.template,
            defaults=loaded.defaults(),
            queue=self._engine,
            next_request_id=self._engine.next_request_id,
            replays=Replays(),
            grammars=self._engine.grammars,
            jump_forward=not loaded.config.disable_jump_forward,
        )
        self._router = _bind(context or zmq.Context.instance(), endpoints)
        self._poller = zmq.Poller()
        self._poller.register(self._router, zmq.POLLIN)
        if self._engine.grammars is not None:  # wakes the loop when one is there
            self._poller.register(self._engine.grammars, zmq.POLLIN)
        if self._engine.kv_store is not None:  # wakes it when blocks have been fetched
            self._poller.register(self._engine.kv_store, zmq.POLLIN)
        if stop_fd is not None:
            self._poller.register(stop_fd, zmq.POLLIN)

    def stop(self) -> None:
        """Ask the loop to end (from a signal handler or another thread)."""
        self._should_stop = True

    def run(self) -> None:
        """Serve until stopped."""
        next_sweep = time.monotonic() + 1.0
        if self._engine.grammars is not None:
            self._engine.grammars.start()
        try:
            while not self._should_stop:
                self._receive(self._patience_ms())
                if time.monotonic() > next_sweep:  # all that was sent during a long step is read
                    self._drop_silent_clients()
                    next_sweep = time.monotonic() + 1.0
                self._advance()
                if self._engine.has_work:
                    self._engine.step()
                    self._advance()
                self._send_events()
        finally:
            self._router.close(linger=200)
            if self._engine.grammars is not None:
                self._engine.grammars.close()
            if self._engine.kv_store is not None:
                self._engine.kv_store.close()

    def _patience_ms(self) -> int:
        """How long to wait for messages: until the engine may have work again."""
        if self._engine.has_work:
            return 0
        wake_s = self._engine.next_wake_s
        if wake_s is None:
            return IDLE_POLL_MS
        left_ms = math.ceil(1000 * (wake_s - time.perf_counter()))
        return min(IDLE_POLL_MS, max(0, left_ms))

    # --- in -----------------------------------------------------------------------------------

    def _receive(self, timeout_ms: int) -> None:
        ready = dict(self._poller.poll(timeout_ms))
        if self._stop_fd is not None and self._stop_fd in ready:
            self._should_stop = True
        if self._engine.kv_store is not None and self._engine.kv_store in ready:
            self._engine.kv_store.collect()
        if self._router not in ready:
            return
        for _ in range(MAX_MESSAGES_A_STEP):
            try:
                identity, *parts = self._router.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            self._handle(identity, parts)

    def _handle(self, identity: bytes, parts: list[bytes]) -> None:
        try:
            message = wire.decode(parts, wire.CLIENT_OPS)
            client = self._client(identity, message)
            client.last_heard_s = time.monotonic()
            self._dispatch(client, message)
        except ProtocolError as error:
            self._send(identity, wire.encode("error", message=str(error), supported=[wire.VERSION]))

    def _client(self, identity: bytes, message: wire.Message) -> _Client:
        if message.op == "hello" or identity not in self._clients:
            if message.op != "hello":
                raise ProtocolError(f"{message.op} before hello (or after too long a silence)")
            self._clients.setdefault(
                identity, _Client(identity, secrets.token_hex(16), time.monotonic())
            )
        return self._clients[identity]

    def _dispatch(self, client: _Client, message: wire.Message) -> None:
        header = message.header
        if message.op == "ops":
            self._take_ops(client, header)
        elif message.op == "ping":
            self._send(client.identity, wire.encode("pong"))
        elif message.op == "call":
            self._answer(client, header)
        elif message.op == "cancel":
            session = client.programs.pop(_int(header, "program"), None)
            if session is not None:
                self._cancel(session)
        elif message.op == "hello":
            self._send(client.identity, self._welcome(client))

    def _welcome(self, client: _Client) -> list[bytes]:
        return wire.encode(
            "welcome",
            session=client.session,
            heartbeat_s=wire.HEARTBEAT_S,
            max_frame_bytes=wire.MAX_FRAME_BYTES,
            **self._loaded.describe(),
        )

    def _take_ops(self, client: _Client, header: dict[str, Any]) -> None:
        program = _int(header, "program")
        session = client.programs.get(program)
        if session is None:
            if "create" not in header:
                return  # it was cancelled, or has failed as a whole, while these were under way
            session = client.programs[program] = self._open(client, program, header["create"])
        try:
            items = header.get("ops", [])
            if not isinstance(items, list):
                raise InvalidProgram.of("ops", items, "a list")
            session.receive([op_from_wire(item) for item in items], end=bool(header.get("end")))
        except InvalidProgram as error:
            self._reject(session, error)
            return
        self._ready[session] = None

    def _open(self, client: _Client, program: int, create: object) -> ProgramSession:
        values = create if isinstance(create, dict) else {}
        session = ProgramSession(
            self._world,
            partial(self._emit, client, program),
            self._mark_ready,
            seed=_int(values, "seed", 0),
            instance=_int(values, "instance", 0),
            is_streaming=bool(values.get("stream")),
            client=client.session,
            tools=_tools(values.get("tools")),
        )
        return session

    def _reject(self, session: ProgramSession, error: StemmaError) -> None:
        """Ops that cannot be read at all: the program ends here."""
        self._ready.pop(session, None)
        session.reject(error)

    def _answer(self, client: _Client, header: dict[str, Any]) -> None:
        method, args = header.get("method"), header.get("args")
        try:
            if method not in self._calls:
                raise InvalidProgram.of("method", method, f"one of {sorted(self._calls)}")
            result = self._calls[method](**(args if isinstance(args, dict) else {}))
            reply = wire.encode("reply", id=header.get("id"), ok=True, result=result)
        except Exception as error:  # the arguments are a client's: whatever they cause, it is told
            reply = wire.encode("reply", id=header.get("id"), ok=False, error=str(error))
        self._send(client.identity, reply)

    def _info(self) -> dict[str, Any]:
        return {
            **self._loaded.describe(),
            **self._engine.describe(),
            "num_clients": len(self._clients),
            "num_programs": sum(len(client.programs) for client in self._clients.values()),
            "peak_rss_bytes": _peak_rss_bytes(),
        }

    def _tree(self, max_token_ids: int = 48) -> dict[str, Any]:
        """The radix tree with the text of each edge's first tokens."""
        decode = self._loaded.tokenizer.decode
        rows: list[dict[str, Any]] = []
        for node in self._engine.scheduler.kv_cache.snapshot(int(max_token_ids)):
            rows.append({**node, "text": decode(node["token_ids"], skip_special=False)})
        return {"nodes": rows, **self._engine.describe()}

    # --- programs -------------------------------------------------------------------------------

    def _mark_ready(self, session: ProgramSession) -> None:
        self._ready[session] = None

    def _advance(self) -> None:
        while self._ready:
            session = next(iter(self._ready))  # first come, first served
            del self._ready[session]
            try:
                session.advance()
            except Exception as error:  # a fault of ours must end one program, not the server
                log.exception("a program failed")
                self._reject(session, EngineError(f"{type(error).__name__}: {error}"))

    def _emit(
        self, client: _Client, program: int, branch: int, seq: int, kind: str, payload: Any
    ) -> None:
        client.events.append([program, branch, seq, kind, payload])
        if kind == wire.DONE:
            client.programs.pop(program, None)

    def _cancel(self, session: ProgramSession) -> None:
        self._ready.pop(session, None)
        session.cancel()

    # --- out ------------------------------------------------------------------------------------

    def _send_events(self) -> None:
        for client in self._clients.values():
            while client.events:
                batch = client.events[:MAX_EVENTS_A_MESSAGE]
                del client.events[:MAX_EVENTS_A_MESSAGE]
                self._send_batch(client, batch)

    def _send_batch(self, client: _Client, events: list[list[Any]]) -> None:
        """In as many messages as the size of a frame demands."""
        try:
            self._send(client.identity, wire.encode("events", events=events))
        except ProtocolError as error:
            if len(events) == 1:
                program, branch, seq = events[0][:3]
                payload = {"message": str(error), "kind": "ProtocolError", "op": "result"}
                events = [[program, branch, seq, wire.FAILED, payload]]
                self._send(client.identity, wire.encode("events", events=events))
                return
            middle = len(events) // 2
            self._send_batch(client, events[:middle])
            self._send_batch(client, events[middle:])

    def _send(self, identity: bytes, parts: list[bytes]) -> None:
        try:
            self._router.send_multipart([identity, *parts], zmq.NOBLOCK, copy=False)
        except zmq.ZMQError as error:  # gone, or its queue is full
            log.warning("client %s dropped: %s", identity.hex(), error)
            if identity in self._clients:
                self._clients[identity].is_lost = True

    def _drop_silent_clients(self) -> None:
        now = time.monotonic()
        for identity, client in list(self._clients.items()):
            if client.is_lost or now - client.last_heard_s > self._peer_timeout_s:
                for session in client.programs.values():
                    self._cancel(session)
                del self._clients[identity]
                log.info("client %s is gone", identity.hex())


def _bind(context: zmq.Context[zmq.Socket[bytes]], endpoints: Sequence[str]) -> zmq.Socket[bytes]:
    router = context.socket(zmq.ROUTER)
    router.setsockopt(zmq.ROUTER_MANDATORY, 1)
    router.setsockopt(zmq.MAXMSGSIZE, wire.MAX_FRAME_BYTES)
    router.setsockopt(zmq.SNDHWM, 100_000)
    router.setsockopt(zmq.RCVHWM, 100_000)
    for endpoint in endpoints:
        try:
            router.bind(endpoint)
        except zmq.ZMQError as error:
            router.close(linger=0)
            raise ProtocolError(f"cannot listen at {endpoint}: {error}") from error
    return router


def _int(values: dict[str, Any], name: str, default: int | None = None) -> int:
    value = values.get(name, default)
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < 2**63:
        raise ProtocolError(f"{name}={value!r} is not allowed: an integer in [0, 2**63)")
    return value


def _tools(value: object) -> tuple[Any, ...]:
    """From JSON text. Raises ProtocolError."""
    if value is None:
        return ()
    try:
        tools = orjson.loads(value if isinstance(value, str) else b"")
    except orjson.JSONDecodeError as error:
        raise ProtocolError(f"tools is not JSON: {error}") from error
    if not isinstance(tools, list):
        raise ProtocolError("tools is not a list")
    return tuple(tools)


def _peak_rss_bytes() -> int:
    import resource

    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
