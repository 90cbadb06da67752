"""`/v1/models`, of OpenAI's API and, for clients that say so, of Anthropic's."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from datetime import UTC, datetime
from functools import partial
from typing import Any

from fastapi import APIRouter, Request

from ....errors import model_not_found
from ...generation.service import Service
from ...protocol import anthropic_errors as anthropic

Entry = dict[str, Any]  # of the list


def router(service: Service) -> APIRouter:
    """The routes."""

    async def list_all() -> list[Entry]:
        return entries(service, await service.adapters())

    return models_routes(list_all, partial(_find, service))


def models_routes(
    list_all: Callable[[], Awaitable[list[Entry]]], find: Callable[[str], Awaitable[Entry]]
) -> APIRouter:
    """`find` raises ModelNotFound."""
    routes = APIRouter()

    @routes.head("/v1/models", include_in_schema=False)  # some clients ask so whether it is there
    @routes.get("/models", include_in_schema=False)
    @routes.get("/v1/models")
    async def models(request: Request) -> dict[str, Any]:
        """The model that is served, and its adapters: OpenAI's list, or Anthropic's for clients
        that send `anthropic-version`."""
        found = await list_all()
        if anthropic.is_spoken(request.scope):
            return _anthropic_list(found)
        return {"object": "list", "data": found}

    @routes.head("/v1/models/{name:path}", include_in_schema=False)
    @routes.get("/models/{name:path}", include_in_schema=False)
    @routes.get("/v1/models/{name:path}")
    async def model(name: str, request: Request) -> dict[str, Any]:
        """The model of this name, or the adapter."""
        found = await find(name)
        return _anthropic_model(found) if anthropic.is_spoken(request.scope) else found

    return routes


def entries(service: Service, adapters: Sequence[Entry]) -> list[Entry]:
    """The model, and its adapters as its engine tells of them."""
    return [_model(service), *(_adapter(service, told) for told in adapters)]


async def _find(service: Service, name: str) -> dict[str, Any]:
    """Raises ModelNotFound."""
    if name == service.model:
        return _model(service)
    adapters = await service.adapters()
    for told in adapters:
        if told["name"] == name.removeprefix(f"{service.model}:"):
            return _adapter(service, told)
    raise model_not_found(name, service.model, tuple(told["name"] for told in adapters))


def _model(service: Service) -> dict[str, Any]:
    return {
        "id": service.model,
        "object": "model",
        "created": service.created_s,
        "owned_by": "stemma",
        "root": service.model,
        "parent": None,
        "max_model_len": service.info["max_model_len"],
    }


def _adapter(service: Service, told: dict[str, Any]) -> dict[str, Any]:
    """As vLLM and SGLang list it: `root` is the adapter's folder, `parent` the base model; and
    `revision`, with which the namespace of its KV ends."""
    own = {"id": told["name"], "root": told["path"], "parent": service.model}
    return {**_model(service), **own, "created": told["loaded_s"], "revision": told["revision"]}


def _anthropic_model(model: Mapping[str, Any]) -> dict[str, Any]:
    """A model in Anthropic's words."""
    created = datetime.fromtimestamp(model["created"], UTC)
    return {
        "type": "model",
        "id": model["id"],
        "display_name": model["id"],
        "created_at": created.isoformat(timespec="seconds").replace("+00:00", "Z"),
        "max_input_tokens": model["max_model_len"],
    }


def _anthropic_list(models: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """All in one page, as Anthropic lists them."""
    data = list(map(_anthropic_model, models))
    first, last = data[0]["id"], data[-1]["id"]
    return {"data": data, "has_more": False, "first_id": first, "last_id": last}
