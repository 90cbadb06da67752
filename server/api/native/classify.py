"""`/classify`: a classifier's scores of texts or of pairs, one a label, in vLLM's form; and
`text_1` with `text_2` as vLLM's `/score` has them."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from typing import Any

from fastapi import APIRouter, Request
from pydantic import ConfigDict
from starlette.exceptions import HTTPException

from ....errors import InvalidRequest
from ....frontend.protocol import ir
from ....frontend.protocol.call_ops import score_ops
from ...generation.service import Service
from ...generation.values import usage_of_values, values_of
from ...protocol.fixed_fields import only, refuse_others
from ...protocol.json_route import beside_loop, json_routes
from ...protocol.known_fields import Items
from ...protocol.task import MAX_PROMPTS, require_together
from ..openai.embeddings import TruncationFields, cut_of
from .pair_scores import Method, Pairs, activated, scores_of

MAX_PAIR = 2


class OtherScoreFields(TruncationFields):
    """Fields of vLLM's bodies of /score and /classify that change nothing, or are refused."""

    user: Any = None
    request_id: Any = None
    mm_processor_kwargs: Any = None
    additional_data: Any = None
    priority: Any = only((None, 0), "0: keys have shares")
    activation: Any = only((None,), "left out; see use_activation")
    softmax: Any = only((None,), "left out; see use_activation")
    add_special_tokens: Any = only((None, True), "true")


class ClassifyRequest(OtherScoreFields):
    """Body of /classify: texts, each alone or a list of two that are seen together."""

    model_config = ConfigDict(extra="ignore", strict=True)

    model: str | None = None
    input: str | Items[str | Items[str]]
    use_activation: bool = True

    def programs(self, scores: dict[str, Any] | None) -> list[list[ir.Op]]:
        """`scores`: the engine's report. Raises InvalidRequest, and HTTPException where the model
        gives none."""
        if scores is None:
            raise HTTPException(400, "this model classifies nothing: it has no labels")
        refuse_others(self)
        given = [self.input] if isinstance(self.input, str) else self.input
        if not 1 <= len(given) <= MAX_PROMPTS:
            raise InvalidRequest.of("input", f"{len(given)} inputs", f"1 to {MAX_PROMPTS}")
        cut_to = cut_of(self.asked_cut)
        return [score_ops(*_text_and_pair(each, scores), cut_to=cut_to) for each in given]


class PairFields(OtherScoreFields):
    """vLLM's form of /score, mixed into other bodies: each text of `text_1` with that of `text_2`
    beside it, or a single one with all."""

    text_1: str | Items[str] | None = None
    text_2: str | Items[str] | None = None
    use_activation: bool = True
    pair_method: Method | None = None

    def require_whole(self) -> None:
        """Where no pairs are asked for. Raises InvalidRequest for what holds of these alone."""
        refuse_others(self)
        if self.asked_cut is not None:
            allowed = "left out without text_1 and text_2"
            raise InvalidRequest.of("truncate_prompt_tokens", self.asked_cut, allowed)

    @property
    def has_pairs(self) -> bool:
        """Whether pairs are what is asked for."""
        return self.text_1 is not None or self.text_2 is not None

    def pairs(self) -> Pairs:
        """Raises InvalidRequest."""
        refuse_others(self)
        first, second = _texts("text_1", self.text_1), _texts("text_2", self.text_2)
        if len(first) not in (1, len(second)):
            allowed = f"1 text, or {len(second)}, as many as text_2 has"
            raise InvalidRequest.of("text_1", f"{len(first)} texts", allowed)
        require_together("text_1", len(first[0]), len(second))
        return Pairs(
            first,
            second,
            method=self.pair_method,
            truncate=self.asked_cut,
            is_activated=self.use_activation,
        )


def router(service: Service) -> APIRouter:
    """The routes."""
    routes = json_routes()

    @routes.post("/classify")
    async def classify(body: ClassifyRequest, request: Request) -> dict[str, Any]:
        """Each text's scores, one a label."""
        served, scores = service.served(body.model), service.info.get("scores")
        programs = await beside_loop(request, lambda: body.programs(scores))
        answers = await values_of(service, request, programs, lora_path=served.lora_path)
        assert scores is not None
        activation = scores["activation"] if body.use_activation else "none"
        if body.use_activation and activation == "none" and len(scores["labels"]) > 1:
            activation = "softmax"  # of several labels, as with vLLM
        each = [activated(answer["value"], activation) for answer in answers]
        return {
            "id": f"classify-{secrets.token_hex(12)}",
            "object": "list",
            "created": service.created_s,
            "model": served.name,
            "data": [_told(index, probs, scores["labels"]) for index, probs in enumerate(each)],
            "usage": usage_of_values(answers),
        }

    return routes


async def scored_pairs(service: Service, request: Request, body: PairFields) -> dict[str, Any]:
    """vLLM's answer of /score. Raises what `scores_of` does."""
    served = service.served(getattr(body, "model", None))
    found = await scores_of(service, request, served, body.pairs())
    return {
        "id": f"score-{secrets.token_hex(12)}",
        "object": "list",
        "created": service.created_s,
        "model": served.name,
        "data": [
            {"index": index, "object": "score", "score": score}
            for index, score in enumerate(found.scores)
        ],
        "usage": found.usage,
    }


def _text_and_pair(given: str | Sequence[str], scores: dict[str, Any]) -> tuple[str, str | None]:
    texts = [given] if isinstance(given, str) else given
    if not 1 <= len(texts) <= MAX_PAIR or not all(texts):
        allowed = "texts, or lists of two that are seen together, none of them empty"
        raise InvalidRequest.of("input", list(texts), allowed)
    if len(texts) == MAX_PAIR and not scores["sees_pairs"]:
        raise InvalidRequest("input: this model sees one text at a time, no pairs", "input")
    return texts[0], texts[1] if len(texts) == MAX_PAIR else None


def _told(index: int, probs: list[float], labels: list[str]) -> dict[str, Any]:
    best = max(range(len(probs)), key=probs.__getitem__)
    return {"index": index, "label": labels[best], "probs": probs, "num_classes": len(probs)}


def _texts(field: str, given: str | list[str] | None) -> list[str]:
    texts = [given] if isinstance(given, str) else given or []
    if not 1 <= len(texts) <= MAX_PROMPTS or not all(texts):
        allowed = f"1 to {MAX_PROMPTS} texts, none of them empty"
        raise InvalidRequest.of(field, f"{len(texts)} texts", allowed)
    return texts
