"""`/embedding`: llama.cpp's own form of embeddings."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request

from ....errors import InvalidRequest
from ...generation.service import Service
from ...generation.values import values_of
from ...protocol.json_route import beside_loop, json_routes, validated
from ...protocol.known_fields import Items, NullableFields
from ..openai.embeddings import EmbeddingRequest


class EmbeddingBody(NullableFields):
    """Body of /embedding: `content`, a text or several. `embd_normalize`: 2, to length 1, or -1,
    not at all; llama.cpp's other norms are refused."""

    model: str | None = None
    content: str | Items[str]
    embd_normalize: int = 2

    def request(self) -> EmbeddingRequest:
        """The same in OpenAI's format. Raises InvalidRequest."""
        fields = {"input": self.content, "normalize": self.embd_normalize == 2}
        return validated(EmbeddingRequest, fields)


def router(service: Service) -> APIRouter:
    """The routes."""
    routes = json_routes()

    @routes.post("/embedding")
    async def embedding(body: EmbeddingBody, request: Request) -> list[dict[str, Any]]:
        """A vector a text, each in a list of its own: llama.cpp may pool none of a text's."""
        if body.embd_normalize not in (-1, 2):
            raise InvalidRequest.of("embd_normalize", body.embd_normalize, "2 or -1")
        served, asked = service.served(body.model), body.request()
        info = service.info["embedding"]
        programs = await beside_loop(request, lambda: asked.programs(info))
        answers = await values_of(service, request, programs, lora_path=served.lora_path)
        vectors = [answer["value"] for answer in answers]
        return [{"index": index, "embedding": [vector]} for index, vector in enumerate(vectors)]

    return routes
