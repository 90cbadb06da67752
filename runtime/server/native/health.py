"""Whether the server lives (`/live`), its engine works (`/health`) and it takes work (`/ready`)."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter
from fastapi.responses import JSONResponse, Response

from .... import __version__
from ....errors import EngineError
from ..failures import error_response
from ..service import Service
from .engine_check import EngineCheck


def router(service: Service) -> APIRouter:
    """The routes."""
    routes = APIRouter()
    check = EngineCheck(service)

    @routes.get("/health")
    @routes.get("/health_generate", include_in_schema=False)  # SGLang's name
    @routes.get("/ping", include_in_schema=False)  # SageMaker's
    async def health() -> Response:
        """200 when the engine has just completed a step, else 503 with the reason."""
        try:
            problem = await check.problem()
        except EngineError as error:
            problem = str(error)
        if problem is not None:
            return error_response(503, problem, "server_error")
        return JSONResponse({"status": "ok"})

    @routes.get("/ready")
    async def ready() -> Response:
        """200 when the server takes work, else 503 with the reason."""
        try:
            service.require_open()
        except EngineError as error:
            return error_response(503, str(error), "server_error")
        return JSONResponse({"status": "ready"})

    @routes.get("/live")
    async def live() -> dict[str, Any]:
        """200 as long as the HTTP server answers, whatever its engine does."""
        return {"status": "alive"}

    @routes.get("/version")
    async def version() -> dict[str, Any]:
        """Of Stemma."""
        return {"version": __version__}

    return routes
