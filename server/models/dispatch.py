"""Sends each request to the application of the model that it names, once that is loaded.

A body is read and parsed here, once: its route finds the value. What only asks (GET) names a model
by `?model=`, and loads none.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse
from starlette.types import Receive, Scope, Send

from ..api.ollama.keep_alive import asks_to_unload, told_in, unloaded_answer
from ..app import body_routes
from ..generation.admission import header_timeout_s
from ..generation.service import Service
from ..protocol.caller import caller_of
from ..protocol.disconnect import while_connected
from ..protocol.failures import Refusal
from ..protocol.json_route import JsonRoute, beside_loop, json_reader, keep_json
from ..protocol.ollama_errors import is_spoken
from .allowed_names import TAG
from .cascades import ServedCascade
from .model_names import ModelNames
from .model_pool import ModelPool
from .model_slot import ModelSlot

_FIELD = "model"
_OLDER_FIELD = "name"  # of the same, at these paths
_WITH_OLDER_FIELD = frozenset({"/api/show"})
NEED_NO_ENGINE = frozenset({"/abort", "/abort_request", "/api/show"})


@dataclass(frozen=True, slots=True)
class JointApp:
    """The application of several models that answer together."""

    served: ServedCascade
    service: Service
    app: FastAPI


class Dispatcher:
    """The ASGI application below a server's middleware."""

    def __init__(
        self,
        pool: ModelPool,
        names: ModelNames,
        services: Mapping[ModelSlot, Service],
        apps: Mapping[ModelSlot, FastAPI],
        joint: Mapping[str, JointApp],
    ) -> None:
        """`joint`: by the names of cascades."""
        self._pool = pool
        self._names = names
        self._services = services
        self._apps = apps
        self._joint = joint
        self._routes = body_routes(services[names.first])

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Raises Refusal, InvalidRequest and ModelLoadError."""
        request = Request(scope, receive)
        route = self._routes.get(scope["path"]) if scope["method"] == "POST" else None
        if route is None:
            name = request.query_params.get(_FIELD)
            slot = await self._names.find(name)
            if name or scope["method"] != "GET":  # the page and what it loads are of no model
                request.state.model = slot.name
            await self._apps[slot](scope, receive, send)
            return
        scope["route"] = route  # for the counts, should it be refused here
        value = await self._read(request)
        if (joint := self._joint_named(value)) is not None:
            await self._answer_jointly(joint, route, request, value, send)
            return
        slot = await self._chosen_by_body(request, value, route.fields)
        request.state.model = slot.name
        if scope["path"] in NEED_NO_ENGINE:
            await self._apps[slot](scope, receive, send)
            return
        if not slot.is_open:  # what is refused loads nothing
            await beside_loop(request, lambda: route.read(request, value))
        keep_alive_s = told_in(scope["path"], value) if caller_of(request).is_admin else None
        if keep_alive_s == 0 and asks_to_unload(scope["path"], value, slot.name):
            self._pool.let_go(slot)
            answer = JSONResponse(unloaded_answer(scope["path"], value["model"]))
            await answer(scope, receive, send)
            return
        await self._enter(slot, request, keep_alive_s)
        try:
            await self._apps[slot](scope, receive, send)
        finally:
            self._pool.leave(slot)

    def _joint_named(self, value: Any) -> JointApp | None:
        name = value.get(_FIELD) if isinstance(value, dict) else None
        return self._joint.get(name) if isinstance(name, str) else None

    async def _answer_jointly(
        self, joint: JointApp, route: JsonRoute, request: Request, value: Any, send: Send
    ) -> None:
        request.state.model = joint.served.name
        joint.served.require(request.scope["path"])
        limit = joint.service.body_limit
        if keep_json(request, value) > limit.num_bytes:
            raise Refusal(413, limit.text)
        served, slots = joint.served, joint.served.slots
        if not served.is_open:  # what is refused loads nothing
            await beside_loop(request, lambda: served.require_body(route.read(request, value)))
        entering = self._pool.enter_all(slots, header_timeout_s(request))
        if served.is_open:
            await entering  # at once
        else:
            await while_connected(request.receive, entering)
        try:
            await joint.app(request.scope, request.receive, send)
        finally:
            for slot in slots:
                self._pool.leave(slot)

    async def _read(self, request: Request) -> Any:
        parse = await json_reader(request)
        return await beside_loop(request, parse)

    async def _chosen_by_body(
        self, request: Request, value: Any, fields: frozenset[str] | None
    ) -> ModelSlot:
        """`fields`: those that the route knows; None: any."""
        slot = await self._names.find(_named_in(value, request.scope["path"]))
        if isinstance(value, dict):
            if fields is not None and _FIELD not in fields:
                value.pop(_FIELD, None)  # it has been heeded
            elif value.get(_FIELD) == slot.name + TAG and not is_spoken(request.scope):
                value[_FIELD] = slot.name  # only Ollama's routes know tags
        limit = self._services[slot].body_limit
        if keep_json(request, value) > limit.num_bytes:
            raise Refusal(413, limit.text)
        return slot

    async def _enter(self, slot: ModelSlot, request: Request, keep_alive_s: float | None) -> None:
        entering = self._pool.enter(slot, header_timeout_s(request), keep_alive_s)
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
