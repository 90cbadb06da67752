"""The router: one endpoint for clients, many engines behind it, tokens passed on over ZeroMQ.

    clients  -- ops -->  SessionHost | Router | Replica  -- ops -->  engines
             <- events -             |        |          <- events -

It speaks the runtime's protocol to both sides, so neither can tell it from the other. One thread.
The unit of placement is the program: its first ops decide where it runs, and all of it runs there,
but for branches of wide forks (`parts.py`). The file is long because all of it, clients' messages,
replicas' events, who comes and goes, changes the same few tables between two turns of one loop.
"""

from __future__ import annotations

import hashlib
import logging
import os
import time
from collections.abc import Hashable, Mapping, Sequence
from functools import lru_cache
from itertools import islice
from typing import Any

import zmq

from ..errors import EngineError, InvalidProgram, ProtocolError
from ..frontend.protocol import wire
from ..frontend.protocol.program_log import CALLS, MAX_LOST, ProgramLog
from ..radix.fleet import FleetTree
from ..runtime.sessions.clients import Client, tenant_from
from ..runtime.sessions.fields import integer, optional_text, program_items
from ..runtime.sessions.host import SessionHost
from ..runtime.sessions.listener import ServerKeys
from .cache_mirror import CacheMirror
from .fleet_view import FleetView
from .parts import Parts
from .placement.load import BYTES_PER_TOKEN, AllHabits, ProgramLoad
from .placement.moves import FETCHED_SHARE, better_home, is_crowded
from .placement.policies import DEFAULT_PLACEMENT, Newcomer, policy_of
from .placement.spread import Spread, spread
from .prompt_text import MarkMemory, Opening
from .replica import Part, Replica, ReplicaState, RoutedProgram
from .router_calls import RouterCalls
from .scaling import FleetLoad, Scaling

log = logging.getLogger(__name__)

