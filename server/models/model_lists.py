"""`/v1/models`, `/api/tags` and `/api/ps` of several models: what there is, and what is loaded."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from typing import Any

from fastapi import APIRouter

from ...errors import EngineError
from ..api.ollama.models import loaded_of, tags_of
from ..api.openai.models import Entry, entries, models_routes
from ..generation.service import Service
from .allowed_names import TAG
from .cascades import ServedCascade
from .model_names import ModelNames
from .model_slot import ModelSlot


def router(
    names: ModelNames,
    services: Mapping[ModelSlot, Service],
    cascades: Mapping[str, ServedCascade],
) -> APIRouter:
    """The routes."""
    created_s = services[names.first].created_s

    async def list_all() -> list[Entry]:
        found = [entry for each in services.items() for entry in await _entries(*each)]
        return [*found, *(served.entry(created_s) for served in cascades.values())]

    async def find(name: str) -> Entry:
        if name in cascades:
            return cascades[name].entry(created_s)
        slot = await names.find(name)
        model, *adapters = await _entries(slot, services[slot])
        known = {model["id"]: model} | {told["id"]: told for told in adapters}
        spellings = (name, f"{slot.name}:{name}", name.removesuffix(TAG))
        found = next((known[each] for each in spellings if each in known), None)
        if found is None:
            raise names.unknown(name)
        return found

    routes = models_routes(list_all, find)

    @routes.get("/api/tags")
    async def tags() -> dict[str, Any]:
        """All models, and the adapters of those that are loaded."""
        found = [
            tag
            for slot, service in services.items()
            for tag in await tags_of(service, await _adapter_names(slot, service))
        ]
        return {"models": found}

    @routes.get("/api/ps")
    async def ps() -> dict[str, Any]:
        """Those that are loaded, and their adapters."""
        found = [
            tag
            for slot, service in services.items()
            if slot.is_running
            for tag in await loaded_of(
                service, await _adapter_names(slot, service), _expires_s(slot)
            )
        ]
        return {"models": found}

    return routes


async def _entries(slot: ModelSlot, service: Service) -> list[Entry]:
    """The model with its state and its engine's address, and its adapters while it is loaded."""
    model, *adapters = entries(service, await _adapters(slot, service))
    own = {"status": _status(slot), "endpoint": slot.spec.endpoint}
    return [{**model, **own}, *({**told, "id": f"{slot.name}:{told['id']}"} for told in adapters)]


def _expires_s(slot: ModelSlot) -> float:
    """Since the epoch."""
    return time.time() + slot.remaining_s(asyncio.get_running_loop().time())


def _status(slot: ModelSlot) -> dict[str, Any]:
    """As llama.cpp's router has it, and why the last attempt to load it failed."""
    told: dict[str, Any] = {"value": slot.status}
    if slot.failure is not None and slot.status == "unloaded":
        told |= {"failed": True, "reason": slot.failure.reason}
    return told


async def _adapter_names(slot: ModelSlot, service: Service) -> list[str]:
    return [f"{slot.name}:{told['name']}" for told in await _adapters(slot, service)]


async def _adapters(slot: ModelSlot, service: Service) -> list[dict[str, Any]]:
    if not slot.is_running:
        return []
    try:
        return await service.adapters()
    except EngineError:  # it has just died, or is being unloaded
        return []
