"""The engine's loop: messages in from ZeroMQ, programs advanced, one step, events out.

One thread. `sessions/` has the socket and the clients; here their messages become programs. A
program's error is an event of that program.
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

import zmq

from ...errors import EngineError, InvalidProgram, InvalidRequest, ProtocolError, StemmaError
from ...frontend.protocol import wire
from ...frontend.protocol.ir import Fork, Join, Op, op_from_wire
from ...frontend.protocol.wire import DRAIN_ORDER
from ..encoder_engine import Loaded
from ..programs.kept import given_of
from ..programs.session import ProgramSession
from ..programs.text_threads import TextThreads
from ..sessions.clients import tenant_from
from ..sessions.fields import integer, json_field, optional_text, program_items
from ..sessions.host import SessionHost
from ..sessions.listener import ServerKeys
from ..tokenizer.chat_template import NO_TEMPLATE_ARGS, TemplateArgs
from .ahead import AheadPrefills
from .clients import EngineClient, RunningProgram
from .control import Control
from .prefills import Prefills
from .ready_programs import ReadyPrograms

log = logging.getLogger(__name__)

MAX_BRANCHES = 65_536  # of a program
IDLE_POLL_MS = 500
ADVANCE_S = 0.05  # of programs' turns between two steps; a text of a few words takes 0.2 ms of it


class Gateway:
    """Serves one loaded model at `endpoint`; `run` returns after `stop`."""

    def __init__(
        self,
        loaded: Loaded,
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
        self._ready = ReadyPrograms()
        self._should_stop = False
        self._is_draining = False
        self._texts = TextThreads()
        self._ahead = None if loaded.does_nothing_ahead else AheadPrefills(loaded.engine)
        self._context = replace(loaded.context(), texts=self._texts, prefills=self._ahead)
        self._host = SessionHost(
            self,
            partial(EngineClient, hints=self._engine.hints),
            endpoints,
            context=context,
            grace_s=grace_s,
            keys=keys,
        )
        self._control = Control(loaded, self._host.clients, self._context, self._texts)
        self._poller = zmq.Poller()
        self._poller.register(self._host.socket, zmq.POLLIN)
        engine = self._engine
        stores = (engine.kv_store, engine.state_store)
        sender, receiver = loaded.kv_sender, engine.kv_receiver
        prefills = None if sender is None else Prefills(engine, sender)
        self._control.prefills = prefills
        self._control.ahead = self._ahead
        peers = (receiver, prefills, loaded.ranks)
        beside = (self._texts, engine.grammars, *stores, self._control.adapter_loader, *peers)
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
        if self._engine.grammars is not None:
            self._engine.grammars.start()
        try:
            while not self._should_stop:
                self._receive(self._patience_ms())
                self._host.clock.read()
                if self._host.sweep():
                    self._control.observer.tick()
                self._advance()
                if self._ahead is not None and not self._ready:
                    self._ahead.begin()
                if self._engine.has_work:
                    self._engine.step()
                    self._host.clock.read_after_step()
                    self._advance()
                self._control.feed.publish()
                self._host.send_events()
            self._engine.settle()
            self._host.say_farewell()
        finally:
            self._loaded.tokenizer.close()
            for source in self._beside:
                source.close()
            self._host.close()  # last: clients take a connection that breaks for the process's end

    def _patience_ms(self) -> int:
        """How long to wait for messages: until the engine may have work again."""
        if self._engine.has_work or self._ready:
            return 0
        if self._ahead is not None and self._ahead.has_work:
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
        if self._host.socket in ready:
            self._host.receive()

    def _obey(self, orders: bytes) -> None:
        """Follow the owner's orders; empty ones mean that it has gone."""
        if not orders:
            self._should_stop = True
        elif DRAIN_ORDER in orders:
            self._is_draining = True

    def describe(self) -> dict[str, Any]:
        """The model, for welcomes."""
        return self._loaded.describe()

    def take(self, client: EngineClient, message: wire.Message) -> None:
        """A client's message. Raises ProtocolError."""
        header = message.header
        if message.op == "ops":
            self._take_ops(client, message)
        elif message.op == "call":
            self._control.answer(client, message)
        elif message.op == "cancel":
            self._take_cancel(client, header)

    def _take_cancel(self, client: EngineClient, header: dict[str, Any]) -> None:
        """With `keep` its gens end with their output so far, which the client receives; with
        `branch` only that one is stopped."""
        number = integer(header, "program")
        program = client.programs.get(number)
        if program is None:
            return
        if "branch" in header:
            program.session.stop(integer(header, "branch"))
            self._ready.add(program.session)
        elif header.get("keep") is True:
            program.session.end_gens()
            self._ready.add(program.session)
        else:
            self._cancel(program.session)
            self._emit(client, number, 0, 0, wire.DONE, program.session.used)

    def _take_ops(self, client: EngineClient, message: wire.Message) -> None:
        items = program_items(message.header)
        num_bytes = message.num_bytes if len(items) == 1 else None
        for item in items:
            try:
                self._take_program(client, item, num_bytes)
            except ProtocolError as error:  # concerns only this program
                self._host.complain(client, error)

    def _take_program(
        self, client: EngineClient, item: dict[str, Any], num_bytes: int | None
    ) -> None:
        number = integer(item, "program")
        program = client.programs.get(number)
        if program is None:
            if "create" not in item:
                return  # it was cancelled, or has failed as a whole, while these were on the way
            create = item["create"] if isinstance(item["create"], dict) else {}
            try:
                program = RunningProgram(self._open(client, number, create))
            except ProtocolError as error:  # concerns only this program
                client.refuse(number, error)
                return
            try:
                self._require_open()
                client.require_room()
                program.session.set_template_args(_told(create))
                program.session.use_adapter(optional_text(create, "lora_path"))
            except (EngineError, InvalidRequest) as error:
                self._reject(program.session, error)
                return
            client.programs[number] = program
        try:
            ops = client.take_ops(program, item, num_bytes)
            if "given" in item:
                program.session.give(given_of(item["given"], self._context.vocab_size))
            program.session.receive([_read(op) for op in ops], end=bool(item.get("end")))
        except InvalidProgram as error:
            self._reject(program.session, error)
            return
        self._ready.add(program.session)

    def _require_open(self) -> None:
        if self._is_draining:
            raise EngineError("the runtime is being stopped: it takes no new programs")

    def _open(self, client: EngineClient, program: int, values: dict[str, Any]) -> ProgramSession:
        tenant, account = tenant_from(values), optional_text(values, "account")
        return ProgramSession(
            self._context,
            partial(self._emit, client, program),
            self._mark_ready,
            seed=integer(values, "seed", 0),
            instance=integer(values, "instance", 0),
            is_streaming=bool(values.get("stream")),
            tenant=tenant or client.tenant,
            label=f"{client.number}/{program}",
            stated=client.stated,
            response_id=optional_text(values, "response_id"),
            has_token_ids=bool(values.get("token_ids")),
            namespace=optional_text(values, "namespace") or "",
            account=client.account(tenant) if account is None else (client.owner, account),
            history=optional_text(values, "history") or "",
            op_key=optional_text(values, "op_key"),
            is_replayable=values.get("replayable") is True,
        )

    def _reject(self, session: ProgramSession, error: StemmaError) -> None:
        """Ends a program whose ops cannot be read at all."""
        self._ready.discard(session)
        session.reject(error)

    # --- programs -------------------------------------------------------------------------------

    def _mark_ready(self, session: ProgramSession) -> None:
        self._ready.add(session)

    def _advance(self) -> None:
        """A turn of each program that can go on, as far as the time allows: tenants by turns."""
        ready, self._ready = self._ready, ReadyPrograms()
        until_s = time.perf_counter() + ADVANCE_S
        while ready:
            session = ready.take()
            try:
                session.advance()
            except Exception as error:  # a bug of the runtime must end one program, not the server
                log.exception("a program failed")
                self._reject(session, EngineError(f"{type(error).__name__}: {error}"))
            if time.perf_counter() >= until_s:
                break
        for session in self._ready:
            ready.add(session)
        self._ready = ready

    def _emit(
        self, client: EngineClient, program: int, branch: int, seq: int, kind: str, payload: Any
    ) -> None:
        client.events.append(program, branch, seq, kind, payload)
        if kind == wire.DONE:
            client.remove(program)

    def _cancel(self, session: ProgramSession) -> None:
        self._ready.discard(session)
        session.cancel()

    # --- clients that end -------------------------------------------------------------------------

    def forget(self, client: EngineClient) -> None:
        """Cancel a client's programs, and release its leases."""
        for program in client.programs.values():
            self._cancel(program.session)
        client.stated.release_all()
        self._control.feed.forget(client)


def _read(item: object) -> Op:
    """Raises InvalidProgram, also for a branch number out of range."""
    op = op_from_wire(item)
    children = op.children if isinstance(op, Fork | Join) else ()
    largest = max((op.branch, *children))
    if largest >= MAX_BRANCHES:
        raise InvalidProgram.of("branch", largest, f"in [0, {MAX_BRANCHES - 1}]")
    return op


def _told(values: dict[str, Any]) -> TemplateArgs:
    """The chat template's arguments, from JSON texts. Raises InvalidProgram."""
    tools = json_field(values, "tools", list)
    variables = json_field(values, "template_kwargs", dict)
    if not tools and not variables:
        return NO_TEMPLATE_ARGS
    try:
        return TemplateArgs.of(tools or (), variables or {})
    except RecursionError as error:
        raise InvalidProgram("tools, or template_kwargs, too deep in each other") from error
