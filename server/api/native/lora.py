"""`/load_lora_adapter` and `/unload_lora_adapter`: change adapters while the engine runs.

SGLang's paths, and vLLM's under `/v1`.
"""

from __future__ import annotations

import asyncio
import time
from typing import Any

from fastapi import APIRouter
from pydantic import BaseModel, ConfigDict, Field

from ....errors import MAX_MODEL_NAME_CHARS, ModelLoadError
from ...generation.service import Service
from ...protocol.failures import Refusal
from ...protocol.json_route import json_routes

_POLL_S = 0.05
_MAX_WAIT_S = 60.0  # for requests that still use an adapter


def router(service: Service) -> APIRouter:
    """The routes."""
    routes = json_routes()

    @routes.post("/load_lora_adapter")
    @routes.post("/v1/load_lora_adapter")
    async def load_lora_adapter(body: LoadRequest) -> dict[str, Any]:
        """Serve an adapter from a folder of the server's, once it was checked, however long that
        takes. Who asks again for the same one has it."""
        args = {"lora_name": body.lora_name, "lora_path": body.lora_path}
        try:
            adapter = await service.engine.connection.acall("load_lora_adapter", None, **args)
        except ModelLoadError as error:  # the caller chose the path, unlike the model's
            raise Refusal(400, str(error), field="lora_path") from error
        return {"success": True, "adapter": adapter, "loaded_adapters": await _names(service)}

    @routes.post("/unload_lora_adapter")
    @routes.post("/v1/unload_lora_adapter")
    async def unload_lora_adapter(body: UnloadRequest) -> dict[str, Any]:
        """Serve it no more. Its name is gone at once; the answer comes when no request uses it any
        more, or after a minute."""
        ask = service.engine.connection.acall
        adapter = await ask("unload_lora_adapter", lora_name=body.lora_name)
        num_requests, started_s = adapter["num_requests"], time.monotonic()
        while num_requests and time.monotonic() - started_s < _MAX_WAIT_S:
            await asyncio.sleep(_POLL_S)
            num_requests = (await ask("lora_users", load_id=adapter["load_id"]))["num_requests"]
        return {
            "success": True,
            "loaded_adapters": await _names(service),
            "num_requests": num_requests,
        }

    return routes


class UnloadRequest(BaseModel):
    """Body of /unload_lora_adapter."""

    model_config = ConfigDict(extra="ignore", strict=True)

    lora_name: str = Field(min_length=1, max_length=MAX_MODEL_NAME_CHARS)


class LoadRequest(UnloadRequest):
    """Body of /load_lora_adapter: a name, and a folder with an adapter as PEFT saves it."""

    lora_path: str = Field(min_length=1, max_length=4096)


async def _names(service: Service) -> dict[str, str]:
    """Folders by adapter name, as SGLang reports them."""
    return {told["name"]: told["path"] for told in await service.adapters()}
