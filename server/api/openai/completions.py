"""`/v1/completions`: text completions, of text or token ids."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any

import orjson
from fastapi import APIRouter, Request
from fastapi.responses import Response
from pydantic import Field

from ....errors import InvalidRequest
from ....frontend.protocol.ir import GenParams
from ....frontend.protocol.numbers import MAX_LOGPROBS, MAX_SAMPLES
from ...generation.answer import answer
from ...generation.service import Service
from ...protocol.json_route import beside_loop, json_routes, validated
from ...protocol.known_fields import Items
from ...protocol.pieces import Outcome, Piece
from ...protocol.server_sent_events import event
from ...protocol.task import MAX_PROMPTS
from .constraint_fields import NO_NAMES
from .reply import (
    TEXT,
    CompletionReply,
    Sample,
    Wanted,
    extras_of,
    fingerprint_of,
    prompt_logprobs_of,
)
from .sampling_fields import SamplingFields


def router(service: Service) -> APIRouter:
    """The routes."""
    routes = json_routes()

    @routes.post("/completions", include_in_schema=False)
    @routes.post("/v1/completions")
    async def completions(body: CompletionRequest, request: Request) -> Response:
        """OpenAI's text completions."""
        served = service.served(body.model, body.lora_path)
        task = await beside_loop(
            request, lambda: body.to_task(body.prompts(), body.params(), served)
        )
        reply = TextReply(
            served.name,
            body.wanted,
            fingerprint=fingerprint_of(service.info),
            echoes=await _echoes(service, body) if body.echo else (),
        )
        return await answer(service, request, task, reply)

    return routes


async def _echoes(service: Service, body: CompletionRequest) -> list[str]:
    """The text of each prompt. Raises InvalidRequest and ModelLoadError."""
    prompts, decode = body.prompts(), service.text.decode
    texts = [prompt for prompt in prompts if isinstance(prompt, str)]
    if len(texts) == len(prompts):
        return texts
    return await service.text.in_thread(
        lambda: [p if isinstance(p, str) else decode(p, field="prompt") for p in prompts]
    )


class CompletionRequest(SamplingFields):
    """Body of /v1/completions: one or several prompts, as text or token ids."""

    prompt: str | Items[str] | Items[int] | Items[Items[int]]
    max_tokens: int | None = Field(default=None, ge=0)
    logprobs: int | None = Field(default=None, ge=0, le=MAX_LOGPROBS)
    echo: bool = False
    add_special_tokens: bool = True

    @property
    def num_logprobs(self) -> int | None:
        return self.logprobs

    @property
    def num_drawn(self) -> int:
        return self.n if self.best_of is None or self.use_beam_search else self.best_of

    def params(self) -> GenParams:
        """Sampling as the program's gen takes it; 16 tokens by default, as OpenAI's. Raises
        InvalidRequest."""
        if self.best_of is not None and not self.n <= self.best_of <= MAX_SAMPLES:
            allowed = f"an integer in [n, {MAX_SAMPLES}]"
            raise InvalidRequest.of("best_of", self.best_of, allowed)
        if self.num_drawn > self.n and self.stream:
            raise InvalidRequest.of("best_of", self.best_of, "n where the answer is streamed")
        if not self.add_special_tokens:
            raise InvalidRequest.of("add_special_tokens", False, "true, or token ids as prompt")
        max_tokens = 16 if self.max_tokens is None else self.max_tokens
        scores_prompt = self.echo and self.logprobs is not None
        return self.gen_params(max_tokens, has_prompt_logprobs=scores_prompt)

    def prompts(self) -> list[str | list[int]]:
        """Each prompt by itself."""
        prompt = self.prompt
        if isinstance(prompt, str):
            return [prompt]
        if not prompt:
            raise InvalidRequest.of("prompt", prompt, "at least one prompt")
        if not isinstance(prompt[0], int) and len(prompt) > MAX_PROMPTS:
            raise InvalidRequest.of("prompt", f"{len(prompt)} of them", f"at most {MAX_PROMPTS}")
        if isinstance(prompt[0], int):
            return [[int(i) for i in prompt]]
        return list(prompt)


def completion_request(
    fields: dict[str, Any], names: Mapping[str, str] = NO_NAMES
) -> CompletionRequest:
    """A completion that another API's request amounts to; `names`: that API's, of fields that
    constrain the output. Raises InvalidRequest."""
    return validated(CompletionRequest, fields).named(names)


