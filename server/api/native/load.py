"""`/load` and `/get_load`: how much there is to do, as vLLM and SGLang tell load balancers."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request

from ...generation.admission import ticket_of
from ...generation.service import Service


def router(service: Service) -> APIRouter:
    """The routes."""
    routes = APIRouter()

    @routes.get("/load")
    async def load(request: Request) -> dict[str, int]:
        """vLLM's: samples of this server's requests that run or wait."""
        return {"server_load": ticket_of(request).load.num_samples}

    @routes.get("/get_load")
    async def get_load() -> list[dict[str, Any]]:
        """SGLang's: what the engine runs, of all its clients; of several engines all together."""
        info = await service.engine.connection.acall("info", has_experts=False)
        num_tokens = info["total_tokens"] - info["free_tokens"] - info["evictable_tokens"]
        num_running, num_waiting = info["num_running"], info["num_waiting"]
        return [
            {
                "dp_rank": 0,
                "num_reqs": num_running + num_waiting,
                "num_waiting_reqs": num_waiting,
                "num_tokens": num_tokens,
            }
        ]

    return routes
