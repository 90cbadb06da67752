"""`/rerank`: documents in the order in which they answer a query, in Jina's and Cohere's form."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from typing import Any

from fastapi import APIRouter, Request
from pydantic import Field

from ....errors import InvalidRequest
from ...generation.service import Service
from ...protocol.fixed_fields import only, refuse_others
from ...protocol.json_route import json_routes
from ...protocol.known_fields import Items, NullableFields
from ...protocol.task import MAX_PROMPTS, require_together
from ..openai.embeddings import TruncationFields
from .pair_scores import INSTRUCTION, Method, Pairs, scores_of

_WHOLE = "left out: truncate_prompt_tokens cuts a query with its document"


class DocumentObject(NullableFields):
    """A document as an object."""

    text: str


class RerankRequest(TruncationFields, NullableFields):
    """Body of /rerank. `instruction` and `method` are ours: what is wanted of a document, and how
    it is scored, by default as the model was trained."""

    model: str | None = None
    query: str = Field(min_length=1)
    documents: Items[str | DocumentObject] = Field(min_length=1, max_length=MAX_PROMPTS)
    top_n: int | None = Field(default=None, ge=1)
    return_documents: bool = True
    instruction: str = INSTRUCTION
    method: Method | None = None
    cache_salt: str | None = Field(default=None, max_length=1024)
    user: Any = None
    request_id: Any = None
    rid: Any = None
    mm_processor_kwargs: Any = None
    additional_data: Any = None
    priority: Any = only((None, 0), "0: keys have shares")
    top_k: Any = only((None,), "left out; see top_n")
    instruct: Any = only((None,), "left out; see instruction")
    raw_scores: Any = only((None, False), "false; /score has use_activation")
    use_activation: Any = only((None, True), "true; /score has it")
    max_query_length: Any = only((None,), _WHOLE)
    max_doc_length: Any = only((None,), _WHOLE)
    max_chunks_per_doc: Any = only((None,), _WHOLE)
    max_tokens_per_doc: Any = only((None,), _WHOLE)
    rank_fields: Any = only((None, [], ["text"]), 'left out, or ["text"]')

    @property
    def texts(self) -> list[str]:
        """Each document's text."""
        return [each if isinstance(each, str) else each.text for each in self.documents]

    def pairs(self) -> Pairs:
        """The query with each document. Raises InvalidRequest."""
        refuse_others(self)
        if not all(self.texts):
            raise InvalidRequest("documents: none may be empty", "documents")
        num_chars = len(self.query) + len(self.instruction)
        require_together("query", num_chars, len(self.documents))
        return Pairs(
            [self.query],
            self.texts,
            method=self.method,
            instruction=self.instruction,
            truncate=self.asked_cut,
        )

    def results(self, scores: Sequence[float]) -> list[dict[str, Any]]:
        """The best documents first, equal ones in the order in which they were given."""
        ranked = sorted(range(len(scores)), key=lambda index: -scores[index])
        results: list[dict[str, Any]] = []
        for index in ranked[: self.top_n]:
            told = {"index": index, "relevance_score": scores[index]}
            document = {"document": {"text": self.texts[index]}} if self.return_documents else {}
            results.append({**told, **document})
        return results


def router(service: Service) -> APIRouter:
    """The routes."""
    routes = json_routes()

    @routes.post("/rerank")
    @routes.post("/v1/rerank")
    @routes.post("/v2/rerank")
    @routes.post("/reranking", include_in_schema=False)  # llama.cpp's names
    @routes.post("/v1/reranking", include_in_schema=False)
    async def rerank(body: RerankRequest, request: Request) -> dict[str, Any]:
        """Documents by how well they answer a query."""
        served = service.served(body.model)
        found = await scores_of(service, request, served, body.pairs(), body.cache_salt)
        return {
            "id": f"rerank-{secrets.token_hex(12)}",
            "model": served.name,
            "method": found.method,
            "results": body.results(found.scores),
            "usage": found.usage,
            "meta": {"tokens": {"input_tokens": found.usage["total_tokens"]}},  # Cohere's
        }

    return routes
