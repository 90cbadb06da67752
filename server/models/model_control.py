"""`/models/load` and `/models/unload`, as llama.cpp's router has them, and whether the engines are
well."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fastapi import APIRouter, Request
from pydantic import BaseModel, ConfigDict, Field

from ...errors import EngineError
from ..api.native.engine_check import EngineCheck
from ..api.native.health import health_routes
from ..generation.admission import header_timeout_s
from ..generation.service import Service
from ..protocol.disconnect import while_connected
from ..protocol.json_route import json_routes
from .model_engines import ModelEngines
from .model_names import ModelNames
from .model_pool import ModelPool
from .model_slot import ModelSlot


class ModelBody(BaseModel):
    """A model by its name."""

    model_config = ConfigDict(extra="ignore", strict=True)

    model: str = Field(min_length=1)


def control_routes(pool: ModelPool, names: ModelNames) -> APIRouter:
    """Load a model before it is needed, or make room."""
    routes = json_routes()

    @routes.post("/models/load")
    async def load(body: ModelBody, request: Request) -> dict[str, Any]:
        """Answers once it is loaded."""
        slot = await names.find(body.model)
        await while_connected(request.receive, pool.enter(slot, header_timeout_s(request)))
        pool.leave(slot)
        return {"success": True, "model": slot.name, "endpoint": slot.spec.endpoint}

    @routes.post("/models/unload")
    async def unload(body: ModelBody) -> dict[str, Any]:
        """Answers once its memory is free; 409 while it has requests or programs."""
        slot = await names.find(body.model)
        await pool.unload(slot)
        return {"success": True, "model": slot.name}

    return routes


def health_of_all(engines: ModelEngines, services: Mapping[ModelSlot, Service]) -> APIRouter:
    """`/health` is that of all models that are loaded."""
    checks = {slot: EngineCheck(service) for slot, service in services.items()}
    first = next(iter(services))

    async def find_problem() -> str | None:
        require_ready_once()
        for slot, check in checks.items():
            problem = await _problem_of(check) if slot.is_running else None
            if problem is not None and slot.is_running:  # it was not unloaded meanwhile
                return f"model {slot.name!r}: {problem}"
        return None

    def require_ready_once() -> None:
        if not engines.has_started:
            _ = first.connection
            raise EngineError("the engine is starting")

    def require_ready() -> None:
        services[first].drain_state.require_open()
        require_ready_once()

    return health_routes(find_problem, require_ready)


async def _problem_of(check: EngineCheck) -> str | None:
    try:
        return await check.problem()
    except EngineError as error:  # there is no engine
        return str(error)
