"""Routes with JSON bodies: parsed strictly, and searched for unknown fields.

JSON (RFC 8259) has no NaN and no Infinity, text in UTF-8, and names that are unique in an object;
half of a surrogate pair is no text. Python's parser accepts more. Anything invalid is refused with
400 before any model sees it.
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator
from itertools import islice
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import Response
from fastapi.routing import APIRoute

from .caller import ANSWER_HEADERS
from .failures import Refusal
from .known_fields import MAX_REPORTED, KnownFields, warning_of

WARNINGS = "x-stemma-warnings"
MAX_NESTING = 512  # of lists and objects; half of what the parser itself can do
MAX_NUMBER_CHARS = 400  # 10**308 has 309
MAX_PATH_CHARS = 200  # of a field that is named
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")  # or half of a pair


def json_routes() -> APIRouter:
    """A router whose routes are `JsonRoute`s."""
    return APIRouter(route_class=JsonRoute)


class JsonRoute(APIRoute):
    """A route; if its endpoint takes a body, the body is parsed strictly."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()
        if self.body_field is None:
            return handle
        known = KnownFields.of(self.body_field.field_info.annotation)

        async def handle_json(request: Request) -> Response:
            return await handle(_JsonRequest(request, known))

        return handle_json


class _JsonRequest(Request):
    """Parses its body once."""

    def __init__(self, request: Request, known: KnownFields | None) -> None:
        super().__init__(request.scope, request.receive)
        self._known = known
        self._require_json()

    async def json(self) -> Any:
        body = parse_json(await self.body())
        if self._known is not None:
            unknown = list(islice(self._known.unknown_in(body), MAX_REPORTED + 1))
            if unknown:
                self._take_unknown(unknown)
        return body

    def _require_json(self) -> None:
        """Raises Refusal. A page of another site can send other types unasked, never this one."""
        given = self.headers.get("content-type")
        name = "" if given is None else given.partition(";")[0].strip().lower()
        is_json = name == "application/json" or (
            name.startswith("application/") and name.endswith("+json")
        )
        if not is_json:
            shown = "none" if given is None else repr(given[:80])
            raise Refusal(415, f"content-type is {shown}; this takes application/json")

    def _take_unknown(self, unknown: list[str]) -> None:
        if self.scope["app"].state.strict_fields:
            raise Refusal(
                400, f"unknown field {unknown[0]!r}", code="unknown_parameter", field=unknown[0]
            )
        headers = {**self.scope.get(ANSWER_HEADERS, {}), WARNINGS: warning_of(unknown)}
        self.scope[ANSWER_HEADERS] = headers


def parse_json(body: bytes) -> Any:
    """Parse strictly. Raises Refusal with what is wrong."""
    try:
        text = body.decode("utf-8")
    except UnicodeDecodeError as error:
        raise _no_json(f"invalid UTF-8 at byte {error.start}") from None
    try:
        value = _DECODER.decode(text)
    except RecursionError:
        raise _no_json(f"more than {MAX_NESTING} levels deep") from None
    except json.JSONDecodeError as error:
        raise _no_json(str(error)) from None
    if _is_deep(text, value):
        raise _no_json(f"more than {MAX_NESTING} levels deep")
    if _SURROGATE.search(text):
        _require_text(value)
    return value


def _is_deep(text: str, value: Any) -> bool:
    """Whether nesting exceeds the bound; few bodies have enough brackets to need the check."""
    if text.count("[") + text.count("{") <= MAX_NESTING:
        return False
    level, depth = [value], 0
    while level:
        depth += 1
        if depth > MAX_NESTING:
            return True
        level = [
            item
            for node in level
            if isinstance(node, list | dict)
            for item in (node.values() if isinstance(node, dict) else node)
            if isinstance(item, list | dict)
        ]
    return False


def _require_text(value: Any) -> None:
    """Refuse half surrogate pairs: text made of them cannot be sent on or returned. Raises Refusal
    that names the field."""
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        half = error.object[error.start]
        field = next(path for path, text in _texts_in(value) if half in text)[
            1 : 1 + MAX_PATH_CHARS
        ]
        message = f"{half!r} is half of a surrogate pair, and no text"
        raise _no_json(message, field) from None


def _texts_in(value: Any, path: str = "") -> Iterator[tuple[str, str]]:
    """All texts, and names before their values, each with its path."""
    if isinstance(value, str):
        yield path, value
    elif isinstance(value, list):
        for index, item in enumerate(value):
            yield from _texts_in(item, f"{path}.{index}")
    elif isinstance(value, dict):
        for name, item in value.items():
            yield path, name
            yield from _texts_in(item, f"{path}.{name}")


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
