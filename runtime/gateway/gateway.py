"""The engine's loop: messages in from ZeroMQ, programs advanced, one step, events out.

One ROUTER socket, one thread. A client is identified by its session's token and may reconnect; its
programs are cancelled when it has had no connection for the grace period. A malformed message gets
an error reply and has no other effect; a program's error is an event of that program.
"""

from __future__ import annotations

import logging
import math
import os
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import orjson
import zmq

from ...errors import EngineError, InvalidProgram, InvalidRequest, ProtocolError, StemmaError
from ...frontend.protocol import wire
from ...frontend.protocol.awake_clock import AwakeClock
from ...frontend.protocol.wire import DRAIN_ORDER
from ..engine import LoadedModel
from ..programs.session import ProgramSession
from ..programs.text_threads import TextThreads
from ..tokenizer.chat_template import NO_TEMPLATE_ARGS, TemplateArgs
from .clients import (
    MAX_BEHIND_BYTES,
    Client,
    ClientProgram,
    Clients,
    NoHello,
    tenant_from,
)
from .control import Control
from .listener import Listener, ServerKeys, key_of

log = logging.getLogger(__name__)

MAX_MESSAGES_A_STEP = 1000  # a flood of messages delays a step, but never prevents it
MAX_BYTES_A_STEP = 32 * 1024 * 1024
MAX_OPS_A_MESSAGE = 65_536  # a client's own limit of bytes keeps it below that
IDLE_POLL_MS = 500


