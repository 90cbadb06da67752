"""One engine as the router sees it: its process, the session with it, what runs there.

A replica is started, greeted, used, and, when its process ends or is silent for too long, started
again. What it was carrying out then is its router's to decide.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Hashable, Mapping, Set
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Protocol

import zmq

from ..errors import EngineError
from ..frontend.client.outbox import Outbox
from ..frontend.client.peer_process import PeerProcess
from ..frontend.client.transport import Transport
from ..frontend.protocol import wire
from ..frontend.protocol.keys import ClientKeys
from ..frontend.protocol.program_log import ProgramLog, require_same_model
from ..radix.fleet import Place
from ..runtime.config import Role
from ..runtime.sessions.clients import Client, ClientProgram
from .placement.load import ProgramLoad, ReplicaLoad
from .prompt_text import Opening

log = logging.getLogger(__name__)

_FOLLOW, _ADAPTER = 0, -1  # ids of its own calls; others are above 0
BACKOFF_S = (0.0, 1.0, 2.0, 5.0, 10.0)  # before the next start; the last one from then on
STEADY_S = 60.0  # a replica that was ready for so long did not die of its start
_PROMPT_TOKEN_S = 1e-4  # until a replica has said what its own costs are
_NOT_THE_MODEL = frozenset(
    {"v", "op", "n", "session", "ack", "credit_bytes", "grace_s", "heartbeat_s", "max_frame_bytes"}
)


class Started(Protocol):
    """An engine that was started, or is to be found, at an endpoint."""

    @property
    def endpoint(self) -> str | None:
        """None: it is not known yet."""

    @property
    def keys(self) -> ClientKeys | None:
        """For its endpoint, once that is known."""

    @property
    def peer(self) -> PeerProcess | None:
        """Its process, where it is one of this host."""

    def kill(self) -> None:
        """End it at once."""

    def stop(self) -> None:
        """End it, and forget it."""


class ReplicaState(Enum):
    """Where a replica is in its life."""

    STARTING = "starting"
    READY = "ready"
    LEAVING = "leaving"  # its programs go elsewhere, each between two calls; it gets no new ones
    LOST = "lost"  # it is started again after a while


@dataclass(slots=True, eq=False)
class RoutedProgram(ClientProgram):
    """A client's program, and where it runs."""

    client: Client[RoutedProgram]
    number: int  # the client's
    create: dict[str, Any]
    load: ProgramLoad
    opening: Opening
    log: ProgramLog
    replica: Replica | None = None
    number_there: int = 0
    # Where its beginning ends in the router's tree of these, its bytes, and where it was sent to;
    # until something has come back.
    sent: tuple[Place[int], int, int] | None = None
    parts: list[Part] = field(default_factory=list)
    away: dict[int, Part] = field(default_factory=dict)  # by branch
    num_weighed: int = 0  # forks whose branches might have run elsewhere
    num_withheld: int = 0  # ops of these that the home replica does not have yet
    was_lost: bool = False  # its replica has ended, and no other has taken it yet

    @property
    def is_at_rest(self) -> bool:
        """Whether it waits for no call, and its client may send more."""
        log = self.log
        return not (log.open_calls or log.has_ended or log.is_cancelled)


@dataclass(slots=True, eq=False)
class Part:
    """Branches of a program that run on another replica than the rest of it (`parts.py`)."""

    program: RoutedProgram
    fork: tuple[int, int]  # branch and seq: what they begin with
    replica: Replica | None  # None: it has ended
    load: ProgramLoad
    number_there: int = 0
    is_open: bool = False  # else it is not known yet what the ops before the fork become
    withheld: dict[int, deque[list[Any]]] = field(default_factory=dict)  # by its branches
    waiting: list[list[Any]] = field(default_factory=list)  # its ops, until then
    num_idle: int = 0  # looks in a row at which nothing was under way, meanwhile
    begins_with: dict[int, int] = field(default_factory=dict)  # ops that it was given, by branch
    stopped: set[int] = field(default_factory=set)  # of its branches, what nobody waits for
    ended: set[int] = field(default_factory=set)  # all that becomes of them is known at home
    used: list[int] = field(default_factory=lambda: [0, 0, 0])  # as `ProgramLog.add_used`


