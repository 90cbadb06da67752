"""`/v1/models`."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter
from starlette.exceptions import HTTPException

from ..service import Service


def router(service: Service) -> APIRouter:
    """The routes."""
    routes = APIRouter()

    @routes.get("/v1/models")
    async def models() -> dict[str, Any]:
        """The one model that is served."""
        return {"object": "list", "data": [_model(service)]}

    @routes.get("/v1/models/{name:path}")
    async def model(name: str) -> dict[str, Any]:
        """The model of this name."""
        if name != service.model:
            raise HTTPException(404, f"model {name!r} does not exist; this is {service.model!r}")
        return _model(service)

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
