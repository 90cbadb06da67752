"""`/health`: whether the engine is there."""

from __future__ import annotations

import asyncio

from fastapi import APIRouter
from fastapi.responses import JSONResponse, Response

from ....errors import EngineError
from ..failures import error_response
from ..service import Service


def router(service: Service) -> APIRouter:
    """The routes."""
    routes = APIRouter()

    @routes.get("/health")
    async def health() -> Response:
        """200 when the engine answers, else 503 with the reason."""
        try:
            await asyncio.to_thread(service.engine.connection.call, "info", 5.0)
        except EngineError as error:
            return error_response(503, str(error), "server_error")
        return JSONResponse({"status": "ok"})

    return routes