class Gateway:
    """Serves one loaded model at `endpoint`; `run` returns after `stop`."""

    def __init__(
        self,
        loaded: LoadedModel,
        endpoints: Sequence[str],
        *,
        context: zmq.Context[zmq.Socket[bytes]] | None = None,
        stop_fd: int | None = None,
        grace_s: float = wire.GRACE_S,
        keys: ServerKeys | None = None,
    ) -> None:
        """`stop_fd`: carries the orders of this process's owner; its end of file (the owner has
        gone) stops the loop. `grace_s`: how long a client may be without a connection before its
        programs are cancelled. `keys`: for the tcp endpoints.

        Raises ProtocolError for an endpoint that cannot be bound.
        """
        self._loaded = loaded
        self._engine = loaded.engine
        self._stop_fd = stop_fd
        self._grace_s = grace_s
        self._clients = Clients(self._engine.hints)
        self._ready: dict[ProgramSession, None] = {}
        self._clock = AwakeClock()
        self._should_stop = False
        self._is_draining = False
        self._texts = TextThreads()
        self._context = replace(loaded.context(), texts=self._texts)
        self._control = Control(loaded, self._clients, self._context, self._texts)
        self._listener = Listener(context or zmq.Context.instance(), endpoints, keys)
        self._router = self._listener.router
        self._poller = zmq.Poller()
        self._poller.register(self._router, zmq.POLLIN)
        engine = self._engine
        beside = (self._texts, engine.grammars, engine.kv_store, self._control.adapter_loader)
        self._beside = [source for source in beside if source is not None]
        for source in self._beside:  # wakes the loop when something beside it is done
            self._poller.register(source, zmq.POLLIN)
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
                now = self._clock.read()
                if time.monotonic() > next_sweep:  # messages sent during a long step have been read
                    self._dismiss_lost_clients(now)
                    self._control.observer.tick()
                    next_sweep = time.monotonic() + 1.0
                self._advance()
                if self._engine.has_work:
                    self._engine.step()
                    self._clock.read_after_step()
                    self._advance()
                self._send_events()
            self._engine.settle()
            self._say_farewell()
        finally:
            self._listener.close()
            self._loaded.tokenizer.close()
            for source in self._beside:
                source.close()

    def _patience_ms(self) -> int:
        """How long to wait for messages: until the engine may have work again."""
        if self._engine.has_work or self._ready:
            return 0
        wake_s = self._engine.next_wake_s
        if wake_s is None:
            return IDLE_POLL_MS
        left_ms = math.ceil(1000 * (wake_s - time.perf_counter()))
        return min(IDLE_POLL_MS, max(0, left_ms))

    # --- in -----------------------------------------------------------------------------------

    def _receive(self, timeout_ms: int) -> None:
        ready = dict(self._poller.poll(timeout_ms))  # by socket, or descriptor
        if self._stop_fd is not None and self._stop_fd in ready:
            self._obey(os.read(self._stop_fd, 4096))
        for source in self._beside:
            if source.fileno() in ready:
                source.collect()
        if self._router not in ready:
            return
        num_bytes = 0
        for _ in range(MAX_MESSAGES_A_STEP):
            try:
                sender, *frames = self._router.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                return
            parts = [frame.bytes for frame in frames]
            self._handle(sender, parts)
            num_bytes += sum(len(part) for part in parts)
            if num_bytes > MAX_BYTES_A_STEP:
                return

    def _obey(self, orders: bytes) -> None:
        """Follow the owner's orders; empty ones mean that it has gone."""
        if not orders:
            self._should_stop = True
        elif DRAIN_ORDER in orders:
            self._is_draining = True

    def _handle(self, sender: zmq.Frame, parts: list[bytes]) -> None:
        """`sender`: the frame that names its connection."""
        identity, now = sender.bytes, self._clock.read()
        try:
            message = wire.decode(parts, wire.CLIENT_OPS)
            if message.op == "hello":
                client = self._clients.greet(identity, message.header, now, key_of(sender))
                self._send(identity, self._welcome(client))
                return
            client = self._clients.of(identity, message.op)
            client.last_heard_s = now
            if client.link.take(message):
                self._dispatch(client, message)
        except ProtocolError as error:
            self._complain(identity, error)

    def _complain(self, identity: bytes, error: ProtocolError) -> None:
        said: dict[str, Any] = {"message": str(error), "supported": [wire.VERSION]}
        if isinstance(error, NoHello):
            said["before_hello"] = True
        self._send(identity, wire.encode("error", **said))

    def _dispatch(self, client: Client, message: wire.Message) -> None:
        header = message.header
        if message.op == "ops":
            self._take_ops(client, message)
        elif message.op == "intern":
            client.texts.change(header)
        elif message.op == "ping":
            self._send(client.identity, wire.encode("pong", ack=client.link.take_ack()))
        elif message.op == "call":
            self._control.answer(client, message)
        elif message.op == "cancel":
            self._take_cancel(client, _int(header, "program"), keeps=header.get("keep") is True)
        elif message.op == "bye":
            self._dismiss(client)

    def _take_cancel(self, client: Client, number: int, *, keeps: bool) -> None:
        """With `keeps` its gens end with their output so far, which the client receives."""
        program = client.programs.get(number)
        if program is None:
            return
        if keeps:
            program.session.end_gens()
            self._ready[program.session] = None
        else:
            self._cancel(program.session)
            self._emit(client, number, 0, 0, wire.DONE, program.session.used)

    def _welcome(self, client: Client) -> list[bytes]:
        return wire.encode(
            "welcome",
            session=client.session,
            ack=client.link.take_ack(),
            credit_bytes=wire.CLIENT_CREDIT_BYTES,
            grace_s=self._grace_s,
            heartbeat_s=wire.HEARTBEAT_S,
            max_frame_bytes=wire.MAX_FRAME_BYTES,
            **self._loaded.describe(),
        )

    def _take_ops(self, client: Client, message: wire.Message) -> None:
        items = message.header.get("programs")
        if not isinstance(items, list) or not all(isinstance(item, dict) for item in items):
            raise ProtocolError("ops: programs must be a list of objects")
        num_ops = sum(len(ops) for item in items if isinstance(ops := item.get("ops"), list))
        if num_ops > MAX_OPS_A_MESSAGE:
            raise ProtocolError(f"a message with {num_ops} ops; at most {MAX_OPS_A_MESSAGE}")
        num_bytes = message.num_bytes if len(items) == 1 else None
        for item in items:
            try:
                self._take_program(client, item, num_bytes)
            except ProtocolError as error:  # concerns only this program
                self._complain(client.identity, error)

    def _take_program(self, client: Client, item: dict[str, Any], num_bytes: int | None) -> None:
        number = _int(item, "program")
        program = client.programs.get(number)
        if program is None:
            if "create" not in item:
                return  # it was cancelled, or has failed as a whole, while these were on the way
            create = item["create"] if isinstance(item["create"], dict) else {}
            program = ClientProgram(self._open(client, number, create))
            try:
                self._require_open()
                client.require_room()
                program.session.set_template_args(_told(create))
                program.session.use_adapter(_optional_str(create, "lora_path"))
            except (EngineError, InvalidRequest) as error:
                self._reject(program.session, error)
                return
            client.programs[number] = program
        try:
            ops = client.read_ops(program, item.get("ops", []), num_bytes)
            program.session.receive(ops, end=bool(item.get("end")))
        except InvalidProgram as error:
            self._reject(program.session, error)
            return
        self._ready[program.session] = None

    def _require_open(self) -> None:
        if self._is_draining:
            raise EngineError("the runtime is being stopped: it takes no new programs")

    def _open(self, client: Client, program: int, values: dict[str, Any]) -> ProgramSession:
        tenant = tenant_from(values)
        return ProgramSession(
            self._context,
            partial(self._emit, client, program),
            self._mark_ready,
            seed=_int(values, "seed", 0),
            instance=_int(values, "instance", 0),
            is_streaming=bool(values.get("stream")),
            tenant=tenant or client.tenant,
            label=f"{client.number}/{program}",
            stated=client.stated,
            response_id=_optional_str(values, "response_id"),
            has_token_ids=bool(values.get("token_ids")),
            namespace=_optional_str(values, "namespace") or "",
            account=client.account(tenant),
            history=_optional_str(values, "history") or "",
            op_key=_optional_str(values, "op_key"),
        )

    def _reject(self, session: ProgramSession, error: StemmaError) -> None:
        """Ends a program whose ops cannot be read at all."""
        self._ready.pop(session, None)
        session.reject(error)

    # --- programs -------------------------------------------------------------------------------

    def _mark_ready(self, session: ProgramSession) -> None:
        self._ready[session] = None

    def _advance(self) -> None:
        """A turn of each program that can go on, first come, first served."""
        ready, self._ready = self._ready, {}
        for session in ready:
            try:
                session.advance()
            except Exception as error:  # a bug of the runtime must end one program, not the server
                log.exception("a program failed")
                self._reject(session, EngineError(f"{type(error).__name__}: {error}"))

    def _emit(
        self, client: Client, program: int, branch: int, seq: int, kind: str, payload: Any
    ) -> None:
        client.events.append(program, branch, seq, kind, payload)
        if kind == wire.DONE:
            client.remove(program)

    def _cancel(self, session: ProgramSession) -> None:
        self._ready.pop(session, None)
        session.cancel()

    # --- out ------------------------------------------------------------------------------------

    def _send_events(self) -> None:
        for client in list(self._clients.by_session.values()):
            client.fill_link()
            self._send_link(client)
            if client.behind_bytes > MAX_BEHIND_BYTES:
                reason = (
                    f"this client has not taken its results: more than {MAX_BEHIND_BYTES} bytes "
                    "waited for it, so its programs were cancelled"
                )
                self._dismiss(client, reason)
                self._complain(client.identity, ProtocolError(reason))

    def _send_link(self, client: Client) -> None:
        """Send the link's messages, as many as the connection takes; the rest later, or on the
        next connection."""
        link = client.link
        while (parts := link.unsent()) is not None:
            if not self._send(client.identity, parts):
                return
            link.sent()
        if link.owes_ack:
            self._send(client.identity, wire.encode("credit", ack=link.take_ack()))

    def _send(self, identity: bytes, parts: list[bytes]) -> bool:
        try:
            self._router.send_multipart([identity, *parts], zmq.NOBLOCK, copy=False)
        except zmq.ZMQError as error:  # the connection is gone, or its queue is full
            log.debug("client %s cannot be reached: %s", identity.hex(), error)
            return False
        return True

    # --- clients that end -------------------------------------------------------------------------

    def _dismiss(self, client: Client, reason: str | None = None) -> None:
        """End a session and its programs."""
        for program in client.programs.values():
            self._cancel(program.session)
        self._clients.remove(client, reason)
        log.info("client %s is gone", client.identity.hex())

    def _say_farewell(self) -> None:
        """Report the stop to all clients, so that none waits for a timeout."""
        self._send_events()
        for client in self._clients.by_session.values():
            self._complain(client.identity, ProtocolError("the runtime was stopped"))

    def _dismiss_lost_clients(self, now: float) -> None:
        for client in list(self._clients.by_session.values()):
            if now - client.last_heard_s <= self._grace_s:
                continue
            if self._is_connected(client):  # stopped, perhaps, or starved: it may yet go on
                client.last_heard_s = now
            else:
                self._dismiss(client, _LOST)

    def _is_connected(self, client: Client) -> bool:
        try:
            self._router.send_multipart([client.identity, *wire.encode("pong")], zmq.NOBLOCK)
        except zmq.Again:  # its queue is full, so it has one
            return True
        except zmq.ZMQError:
            return False
        return True


