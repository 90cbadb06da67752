"""`/api/embed`, and the older `/api/embeddings`."""

from __future__ import annotations

import time
from typing import Any

from fastapi import APIRouter, Request
from pydantic import Field

from ...generation.service import Service
from ...generation.values import values_of
from ...protocol.json_route import beside_loop, json_routes, validated
from ...protocol.known_fields import Items, NullableFields
from ..openai.embeddings import EmbeddingRequest, vector_of
from .keep_alive import KeepAlive
from .names import served_as
from .options import Options


class EmbedBody(NullableFields):
    """Body of /api/embed. A text that is too long is cut, as with Ollama, unless `truncate` is
    false."""

    model: str | None = None
    input: str | Items[str] = ""
    dimensions: int | None = Field(default=None, ge=1)
    truncate: bool | None = None
    options: Options = Field(default_factory=Options)
    keep_alive: KeepAlive = None

    def request(self) -> EmbeddingRequest:
        """The same in OpenAI's format. Raises InvalidRequest."""
        cut = {} if self.truncate is False else {"truncate_prompt_tokens": -1}
        asked = {"input": self.input, "dimensions": self.dimensions, **cut}
        return validated(EmbeddingRequest, asked)


class EmbeddingsBody(NullableFields):
    """Body of /api/embeddings: one text, whose vector keeps its length."""

    model: str | None = None
    prompt: str = ""
    options: Options = Field(default_factory=Options)
    keep_alive: KeepAlive = None

    def request(self) -> EmbeddingRequest:
        """The same in OpenAI's format. Raises InvalidRequest."""
        return validated(
            EmbeddingRequest,
            {"input": self.prompt, "normalize": False, "truncate_prompt_tokens": -1},
        )


def router(service: Service) -> APIRouter:
    """The routes."""
    routes = json_routes()

    async def vectors(body: EmbedBody | EmbeddingsBody, request: Request) -> tuple[list[Any], int]:
        """Of each text, and the tokens of all."""
        served, asked = served_as(service, body.model), body.request()
        info = service.info["embedding"]
        programs = await beside_loop(request, lambda: asked.programs(info))
        answers = await values_of(service, request, programs, lora_path=served.lora_path)
        num_tokens = sum(answer["meta"]["prompt_tokens"] for answer in answers)
        return [vector_of(asked, answer["value"]) for answer in answers], num_tokens

    @routes.post("/api/embed")
    async def embed(body: EmbedBody, request: Request) -> dict[str, Any]:
        """Ollama's embeddings."""
        began = time.perf_counter_ns()
        found, num_tokens = await vectors(body, request) if body.input else ([], 0)
        return {
            "model": body.model or service.model,
            "embeddings": found,
            "total_duration": time.perf_counter_ns() - began,
            "load_duration": 0,
            "prompt_eval_count": num_tokens,
        }

    @routes.post("/api/embeddings")
    async def embeddings(body: EmbeddingsBody, request: Request) -> dict[str, Any]:
        """The older form of the same."""
        found, _ = await vectors(body, request) if body.prompt else ([[]], 0)
        return {"embedding": found[0]}

    return routes
