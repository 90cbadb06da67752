"""The router: one endpoint for clients, many engines behind it, tokens passed on over ZeroMQ.

    clients  -- ops -->  SessionHost | Router | Replica  -- ops -->  engines
             <- events -             |        |          <- events -

It speaks the runtime's protocol to both sides, so neither can tell it from the other. One thread.
The unit of placement is the program: its first ops decide where it runs (`homes.py`), and all of it
runs there, but for branches of wide forks (`parts.py`). Who comes and goes: `membership.py`.
"""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Hashable, Mapping, Sequence
from functools import lru_cache
from typing import Any

import zmq

from ..errors import EngineError, InvalidProgram, ProtocolError
from ..frontend.protocol import wire
from ..frontend.protocol.program_log import CALLS, ProgramLog
from ..runtime.sessions.clients import Client, tenant_from
from ..runtime.sessions.fields import integer, optional_text, program_items
from ..runtime.sessions.host import SessionHost
from ..runtime.sessions.listener import ServerKeys
from .fleet_view import FleetView
from .homes import Homes
from .known_prefixes import KnownPrefixes
from .membership import Membership
from .placement.load import AllHabits, ProgramLoad
from .placement.policies import DEFAULT_PLACEMENT
from .placement.spread import Spread, spread
from .prompt_text import MarkMemory, Opening
from .replica import Part, Replica, ReplicaState, RoutedProgram
from .router_calls import RouterCalls
from .scaling import Scaling

log = logging.getLogger(__name__)

IDLE_POLL_MS = 250
MAX_KIND_CHARS = 256  # of a line's name: they are kept

RouterClient = Client[RoutedProgram]