class TextReply(CompletionReply["TextSample"]):
    """Answers of /v1/completions.

    With `echo` a text begins with its prompt. The log probabilities of a prompt are known at the
    end only, so a stream that has these, too, says everything then.
    """

    prefix = "cmpl"
    whole_object = "text_completion"
    chunk_object = "text_completion"

    def __init__(
        self,
        model: str,
        wanted: Wanted | None = None,
        *,
        fingerprint: str | None = None,
        echoes: Sequence[str] = (),
    ) -> None:
        """`echoes`: by prompt, the text that is repeated."""
        super().__init__(model, wanted, fingerprint=fingerprint)
        self._echoes = echoes
        self._waits_for_prompts = bool(echoes) and self.wanted.num_logprobs is not None
        self._prompts: Sequence[Outcome] = ()  # the first sample of each, which knows its scores

    def whole(self, outcomes: Sequence[Outcome], hints: dict[str, Any] | None) -> dict[str, Any]:
        self._note_prompts(outcomes)
        return super().whole(outcomes, hints)

    def close(self, outcomes: Sequence[Outcome], hints: dict[str, Any] | None) -> bytes:
        self._note_prompts(outcomes)
        said = b""
        if self._waits_for_prompts:
            said = b"".join(event(self._chunk(self.choice(outcome))) for outcome in outcomes)
        return said + super().close(outcomes, hints)

    def choice(self, outcome: Outcome) -> dict[str, Any]:
        echo = self._echo(outcome.index)
        outcome = self._with_stop_text(outcome)
        logprobs = self._logprobs(outcome.meta.get("logprobs"), len(echo))
        prompt = self._prompts[outcome.index // self.wanted.n]
        if logprobs is not None and self._waits_for_prompts:
            before = self._prompt_logprobs(prompt.meta["prompt_logprobs"], echo)
            logprobs = {
                name: None if values is None else before[name] + values
                for name, values in logprobs.items()
            }
        choice = {
            "index": outcome.index,
            "text": echo + outcome.text,
            "finish_reason": outcome.meta["finish_reason"],
            "logprobs": logprobs,
            **extras_of(outcome),
        }
        if self.wanted.has_token_ids:
            choice["token_ids"] = outcome.meta["output_ids"]
        if (num := self.wanted.num_prompt_logprobs) is not None:
            choice["prompt_logprobs"] = prompt_logprobs_of(prompt, num)
        return choice

    def piece(self, piece: Piece) -> bytes:
        if self._waits_for_prompts:
            return b""
        sample, begin = self._sample(piece.index)
        if self._is_plain:
            return begin + sample.head + orjson.dumps(piece.text) + sample.tail
        sample.hold(piece)
        return begin + self._said(sample, piece.text)

    def end(self, outcome: Outcome) -> bytes:
        if self._waits_for_prompts:
            return b""
        sample, begin = self._sample(outcome.index)
        reason = outcome.meta["finish_reason"]
        return begin + self._said(sample, self._stop_text(outcome), reason, extras_of(outcome))

    def _note_prompts(self, outcomes: Sequence[Outcome]) -> None:
        self._prompts = outcomes[:: self._num_drawn]

    def _echo(self, index: int) -> str:
        return self._echoes[index // self.wanted.n] if self._echoes else ""

    def _sample(self, index: int) -> tuple[TextSample, bytes]:
        """A sample, and what a stream says when it begins, where it does now."""
        sample = self._samples.get(index)
        if sample is not None:
            return sample, b""
        choice = {"index": index, "text": TEXT, "logprobs": None, "finish_reason": None}
        echo = self._echo(index)
        sample = self._samples[index] = TextSample(index, self._around_text(choice), len(echo))
        return sample, self._said(sample, echo) if echo else b""

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
        return self._chunk_of_tokens(sample, choice, reason, extras)

    def _logprobs(
        self, entries: Sequence[dict[str, Any]] | None, first_offset: int = 0
    ) -> dict[str, Any] | None:
        num = self.wanted.num_logprobs
        if entries is None or num is None:
            return None
        lengths = (len(entry["token"]) for entry in entries)
        return {
            "tokens": [entry["token"] for entry in entries],
            "token_logprobs": [entry["logprob"] for entry in entries],
            "top_logprobs": [_likeliest(entry, num) for entry in entries] if num else None,
            "text_offset": list(accumulate(lengths, initial=first_offset))[:-1],
        }

    def _prompt_logprobs(self, entries: Sequence[dict[str, Any]], echo: str) -> dict[str, Any]:
        """A token of the beginning that the text does not have (BOS) has no length."""
        shown = self._logprobs(entries) or {}
        first = shown["tokens"][0]
        if not echo.startswith(first):
            offsets = [max(0, offset - len(first)) for offset in shown["text_offset"]]
            shown["text_offset"] = offsets
        return shown


def _likeliest(entry: dict[str, Any], num: int) -> dict[str, float] | None:
    """The best tokens at a place, and the one that is there; None where nothing is known."""
    if entry["logprob"] is None:
        return None
    return {
        **{top["token"]: top["logprob"] for top in entry["top"][:num]},
        entry["token"]: entry["logprob"],
    }


class TextSample(Sample):
    """A sample, and where its next token's text stands."""

    __slots__ = ("num_chars",)

    def __init__(self, index: int, around_text: tuple[bytes, bytes], num_chars: int) -> None:
        super().__init__(index, around_text)
        self.num_chars = num_chars
