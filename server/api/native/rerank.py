"""`/rerank`: documents in the order in which they answer a query, in Jina's and Cohere's form.

A model that was trained for embeddings gives the cosine of the query's vector and the document's.
Any other one is asked whether the document answers the query; its score is p(yes) / (p(yes) +
p(no)), as Zhang et al., "Qwen3 Embedding", 2025, section 2, have it.
"""

from __future__ import annotations

import asyncio
import math
import secrets
from collections.abc import Sequence
from typing import Any, Literal

from fastapi import APIRouter, Request
from pydantic import Field

from ....errors import InvalidRequest
from ....frontend.chat_format.chat_format import ChatFormat
from ....frontend.protocol import ir
from ....frontend.protocol.chat_message import Message
from ...generation.completion import prompt_ops
from ...generation.service import Service
from ...generation.values import usage_of_values, values_of
from ...protocol.fixed_fields import only, refuse_others
from ...protocol.json_route import beside_loop, json_routes
from ...protocol.known_fields import Items, NullableFields
from ...protocol.task import MAX_PROMPTS, require_together
from ..openai.embeddings import EmbeddingRequest

ASKED = ("yes", "no")
_SYSTEM = (
    "Judge whether the Document meets the requirements based on the Query and the Instruct "
    'provided. Note that the answer can only be "yes" or "no".'
)
_INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"
_WHOLE = "left out: a document is taken whole or refused"

Method = Literal["yes_no", "cosine"]


class DocumentObject(NullableFields):
    """A document as an object."""

    text: str


class RerankRequest(NullableFields):
    """Body of /rerank. `instruction` and `method` are ours: what is wanted of a document, and how
    it is scored, by default as the model was trained."""

    model: str | None = None
    query: str = Field(min_length=1)
    documents: Items[str | DocumentObject] = Field(min_length=1, max_length=MAX_PROMPTS)
    top_n: int | None = Field(default=None, ge=1)
    return_documents: bool = True
    instruction: str = _INSTRUCTION
    method: Method | None = None
    cache_salt: str | None = Field(default=None, max_length=1024)
    user: Any = None
    max_chunks_per_doc: Any = only((None,), _WHOLE)
    max_tokens_per_doc: Any = only((None,), _WHOLE)
    truncate_prompt_tokens: Any = only((None,), _WHOLE)
    rank_fields: Any = only((None, [], ["text"]), 'left out, or ["text"]')

    @property
    def texts(self) -> list[str]:
        """Each document's text."""
        return [each if isinstance(each, str) else each.text for each in self.documents]

    def method_for(self, embedding: dict[str, Any]) -> Method:
        """`embedding`: the engine's report on the model's embeddings. Raises InvalidRequest."""
        refuse_others(self)
        if not all(self.texts):
            raise InvalidRequest("documents: none may be empty", "documents")
        num_chars = len(self.query) + len(self.instruction)
        require_together("query", num_chars, len(self.documents))
        trained: Method = "cosine" if embedding.get("is_declared") else "yes_no"
        return self.method or trained

    def questions(self, chat_format: ChatFormat) -> list[list[ir.Op]]:
        """A program for each document, which chooses between yes and no."""
        return [_question(self._messages(text, chat_format)) for text in self.texts]

    def embeddings(self, embedding: dict[str, Any]) -> list[list[ir.Op]]:
        """Programs for the vectors of the query and of each document. Raises as embeddings do."""
        return EmbeddingRequest(input=[self.query, *self.texts]).programs(embedding)

    def results(self, scores: Sequence[float]) -> list[dict[str, Any]]:
        """The best documents first, equal ones in the order in which they were given."""
        ranked = sorted(range(len(scores)), key=lambda index: -scores[index])
        results: list[dict[str, Any]] = []
        for index in ranked[: self.top_n]:
            told = {"index": index, "relevance_score": scores[index]}
            document = {"document": {"text": self.texts[index]}} if self.return_documents else {}
            results.append({**told, **document})
        return results

    def _messages(self, document: str, chat_format: ChatFormat) -> list[Message]:
        asked = f"<Instruct>: {self.instruction}\n<Query>: {self.query}\n<Document>: {document}"
        messages = [Message("system", _SYSTEM), Message("user", asked)]
        tags = chat_format.reasoning
        if chat_format.channels is not None:
            allowed = "'cosine': the model's answers begin with a header, not with yes or no"
            raise InvalidRequest.of("method", "yes_no", allowed)
        if tags is not None:  # it has thought, and nothing: the answer comes first
            messages.append(Message("assistant", f"{tags.begin}\n\n{tags.end}\n\n"))
        return messages


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
        served, info = service.served(body.model), service.info["embedding"]
        settings = service.settings
        chat_format = ChatFormat.of(
            service.info, settings.tool_call_parser, settings.reasoning_parser
        )
        method = body.method_for(info)
        is_cosine = method == "cosine"
        programs = await beside_loop(
            request, lambda: body.embeddings(info) if is_cosine else body.questions(chat_format)
        )
        answers = await values_of(service, request, programs, body.cache_salt, served.lora_path)
        scores = await asyncio.to_thread(_cosines if is_cosine else _shares_of_yes, answers)
        usage = usage_of_values(answers)
        return {
            "id": f"rerank-{secrets.token_hex(12)}",
            "model": served.name,
            "method": method,
            "results": body.results(scores),
            "usage": usage,
            "meta": {"tokens": {"input_tokens": usage["total_tokens"]}},  # Cohere's
        }

    return routes


def _question(messages: Sequence[Message]) -> list[ir.Op]:
    ops = list(prompt_ops(messages))
    return [*ops, ir.Select(0, len(ops), None, "answer", ASKED, ir.CHOICES_METHODS[0])]


def _shares_of_yes(answers: Sequence[dict[str, Any]]) -> list[float]:
    return [_share_of_yes(answer) for answer in answers]


def _share_of_yes(answer: dict[str, Any]) -> float:
    yes, no = (sum(each) for each in answer["meta"]["choice_token_logprobs"])
    return 1.0 / (1.0 + math.exp(min(700.0, no - yes)))


def _cosines(answers: Sequence[dict[str, Any]]) -> list[float]:
    """Of the first vector and each other; all have length 1."""
    query, *documents = (answer["value"] for answer in answers)
    return [_dot(query, each) for each in documents]


def _dot(one: Sequence[float], other: Sequence[float]) -> float:
    return math.fsum(a * b for a, b in zip(one, other, strict=True))
