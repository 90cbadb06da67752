"""How well texts go together, pair by pair: what reranking and scoring are made of.

A model that was trained to score pairs does. One that was trained for embeddings gives the cosine
of the two vectors. Any other one is asked whether the second text answers the first; the score is
p(yes) / (p(yes) + p(no)), as Zhang et al., "Qwen3 Embedding", 2025, section 2, have it.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from fastapi import Request
from starlette.exceptions import HTTPException

from ....errors import InvalidRequest
from ....frontend.chat_format.chat_format import ChatFormat
from ....frontend.protocol import ir
from ....frontend.protocol.call_ops import score_ops
from ....frontend.protocol.chat_message import Message
from ...generation.completion import prompt_ops
from ...generation.service import Served, Service
from ...generation.values import usage_of_values, values_of
from ...protocol.json_route import beside_loop
from ..openai.embeddings import EmbeddingRequest, cut_of

ASKED = ("yes", "no")
_SYSTEM = (
    "Judge whether the Document meets the requirements based on the Query and the Instruct "
    'provided. Note that the answer can only be "yes" or "no".'
)
INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"

Method = Literal["yes_no", "cosine", "scores"]


@dataclass(frozen=True, slots=True)
class Pairs:
    """What a request asks: queries, each with its document; a single query may go with all."""

    queries: Sequence[str]
    documents: Sequence[str]
    method: Method | None = None  # None: as the model was trained
    instruction: str = INSTRUCTION  # what is wanted of a document
    truncate: int | None = None  # as vLLM's `truncate_prompt_tokens`
    is_activated: bool = True  # scores, or else the logits that they are made of

    @property
    def query_of(self) -> list[str]:
        """The query of each document."""
        if len(self.queries) == 1:
            return [self.queries[0]] * len(self.documents)
        return list(self.queries)

    def method_for(self, info: dict[str, Any]) -> Method:
        """Raises InvalidRequest for one that the model does not have."""
        trained = trained_method(info)
        if self.method is None:
            return trained
        if trained == "scores" and self.method != "scores":
            raise InvalidRequest.of("method", self.method, "'scores', which the model gives")
        if self.method == "scores" != trained or (
            self.method == "yes_no" and not info.get("generates", True)
        ):
            raise InvalidRequest.of("method", self.method, f"{trained!r} with this model")
        return self.method


@dataclass(frozen=True, slots=True)
class PairScores:
    """A score for each document."""

    method: Method
    scores: list[float]
    usage: dict[str, Any]


def trained_method(info: dict[str, Any]) -> Method:
    """`info`: the engine's report."""
    if info.get("scores") is not None:
        return "scores"
    return "cosine" if info["embedding"].get("is_declared") else "yes_no"


async def scores_of(
    service: Service,
    request: Request,
    served: Served,
    pairs: Pairs,
    cache_salt: str | None = None,
) -> PairScores:
    """Raises what embeddings do, and InvalidRequest for a method or a field at fault."""
    info = service.info
    method = pairs.method_for(info)
    format_ = ChatFormat.of(
        info, service.settings.tool_call_parser, service.settings.reasoning_parser
    )
    programs = await beside_loop(request, lambda: _programs(pairs, method, info, format_))
    answers = await values_of(service, request, programs, cache_salt, served.lora_path)
    if method == "cosine":
        scores = await asyncio.to_thread(_cosines, answers, len(pairs.queries))
    elif method == "yes_no":
        scores = [_share_of_yes(answer) for answer in answers]
    else:
        activation = info["scores"]["activation"] if pairs.is_activated else "none"
        scores = [activated(answer["value"], activation)[0] for answer in answers]
    return PairScores(method, scores, usage_of_values(answers))


def activated(logits: Sequence[float], activation: str) -> list[float]:
    """Scores of a classifier's logits."""
    if activation == "sigmoid":
        return [1.0 / (1.0 + math.exp(min(700.0, -logit))) for logit in logits]
    if activation == "softmax":
        weights = [math.exp(logit - max(logits)) for logit in logits]
        return [weight / sum(weights) for weight in weights]
    return list(logits)


def question_ops(
    query: str, document: str, instruction: str, chat_format: ChatFormat
) -> list[ir.Op]:
    """Whether the document answers the query, up to where the answer begins. Raises
    InvalidRequest."""
    asked = f"<Instruct>: {instruction}\n<Query>: {query}\n<Document>: {document}"
    messages = [Message("system", _SYSTEM), Message("user", asked)]
    tags = chat_format.reasoning
    if chat_format.channels is not None:
        allowed = "'cosine': the model's answers begin with a header, not with yes or no"
        raise InvalidRequest.of("method", "yes_no", allowed)
    if tags is not None:  # it has thought, and nothing: the answer comes first
        messages.append(Message("assistant", f"{tags.begin}\n\n{tags.end}\n\n"))
    return list(prompt_ops(messages))


def _programs(
    pairs: Pairs, method: Method, info: dict[str, Any], chat_format: ChatFormat
) -> list[list[ir.Op]]:
    if method == "cosine":
        texts = [*pairs.queries, *pairs.documents]
        request = EmbeddingRequest(input=texts, truncate_prompt_tokens=pairs.truncate)
        return request.programs(info["embedding"])
    if method == "scores":
        return [
            pair_ops(query, document, pairs, info, chat_format)
            for query, document in zip(pairs.query_of, pairs.documents, strict=True)
        ]
    _require_whole(pairs)
    return [
        _choice(question_ops(query, document, pairs.instruction, chat_format))
        for query, document in zip(pairs.query_of, pairs.documents, strict=True)
    ]


def pair_ops(
    query: str, document: str, pairs: Pairs, info: dict[str, Any], chat_format: ChatFormat
) -> list[ir.Op]:
    """A classifier's scores of a pair; one that was made of a generating model is asked as that
    was. Raises HTTPException for a model of several labels."""
    labels = info["scores"]["labels"]
    if len(labels) != 1:
        raise HTTPException(
            400,
            f"this model gives {len(labels)} scores ({', '.join(labels[:8])}), of which none says "
            "how well two texts go together; /classify has them all",
        )
    if info["scores"]["sees_pairs"]:
        return score_ops(query, document, cut_to=cut_of(pairs.truncate))
    _require_whole(pairs)
    ops = question_ops(query, document, pairs.instruction, chat_format)
    return [*ops, ir.Embed(0, len(ops), None, "scores", normalize=False, has_scores=True)]


def _require_whole(pairs: Pairs) -> None:
    if pairs.truncate is not None:
        allowed = "left out: a document is taken whole or refused"
        raise InvalidRequest.of("truncate_prompt_tokens", pairs.truncate, allowed)


def _choice(ops: list[ir.Op]) -> list[ir.Op]:
    return [*ops, ir.Select(0, len(ops), None, "answer", ASKED, ir.CHOICES_METHODS[0])]


def _share_of_yes(answer: dict[str, Any]) -> float:
    yes, no = (sum(each) for each in answer["meta"]["choice_token_logprobs"])
    return 1.0 / (1.0 + math.exp(min(700.0, no - yes)))


def _cosines(answers: Sequence[dict[str, Any]], num_queries: int) -> list[float]:
    """Of each query's vector and its document's; all have length 1."""
    vectors = [answer["value"] for answer in answers]
    queries, documents = vectors[:num_queries], vectors[num_queries:]
    if num_queries == 1:
        queries = queries * len(documents)
    return [_dot(one, other) for one, other in zip(queries, documents, strict=True)]


def _dot(one: Sequence[float], other: Sequence[float]) -> float:
    return math.fsum(a * b for a, b in zip(one, other, strict=True))
