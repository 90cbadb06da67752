"""Routes with JSON bodies: parsed strictly, searched for unknown fields, and validated.

JSON (RFC 8259) has no NaN and no Infinity, text in UTF-8, and names that are unique in an object;
half of a surrogate pair is no text. Python's parser accepts more. Anything invalid is refused with
400 before any model sees it.

A large body is read on another thread, so that the event loop goes on meanwhile, and large answers
are written there; `json_bounds` says how long reading may keep the loop from running.
"""

from __future__ import annotations

import asyncio
import json
import math
import re
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property, partial
from inspect import signature
from itertools import islice
from typing import Any, TypeVar

import orjson
from fastapi import APIRouter, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import Response
from fastapi.routing import APIRoute
from pydantic import BaseModel, TypeAdapter, ValidationError
from starlette.requests import ClientDisconnect

from ...errors import InvalidRequest
from . import ollama_errors as ollama
from .caller import ANSWER_HEADERS
from .disconnect import refuse_the_gone
from .failures import Refusal
from .json_bounds import require_bounded
from .known_fields import MAX_REPORTED, KnownFields, warning_of

_UNTYPED = ("", "application/x-www-form-urlencoded")
_OF_PAGES = ("origin", "sec-fetch-site")
WARNINGS = "x-stemma-warnings"
LARGE_BYTES = 16 * 1024  # a body of so many takes the loop 3 ms at worst; most chats have fewer
NUM_THREADS = (
    1  # that reads large bodies: more keep the loop waiting for the GIL longer, and gain nothing
)
MAX_NUMBER_CHARS = 400  # 10**308 has 309
MAX_PATH_CHARS = 200  # of a field that is named
_NUM_BYTES = "stemma.num_bytes"  # of the body; in a request's scope
_VALUE = "stemma.json"  # the body, where it was parsed already; there, too
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")  # or half of a pair

_T = TypeVar("_T")
_M = TypeVar("_M", bound=BaseModel)


def json_routes() -> APIRouter:
    """A router whose routes are `JsonRoute`s."""
    return APIRouter(route_class=JsonRoute)


def body_threads() -> ThreadPoolExecutor:
    """What an application whose routes these are has as `state.body_threads`."""
    return ThreadPoolExecutor(NUM_THREADS, "body")


class JsonRoute(APIRoute):
    """A route. If its endpoint takes a body, the body is read strictly; the endpoint is given that
    and, if it takes it, the request, and nothing else. It returns a response or plain data."""

    @property
    def fields(self) -> frozenset[str] | None:
        """The names of its body's fields; None: it takes no body, or any field."""
        known = None if self.body_field is None else self._known
        return None if known is None else known.names

    @property
    def _body_type(self) -> Any:
        assert self.body_field is not None, "it takes a body"
        return self.body_field.field_info.annotation

    def read(self, request: Request, value: object) -> Any:
        """The body's model. Raises RequestValidationError and Refusal."""
        if self._known is not None:
            _note_unknown(request, self._known, value)
        return _validated(self._adapter, value)

    @cached_property
    def _known(self) -> KnownFields | None:
        return KnownFields.of(self._body_type)

    @cached_property
    def _adapter(self) -> TypeAdapter[Any]:
        return TypeAdapter[Any](self._body_type)

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        if self.body_field is None:
            return super().get_route_handler()
        names, endpoint = tuple(signature(self.endpoint).parameters), self.endpoint
        assert names in (("body",), ("body", "request")), f"{self.path} takes {names}"
        takes_request = "request" in names

        async def handle_json(request: Request) -> Response:
            parse = await json_reader(request)
            body = await beside_loop(request, lambda: self.read(request, parse()))
            # FastAPI's own handler would read and validate all of it once more.
            answer = await (endpoint(body, request) if takes_request else endpoint(body))
            if isinstance(answer, Response):
                return answer
            return Response(orjson.dumps(answer), media_type="application/json")

        return handle_json


async def json_reader(request: Request) -> Callable[[], Any]:
    """Receives the body; what it returns parses it, or has what `keep_json` was given. Raises
    Refusal and HTTPException."""
    if _VALUE in request.scope:
        return partial(request.scope.pop, _VALUE)
    _require_json(request)
    chunks = await _chunks_of(request)
    num_bytes = sum(map(len, chunks))
    if not num_bytes:
        raise Refusal(400, "the body is missing", code="invalid_json")
    request.scope[_NUM_BYTES] = num_bytes

    def parse() -> Any:
        value = parse_json(b"".join(chunks))
        chunks.clear()
        return value

    return parse


def keep_json(request: Request, value: object) -> int:
    """Have the route find the body's value, which was parsed on the way to it; returns how many
    bytes it was of."""
    request.scope[_VALUE] = value
    num_bytes: int = request.scope[_NUM_BYTES]
    return num_bytes


async def _chunks_of(request: Request) -> list[bytes]:
    """The body. Raises HTTPException where the client goes before it has sent all."""
    try:
        return [chunk async for chunk in request.stream()]
    except ClientDisconnect:
        refuse_the_gone()