class Replica:
    """Owns one engine, and the session with it; used by the router's thread."""

    def __init__(
        self,
        number: int,
        start: Callable[[], Started],
        *,
        context: zmq.Context[zmq.Socket[bytes]],
        connect_s: float,
        silence_s: float = wire.RUNTIME_TIMEOUT_S,
        is_own: bool = True,
        role: Role | None = None,
    ) -> None:
        """`start`: starts its engine, each time anew; `connect_s`, `silence_s`: as `Transport`;
        `is_own`: it is started and ended here, else found where somebody has started it; `role`:
        where it has one, that with which it is started."""
        self.number = number
        self.role = role
        self.is_own = is_own
        self.state = ReplicaState.LOST
        self.why_lost = "it was not started yet"
        self.programs: dict[int, RoutedProgram] = {}  # by their numbers there
        self.parts: dict[int, Part] = {}  # of programs that run elsewhere, too
        self.info: dict[str, Any] = {}  # of the model, from its welcome
        self.prompt_token_s = _PROMPT_TOKEN_S
        self.row_tokens = 0.0  # what one more row adds to a step, in these; 0: not known yet
        self.total_tokens = 0.0  # KV that it holds
        self.load = ReplicaLoad()
        self.is_paused = False  # its process is stopped: nothing is placed or asked there
        self.num_starts = 0
        self.leaves_at_s = 0.0
        self.leaves_for_good = False
        self.outbox = Outbox()
        # Loaded at run time, by name: the router's. What it was told to load of these, whether or
        # not it can be had there, may be behind.
        self.adapters: Mapping[str, dict[str, Any]] = {}
        self.told_adapters: dict[str, dict[str, Any]] = {}
        self.dropped: Set[str] = frozenset()  # of those that it starts with; the router's, too
        self.told_dropped: set[str] = set()
        self.is_behind = True
        self._is_welcomed = False
        self._telling: str | None = None  # of an adapter
        self._start = start
        self._context = context
        self._connect_s = connect_s
        self._silence_s = silence_s
        self._started: Started | None = None
        self._ending: threading.Thread | None = None
        self._transport: Transport | None = None
        self._start_at_s = 0.0
        self._ready_s = 0.0
        self._num_deaths = 0  # in a row
        self._num_programs = 0  # since the start of the router

    # --- its life -------------------------------------------------------------------------------

    def revive(self) -> None:
        """Start it, if it is lost and its time has come."""
        if self.state is not ReplicaState.LOST or time.monotonic() < self._start_at_s:
            return
        try:
            self._started = self._start()
        except (EngineError, OSError) as error:
            self.lose(f"it cannot be started: {error}")
            return
        self.num_starts += 1
        self.outbox = Outbox()
        self._is_welcomed, self._telling = False, None
        self.told_adapters.clear()
        self.told_dropped.clear()
        self.is_behind = True
        self.state = ReplicaState.STARTING

    def _connect(self) -> None:
        """Raises EngineError where that cannot be."""
        assert self._started is not None
        if self._started.endpoint is None:
            if self._started.peer is not None and (death := self._started.peer.death()) is not None:
                raise EngineError(death)
            return
        try:
            self._transport = Transport(
                self._context,
                self._started.endpoint,
                self._started.keys,
                None,
                self._started.peer,
                None,
                self._connect_s,
                self._silence_s,
            )
        except (OSError, zmq.ZMQError) as error:
            raise EngineError(f"no connection to {self._started.endpoint}: {error}") from error

    def lose(self, reason: str, *, is_asked: bool = False) -> list[RoutedProgram]:
        """It has ended, or is given up, or is to be started anew (`is_asked`); returns the programs
        that it had."""
        if is_asked:
            self._num_deaths = 0
        elif self.is_serving:
            is_steady = time.monotonic() - self._ready_s > STEADY_S
            self._num_deaths = 0 if is_steady else self._num_deaths
        self.why_lost = reason
        self.state = ReplicaState.LOST
        self._close(kills=not is_asked)
        self._start_at_s = time.monotonic() + BACKOFF_S[min(self._num_deaths, len(BACKOFF_S) - 1)]
        self._num_deaths += not is_asked
        programs, self.programs = list(self.programs.values()), {}
        self.parts = {}
        for program in programs:
            program.load.leave()
            program.replica = None
        return programs

    def leave(self, until_s: float, *, for_good: bool) -> None:
        """Its programs are to go elsewhere, all of them by `until_s` (monotonic). Then it is
        started anew, or, `for_good`, ended."""
        self.state, self.leaves_at_s, self.leaves_for_good = ReplicaState.LEAVING, until_s, for_good

    @property
    def is_serving(self) -> bool:
        """Whether programs run there."""
        return self.state in (ReplicaState.READY, ReplicaState.LEAVING)

    def close(self) -> None:
        """End it; `wait_closed` waits until it has."""
        self._close(kills=False)
        self.state = ReplicaState.LOST

    def wait_closed(self) -> None:
        """Until the engine that was asked to end last has."""
        if self._ending is not None:
            self._ending.join()

    def _close(self, *, kills: bool) -> None:
        if self._transport is not None:
            self._transport.close()
            self._transport = None
        started, self._started = self._started, None
        if started is None:
            return
        if kills:
            started.kill()
            started.stop()
        else:  # it may write what it has to its store
            self._ending = threading.Thread(target=started.stop, daemon=True)
            self._ending.start()

    # --- what is said ---------------------------------------------------------------------------

    @property
    def is_stopped(self) -> bool:
        """Whether its process was stopped, and may be continued."""
        peer = None if self._started is None else self._started.peer
        return peer is not None and peer.is_stopped()

    @property
    def sockets(self) -> list[zmq.Socket[bytes]]:
        """To be polled."""
        return [] if self._transport is None else self._transport.sockets

    def hear(self, model: dict[str, Any]) -> list[wire.Message]:
        """What it has said since the last time; `model`: what the others say of theirs, if any has.
        Raises EngineError or ProtocolError when it is to be given up."""
        if self._transport is None and self._started is not None:
            self._connect()
        if self._transport is None:
            return []
        messages = self._transport.poll(0.0)
        if self._transport.welcome is not None:
            if not self._is_welcomed:
                self._be_welcomed(self._transport.welcome, model)
            messages = [each for each in messages if not self._has_followed(each)]
            self._follow_adapters()
        return messages

    def _be_welcomed(self, welcome: dict[str, Any], model: dict[str, Any]) -> None:
        info = {name: value for name, value in welcome.items() if name not in _NOT_THE_MODEL}
        if model:
            try:
                require_same_model(info, model)
            except EngineError as error:
                raise EngineError(f"it is no replica of the others: {error}") from error
        self.info = info
        self._is_welcomed = True
        self.outbox.queue("call", {"id": _FOLLOW, "method": "follow_cache", "args": {}})

    def _follow_adapters(self) -> None:
        """Have it load and unload what others were told while it started, or was stopped. It is
        ready once it has the same."""
        if self._telling is not None:
            return
        if self.is_behind and (change := self._next_change()) is not None:
            method, name, args = change
            self._telling = name
            self.outbox.queue("call", {"id": _ADAPTER, "method": method, "args": args})
            return
        self.is_behind = False
        if self.state is ReplicaState.STARTING:
            self.state = ReplicaState.READY
            self._ready_s = time.monotonic()

    def _next_change(self) -> tuple[str, str, dict[str, Any]] | None:
        for name in self.dropped - self.told_dropped:
            self.told_dropped.add(name)
            return "unload_lora_adapter", name, {"lora_name": name}
        for name, args in self.told_adapters.items():
            if self.adapters.get(name) is not args:  # also where another one has its name now
                del self.told_adapters[name]
                return "unload_lora_adapter", name, {"lora_name": name}
        for name, args in self.adapters.items():
            if name not in self.told_adapters:
                self.told_adapters[name] = args
                return "load_lora_adapter", name, args
        return None

    def _has_followed(self, message: wire.Message) -> bool:
        """Whether this answers for an adapter. Without one that cannot be had there it is ready all
        the same: what names it is told so."""
        if message.op != "reply" or message.header.get("id") != _ADAPTER:
            return False
        if not message.header.get("ok") and self._telling in self.told_adapters:
            why = message.header.get("error")
            log.warning("replica %d is without adapter %s: %s", self.number, self._telling, why)
        self._telling = None
        return True

    def say(self) -> None:
        """Send what was queued."""
        if self._transport is None:
            return
        self.outbox.flush_all()
        self.outbox.hand_over(self._transport.link)
        self.outbox.release(self._transport.link.num_acked)
        self._transport.send()

    def open(self, program: RoutedProgram) -> None:
        """Run a program here, from where it is. Raises InvalidProgram if it cannot be sent."""
        create = wire.encode_create(program.log.adapted(program.create))
        given = program.log.given()
        self._num_programs += 1
        program.replica, program.number_there = self, self._num_programs
        self.programs[self._num_programs] = program
        self.outbox.open(self._num_programs, create, given)

    def open_part(self, part: Part) -> None:
        """Run a part of a program here. Raises InvalidProgram if it cannot be sent."""
        log = part.program.log
        own = {name: value for name, value in part.program.create.items() if name != "response_id"}
        create = wire.encode_create(log.adapted(own))
        places = {(op[1], op[2]) for op in log.ops if op[2] < part.begins_with.get(op[1], 0)}
        given = log.given(places)
        self._num_programs += 1
        part.number_there = self._num_programs
        self.parts[self._num_programs] = part
        self.outbox.open(self._num_programs, create, given)

    def release(self, program: RoutedProgram) -> None:
        """It goes on elsewhere."""
        self.programs.pop(program.number_there, None)
        program.load.leave()
        if self.outbox.forget(program.number_there):
            self.outbox.queue("cancel", {"program": program.number_there})
        program.replica = None

    def end_program(self, program: RoutedProgram) -> None:
        """The engine says that it has ended."""
        del self.programs[program.number_there]
        program.load.end()
        self.outbox.forget(program.number_there)

    def close_program(self, program: RoutedProgram) -> None:
        """It has ended, or is to be cancelled: nothing more of it is taken."""
        program.load.end()
        self.release(program)

    # --- for placement --------------------------------------------------------------------------

    @property
    def num_calls(self) -> int:
        """Calls in flight."""
        return self.load.num_calls

    @property
    def expected_tokens(self) -> float:
        """What its open programs are expected to have it compute."""
        return self.load.expected_tokens

    def expected_before(self, tenant: Hashable, num_tokens: float) -> float:
        """Of these, what it computes before so many more of a tenant's."""
        return self.load.ahead_of(tenant, num_tokens)

    @property
    def room_tokens(self) -> float:
        """KV that its open programs do not want again."""
        return self.total_tokens - self.load.held_tokens
