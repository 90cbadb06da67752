"""`/kv_hints`: actions on the KV cache, outside of any request."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter

from ..generation.hint_envelope import HintEnvelope
from ..service import Service


def router(service: Service) -> APIRouter:
    """The routes."""
    routes = APIRouter()

    @routes.post("/kv_hints")
    async def kv_hints(body: HintEnvelope) -> dict[str, Any]:
        """Carry out a batch of actions; each is answered with its outcome."""
        body.check(needs_targets=True)
        return await body.carry_out(service.engine.connection)

    return routes