async def beside_loop(request: Request, work: Callable[[], _T], num_bytes: int | None = None) -> _T:
    """The result of `work`: on another thread if what it works on is large. `num_bytes`: about how
    large that is, the request's body if it is not given."""
    if (request.scope[_NUM_BYTES] if num_bytes is None else num_bytes) < LARGE_BYTES:
        return work()
    threads = request.app.state.body_threads
    return await asyncio.get_running_loop().run_in_executor(threads, work)


def _require_json(request: Request) -> None:
    """Raises Refusal. A page of another site can send other types unasked, never this one."""
    given = request.headers.get("content-type")
    name = "" if given is None else given.partition(";")[0].strip().lower()
    is_json = name == "application/json" or (
        name.startswith("application/") and name.endswith("+json")
    )
    if not is_json and not _is_untyped(request, name):
        shown = "none" if given is None else repr(given[:80])
        raise Refusal(415, f"content-type is {shown}; this takes application/json")


def _is_untyped(request: Request, name: str) -> bool:
    """Whether it is of Ollama's API, whose clients name no type, or curl's by default, and comes
    from no page: a browser says where a request comes from."""
    is_from_page = any(header in request.headers for header in _OF_PAGES)
    return ollama.is_spoken(request.scope) and name in _UNTYPED and not is_from_page


def _note_unknown(request: Request, known: KnownFields, value: object) -> None:
    """Raises Refusal where no unknown fields are allowed."""
    unknown = list(islice(known.unknown_in(value), MAX_REPORTED + 1))
    if not unknown:
        return
    if request.app.state.strict_fields:
        raise Refusal(
            400, f"unknown field {unknown[0]!r}", code="unknown_parameter", field=unknown[0]
        )
    headers = {**request.scope.get(ANSWER_HEADERS, {}), WARNINGS: warning_of(unknown)}
    request.scope[ANSWER_HEADERS] = headers


def validated(kind: type[_M], fields: dict[str, Any]) -> _M:
    """A body of another API that a request amounts to. Raises InvalidRequest."""
    try:
        return kind.model_validate(fields)
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(str(part) for part in first["loc"])
        raise InvalidRequest(f"{field}: {first['msg']}", field) from error


def _validated(adapter: TypeAdapter[Any], value: object) -> Any:
    """Raises RequestValidationError."""
    try:
        return adapter.validate_python(value)
    except ValidationError as error:
        told = error.errors(include_url=False)
        raise RequestValidationError(
            [{**each, "loc": ("body", *each["loc"])} for each in told]
        ) from None


def parse_json(body: bytes) -> Any:
    """Parse strictly. Raises Refusal with what is wrong."""
    require_bounded(body)
    try:
        text = body.decode("utf-8-sig")  # some editors and shells write a mark before it
    except UnicodeDecodeError as error:
        raise _no_json(f"invalid UTF-8 at byte {error.start}") from None
    try:
        value = _DECODER.decode(text)
    except json.JSONDecodeError as error:
        raise _no_json(str(error)) from None
    if _SURROGATE.search(text):
        _require_text(value)
    return value


_Path = tuple["_Path", object] | None  # of a value: its parent's, and its name or index there


def _require_text(value: object) -> None:
    """Refuse half surrogate pairs: text made of them cannot be sent on or returned. Raises Refusal
    that names the field."""
    for path, text in _texts_in(value):
        try:
            text.encode()
        except UnicodeEncodeError as error:
            half = text[error.start]
            message = f"{half!r} is half of a surrogate pair, and no text"
            raise _no_json(message, _shown(path)) from None


def _texts_in(value: object) -> Iterator[tuple[_Path, str]]:
    """All texts, names too, each with its path."""
    waiting: list[tuple[_Path, object]] = [(None, value)]
    while waiting:
        path, value = waiting.pop()
        if isinstance(value, str):
            yield path, value
        elif isinstance(value, list):
            waiting += [((path, i), v) for i, v in enumerate(value) if type(v) in _WITH_TEXTS]
        elif isinstance(value, dict):
            yield from ((path, name) for name in value)
            waiting += [((path, n), v) for n, v in value.items() if type(v) in _WITH_TEXTS]


_WITH_TEXTS = (str, list, dict)


def _shown(path: _Path) -> str:
    names: list[str] = []
    while path is not None:
        path, name = path
        names.append(str(name))
    return ".".join(reversed(names))[:MAX_PATH_CHARS]


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        counts = Counter(name for name, _ in pairs)
        twice = next(name for name, num in counts.items() if num > 1)
        raise _no_json(f"the name {twice[:80]!r} is there twice in an object")
    return found


def _finite(text: str) -> float:
    value = float(text) if len(text) <= MAX_NUMBER_CHARS else math.inf
    if math.isinf(value):
        raise _no_json(f"the number {text[:40]} is too large")
    return value


def _integer(text: str) -> int:
    if len(text) > MAX_NUMBER_CHARS:
        raise _no_json(f"the number {text[:40]} is too large")
    return int(text)


def _constant(name: str) -> Any:
    raise _no_json(f"{name} is no number of JSON's")


def _no_json(reason: str, field: str = "") -> Refusal:
    message = f"the body is no valid JSON: {field}{': ' if field else ''}{reason}"
    return Refusal(400, message, code="invalid_json", field=field or None)


_DECODER = json.JSONDecoder(
    object_pairs_hook=_unique,
    parse_float=_finite,
    parse_int=_integer,
    parse_constant=_constant,
)
