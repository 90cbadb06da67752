"""`/kv_hints`: actions on the KV cache, outside of any request."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request
from pydantic import Field

from ....errors import MAX_MODEL_NAME_CHARS
from ...generation.service import Service
from ...protocol.caller import caller_of
from ...protocol.hint_envelope import HintEnvelope
from ...protocol.json_route import json_routes


def router(service: Service) -> APIRouter:
    """The routes."""
    routes = json_routes()

    @routes.post("/kv_hints")
    async def kv_hints(body: KVHintsRequest, request: Request) -> dict[str, Any]:
        """Carry out a batch of actions; each is answered with its outcome."""
        body.check(needs_targets=True)
        caller = caller_of(request).salted(body.cache_salt)
        lora_path = service.served(body.model, body.lora_path).lora_path
        return await body.carry_out(service.engine.connection, caller, lora_path=lora_path)

    return routes


class KVHintsRequest(HintEnvelope):
    """Body of /kv_hints: `cache_salt`, `model` and `lora_path` as in the requests whose KV is
    meant."""

    cache_salt: str | None = Field(default=None, max_length=1024)
    model: str | None = None
    lora_path: str | None = Field(default=None, max_length=MAX_MODEL_NAME_CHARS)
