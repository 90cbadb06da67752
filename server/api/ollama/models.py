"""What models there are, in Ollama's words: `/api/tags`, `/api/show`, `/api/ps`, `/api/version`."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fastapi import APIRouter

from ....frontend.chat_format.chat_format import ChatFormat
from ...generation.service import Service
from ...protocol.json_route import json_routes
from ...protocol.known_fields import NullableFields
from .names import tagged, untagged
from .reply import timestamp

VERSION = "0.12.11"  # of the API that this follows; clients compare it with what they need
NEVER = "9999-12-31T23:59:59Z"  # it stays loaded
_WEIGHTS = ("*.safetensors", "*.gguf")


class ShowBody(NullableFields):
    """Body of /api/show; `name` is the older name of `model`."""

    model: str | None = None
    name: str | None = None
    verbose: bool = False


def router(service: Service) -> APIRouter:
    """The routes."""
    routes = json_routes()

    async def adapter_names() -> list[str]:
        return [told["name"] for told in await service.adapters()]

    @routes.get("/api/tags")
    async def tags() -> dict[str, Any]:
        """The model that is served, and its adapters."""
        return {"models": await tags_of(service, await adapter_names())}

    @routes.get("/api/ps")
    async def ps() -> dict[str, Any]:
        """The same, since all of it is loaded."""
        return {"models": await loaded_of(service, await adapter_names())}

    @routes.post("/api/show")
    async def show(body: ShowBody) -> dict[str, Any]:
        """What is known of the model."""
        await service.require_model(untagged(body.model or body.name))
        template = await service.text.in_thread(lambda: service.text.template)
        chat_format = await service.text.in_thread(lambda: _chat_format(service))
        return {
            "modelfile": "",
            "parameters": "",
            "template": template.source,
            "details": _details(service),
            "model_info": _model_info(service.info),
            "capabilities": _capabilities(service, chat_format, can_infill=template.can_infill),
            "modified_at": timestamp(service.created_s),
        }

    @routes.head("/api/version", include_in_schema=False)
    @routes.get("/api/version")
    async def version() -> dict[str, str]:
        """The version of Ollama whose API this is; /version is Stemma's own."""
        return {"version": VERSION}

    return routes


async def tags_of(service: Service, adapters: Sequence[str]) -> list[dict[str, Any]]:
    """The model and its adapters."""
    size = await service.text.in_thread(lambda: _num_bytes(service.info["model_path"]))
    return [_listed(service, name, size) for name in (service.model, *adapters)]


async def loaded_of(
    service: Service, adapters: Sequence[str], expires_s: float = math.inf
) -> list[dict[str, Any]]:
    """The same, as `/api/ps` lists what is loaded. `expires_s`: since the epoch, when that will be
    unloaded if it has nothing to do until then."""
    info = service.info
    in_vram = info["device"] != "cpu"
    more = {
        "expires_at": NEVER if math.isinf(expires_s) else timestamp(expires_s),
        "context_length": info["max_model_len"],
    }
    return [
        {**model, **more, "size_vram": model["size"] if in_vram else 0}
        for model in await tags_of(service, adapters)
    ]


def _listed(service: Service, name: str, size: int) -> dict[str, Any]:
    revisions = [name, *service.info["revisions"]]
    return {
        "name": tagged(name),
        "model": tagged(name),
        "modified_at": timestamp(service.created_s),
        "size": size,
        "digest": hashlib.sha256("\n".join(revisions).encode()).hexdigest(),
        "details": _details(service, parent="" if name == service.model else service.model),
    }


def _details(service: Service, parent: str = "") -> dict[str, Any]:
    info = service.info
    quantization = info["quantization"]
    family = _family(info)
    return {
        "parent_model": parent,
        "format": "safetensors",
        "family": family,
        "families": [family],
        "parameter_size": "",
        "quantization_level": info["dtype"] if quantization == "none" else quantization,
    }


def _model_info(info: dict[str, Any]) -> dict[str, Any]:
    family = _family(info)
    return {
        "general.architecture": family,
        f"{family}.context_length": info["max_model_len"],
        f"{family}.embedding_length": info["embedding"]["size"],
        f"{family}.vocab_size": info["vocab_size"],
    }


def _chat_format(service: Service) -> ChatFormat:
    """As the engine describes it; as the files do, where there has not been an engine yet."""
    settings, info = service.settings, service.info
    described = info if "chat_format" in info else service.text.chat_description
    return ChatFormat.of(described, settings.tool_call_parser, settings.reasoning_parser)


def _capabilities(service: Service, chat_format: ChatFormat, *, can_infill: bool) -> list[str]:
    """Calls of tools work with every model that generates: they can be forced."""
    generates = bool(service.info.get("generates", True))
    is_there = {
        "completion": generates,
        "tools": generates,
        "vision": bool(service.info.get("reads_images")),
        "thinking": chat_format.reasoning is not None,
        "insert": can_infill,
        "embedding": bool(service.info["embedding"].get("is_declared"))
        and not service.info.get("scores"),
    }
    return [name for name, has in is_there.items() if has]


def _family(info: dict[str, Any]) -> str:
    return str(info["architecture"]).removesuffix("ForCausalLM").lower()


def _num_bytes(model_path: str) -> int:
    """Of the files of weights; 0 where they are not on this host."""
    folder = Path(model_path)
    if not folder.is_absolute():  # it is not known
        return 0
    files = [path for pattern in _WEIGHTS for path in folder.glob(pattern)]
    return sum(path.stat().st_size for path in files)
