"""Sends each request to the application of the model that it names, once that is loaded.

A body is read and parsed here, once: its route finds the value. What only asks (GET) names a model
by `?model=`, and loads none.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fastapi import FastAPI, Request
from starlette.types import Receive, Scope, Send

from ..app import body_routes
from ..generation.admission import header_timeout_s
from ..generation.service import Service
from ..protocol.disconnect import while_connected
from ..protocol.failures import Refusal
from ..protocol.json_route import beside_loop, json_reader, keep_json
from .model_names import ModelNames
from .model_pool import ModelPool
from .model_slot import ModelSlot

_FIELD = "model"
_OLDER_FIELD = "name"  # of the same, at these paths
_WITH_OLDER_FIELD = frozenset({"/api/show"})
NEED_NO_ENGINE = frozenset({"/abort", "/abort_request", "/api/show"})


class Dispatcher:
    """The ASGI application below a server's middleware."""

    def __init__(
        self,
        pool: ModelPool,
        names: ModelNames,
        services: Mapping[ModelSlot, Service],
        apps: Mapping[ModelSlot, FastAPI],
    ) -> None:
        self._pool = pool
        self._names = names
        self._services = services
        self._apps = apps
        self._routes = body_routes(services[names.first])

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Raises Refusal, InvalidRequest and ModelLoadError."""
        request = Request(scope, receive)
        route = self._routes.get(scope["path"]) if scope["method"] == "POST" else None
        if route is None:
            slot = await self._names.find(request.query_params.get(_FIELD))
            await self._apps[slot](scope, receive, send)
            return
        scope["route"] = route  # for the counts, should it be refused here
        slot = await self._chosen_by_body(request, route.fields)
        if scope["path"] in NEED_NO_ENGINE:
            await self._apps[slot](scope, receive, send)
            return
        await self._enter(slot, request)
        try:
            await self._apps[slot](scope, receive, send)
        finally:
            self._pool.leave(slot)

    async def _chosen_by_body(self, request: Request, fields: frozenset[str] | None) -> ModelSlot:
        """`fields`: those that the route knows; None: any."""
        parse = await json_reader(request)
        value = await beside_loop(request, parse)
        slot = await self._names.find(_named_in(value, request.scope["path"]))
        if isinstance(value, dict) and fields is not None and _FIELD not in fields:
            value.pop(_FIELD, None)  # it has been heeded
        limit = self._services[slot].body_limit
        if keep_json(request, value) > limit.num_bytes:
            raise Refusal(413, limit.text)
        return slot

    async def _enter(self, slot: ModelSlot, request: Request) -> None:
        entering = self._pool.enter(slot, header_timeout_s(request))
        if slot.is_open:
            await entering  # at once
        else:
            await while_connected(request.receive, entering)


def _named_in(value: Any, path: str) -> Any:
    if not isinstance(value, dict):
        return None  # its route refuses it
    name = value.get(_FIELD)
    if name is None and path in _WITH_OLDER_FIELD:
        name = value.get(_OLDER_FIELD)
    return name
