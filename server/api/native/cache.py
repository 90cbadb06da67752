"""`/flush_cache`, `/tree` and `/server_info`: the engine's cache, pool and counters."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Query

from ....errors import InvalidRequest
from ...generation.model_text import ModelText
from ...generation.service import Service

MAX_TREE_NODES = 2000
MAX_NODE_IDS = 1024


def router(service: Service) -> APIRouter:
    """The routes."""
    routes = APIRouter()

    async def ask(method: str, **args: Any) -> Any:
        return await service.engine.connection.acall(method, **args)

    @routes.post("/flush_cache")
    async def flush_cache() -> dict[str, Any]:
        """Drop cached KV that nothing uses; what is in use or kept by hints stays."""
        return {"status": "ok", "flushed_tokens": await ask("flush_cache")}

    @routes.get("/tree")
    async def tree(
        max_nodes: int = Query(default=1000, ge=1, le=MAX_TREE_NODES),
        max_token_ids: int = Query(default=48, ge=0, le=MAX_NODE_IDS),
        replica: int | None = Query(default=None, ge=0),
    ) -> dict[str, Any]:
        """The radix tree, of a large one the part used last, and how full the pool is; of several
        engines all of it, with who has which prefix, or that of `replica`."""
        bounds = {"max_nodes": max_nodes, "max_token_ids": max_token_ids}
        bounds |= {} if replica is None else {"replica": replica}
        answer: dict[str, Any] = await ask("tree", **bounds, has_text=False)
        await service.text.in_thread(lambda: _add_texts(service.text, answer["nodes"]))
        return answer

    @routes.post("/restart_replica")
    async def restart_replica(replica: int = Query(ge=0)) -> dict[str, Any]:
        """Start one of several engines anew; its programs go on on the others."""
        if service.info.get("num_replicas", 1) == 1:
            raise InvalidRequest("there is one engine: --replicas starts several", "replica")
        answer: dict[str, Any] = await ask("restart_replica", replica=replica)
        return answer

    @routes.post("/set_role")
    async def set_role(
        role: str, replica: int | None = Query(default=None, ge=0)
    ) -> dict[str, Any]:
        """Have an engine, of several the one with that number, compute long prompts for others
        (prefill), run programs (decode), or both."""
        args = {"role": role} if replica is None else {"role": role, "replica": replica}
        answer: dict[str, Any] = await ask("set_role", **args)
        return answer

    @routes.get("/server_info")
    @routes.get("/get_server_info")
    async def server_info() -> dict[str, Any]:
        """The model, and the engine's pool, queue and counters as they are now."""
        info: dict[str, Any] = await ask("info")
        return {"version": own_version(), **info}

    @routes.get("/model_info")
    @routes.get("/get_model_info")
    async def model_info() -> dict[str, Any]:
        """The model, in SGLang's words."""
        info = service.info
        return {
            "model_path": info["model_path"],
            "tokenizer_path": info["model_path"],
            "served_model_name": info["model"],
            "is_generation": True,
            "architecture": info["architecture"],
            "vocab_size": info["vocab_size"],
            "max_model_len": info["max_model_len"],
        }

    return routes


def own_version() -> str:
    """The version of the installed Stemma."""
    from importlib.metadata import version

    return version("stemma-lm")


def _add_texts(texts: ModelText, nodes: list[dict[str, Any]]) -> None:
    """Add the text of each node's first tokens; the engine's loop has no time for that. Nodes of
    several engines have it."""
    for node in nodes:
        if "token_ids" in node:
            ids = [each for each in node["token_ids"] if each >= 0]  # others have no text
            node["text"] = texts.decode(ids, skip_special=False)
