"""`/abort`: end requests by their ids, with their output so far."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request
from pydantic import BaseModel, ConfigDict, Field

from ....errors import InvalidRequest
from ...generation.service import Service
from ...protocol.caller import caller_of
from ...protocol.json_route import json_routes


def router(service: Service) -> APIRouter:
    """The routes."""
    routes = json_routes()

    @routes.post("/abort")
    @routes.post("/abort_request")
    async def abort(body: AbortRequest, request: Request) -> dict[str, Any]:
        """End the caller's own requests now; how many there were."""
        return {"aborted": service.running.abort(body.wanted, caller_of(request))}

    return routes


class AbortRequest(BaseModel):
    """Body of /abort: an id, the answer's or the `rid` that the client gave, or `abort_all`."""

    model_config = ConfigDict(extra="ignore", strict=True)

    id: str | None = Field(default=None, min_length=1, max_length=256)
    rid: str | None = Field(default=None, max_length=256)  # SGLang's sends "" with abort_all
    abort_all: bool = False

    @property
    def wanted(self) -> str | None:
        """The id to abort; None: all. Raises InvalidRequest."""
        given = [name for name in (self.id, self.rid) if name]
        if len(given) + self.abort_all != 1:
            raise InvalidRequest("one of id, rid and abort_all is needed", "id")
        return given[0] if given else None
