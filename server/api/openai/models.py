"""`/v1/models`."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter

from ....errors import model_not_found
from ...generation.service import Service


def router(service: Service) -> APIRouter:
    """The routes."""
    routes = APIRouter()

    @routes.get("/v1/models")
    async def models() -> dict[str, Any]:
        """The model that is served, and its adapters."""
        adapters = [_adapter(service, told) for told in await service.adapters()]
        return {"object": "list", "data": [_model(service), *adapters]}

    @routes.get("/v1/models/{name:path}")
    async def model(name: str) -> dict[str, Any]:
        """The model of this name, or the adapter."""
        if name == service.model:
            return _model(service)
        adapters = await service.adapters()
        for told in adapters:
            if told["name"] == name.removeprefix(f"{service.model}:"):
                return _adapter(service, told)
        raise model_not_found(name, service.model, tuple(told["name"] for told in adapters))

    return routes


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
