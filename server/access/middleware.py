"""The access middleware: every request passes here first, and every response last.

Pure ASGI, outside of all routes. In order: a request id, the head's form, the browser's rules, the
key, its limits, a bound on the body. On the way out it adds the headers that every response has,
and words unforeseen errors. It costs one extra call per chunk of a stream.
"""

from __future__ import annotations

import logging
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ...shared_limit import SharedLimit
from ..protocol.caller import (
    ANSWER_HEADERS,
    CALLER,
    TENANT_HEADER,
    Caller,
    named_tenant,
    request_id_of,
)
from ..protocol.connections import connection_of
from ..protocol.failures import Refusal, failure_of
from ..settings import ServerSettings
from .api_keys import ApiKey, KeyRing
from .cors import BrowserRules
from .framing import require_one_meaning
from .load import Load, Ticket
from .rates import KeyUsage
from .request_body import BodyLimit, RequestBody
from .route_access import PROBES, RouteAccess, door_of

log = logging.getLogger(__name__)

REQUEST_ID = "x-request-id"
TICKET = "stemma.ticket"  # in a request's scope
MAX_HEADER_BYTES = 65_536  # all headers together
MAX_USAGES = 65_536
_LIMITS = ("limit", "remaining", "reset")
EXPOSED_HEADERS = (
    REQUEST_ID,
    "x-stemma-warnings",
    "retry-after",
    *(f"x-ratelimit-{what}-{of}" for what in _LIMITS for of in ("requests", "tokens")),
)

_Headers = dict[str, list[str]]


class AccessMiddleware:
    """Owns the usage of keys and the load. Lifetime: the application's."""

    def __init__(
        self,
        app: ASGIApp,
        settings: ServerSettings,
        keys: KeyRing,
        body_limit: Callable[[], BodyLimit],
    ) -> None:
        self._app = app
        self._settings = settings
        self._keys = keys
        self._body_limit = body_limit
        self._rules = BrowserRules.of(
            settings.host, settings.allowed_hosts, settings.cors_origins, has_keys=keys.is_used
        )
        self._load = Load()
        self._room = SharedLimit()  # bytes of bodies under way
        self._usages: OrderedDict[str, KeyUsage] = OrderedDict()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":  # lifespan; this server has no websockets
            await self._app(scope, receive, send)
            return
        headers = _headers_of(scope)
        request_id = request_id_of(_one(headers, REQUEST_ID))
        answer = _Answer(scope, send, request_id)
        ticket = Ticket(self._load)
        scope[TICKET] = ticket
        try:
            scope[CALLER] = caller = self._let_in(scope, headers, request_id, ticket)
            ticket.tenant = owner = caller.tenant if self._keys.is_used else _peer_of(scope)
            length = _one(headers, "content-length")
            with RequestBody(receive, self._room, owner, self._body_limit(), length) as body:
                await self._app(scope, body.receive, answer.send)
        except Exception as error:
            await self._answer_error(error, scope, receive, answer)
        finally:
            ticket.release()

    def _let_in(self, scope: Scope, headers: _Headers, request_id: str, ticket: Ticket) -> Caller:
        """Admit the request. Raises Refusal and InvalidRequest."""
        if sum(len(name) + len(value) for name, value in scope["headers"]) > MAX_HEADER_BYTES:
            raise Refusal(431, f"headers may have at most {MAX_HEADER_BYTES} bytes")
        require_one_meaning(scope, headers)
        method, path = scope["method"], scope["path"]
        connection = connection_of(scope)
        if connection is not None and connection.is_spare:
            scope[ANSWER_HEADERS] = {"connection": "close"}
            if path not in PROBES:
                raise Refusal(503, "all connections are in use", code="too_many_connections")
        door = door_of(method, path, is_metrics_open=self._settings.metrics_open)
        self._rules.check(
            headers.get("host", []),
            _one(headers, "origin"),
            _one(headers, "sec-fetch-site"),
            is_open=door is RouteAccess.OPEN,
        )
        if not self._keys.is_used:
            return Caller(named_tenant(_one(headers, TENANT_HEADER)), request_id=request_id)
        given = _key_in(headers)
        key = None if given is None else self._keys.find(given)
        if door is RouteAccess.OPEN:
            return Caller(request_id=request_id, is_admin=False)
        if key is None:
            raise _no_key(given)
        is_admin = key.is_admin or not self._settings.isolate_cache
        if door is RouteAccess.ADMIN and not is_admin:
            raise Refusal(403, f"{path} shows what is not this key's own: it needs an admin's key")
        if method == "POST":
            self._begin(key, scope, ticket)
        namespace = f"key/{key.tenant}" if self._settings.isolate_cache else ""
        return Caller(key.tenant, namespace, request_id, is_admin)

    def _begin(self, key: ApiKey, scope: Scope, ticket: Ticket) -> None:
        """Charge the key. Raises Refusal where its limits are used up."""
        now = time.monotonic()
        usage = self._usages.setdefault(key.name, KeyUsage(key, now))
        self._usages.move_to_end(key.name)
        while len(self._usages) > MAX_USAGES:
            self._usages.popitem(last=False)
        usage.take_limits(key, now)
        usage.begin(now)
        ticket.usage = usage
        scope[ANSWER_HEADERS] = usage.headers()

    async def _answer_error(
        self, error: Exception, scope: Scope, receive: Receive, answer: _Answer
    ) -> None:
        failure = failure_of(error)
        if failure.status == 500:
            log.error("%s %s failed", scope["method"], answer.request_id, exc_info=error)
        if not answer.has_begun:  # else the server closes the connection of an incomplete response
            await failure.response(scope)(scope, receive, answer.send)


