"""`/v1/messages`: chats in Anthropic's format."""

from __future__ import annotations

from functools import partial

import orjson
from fastapi import APIRouter, Request
from fastapi.responses import Response

from ....frontend.protocol.chat_message import Message
from ...generation.answer import answer
from ...generation.service import Service
from ...protocol.json_route import beside_loop, json_routes
from ..openai.chat import chat_task
from .reply import MessagesReply
from .schema import MessagesRequest, PromptFields


def router(service: Service) -> APIRouter:
    """The routes."""
    routes = json_routes()

    @routes.post("/v1/messages")
    async def messages(body: MessagesRequest, request: Request) -> Response:
        """Anthropic's Messages."""
        served = service.served(body.model)
        task, new_reader = await beside_loop(
            request, lambda: chat_task(service, body.chat(), served, body.image_fields())
        )
        max_model_len = int(service.info["max_model_len"])
        reply = MessagesReply(served.name, new_reader(), max_model_len=max_model_len)
        return await answer(service, request, task, reply)

    @routes.post("/v1/messages/count_tokens")
    async def count_tokens(body: PromptFields, request: Request) -> dict[str, int]:
        """How long the prompt of such a message would be."""
        await service.require_model(body.model)
        served = service.served(body.model)
        task, _ = await beside_loop(
            request, lambda: chat_task(service, body.prompt_chat(), served, body.image_fields())
        )
        task = await service.images.resolved(task)
        encode = partial(
            service.text.encode_chat,
            [message for message in task.prompts[0] if isinstance(message, Message)],
            tools=orjson.loads(task.tools or "[]"),
            variables=orjson.loads(task.template_kwargs or "{}"),
        )
        return {"input_tokens": len(await service.text.in_thread(encode))}

    return routes