IDLE_POLL_MS = 250
PATIENCE_S = 60.0  # that programs wait for a replica while none is ready
MAX_CONSIDERED = 256  # programs of a replica that might be moved, in one look
LEAVE_S = 30.0  # that a replica which leaves gives the calls that run there
MAX_KIND_CHARS = 256  # of a line's name: they are kept
MAX_TREE_BYTES = 256 * 1024 * 1024
_STOPPING = "the cluster is being stopped: it takes no new programs"

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
        self._replicas = list(replicas)
        self._policy = policy_of(placement)
        self._scaling = scaling
        self._moves = placement == DEFAULT_PLACEMENT
        self._parts = Parts(
            spread,
            lambda: self._takers() if self._moves else [],
            lambda program: self._cached_of(program, program.opening.text),
        )
        self._stop_fd = stop_fd
        self._should_stop = False
        self._is_draining = False
        self._sent = FleetTree[int]()  # what was sent where
        self._on_the_way = FleetTree[int]()  # of this, what nothing has come back for
        self._cached = FleetTree[int]()  # what is cached where
        self._mirrors = {r.number: CacheMirror(self._cached, r.number) for r in replicas}
        self._habits = AllHabits()
        self._marks = MarkMemory()
        self._view = FleetView(self._replicas, self._cached, self._mirrors)
        self._calls = RouterCalls(
            self._replicas, lambda each: self.retire(each, for_good=False), self._view
        )
        self._tenant_weights = dict(tenant_weights or {})
        for replica in replicas:
            self._equip(replica)
        self._host: SessionHost[RouterClient] | None = None
        self._poller = zmq.Poller()
        self._polled: list[Any] = []
        self._homeless: dict[RoutedProgram, None] = {}  # no replica was ready for them
        self._ready_at_s = time.monotonic()  # when one was, last
        self.num_placed: dict[int, int] = {replica.number: 0 for replica in replicas}

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
        """End all replicas."""
        for replica in self._replicas:
            replica.close()

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
                for replica in self._replicas:
                    replica.is_paused = replica.is_stopped
                    self._look_for_idle_parts(replica)
                    if replica.is_paused:
                        self._calls.lose(replica, "its process is stopped")
                if self._moves:
                    self._rebalance()
                if self._scaling is not None:
                    self._scale(self._scaling)
        for replica in list(self._replicas):
            replica.revive()
            self._hear(replica)
            if replica.state is ReplicaState.LEAVING:
                self._drain(replica)
            if replica.state is ReplicaState.LOST and replica.leaves_for_good:
                self._replicas.remove(replica)
                del self._mirrors[replica.number]
        self._rehouse()
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
            self._is_draining = True

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
            self._arrive(program)
            self._parts.forget(program)
            if program.replica is not None:
                program.replica.close_program(program)
            self._homeless.pop(program, None)

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
            self._reject(program, error)
        except Exception as error:  # a bug must end one program, not the router
            log.exception("a program could not be passed on")
            self._reject(program, EngineError(f"{type(error).__name__}: {error}"))

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
            self._parts.send(program, ops)
        elif program not in self._homeless and (program.log.ops or is_end):
            self._place(program)  # what is given comes ahead of its ops

    def _place(self, program: RoutedProgram) -> None:
        """Have a program run on a replica from where it is: at first, or after one was lost."""
        if self._is_draining and not program.number_there:
            raise EngineError(_STOPPING)
        candidates = self._ready_replicas()
        if not candidates:
            self._homeless[program] = None
            return
        newcomer = self._newcomer(program)
        replica = self._policy(newcomer, candidates)
        assert isinstance(replica, Replica)
        self._settle(program, newcomer, replica)

    def _newcomer(self, program: RoutedProgram) -> Newcomer:
        """What is known of it to place it. What it has said counts with its first prompt."""
        text, load = program.opening.text, program.load
        if not load.num_ended:
            load.max_tokens = program.opening.max_tokens
        return Newcomer(
            max(len(text) / BYTES_PER_TOKEN, load.held_tokens),
            self._cached_of(program, text),
            program.create.get("history") or None,
            text,
            load.output_tokens * load.habits.num_calls,
            load.tenant,
        )

    def _settle(self, program: RoutedProgram, newcomer: Newcomer, replica: Replica) -> None:
        """Run it there, from where it is. Raises InvalidProgram if it cannot be sent."""
        text, num_tokens = newcomer.text, newcomer.num_tokens
        self._homeless.pop(program, None)
        replica.open(program)
        namespace, adapter = _namespace_of(program.create)
        if adapter or not self._mirrors[replica.number].is_known:
            self._sent.insert((namespace, adapter), text, replica.number, num_tokens)
            self._sent.shrink(MAX_TREE_BYTES)
        if not adapter:
            self._on_the_way.cover(namespace, text, replica.number, num_tokens)
            program.sent = namespace, text, replica.number
        self.num_placed[replica.number] += 1
        self._view.place(program, replica)
        missing = num_tokens - newcomer.cached.get(replica.number, 0.0)
        program.load.enter(replica.load, max(0.0, missing))
        self._parts.send(program, program.log.ops)
        if program.log.ends_gens:
            replica.outbox.queue("cancel", {"program": program.number_there, "keep": True})

    def _cached_of(self, program: RoutedProgram, text: bytes) -> dict[int, float]:
        """How many tokens of its beginning each replica has: what it says, with what is on its way
        there; where it says nothing, what was sent to it."""
        namespace, adapter = _namespace_of(program.create)
        if adapter:  # whose namespace is the engine's
            return self._sent.match((namespace, adapter), text)
        cached = self._cached.match(namespace, text)
        for number, num_tokens in self._on_the_way.match(namespace, text).items():
            cached[number] = max(num_tokens, cached.get(number, 0.0))
        unknown = [n for n, mirror in self._mirrors.items() if not mirror.is_known]
        if unknown:
            sent = self._sent.match((namespace, adapter), text)
            cached |= {number: sent[number] for number in unknown if number in sent}
        return cached

    def _takers(self) -> list[Replica]:
        """Those that may be given more."""
        return [r for r in self._replicas if r.state is ReplicaState.READY and not r.is_paused]

    def _ready_replicas(self) -> list[Replica]:
        ready = [each for each in self._replicas if each.state is ReplicaState.READY]
        ready = ready or [each for each in self._replicas if each.is_serving]
        return [each for each in ready if not each.is_paused] or ready

    def _take_cancel(self, client: RouterClient, header: dict[str, Any]) -> None:
        program = client.programs.get(integer(header, "program"))
        if program is None:
            return
        if program.replica is None:  # it waits for one
            self._take_cancel_of_homeless(program, keeps=header.get("keep") is True)
            return
        replica, there = program.replica, program.number_there
        replica.outbox.flush(there)
        if header.get("keep") is True:
            program.log.ends_gens = True
            self._parts.end_gens(program)
            replica.outbox.queue("cancel", {"program": there, "keep": True})
        else:
            program.log.is_cancelled = True
            self._parts.forget(program)
            replica.outbox.queue("cancel", {"program": there})  # its DONE ends it

    def _take_cancel_of_homeless(self, program: RoutedProgram, *, keeps: bool) -> None:
        if keeps:
            program.log.ends_gens = True
            return
        self._homeless.pop(program, None)
        program.client.remove(program.number)
        program.client.events.append(program.number, 0, 0, wire.DONE, program.log.done({}))

    def _reject(self, program: RoutedProgram, error: EngineError | InvalidProgram) -> None:
        """End a program that cannot be carried out at all."""
        failure = {"message": str(error), "kind": type(error).__name__, "op": "program"}
        self._end(program)
        events = program.client.events
        events.append(program.number, 0, 0, wire.FAILED, failure)
        used = {"num_requests": 0, "prompt_tokens": 0, "completion_tokens": 0}
        events.append(program.number, 0, 0, wire.DONE, used)

    def _arrive(self, program: RoutedProgram) -> None:
        """Its beginning is on its way no more."""
        if program.sent is not None:
            namespace, text, number = program.sent
            self._on_the_way.uncover(namespace, text, number)
        program.sent = None

    def _end(self, program: RoutedProgram) -> None:
        self._arrive(program)
        self._parts.forget(program)
        self._homeless.pop(program, None)
        if program.replica is not None:
            program.replica.close_program(program)
            program.replica = None
        if program.client.programs.get(program.number) is program:
            program.client.remove(program.number)

    # --- from replicas --------------------------------------------------------------------------

    def _hear(self, replica: Replica) -> None:
        try:
            is_starting = replica.state is ReplicaState.STARTING
            messages = replica.hear(self._model_that_binds() if is_starting else {})
        except (EngineError, ProtocolError) as error:
            self._bury(replica, str(error))
            return
        for message in messages:
            try:
                if message.op == "events":
                    self._take_events(replica, message.header["events"])
                elif message.op == "reply":
                    self._calls.take_reply(replica, message.header)
                elif message.op == "cache":
                    self._take_cache(replica, message.header["changes"])
            except Exception:  # a bug of the router is no fault of the engine
                log.exception("a message of replica %d could not be taken", replica.number)

    def _model_that_binds(self) -> dict[str, Any]:
        """What a replica must serve to get programs: what others serve, or what programs that wait
        have tokens of."""
        binding = [r.info for r in self._replicas if r.is_serving]
        binding += [r.info for r in self._replicas if r.info and self._homeless]
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
                self._reject(program, EngineError(f"{type(error).__name__}: {error}"))

    def _take_event(
        self, program: RoutedProgram, branch: int, seq: int, kind: str, payload: Any
    ) -> None:
        if (
            program.sent is not None and kind != wire.MARK
        ):  # which comes before its prompt is planned
            self._arrive(program)
        if kind != wire.DONE:
            self._pass_on_event(program, None, branch, seq, kind, payload)
            return
        self._parts.forget(program)
        assert program.replica is not None, "it is nowhere"
        program.replica.end_program(program)
        program.client.remove(program.number)
        payload = program.log.done(payload)
        program.client.events.append(program.number, branch, seq, kind, payload)

    def _take_event_of_part(
        self, part: Part, branch: int, seq: int, kind: str, payload: Any
    ) -> None:
        if kind == wire.DONE:
            self._parts.note_done(part, payload)
        elif kind == wire.FAILED and payload.get("op") == "program":
            log.warning("a part of a program is refused: %s", payload.get("message"))
            self._recall(part)
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
            self._parts.note_event(program, branch, kind, part)
        if payload is not None:
            program.client.events.append(program.number, branch, seq, kind, payload)

    def _take_cache(self, replica: Replica, changes: list[Any]) -> None:
        mirror = self._mirrors[replica.number]
        mirror.take(changes)
        replica.prompt_token_s = mirror.costs.get("prompt_token_s", replica.prompt_token_s)
        replica.row_tokens = mirror.costs.get("added_row_tokens", replica.row_tokens)
        replica.total_tokens = mirror.costs.get("total_tokens", replica.total_tokens)

    # --- who comes and goes ---------------------------------------------------------------------

    def add(self, replica: Replica) -> None:
        """One more, under a number that none of them has; it is started."""
        self._mirrors[replica.number] = CacheMirror(self._cached, replica.number)
        self.num_placed.setdefault(replica.number, 0)
        self._equip(replica)
        self._replicas.append(replica)

    def _equip(self, replica: Replica) -> None:
        replica.adapters = self._calls.adapters
        replica.load.weights = self._tenant_weights

    def _scale(self, scaling: Scaling) -> None:
        """Start another one, or have one leave, if that is wanted."""
        staying = [r for r in self._replicas if not r.leaves_for_good]
        num_waiting = sum(len(each.log.open_calls) for each in self._homeless)
        running = next((r.info["max_running_requests"] for r in staying if r.info), None)
        if running is None:
            return
        load = FleetLoad(
            num_waiting + sum(each.num_calls for each in self._replicas),
            sum(each.load.held_tokens for each in self._replicas),
            scaling.target_calls or running / 2,
            max(each.total_tokens for each in staying),
        )
        num_wanted = scaling.scaler.decide(len(staying), load)
        for _ in range(num_wanted - len(staying)):
            taken = {each.number for each in self._replicas}
            number = next(n for n in range(len(taken) + 1) if n not in taken)
            log.info("replica %d is started: there is enough to do", number)
            self.add(scaling.hire(number))
        ready = [each for each in staying if each.state is ReplicaState.READY]
        ready.sort(key=lambda each: (each.load.held_tokens, each.expected_tokens, -each.number))
        for replica in ready[: max(0, len(staying) - num_wanted)]:
            log.info("replica %d is to leave: there is less to do", replica.number)
            self.retire(replica, for_good=True)

    def retire(self, replica: Replica, *, for_good: bool) -> None:
        """It is to leave, `for_good` or to be started anew. Its programs go on elsewhere, each once
        it waits for no call, and all after `LEAVE_S`."""
        is_serving = replica.is_serving
        replica.leave(time.monotonic() + LEAVE_S, for_good=for_good)
        if not is_serving:
            self._bury(replica, "it is to leave", is_asked=True)

    def _drain(self, replica: Replica) -> None:
        """Move what can be moved; end it once nothing is left, or its time has come."""
        if any(each.state is ReplicaState.READY for each in self._replicas):
            for program in list(replica.programs.values()):
                if program.is_at_rest:
                    self._move(program)
        for part in list(replica.parts.values()):
            if not part.load.num_calls:
                self._recall(part)
        if (replica.programs or replica.parts) and time.monotonic() < replica.leaves_at_s:
            return
        reason = "it has left" if replica.leaves_for_good else "it is being started anew"
        self._bury(replica, reason, is_asked=True)

    def _look_for_idle_parts(self, replica: Replica) -> None:
        for program in [each for each in replica.programs.values() if each.parts]:
            try:
                self._parts.note_idle(program)
            except Exception as error:  # a bug must end one program, not the router
                log.exception("parts of a program could not be recalled")
                self._reject(program, EngineError(f"{type(error).__name__}: {error}"))

    def _rebalance(self) -> None:
        """Move programs that wait for no call from replicas that have too much to do or to hold."""
        ready = self._takers()
        for here in ready:
            others = [each for each in ready if each is not here]
            if not is_crowded(here, others):
                continue
            share = FETCHED_SHARE if here.info.get("shares_kv") else 1.0
            resting = (each for each in list(here.programs.values()) if each.is_at_rest)
            for program in islice(resting, MAX_CONSIDERED):
                there = better_home(program.load, here, others, share)
                if there is not None:
                    self._move(program, there)

    def _move(self, program: RoutedProgram, there: Replica | None = None) -> None:
        """Have a program that waits for no call go on elsewhere; None: where the policy says."""
        assert program.replica is not None, "it is nowhere"
        self._arrive(program)
        self._parts.forget(program)
        self._view.move(program.replica)
        program.replica.release(program)
        program.log.lose(is_asked=True)
        self._homeless[program] = None
        if there is not None:
            try:
                self._settle(program, self._newcomer(program), there)
            except Exception as error:  # it cannot be sent, or is a bug: of one program
                self._reject(program, EngineError(f"{type(error).__name__}: {error}"))

    def _bury(self, replica: Replica, reason: str, *, is_asked: bool = False) -> None:
        """A replica has ended, or does not answer."""
        is_news = replica.is_serving or reason != replica.why_lost
        if is_news and (self._host is not None or not replica.is_own):
            log.warning("replica %d is lost: %s", replica.number, reason)
        self._view.lose(replica, is_asked=is_asked)
        self._sent.forget(replica.number)
        self._mirrors[replica.number].reset()
        self._calls.lose(replica, reason)
        for program in list(replica.programs.values()):
            self._arrive(program)
            self._parts.forget(program)
        parts = [part for part in replica.parts.values() if part.replica is not None]
        for program in replica.lose(reason, is_asked=is_asked):
            program.log.lose(is_asked=is_asked)
            if program.log.is_cancelled:
                program.client.remove(program.number)
                used = program.log.done({})
                program.client.events.append(program.number, 0, 0, wire.DONE, used)
            elif not self._has_lost_too_many(program, reason):
                self._homeless[program] = None
        waited = [part.program for part in parts if self._recall(part)]
        for program in dict.fromkeys(waited):
            program.log.num_lost += not is_asked
            self._has_lost_too_many(program, reason)

    def _recall(self, part: Part) -> bool:
        """Have its branches go on at home; whether one waited for a call."""
        try:
            return self._parts.recall(part)
        except Exception as error:  # it cannot be sent, or is a bug: of one program
            log.exception("a part of a program could not be recalled")
            self._reject(part.program, EngineError(f"{type(error).__name__}: {error}"))
            return False

    def _has_lost_too_many(self, program: RoutedProgram, reason: str) -> bool:
        """Then it counts as the cause, and is refused."""
        if program.log.num_lost < MAX_LOST:
            return False
        ended = f"{program.log.num_lost} engines in a row have ended with this program"
        self._reject(program, EngineError(f"{ended}, the last one: {reason}"))
        return True

    def _rehouse(self) -> None:
        """Have programs that are nowhere go on, once a replica can take them."""
        now_s = time.monotonic()
        if self._ready_replicas():
            self._ready_at_s = now_s
        elif now_s - self._ready_at_s < PATIENCE_S:
            return
        homeless, self._homeless = self._homeless, {}
        for program in homeless:
            try:
                if self._ready_at_s != now_s:
                    reasons = "; ".join(f"replica {r.number}: {r.why_lost}" for r in self._replicas)
                    raise EngineError(f"no replica is ready ({reasons})")
                self._place(program)
            except (EngineError, InvalidProgram) as error:
                self._reject(program, error)
            except Exception as error:  # a bug must end one program, not the router
                log.exception("a program could not be placed again")
                self._reject(program, EngineError(f"{type(error).__name__}: {error}"))


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


def _namespace_of(create: dict[str, Any]) -> tuple[str, str]:
    return str(create.get("namespace") or ""), str(create.get("lora_path") or "")