class _Answer:
    """Sends the response; adds to its first message the headers that all responses have."""

    def __init__(self, scope: Scope, send: Send, request_id: str) -> None:
        self._scope = scope
        self._send = send
        self.request_id = request_id
        self.has_begun = False

    def send(self, message: Message) -> Awaitable[None]:
        if message["type"] == "http.response.start":
            self.has_begun = True
            more = {REQUEST_ID: self.request_id, **self._scope.get(ANSWER_HEADERS, {})}
            given = message.get("headers", ())
            names = {name.lower() for name, _ in given}
            fresh = [(name.encode(), value.encode("latin-1")) for name, value in more.items()]
            fresh = [(name, value) for name, value in fresh if name not in names]
            message = {**message, "headers": [*given, *fresh]}
        return self._send(message)


def _headers_of(scope: Scope) -> _Headers:
    found: _Headers = {}
    for name, value in scope["headers"]:
        found.setdefault(name.decode("latin-1"), []).append(value.decode("latin-1"))
    return found


def _one(headers: _Headers, name: str) -> str | None:
    """A header's value; the first one of a header that comes twice."""
    values = headers.get(name)
    return values[0] if values else None


def _peer_of(scope: Scope) -> str:
    """The address that a request comes from: whom it counts for where there are no keys, since any
    client may name itself, also in X-Forwarded-For, which uvicorn has in the scope's `client`."""
    connection = connection_of(scope)
    return "" if connection is None else connection.peer


def _key_in(headers: _Headers) -> str | None:
    """OpenAI's `Authorization: Bearer`, or Anthropic's `x-api-key`."""
    scheme, _, key = (_one(headers, "authorization") or "").partition(" ")
    if scheme.lower() == "bearer" and key.strip():
        return key.strip()
    return _one(headers, "x-api-key")


def _no_key(given: str | None) -> Refusal:
    what = "an API key is needed" if given is None else "this API key is not known"
    message = f"{what}: send it as `Authorization: Bearer KEY` or `x-api-key: KEY`"
    return Refusal(401, message, headers={"www-authenticate": 'Bearer realm="stemma"'})
