"""The clients at an endpoint: the state of a session, and the limits that keep it bounded.

A session outlives its connections: it belongs to whoever knows its token. All its resources are
bounded, so that a client can only exhaust its own; docs/how-it-works/protocol.md lists the limits.
"""

from __future__ import annotations

import secrets
from collections import OrderedDict
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Any, Generic, Protocol, TypeVar

import orjson

from ...errors import InvalidProgram, ProtocolError, StemmaError
from ...frontend.protocol import wire
from ...frontend.protocol.interning import TakenTexts
from ...frontend.protocol.link import Link
from ...shared_limit import SharedLimit
from .event_outbox import EventOutbox

# Guesses: each far above what a sane program needs, and small against a server's memory.
MAX_CLIENTS = 2048  # one key, or tenant, alone may have half
MAX_PROGRAMS = 65_536  # of a client, at the same time
MAX_OPS = 1_000_000  # of a program
MAX_PROGRAM_BYTES = 256 * 1024 * 1024  # of a program's ops and the texts they name by slot
MAX_CLIENT_BYTES = 1024 * 1024 * 1024  # the same over all running programs of a client
MAX_BEHIND_BYTES = 64 * 1024 * 1024  # results that a client has not received
EVENTS_MESSAGE_BYTES = 256 * 1024
MAX_FAREWELLS = 1024


@dataclass(slots=True, eq=False)
class ClientProgram:
    """A running program of a client: how much of it the client has sent."""

    num_ops: int = field(default=0, kw_only=True)
    num_bytes: int = field(default=0, kw_only=True)


P = TypeVar("P", bound=ClientProgram)


class Client(Generic[P]):
    """One session: its programs, the link to the client, and the events that wait for it."""

    def __init__(
        self,
        identity: bytes,
        now: float,
        *,
        number: int,
        tenant: str | None,
        owner: str | None,
    ) -> None:
        """`identity`: of its current connection, as the ROUTER names it; `number`: its name in
        reports to others; `tenant`: the account it is charged to, None: its own; `owner`: whose
        session it is."""
        self.number = number
        self.owner = owner
        self.identity = identity
        self.last_heard_s = now
        self.session = secrets.token_hex(16)
        self._stated_tenant = tenant
        self.tenant = self.session if tenant is None else tenant
        self.link = Link()
        self.texts = TakenTexts()
        self.events = EventOutbox()
        self.programs: dict[int, P] = {}
        self.num_bytes = 0  # of its running programs

    def account(self, tenant: str | None) -> Hashable:
        """Whose the texts of its programs are, of one that names `tenant`: those of its key, or of
        all clients without one, apart by the tenants that they name."""
        return self.owner, tenant or self._stated_tenant

    @property
    def behind_bytes(self) -> int:
        """Size of the results that it has not received."""
        return self.link.unacked_bytes + self.events.num_bytes

    def fill_link(self) -> None:
        """Move events into the link, up to the limit of unacknowledged ones."""
        while self.events and self.link.unacked_bytes < wire.RUNTIME_CREDIT_BYTES:
            self.link.put_list("events", "events", self.events.take(EVENTS_MESSAGE_BYTES))

    def require_room(self) -> None:
        """Raises InvalidProgram if it may not have another program."""
        if len(self.programs) >= MAX_PROGRAMS:
            raise InvalidProgram(f"a client may have at most {MAX_PROGRAMS} programs at a time")

    def take_ops(self, program: P, item: dict[str, Any], num_bytes: int | None) -> list[Any]:
        """The ops of an item of a message of `num_bytes` (None: it has others, too), with the texts
        that they name by their slots. Raises InvalidProgram where they are no list, or too much
        with what is `given`."""
        items = item.get("ops", [])
        if not isinstance(items, list):
            raise InvalidProgram.of("ops", items, "a list")
        size = _size_of((items, item.get("given"))) if num_bytes is None else num_bytes
        size += sum(self.texts.restore(item) for item in items)
        program.num_ops += len(items)
        program.num_bytes += size
        self.num_bytes += size
        if program.num_ops > MAX_OPS:
            raise InvalidProgram(f"a program may have at most {MAX_OPS} ops")
        if program.num_bytes > MAX_PROGRAM_BYTES:
            raise InvalidProgram(f"a program's ops may have at most {MAX_PROGRAM_BYTES} bytes")
        if self.num_bytes > MAX_CLIENT_BYTES:
            raise InvalidProgram(f"a client's programs may have at most {MAX_CLIENT_BYTES} bytes")
        return items

    def refuse(self, number: int, error: StemmaError) -> None:
        """Tell that a program has ended before it began."""
        kind = InvalidProgram.__name__ if isinstance(error, ProtocolError) else type(error).__name__
        failure = {"message": str(error), "kind": kind, "op": "program"}
        self.events.append(number, 0, 0, wire.FAILED, failure)
        used = {"num_requests": 0, "prompt_tokens": 0, "completion_tokens": 0}
        self.events.append(number, 0, 0, wire.DONE, used)

    def remove(self, number: int) -> P | None:
        """Forget a program; returns it, if there was one."""
        program = self.programs.pop(number, None)
        if program is not None:
            self.num_bytes -= program.num_bytes
        return program