_LOST = "this client was without a connection for longer than the grace period, see --grace-s"


def _int(values: dict[str, Any], name: str, default: int | None = None) -> int:
    value = values.get(name, default)
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < 2**63:
        raise ProtocolError(f"{name}={value!r} is not allowed; allowed: an integer in [0, 2**63)")
    return value


def _optional_str(values: dict[str, Any], name: str) -> str | None:
    value = values.get(name)
    if value is not None and not (isinstance(value, str) and len(value) <= 256):
        raise ProtocolError(
            f"{name}={value!r} is not allowed; allowed: a string of at most 256 characters"
        )
    return value


def _told(values: dict[str, Any]) -> TemplateArgs:
    """The chat template's arguments, from JSON texts. Raises InvalidProgram."""
    tools = _json(values, "tools", list)
    variables = _json(values, "template_kwargs", dict)
    if not tools and not variables:
        return NO_TEMPLATE_ARGS
    try:
        return TemplateArgs.of(tools or (), variables or {})
    except RecursionError as error:
        raise InvalidProgram("tools, or template_kwargs, too deep in each other") from error


def _json(values: dict[str, Any], name: str, kind: type) -> Any:
    """A field's value from its JSON text; None if it is absent. Raises InvalidProgram."""
    text = values.get(name)
    if text is None:
        return None
    try:
        value = orjson.loads(text if isinstance(text, str) else b"")
    except orjson.JSONDecodeError as error:
        raise InvalidProgram(f"{name}: not JSON: {error}", name) from error
    if not isinstance(value, kind):
        raise InvalidProgram(f"{name}: no {kind.__name__}", name)
    return value
