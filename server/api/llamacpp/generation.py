"""`/completion` and `/infill`."""

from __future__ import annotations

from fastapi import APIRouter, Request
from fastapi.responses import Response

from ...generation.answer import answer
from ...generation.service import Service
from ...protocol.json_route import json_routes
from .reply import CompletionReply, Form
from .schema import CompletionBody, InfillBody, SamplerBody


def router(service: Service) -> APIRouter:
    """The routes."""
    routes = json_routes()

    async def generate(body: CompletionBody | InfillBody, request: Request, form: Form) -> Response:
        served = service.served(body.model, body.lora_path)
        task = await service.text.in_thread(lambda: body.task(served, service.text))
        return await answer(service, request, task, CompletionReply(form))

    @routes.post("/completion")
    async def completion(body: CompletionBody, request: Request) -> Response:
        """llama.cpp's completions."""
        form = _form(service, body, body.texts, is_batch=body.is_batch)
        return await generate(body, request, form)

    @routes.post("/infill")
    async def infill(body: InfillBody, request: Request) -> Response:
        """What belongs between a prefix and a suffix, by models that have tokens for it."""
        return await generate(body, request, _form(service, body, [""], is_batch=body.n_cmpl > 1))

    return routes


def _form(service: Service, body: SamplerBody, prompts: list[str], *, is_batch: bool) -> Form:
    return Form(
        service.served(body.model, body.lora_path).name,
        {"n_ctx": service.info["max_model_len"], **body.shown()},
        prompts,
        n=body.n_cmpl,
        is_batch=is_batch,
        has_tokens=body.return_tokens,
        num_probs=body.n_probs,
        only_computes=body.only_computes,
    )