def _size_of(told: object) -> int:
    """Raises InvalidProgram."""
    try:
        return len(orjson.dumps(told))
    except TypeError as error:  # deeper than what can be passed on
        raise InvalidProgram(f"a program's ops cannot be read: {error}") from error


def tenant_from(header: dict[str, Any]) -> str | None:
    """Raises ProtocolError."""
    tenant = header.get("tenant")
    if tenant is not None and not (
        isinstance(tenant, str) and 0 < len(tenant) <= wire.MAX_TENANT_CHARS
    ):
        allowed = f"a string of 1 to {wire.MAX_TENANT_CHARS} characters"
        raise ProtocolError(f"tenant={tenant!r} is not allowed; allowed: {allowed}")
    return tenant


C = TypeVar("C", bound="Client[Any]")
C_co = TypeVar("C_co", bound="Client[Any]", covariant=True)


class NewClient(Protocol[C_co]):
    """Makes a client, as `Client` is made."""

    def __call__(
        self, identity: bytes, now: float, *, number: int, tenant: str | None, owner: str | None
    ) -> C_co: ...


class Clients(Generic[C]):
    """All sessions, by token and by current connection."""

    def __init__(self, new_client: NewClient[C]) -> None:
        self._new = new_client
        self._num_clients = 0  # since the start
        self.by_session: dict[str, C] = {}
        self._by_identity: dict[bytes, C] = {}
        self._sessions = SharedLimit()
        self._farewells: OrderedDict[str | bytes, str] = OrderedDict()

    def __len__(self) -> int:
        return len(self.by_session)

    @property
    def num_programs(self) -> int:
        """Running programs of all clients."""
        return sum(len(client.programs) for client in self.by_session.values())

    def greet(
        self, identity: bytes, header: dict[str, Any], now: float, key: str | None = None
    ) -> C:
        """The client of a hello: a new one, or one that reconnects and reports what it received.
        Sessions are shared by `key`, the client's, or, where there are no keys, by the tenant that
        it states.

        Raises ProtocolError for a session that has ended, or if there are too many.
        """
        token = header.get("session")
        client = self._by_identity.get(identity)
        if token is not None:
            client = self.by_session.get(token) if isinstance(token, str) else None
            if client is None:
                if (reason := self._reason(token)) is not None:
                    raise ProtocolError(reason)
                raise UnknownSession(_UNKNOWN)
        if client is None:
            client = self._new_client(identity, now, tenant_from(header), key)
        else:
            client.link.resume(header.get("ack", 0))
            self._by_identity.pop(client.identity, None)
        client.identity = identity
        client.last_heard_s = now
        self._by_identity[identity] = client
        return client

    def _new_client(self, identity: bytes, now: float, tenant: str | None, key: str | None) -> C:
        owner = tenant if key is None else key
        if self._sessions.num_missing(owner, 1, MAX_CLIENTS):
            raise ProtocolError(
                f"this runtime serves at most {MAX_CLIENTS} clients, and has {len(self)}, "
                f"{self._sessions.used_by(owner)} of them yours; each key, or tenant where there "
                "are no keys, may have as many as are left free; close some"
            )
        self._num_clients += 1
        client = self._new(identity, now, number=self._num_clients, tenant=tenant, owner=owner)
        self._sessions.take(owner, 1)
        self.by_session[client.session] = client
        return client

    def of(self, identity: bytes, op: str) -> C:
        """The client that sent a message. Raises ProtocolError before its hello."""
        client = self._by_identity.get(identity)
        if client is None:
            if (reason := self._reason(identity)) is not None:
                raise ProtocolError(reason)
            raise NoHello(f"{op} before hello (or after too long a silence)")
        return client

    def remove(self, client: C, reason: str | None = None) -> None:
        """End a session; a later request for it is answered with the reason."""
        if self.by_session.pop(client.session, None) is not None:
            self._sessions.give_back(client.owner, 1)
        if self._by_identity.get(client.identity) is client:
            del self._by_identity[client.identity]
        if reason is not None:
            self._farewells[client.session] = self._farewells[client.identity] = reason
        while len(self._farewells) > MAX_FAREWELLS:
            self._farewells.popitem(last=False)

    def _reason(self, key: object) -> str | None:
        return self._farewells.get(key) if isinstance(key, str | bytes) else None


class NoHello(ProtocolError):
    """A message came over a connection that has not said hello. Where the connection before it
    broke, the client may not know yet."""


class UnknownSession(ProtocolError):
    """A hello names a session of another runtime that was here, or of one that ended by itself."""


_UNKNOWN = (
    "this session is not known any more: the runtime was started anew, or the client was away for "
    "longer than the grace period"
)
