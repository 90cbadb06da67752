"""`/score`: the likelihood of each choice after a prompt; and SGLang's `/v1/score`, the likelihood
of single tokens after texts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Literal

from fastapi import APIRouter, Request
from pydantic import ConfigDict, Field

from ....errors import InvalidRequest
from ....frontend.protocol import ir
from ...generation.admission import require_generation
from ...generation.completion import prompt_ops
from ...generation.service import Service
from ...generation.values import usage_of_values, values_of
from ...protocol.json_route import beside_loop, json_routes
from ...protocol.known_fields import Items
from ...protocol.task import MAX_PROMPTS, Prompt, require_together
from ..openai.chat_messages import ChatMessage
from .classify import PairFields, scored_pairs
from .prompts import PromptFields

MAX_SCORES = 4096  # prompts times choices, each an engine request (guess)


def router(service: Service) -> APIRouter:
    """The routes."""
    routes = json_routes()

    @routes.post("/score")
    async def score(body: ScoreRequest, request: Request) -> Any:
        """Log probabilities of choices after a prompt, or after each of several; or scores of
        pairs of texts."""
        if body.has_pairs:
            return await scored_pairs(service, request, body)
        require_generation(service)
        served = service.served(body.model)
        programs = await beside_loop(request, body.programs)
        answers = await values_of(service, request, programs, body.cache_salt, served.lora_path)
        told = [body.answer(answer) for answer in answers]
        return told if body.is_batch else told[0]

    @routes.post("/v1/score")
    async def label_scores(body: LabelScoreRequest, request: Request) -> dict[str, Any]:
        """SGLang's scoring: the probabilities of labels after each query with its item; or vLLM's:
        scores of pairs of texts."""
        if body.has_pairs:
            return await scored_pairs(service, request, body)
        require_generation(service)
        served = service.served(body.model)
        programs = await beside_loop(request, body.programs)
        answers = await values_of(service, request, programs, lora_path=served.lora_path)
        return {
            "object": "scoring",
            "model": served.name,
            "scores": [body.scores(answer) for answer in answers],
            "usage": usage_of_values(answers),
        }

    return routes


class ScoreRequest(PromptFields, PairFields):
    """Body of /score: `text`, `input_ids` or `messages`, and `choices` as texts or token ids; or
    `text_1` and `text_2`."""

    messages: Items[ChatMessage] | None = Field(
        default=None, min_length=1, max_length=ir.MAX_MESSAGES
    )
    choices: Items[str] | Items[Items[int]] = Field(default=[], max_length=ir.MAX_CHOICES)
    method: Literal[
        "token_length_normalized", "greedy_token_selection", "unconditional_likelihood_normalized"
    ] = "token_length_normalized"

    def programs(self) -> list[list[ir.Op]]:
        """One program per prompt. Raises InvalidRequest."""
        self.require_whole()
        prompts = self._all_prompts()
        _require_scores(len(prompts) * len(self.choices), "choices")
        if not self.choices:
            raise InvalidRequest.of("choices", [], f"1 to {ir.MAX_CHOICES} choices")
        if not all(self.choices):
            raise InvalidRequest.of("choices", self.choices, "none of them empty")
        if isinstance(self.choices[0], str):
            texts = tuple(str(choice) for choice in self.choices)
            return [_select(prompt, choices=texts, method=self.method) for prompt in prompts]
        ids = tuple(tuple(choice) for choice in self.choices)
        return [_select(prompt, ids=ids, method=self.method) for prompt in prompts]

    def answer(self, answer: dict[str, Any]) -> dict[str, Any]:
        """The result of one prompt. A choice's log probability is the sum over its tokens, its
        normalized one the mean; the probabilities compare it with the other choices."""
        meta = answer["meta"]
        token_logprobs: list[list[float]] = meta["choice_token_logprobs"]
        sums = [sum(each) for each in token_logprobs]
        is_text = isinstance(self.choices[0], str)
        best = self.choices.index(answer["value"] if is_text else meta["output_ids"])
        return {
            "choices": self.choices,
            "logprobs": sums,
            "normalized_logprobs": meta["choice_logprobs"],
            "probabilities": _softmax(sums),
            "token_logprobs": token_logprobs,
            "best": best,
            "method": self.method,
            "usage": usage_of_values([answer]),
            "meta_info": {"e2e_latency": meta["latency_s"]},
        }

    def _all_prompts(self) -> list[Prompt]:
        if self.messages is None:
            return self.prompts()
        if self.text is not None or self.input_ids is not None:
            raise InvalidRequest("messages: not together with text or input_ids", "messages")
        return [[message.plain(index) for index, message in enumerate(self.messages)]]


class LabelScoreRequest(PairFields):
    """Body of /v1/score: a query and items, both as texts or both as ids; or `text_1` and
    `text_2`."""

    model_config = ConfigDict(extra="ignore", strict=True)

    model: str | None = None
    query: str | Items[int] = ""
    items: str | Items[str] | Items[Items[int]] = Field(default=[])
    label_token_ids: Items[int] = Field(default=[], max_length=ir.MAX_CHOICES)
    apply_softmax: bool = False
    item_first: bool = False

    def programs(self) -> list[list[ir.Op]]:
        """One program per item. Raises InvalidRequest."""
        self.require_whole()
        items = [self.items] if isinstance(self.items, str) else self.items
        if not self.label_token_ids:
            allowed = f"1 to {ir.MAX_CHOICES} token ids, or text_1 and text_2"
            raise InvalidRequest.of("label_token_ids", [], allowed)
        if not 1 <= len(items) <= MAX_PROMPTS:
            raise InvalidRequest.of("items", f"{len(items)} items", f"1 to {MAX_PROMPTS}")
        _require_scores(len(items) * len(self.label_token_ids), "label_token_ids")
        require_together("query", len(self.query), len(items))
        labels = tuple((token_id,) for token_id in self.label_token_ids)
        return [_select(self._prompt(item), ids=labels) for item in items]

    def scores(self, answer: dict[str, Any]) -> list[float]:
        """One item's label probabilities, with `apply_softmax` among the labels only."""
        logprobs = [logprob for (logprob,) in answer["meta"]["choice_token_logprobs"]]
        return _softmax(logprobs) if self.apply_softmax else [math.exp(lp) for lp in logprobs]

    def _prompt(self, item: str | list[int]) -> Prompt:
        if isinstance(self.query, str) and isinstance(item, str):
            return item + self.query if self.item_first else self.query + item
        if isinstance(self.query, list) and isinstance(item, list):
            return [*item, *self.query] if self.item_first else [*self.query, *item]
        raise InvalidRequest("items: texts where the query is a text, else lists of ids", "items")


def _select(
    prompt: Prompt,
    *,
    choices: tuple[str, ...] = (),
    ids: tuple[tuple[int, ...], ...] = (),
    method: str = ir.CHOICES_METHODS[0],
) -> list[ir.Op]:
    ops = list(prompt_ops(prompt))
    return [*ops, ir.Select(0, len(ops), None, "choice", choices, method, ids)]


def _require_scores(num_scores: int, field: str) -> None:
    if num_scores > MAX_SCORES:
        raise InvalidRequest.of(field, f"{num_scores} scores", f"at most {MAX_SCORES} at a time")


def _softmax(logprobs: Sequence[float]) -> list[float]:
    largest = max(logprobs)
    weights = [math.exp(logprob - largest) for logprob in logprobs]
    total = sum(weights)
    return [weight / total for weight in weights]
