"""`/v1/completions`: text completions, of text or token ids."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import Response

from ....errors import InvalidRequest
from ....frontend.ir import GenParams
from ..access.json_route import json_routes
from ..generation.answer import answer
from ..generation.pieces import Outcome, Piece
from ..generation.task import Task
from ..service import Service
from .reply import CompletionReply, event, warnings_of
from .sampling_fields import SamplingFields


def router(service: Service) -> APIRouter:
    """The routes."""
    routes = json_routes()

    @routes.post("/v1/completions")
    async def completions(body: CompletionRequest, request: Request) -> Response:
        """OpenAI's text completions."""
        service.require_model(body.model)
        task = Task(
            body.prompts(),
            body.params(),
            n=body.n,
            stream=body.stream,
            hints=body.kv_hints,
            cache_salt=body.cache_salt,
            constraint_field=body.constraint_field,
        )
        reply = TextReply(
            service.model,
            n=body.n,
            includes_usage=body.includes_usage,
            has_token_ids=body.return_token_ids,
        )
        return await answer(service, request, task, reply)

    return routes


class CompletionRequest(SamplingFields):
    """Body of /v1/completions: one or several prompts, as text or token ids; `return_token_ids`
    is an extra that vLLM has too."""

    prompt: str | list[str] | list[int] | list[list[int]]
    max_tokens: int | None = None
    logprobs: int | None = None
    echo: bool = False
    return_token_ids: bool = False

    def params(self) -> GenParams:
        """Sampling as the program's gen takes it; 16 tokens by default, as OpenAI's."""
        if self.echo:
            raise InvalidRequest.of("echo", True, "false")
        if self.return_token_ids and self.stream:
            raise InvalidRequest.of("return_token_ids", True, "only without stream, for now")
        return self.gen_params(16 if self.max_tokens is None else self.max_tokens, self.logprobs)

    def prompts(self) -> list[str | list[int]]:
        """Each prompt by itself."""
        prompt = self.prompt
        if isinstance(prompt, str):
            return [prompt]
        if not prompt:
            raise InvalidRequest.of("prompt", prompt, "at least one prompt")
        if isinstance(prompt[0], int):
            return [[int(i) for i in prompt]]
        return list(prompt)


class TextReply(CompletionReply):
    """Answers of /v1/completions."""

    prefix = "cmpl"
    whole_object = "text_completion"
    chunk_object = "text_completion"

    def __init__(
        self, model: str, *, n: int = 1, includes_usage: bool = False, has_token_ids: bool = False
    ) -> None:
        super().__init__(model, n=n, includes_usage=includes_usage)
        self._has_token_ids = has_token_ids

    def choice(self, outcome: Outcome) -> dict[str, Any]:
        ids = {"token_ids": outcome.meta["output_ids"]} if self._has_token_ids else {}
        return {
            "index": outcome.index,
            "text": outcome.text,
            "finish_reason": outcome.meta["finish_reason"],
            "logprobs": _completion_logprobs(outcome.meta.get("logprobs")),
            **ids,
            **warnings_of(outcome),
        }

    def piece(self, piece: Piece) -> bytes:
        choice = {"index": piece.index, "text": piece.text, "finish_reason": None}
        return event(self._chunk(choice))

    def end(self, outcome: Outcome) -> bytes:
        reason = outcome.meta["finish_reason"]
        choice = {"index": outcome.index, "text": "", "finish_reason": reason}
        return event(self._chunk({**choice, **warnings_of(outcome)}))


def _completion_logprobs(entries: list[dict[str, Any]] | None) -> dict[str, Any] | None:
    if entries is None:
        return None
    offsets, end = [], 0
    for entry in entries:
        offsets.append(end)
        end += len(entry["token"])
    return {
        "tokens": [entry["token"] for entry in entries],
        "token_logprobs": [entry["logprob"] for entry in entries],
        "top_logprobs": [{t["token"]: t["logprob"] for t in e["top"]} for e in entries],
        "text_offset": offsets,
    }
