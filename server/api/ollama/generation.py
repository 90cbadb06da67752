"""`/api/chat` and `/api/generate`."""

from __future__ import annotations

from collections.abc import Callable

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response

from ....frontend.chat_format.chat_format import ChatFormat
from ...generation.answer import answer
from ...generation.infill import InfillText
from ...generation.service import Served, Service
from ...protocol.json_route import beside_loop, json_routes
from ...protocol.task import Prompt, Task
from ..openai.chat import chat_task
from ..openai.completions import CompletionRequest
from ..openai.message_reader import MessageReader, PlainReader
from .names import served_as, untagged
from .reply import GenerateReply, OllamaReply, about_model
from .schema import ChatBody, GenerateBody, GenerationFields


def router(service: Service) -> APIRouter:
    """The routes."""
    routes = json_routes()

    @routes.post("/api/chat")
    async def chat(body: ChatBody, request: Request) -> Response:
        """Ollama's chats."""
        served, name = _begin(service, body)
        if not body.messages:
            return await _of_model(service, OllamaReply(name, PlainReader()), name)
        task, new_reader = await beside_loop(
            request, lambda: chat_task(service, body.chat(), served, body.image_fields())
        )
        reply = OllamaReply(name, new_reader(), body.num_logprobs)
        return await answer(service, request, task, reply, reply.stream_format)

    @routes.post("/api/generate")
    async def generate(body: GenerateBody, request: Request) -> Response:
        """Ollama's completions: of a user's message, with `raw` of the text as it is, and with
        `suffix` of what is before it."""
        served, name = _begin(service, body)
        body.refuse_what_is_not_there()
        if body.is_of_model:
            return await _of_model(service, GenerateReply(name, PlainReader()), name)
        task, new_reader = await _task(service, body, request, served)
        reply = GenerateReply(name, new_reader(), body.num_logprobs)
        return await answer(service, request, task, reply, reply.stream_format)

    return routes


def _begin(service: Service, body: GenerationFields) -> tuple[Served, str]:
    """The model, and its name as the client has it. Raises InvalidRequest."""
    served = served_as(service, body.model)
    name = body.model or served.name
    settings = service.settings
    chat_format = ChatFormat.of(service.info, settings.tool_call_parser, settings.reasoning_parser)
    body.require_thinking(chat_format, name)
    return served, name


async def _of_model(service: Service, reply: OllamaReply, name: str) -> Response:
    """Raises ModelNotFound."""
    await service.require_model(untagged(name))
    return JSONResponse(about_model(reply, name))


async def _task(
    service: Service, body: GenerateBody, request: Request, served: Served
) -> tuple[Task, Callable[[], MessageReader]]:
    """Raises InvalidRequest."""
    if body.suffix:
        return await service.text.in_thread(lambda: _infilling(service, body, served)), PlainReader
    if body.raw:
        return _completion(body.completion(), body.prompt, served), PlainReader
    return await beside_loop(
        request, lambda: chat_task(service, body.chat(), served, body.image_fields())
    )


def _infilling(service: Service, body: GenerateBody, served: Served) -> Task:
    ids, ends = service.text.infill(InfillText(body.prompt, body.suffix))
    return _completion(body.completion(ends), ids, served)


def _completion(request: CompletionRequest, prompt: Prompt, served: Served) -> Task:
    return request.to_task([prompt], request.params(), served)