class Router:
    """Serves `replicas` at `endpoints`; `run` returns after `stop`, or when the owner has gone."""

    def __init__(
        self,
        replicas: Sequence[Replica],
        *,
        placement: str = DEFAULT_PLACEMENT,
        scaling: Scaling | None = None,
        stop_fd: int | None = None,
        spread: Spread = spread,
        tenant_weights: Mapping[Hashable, float] | None = None,
    ) -> None:
        """`placement`: of `placement.policies.PLACEMENTS`; `scaling`: when there are to be more or
        fewer, None: never; `stop_fd`: as of a `Gateway`; `spread`: where the branches of forks run,
        with the placement "program"; `tenant_weights`: as the engines have them."""
        self._replicas: list[Replica] = []
        self._stop_fd = stop_fd
        self._should_stop = False
        self._prefixes = KnownPrefixes()
        self._view = FleetView(self._replicas, self._prefixes.cached, self._prefixes.mirrors)
        self._homes = Homes(
            self._replicas, self._prefixes, self._view, placement=placement, spread=spread
        )
        self._calls = RouterCalls(self._replicas, self._restart, self._view)
        self._members = Membership(
            self._replicas,
            self._homes,
            self._prefixes,
            self._calls,
            self._view,
            scaling=scaling,
            tenant_weights=dict(tenant_weights or {}),
        )
        for replica in replicas:
            self.add(replica)
        self._habits = AllHabits()
        self._marks = MarkMemory()
        self._host: SessionHost[RouterClient] | None = None
        self._poller = zmq.Poller()
        self._polled: list[Any] = []

    @property
    def num_placed(self) -> Mapping[int, int]:
        """Programs given to each replica, by its number."""
        return self._view.num_placed()

    def add(self, replica: Replica) -> None:
        """One more, under a number that none of them has; it is started."""
        self._members.add(replica)

    def _restart(self, replica: Replica) -> None:
        self._members.retire(replica, for_good=False)

    def stop(self) -> None:
        """Ask the loop to end (from a signal handler or another thread)."""
        self._should_stop = True

    # --- the loop -------------------------------------------------------------------------------

    def start(self) -> None:
        """Start all replicas, and wait until each is ready; of those that somebody else starts one
        is enough. Raises EngineError when an own one ends before it ever was: its configuration
        cannot work."""
        own = [replica for replica in self._replicas if replica.is_own]
        while not self._should_stop:
            self._turn()
            if (all if own else any)(r.state is ReplicaState.READY for r in own or self._replicas):
                return
            for replica in own:
                if replica.state is ReplicaState.LOST and not replica.info and replica.num_starts:
                    raise EngineError(replica.why_lost)

    def listen(
        self,
        endpoints: Sequence[str],
        *,
        context: zmq.Context[zmq.Socket[bytes]] | None = None,
        grace_s: float = wire.GRACE_S,
        keys: ServerKeys | None = None,
    ) -> None:
        """Take clients at `endpoints`; as of a `SessionHost`."""
        self._host = SessionHost(
            self, RouterClient, endpoints, context=context, grace_s=grace_s, keys=keys
        )
        self._calls.clients = self._host.clients
        self._members.is_starting = False

    def run(self) -> None:
        """Serve until stopped."""
        assert self._host is not None, "nobody can reach it: listen first"
        try:
            while not self._should_stop:
                self._turn()
            self._host.say_farewell()
        finally:
            self._host.close()
            self.close()

    def close(self) -> None:
        """End all replicas, all at once."""
        for replica in self._replicas:
            replica.close()
        for replica in self._replicas:
            replica.wait_closed()

    def _turn(self) -> None:
        ready = self._poll()
        if self._stop_fd is not None and self._stop_fd in ready:
            self._obey(os.read(self._stop_fd, 4096))
        host = self._host
        if host is not None:
            if host.socket in ready:
                host.receive()
            host.clock.read()
            if host.sweep():
                self._members.look()
        for replica in list(self._replicas):
            replica.revive()
            self._hear(replica)
            self._members.attend(replica)
        self._homes.rehouse()
        for replica in self._replicas:
            replica.say()
        if host is not None:
            host.send_events()

    def _poll(self) -> dict[Any, int]:
        sockets: list[Any] = [socket for replica in self._replicas for socket in replica.sockets]
        sockets += [] if self._host is None else [self._host.socket]
        sockets += [] if self._stop_fd is None else [self._stop_fd]
        if sockets != self._polled:  # a connection was opened or has broken
            self._polled, self._poller = sockets, zmq.Poller()
            for socket in sockets:
                self._poller.register(socket, zmq.POLLIN)
        return dict(self._poller.poll(IDLE_POLL_MS))

    def _obey(self, orders: bytes) -> None:
        if not orders:
            self._should_stop = True
        elif wire.DRAIN_ORDER in orders:
            self._homes.is_draining = True

    # --- from clients ---------------------------------------------------------------------------

    def describe(self) -> dict[str, Any]:
        """The model, for welcomes."""
        return self._calls.model

    def take(self, client: RouterClient, message: wire.Message) -> None:
        """A client's message. Raises ProtocolError."""
        try:
            if message.op == "ops":
                self._take_ops(client, message)
            elif message.op == "call":
                self._calls.take(client, message)
            elif message.op == "cancel":
                self._take_cancel(client, message.header)
        except ProtocolError:
            raise
        except Exception as error:  # a bug of the router concerns this message, and nobody else
            log.exception("a message could not be taken")
            raise ProtocolError(f"{message.op}: {type(error).__name__}: {error}") from error

    def forget(self, client: RouterClient) -> None:
        """A session ends: cancel its programs."""
        for program in list(client.programs.values()):
            self._homes.close(program)

    def _take_ops(self, client: RouterClient, message: wire.Message) -> None:
        items = program_items(message.header)
        num_bytes = message.num_bytes if len(items) == 1 else None
        for item in items:
            try:
                self._take_program(client, item, num_bytes)
            except ProtocolError as error:  # concerns only this program
                assert self._host is not None
                self._host.complain(client, error)

    def _take_program(
        self, client: RouterClient, item: dict[str, Any], num_bytes: int | None
    ) -> None:
        number = integer(item, "program")
        program = client.programs.get(number)
        if program is None:
            if "create" not in item:
                return  # it has ended while these were on the way
            create = dict(item["create"]) if isinstance(item["create"], dict) else {}
            try:
                program = self._program(client, number, create, item.get("ops", []))
            except ProtocolError as error:
                client.refuse(number, error)
                return
        try:
            if number not in client.programs:
                client.require_room()
                client.programs[number] = program
            ops = client.take_ops(program, item, num_bytes)
            if "given" in item:
                program.log.restore(item["given"])
            self._pass_on(program, ops, is_end=bool(item.get("end")))
        except (InvalidProgram, EngineError) as error:
            self._homes.reject(program, error)
        except Exception as error:  # a bug must end one program, not the router
            log.exception("a program could not be passed on")
            self._homes.reject(program, EngineError(f"{type(error).__name__}: {error}"))

    def _program(
        self, client: RouterClient, number: int, create: dict[str, Any], ops: Any
    ) -> RoutedProgram:
        for name in ("seed", "instance"):
            integer(create, name, 0)
        for name in ("lora_path", "response_id", "namespace", "history", "op_key"):
            optional_text(create, name)
        for name in ("tools", "template_kwargs"):
            if not isinstance(create.get(name, ""), str):
                raise ProtocolError(f"{name}={create[name]!r:.200} is not allowed; allowed: a text")
        tenant = tenant_from(create)
        create["tenant"] = tenant or client.tenant
        create["account"] = _name_of(client.account(tenant))
        habits = self._habits.of(_kind_of(create, ops))
        opening = Opening(create, self._marks)
        load = ProgramLoad(habits, tenant=create["tenant"])
        own_log = ProgramLog(create)
        return RoutedProgram(client, number, create, load, opening, own_log)

    def _pass_on(self, program: RoutedProgram, ops: list[Any], *, is_end: bool) -> None:
        """Send a program's next ops to its replica, which is chosen with the first ones."""
        program.log.require_ops(ops)
        program.opening.take(ops)
        program.log.take(ops)
        program.log.has_ended |= is_end
        if program.replica is not None:
            self._homes.parts.send(program, ops)
        elif program not in self._homes.homeless and (program.log.ops or is_end):
            self._homes.place(program)  # what is given comes ahead of its ops

    def _take_cancel(self, client: RouterClient, header: dict[str, Any]) -> None:
        program = client.programs.get(integer(header, "program"))
        if program is None:
            return
        if program.replica is None:  # it waits for one
            if header.get("keep") is True:
                program.log.ends_gens = True
            else:
                self._homes.dismiss(program)
            return
        replica, there = program.replica, program.number_there
        replica.outbox.flush(there)
        if header.get("keep") is True:
            program.log.ends_gens = True
            self._homes.parts.end_gens(program)
            replica.outbox.queue("cancel", {"program": there, "keep": True})
        else:
            program.log.is_cancelled = True
            self._homes.parts.forget(program)
            replica.outbox.queue("cancel", {"program": there})  # its DONE ends it

    # --- from replicas --------------------------------------------------------------------------

    def _hear(self, replica: Replica) -> None:
        try:
            is_starting = replica.state is ReplicaState.STARTING
            messages = replica.hear(self._model_that_binds() if is_starting else {})
        except (EngineError, ProtocolError) as error:
            self._members.lose(replica, str(error))
            return
        for message in messages:
            try:
                if message.op == "events":
                    self._take_events(replica, message.header["events"])
                elif message.op == "reply":
                    self._calls.take_reply(replica, message.header)
                elif message.op == "cache":
                    self._prefixes.take(replica, message.header["changes"])
            except Exception:  # a bug of the router is no fault of the engine
                log.exception("a message of replica %d could not be taken", replica.number)

    def _model_that_binds(self) -> dict[str, Any]:
        """What a replica must serve to get programs: what others serve, or what programs that wait
        have tokens of."""
        binding = [r.info for r in self._replicas if r.is_serving]
        binding += [r.info for r in self._replicas if r.info and self._homes.homeless]
        return binding[0] if binding else {}

    def _take_events(self, replica: Replica, events: list[Any]) -> None:
        for number, *event in events:
            part = replica.parts.get(number)
            program = replica.programs.get(number) if part is None else part.program
            if program is None:
                continue  # it was cancelled
            try:
                if part is None:
                    self._take_event(program, *event)
                else:
                    self._take_event_of_part(part, *event)
            except Exception as error:  # a bug must end one program, not the router
                log.exception("an event could not be passed on")
                self._homes.reject(program, EngineError(f"{type(error).__name__}: {error}"))

    def _take_event(
        self, program: RoutedProgram, branch: int, seq: int, kind: str, payload: Any
    ) -> None:
        if (
            program.sent is not None and kind != wire.MARK
        ):  # which comes before its prompt is planned
            self._prefixes.arrive(program)
        if kind != wire.DONE:
            self._pass_on_event(program, None, branch, seq, kind, payload)
            return
        self._homes.parts.forget(program)
        assert program.replica is not None, "it is nowhere"
        program.replica.end_program(program)
        program.client.remove(program.number)
        payload = program.log.done(payload)
        program.client.events.append(program.number, branch, seq, kind, payload)

    def _take_event_of_part(
        self, part: Part, branch: int, seq: int, kind: str, payload: Any
    ) -> None:
        if kind == wire.DONE:
            self._homes.parts.note_done(part, payload)
        elif kind == wire.FAILED and payload.get("op") == "program":
            log.warning("a part of a program is refused: %s", payload.get("message"))
            self._homes.recall(part)
        else:
            self._pass_on_event(part.program, part, branch, seq, kind, payload)

    def _pass_on_event(
        self,
        program: RoutedProgram,
        part: Part | None,
        branch: int,
        seq: int,
        kind: str,
        payload: Any,
    ) -> None:
        """Of a call, a branch, a role: to the client, unless it knows."""
        away = program.away.get(branch) if part is None else part
        load = program.load if away is None else away.load
        used = None if part is None else part.used
        num_open = len(program.log.open_calls)
        payload = program.log.pass_on(branch, seq, kind, payload, used)
        for _ in range(num_open - len(program.log.open_calls)):
            load.end_call(*_used(payload))
        if kind == wire.MARK and branch == 0:
            program.opening.note_mark(seq, payload)
        if program.parts and payload is not None:
            self._homes.parts.note_event(program, branch, kind, part)
        if payload is not None:
            program.client.events.append(program.number, branch, seq, kind, payload)


def _used(payload: Any) -> tuple[int, int]:
    """Tokens of a call's prompt and output, from its value."""
    meta = payload.get("meta") if isinstance(payload, dict) else None
    metas = meta if isinstance(meta, list) else [meta]
    known = [each for each in metas if isinstance(each, dict)]
    prompt = max((int(each.get("prompt_tokens", 0)) for each in known), default=0)
    return prompt, sum(int(each.get("completion_tokens", 0)) for each in known)


def _kind_of(create: dict[str, Any], ops: Any) -> str:
    """What programs that do the same have in common: the line of their first call."""
    named = create.get("op_key")
    if isinstance(named, str):
        return named
    for op in ops if isinstance(ops, list) else ():
        if isinstance(op, list) and len(op) > 3 and op[0] in CALLS and isinstance(op[3], str):
            return op[3][-MAX_KIND_CHARS:]
    return ""


@lru_cache(maxsize=4096)
def _name_of(account: Hashable) -> str:
    """An account's name to engines, which says nothing of its keys."""
    return hashlib.blake2b(repr(account).encode(), digest_size=16).hexdigest()
