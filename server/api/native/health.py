"""Whether the server lives (`/live`), its engine works (`/health`) and it takes work (`/ready`).

They answer HEAD too, with which `wget --spider` and some monitors ask.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from fastapi import APIRouter

from ....errors import EngineError
from ...generation.service import Service
from .cache import own_version
from .engine_check import EngineCheck


def router(service: Service) -> APIRouter:
    """The routes."""
    return health_routes(EngineCheck(service).problem, service.require_open)


def health_routes(
    find_problem: Callable[[], Awaitable[str | None]], require_ready: Callable[[], None]
) -> APIRouter:
    """`find_problem`: why there is no step, or None; `require_ready` raises where no work is
    taken."""
    routes = APIRouter()

    @routes.head("/health", include_in_schema=False)
    @routes.get("/health")
    @routes.head("/health_generate", include_in_schema=False)
    @routes.get("/health_generate", include_in_schema=False)  # SGLang's name
    @routes.head("/v1/health", include_in_schema=False)
    @routes.get("/v1/health", include_in_schema=False)  # llama.cpp's
    @routes.head("/ping", include_in_schema=False)
    @routes.get("/ping", include_in_schema=False)  # SageMaker's
    async def health() -> dict[str, Any]:
        """200 when the engine has just completed a step, else 503 with the reason."""
        problem = await find_problem()
        if problem is not None:
            raise EngineError(problem)
        return {"status": "ok"}

    @routes.head("/ready", include_in_schema=False)
    @routes.get("/ready")
    async def ready() -> dict[str, Any]:
        """200 when the server takes work, else 503 with the reason."""
        require_ready()
        return {"status": "ready"}

    @routes.head("/live", include_in_schema=False)
    @routes.get("/live")
    async def live() -> dict[str, Any]:
        """200 as long as the HTTP server answers, whatever its engine does."""
        return {"status": "alive"}

    @routes.get("/version")
    async def version() -> dict[str, Any]:
        """Of Stemma."""
        return {"version": own_version()}

    return routes
