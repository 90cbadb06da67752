"""`/abort`: end requests that are under way, from beside. SGLang's name is known too."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request
from pydantic import BaseModel, ConfigDict, Field

from ....errors import InvalidRequest
from ..access.json_route import json_routes
from ..caller import caller_of
from ..service import Service


def router(service: Service) -> APIRouter:
    """The routes."""
    routes = json_routes()

    @routes.post("/abort")
    @routes.post("/abort_request")
    async def abort(body: AbortRequest, request: Request) -> dict[str, Any]:
        """End a request of the caller's, or all of them. Each is answered with what it has, finish
        reason "abort"."""
        if body.abort_all == (body.rid is not None):
            raise InvalidRequest("rid: either it or abort_all=true is needed", "rid")
        num_aborted = service.running.abort(body.rid, caller_of(request))
        return {"status": "ok", "num_aborted": num_aborted}

    return routes


class AbortRequest(BaseModel):
    """Body of /abort. `rid`: the id of an answer, or the one that its request brought; an unknown
    one is no error, as the answer may just have ended."""

    model_config = ConfigDict(extra="ignore", strict=True)

    rid: str | None = Field(default=None, min_length=1, max_length=256)
    abort_all: bool = False
