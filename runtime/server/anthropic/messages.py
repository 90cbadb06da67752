"""`/v1/messages`: chats in Anthropic's words."""

from __future__ import annotations

from fastapi import APIRouter, Request
from fastapi.responses import Response

from ..access.json_route import json_routes
from ..generation.answer import answer
from ..openai.chat import chat_task
from ..service import Service
from .reply import MessagesReply
from .schema import MessagesRequest


def router(service: Service) -> APIRouter:
    """The routes."""
    routes = json_routes()

    @routes.post("/v1/messages")
    async def messages(body: MessagesRequest, request: Request) -> Response:
        """Anthropic's Messages."""
        service.require_model(body.model)
        task, new_reader = chat_task(service, body.chat())
        max_model_len = int(service.info["max_model_len"])
        reply = MessagesReply(service.model, new_reader(), max_model_len=max_model_len)
        return await answer(service, request, task, reply)

    return routes
