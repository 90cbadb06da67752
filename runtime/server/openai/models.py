"""`/v1/models`."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter

from ..service import Service


def router(service: Service) -> APIRouter:
    """The routes."""
    routes = APIRouter()

    @routes.get("/v1/models")
    async def models() -> dict[str, Any]:
        """The one model that is served."""
        model = {
            "id": service.model,
            "object": "model",
            "created": service.created_s,
            "owned_by": "stemma",
            "max_model_len": service.info["max_model_len"],
        }
        return {"object": "list", "data": [model]}

    return routes
