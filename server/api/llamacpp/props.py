"""`/props`, `/slots` and `/apply-template`: what llama.cpp's clients ask of a server."""

from __future__ import annotations

from functools import partial
from typing import Any

import orjson
from fastapi import APIRouter, Query, Request

from ....frontend.protocol.chat_message import Message
from ...generation.service import Service
from ...protocol.failures import Refusal
from ...protocol.json_route import beside_loop, json_routes
from ..native.cache import own_version
from ..openai.chat import ChatRequest, chat_task

_DEFAULTS: dict[str, Any] = {"n_predict": -1, "n_probs": 0, "stop": [], "grammar": ""}


def router(service: Service) -> APIRouter:
    """The routes."""
    routes = json_routes()

    @routes.get("/props")
    async def props() -> dict[str, Any]:
        """The model, its template, and how many requests run at once."""
        info = service.info
        template = await service.text.in_thread(lambda: service.text.template)
        return {
            "default_generation_settings": {
                "id": 0,
                "id_task": -1,
                "n_ctx": info["max_model_len"],
                "is_processing": False,
                "params": _DEFAULTS,
            },
            "total_slots": service.max_running,
            "model_alias": service.model,
            "model_path": info["model_path"],
            "chat_template": template.source,
            "bos_token": template.bos_token,
            "eos_token": template.eos_token,
            "modalities": {"vision": bool(info.get("reads_images")), "audio": False},
            "build_info": f"stemma {own_version()}",
            "is_sleeping": False,
        }

    @routes.get("/slots")
    async def slots(
        fail_on_no_slot: int = Query(default=0, ge=0, le=1),
    ) -> list[dict[str, Any]]:
        """As many as run at once; which request runs in which of them means nothing here."""
        info = await service.engine.connection.acall("info", has_experts=False)
        num_slots, num_running = service.max_running, int(info["num_running"])
        if fail_on_no_slot and num_running >= num_slots:
            raise Refusal(503, "no slot is free: as many requests run as may at once")
        n_ctx = info["max_model_len"]
        return [
            {"id": index, "n_ctx": n_ctx, "is_processing": index < num_running}
            for index in range(num_slots)
        ]

    @routes.post("/apply-template")
    async def apply_template(body: ChatRequest, request: Request) -> dict[str, str]:
        """The text of a chat as the model reads it, up to where its answer begins."""
        served = service.served(body.model, body.lora_path)
        task, _ = await beside_loop(request, lambda: chat_task(service, body, served))
        task = await service.images.resolved(task)
        render = partial(
            service.text.apply_template,
            [message for message in task.prompts[0] if isinstance(message, Message)],
            tools=orjson.loads(task.tools or "[]"),
            variables=orjson.loads(task.template_kwargs or "{}"),
        )
        return {"prompt": await service.text.in_thread(render)}

    return routes
