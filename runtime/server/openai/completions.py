"""`/v1/completions`: text completions, of text or token ids."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import orjson
from fastapi import APIRouter, Request
from fastapi.responses import Response

from ....errors import InvalidRequest
from ....frontend.ir import GenParams
from ..access.json_route import json_routes
from ..generation.answer import answer
from ..generation.pieces import Outcome, Piece
from ..generation.task import Task
from ..service import Service
from .reply import TEXT, CompletionReply, Sample, Wanted, extras_of, fingerprint_of
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
            has_token_ids=body.wanted.needs_token_ids,
            hints=body.kv_hints,
            cache_salt=body.cache_salt,
            constraint_field=body.constraint_field,
        )
        fingerprint = fingerprint_of(service.info)
        reply = TextReply(service.model, body.wanted, fingerprint=fingerprint)
        return await answer(service, request, task, reply)

    return routes


class CompletionRequest(SamplingFields):
    """Body of /v1/completions: one or several prompts, as text or token ids."""

    prompt: str | list[str] | list[int] | list[list[int]]
    max_tokens: int | None = None
    logprobs: int | None = None
    echo: bool = False

    @property
    def has_logprobs(self) -> bool:
        return self.logprobs is not None

    def params(self) -> GenParams:
        """Sampling as the program's gen takes it; 16 tokens by default, as OpenAI's."""
        if self.echo:
            raise InvalidRequest.of("echo", True, "false")
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
        self,
        model: str,
        wanted: Wanted | None = None,
        *,
        fingerprint: str | None = None,
    ) -> None:
        super().__init__(model, wanted, fingerprint=fingerprint)
        self._samples: dict[int, TextSample] = {}

    def choice(self, outcome: Outcome) -> dict[str, Any]:
        outcome = self._with_stop_text(outcome)
        ids = {"token_ids": outcome.meta["output_ids"]} if self.wanted.has_token_ids else {}
        return {
            "index": outcome.index,
            "text": outcome.text,
            "finish_reason": outcome.meta["finish_reason"],
            "logprobs": self._logprobs(outcome.meta.get("logprobs")),
            **ids,
            **extras_of(outcome),
        }

    def piece(self, piece: Piece) -> bytes:
        sample = self._sample(piece.index)
        if self._is_plain:
            return sample.head + orjson.dumps(piece.text) + sample.tail
        sample.hold(piece)
        return self._said(sample, piece.text)

    def end(self, outcome: Outcome) -> bytes:
        sample = self._sample(outcome.index)
        reason = outcome.meta["finish_reason"]
        return self._said(sample, self._stop_text(outcome), reason, extras_of(outcome))

    def _sample(self, index: int) -> TextSample:
        sample = self._samples.get(index)
        if sample is None:
            choice = {"index": index, "text": TEXT, "logprobs": None, "finish_reason": None}
            sample = self._samples[index] = TextSample(index, *self._around_text(choice))
        return sample

    def _said(
        self,
        sample: TextSample,
        text: str,
        reason: str | None = None,
        extras: dict[str, Any] | None = None,
    ) -> bytes:
        """A chunk, with the tokens that waited for it."""
        entries = sample.take_logprobs()
        logprobs = self._logprobs(entries or None, sample.num_chars)
        sample.num_chars += sum(len(entry["token"]) for entry in entries)
        choice = {"index": sample.index, "text": text, "logprobs": logprobs}
        choice |= {"finish_reason": reason, **(extras or {})}
        return self._chunk_of_tokens(choice, sample, self._samples.values())

    def _logprobs(
        self, entries: Sequence[dict[str, Any]] | None, first_offset: int = 0
    ) -> dict[str, Any] | None:
        if entries is None or not self.wanted.has_logprobs:
            return None
        lengths = (len(entry["token"]) for entry in entries)
        return {
            "tokens": [entry["token"] for entry in entries],
            "token_logprobs": [entry["logprob"] for entry in entries],
            "top_logprobs": [{t["token"]: t["logprob"] for t in e["top"]} for e in entries],
            "text_offset": list(accumulate(lengths, initial=first_offset))[:-1],
        }


class TextSample(Sample):
    """A sample, where its next token's text stands, and a chunk of nothing but text, before and
    behind that."""

    __slots__ = ("head", "num_chars", "tail")

    def __init__(self, index: int, head: bytes, tail: bytes) -> None:
        super().__init__(index)
        self.head = head
        self.tail = tail
        self.num_chars = 0
