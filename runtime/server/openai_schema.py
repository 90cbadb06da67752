"""Bodies of OpenAI's completion endpoints: what is read of a request, what a response looks like.

Fields that are not listed are ignored. Values are checked by the runtime, whose errors name the
field; here only types are.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from typing import Any, Literal, Protocol

from pydantic import BaseModel, ConfigDict, Field

from ...errors import InvalidRequest
from ...frontend.ir import MAX_SAMPLES, GenParams, logit_bias_pairs
from .completion import Message, Outcome

UNBOUNDED = 2**31 - 1  # the engine cuts max_tokens to what fits the context


class StreamOptions(BaseModel):
    """What a stream carries besides text."""

    include_usage: bool = False


class _SamplingFields(BaseModel):
    """Fields that both endpoints share; `top_k`, `min_p`, `repetition_penalty`, `min_tokens`,
    `stop_token_ids` and `ignore_eos` are extras that vLLM has too."""

    model_config = ConfigDict(extra="ignore", strict=True)

    model: str | None = None
    n: int = Field(default=1, ge=1, le=MAX_SAMPLES)
    best_of: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    min_tokens: int | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None

    @property
    def includes_usage(self) -> bool:
        """Whether a stream ends with a chunk of usage."""
        return self.stream_options is not None and self.stream_options.include_usage

    def _params(self, max_tokens: int, logprobs: int | None) -> GenParams:
        if logprobs is not None and self.stream:
            raise InvalidRequest.of("logprobs", logprobs, "only without stream, for now")
        if self.best_of not in (None, self.n):
            raise InvalidRequest.of("best_of", self.best_of, "left out, or the same as n")
        stop = (self.stop,) if isinstance(self.stop, str) else self.stop
        return GenParams(
            max_tokens=max_tokens,
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=None if self.top_k == -1 else self.top_k,
            min_p=self.min_p,
            frequency_penalty=self.frequency_penalty,
            presence_penalty=self.presence_penalty,
            repetition_penalty=self.repetition_penalty,
            logit_bias=None if self.logit_bias is None else logit_bias_pairs(self.logit_bias),
            min_tokens=self.min_tokens,
            seed=self.seed,
            stop=None if stop is None else tuple(stop),
            stop_token_ids=None if self.stop_token_ids is None else tuple(self.stop_token_ids),
            ignore_eos=self.ignore_eos,
            logprobs=logprobs,
        )


class TextPart(BaseModel):
    """A part of a message's content; only text is known here."""

    type: Literal["text"]
    text: str


class ChatMessage(BaseModel):
    """A message of a chat."""

    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[TextPart]

    def plain(self) -> Message:
        """Role and text, "developer" being today's name of "system"."""
        content = self.content
        text = content if isinstance(content, str) else "".join(part.text for part in content)
        return Message("system" if self.role == "developer" else self.role, text)


class ChatRequest(_SamplingFields):
    """Body of /v1/chat/completions."""

    messages: list[ChatMessage] = Field(min_length=1)
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    logprobs: bool = False
    top_logprobs: int | None = None

    def params(self) -> GenParams:
        """Sampling as the program's gen takes it."""
        given = (self.max_completion_tokens, self.max_tokens, UNBOUNDED)
        wanted = next(value for value in given if value is not None)
        return self._params(wanted, (self.top_logprobs or 0) if self.logprobs else None)


class CompletionRequest(_SamplingFields):
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
        return self._params(16 if self.max_tokens is None else self.max_tokens, self.logprobs)

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


def usage(outcomes: Sequence[Outcome], num_prompts: int = 1) -> dict[str, Any]:
    """Token counts; a prompt counts once, however many samples (`n`) were drawn from it."""
    samples = max(1, len(outcomes) // num_prompts)
    prompt = sum(outcome.meta["prompt_tokens"] for outcome in outcomes[::samples])
    cached = sum(outcome.meta["cached_tokens"] for outcome in outcomes[::samples])
    completion = sum(outcome.meta["completion_tokens"] for outcome in outcomes)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": cached},
    }


class Reply(Protocol):
    """How one endpoint words its answers."""

    def choice(self, index: int, outcome: Outcome) -> dict[str, Any]:
        """A finished choice."""

    def whole(self, choices: list[dict[str, Any]], used: dict[str, Any]) -> dict[str, Any]:
        """The body of an answer that is not streamed."""

    def chunks(self, index: int, item: str | Outcome) -> list[dict[str, Any]]:
        """What a stream says of a piece of text, or of the end of a choice."""

    def usage_chunk(self, used: dict[str, Any]) -> dict[str, Any]:
        """The last chunk of a stream that was asked for usage."""


class _Reply:
    """Id, model and time that all bodies of one answer share."""

    prefix = ""
    whole_object = ""
    chunk_object = ""

    def __init__(self, model: str) -> None:
        created = int(time.time())
        identity = f"{self.prefix}-{secrets.token_hex(12)}"
        self._head = {"id": identity, "created": created, "model": model}

    def whole(self, choices: list[dict[str, Any]], used: dict[str, Any]) -> dict[str, Any]:
        return {**self._head, "object": self.whole_object, "choices": choices, "usage": used}

    def usage_chunk(self, used: dict[str, Any]) -> dict[str, Any]:
        return {**self._head, "object": self.chunk_object, "choices": [], "usage": used}

    def _chunk(self, choice: dict[str, Any]) -> dict[str, Any]:
        return {**self._head, "object": self.chunk_object, "choices": [choice]}


class ChatReply(_Reply):
    """Answers of /v1/chat/completions."""

    prefix = "chatcmpl"
    whole_object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def __init__(self, model: str) -> None:
        super().__init__(model)
        self._begun: set[int] = set()

    def choice(self, index: int, outcome: Outcome) -> dict[str, Any]:
        return {
            "index": index,
            "message": {"role": "assistant", "content": outcome.text},
            "finish_reason": outcome.meta["finish_reason"],
            "logprobs": _chat_logprobs(outcome.meta.get("logprobs")),
        }

    def chunks(self, index: int, item: str | Outcome) -> list[dict[str, Any]]:
        deltas: list[tuple[dict[str, str], str | None]] = []
        if index not in self._begun:
            self._begun.add(index)
            deltas.append(({"role": "assistant", "content": ""}, None))
        if isinstance(item, str):
            deltas.append(({"content": item}, None))
        else:
            deltas.append(({}, item.meta["finish_reason"]))
        return [
            self._chunk({"index": index, "delta": delta, "finish_reason": reason})
            for delta, reason in deltas
        ]


class TextReply(_Reply):
    """Answers of /v1/completions."""

    prefix = "cmpl"
    whole_object = "text_completion"
    chunk_object = "text_completion"

    def __init__(self, model: str, *, has_token_ids: bool) -> None:
        super().__init__(model)
        self._has_token_ids = has_token_ids

    def choice(self, index: int, outcome: Outcome) -> dict[str, Any]:
        ids = {"token_ids": outcome.meta["output_ids"]} if self._has_token_ids else {}
        return {
            "index": index,
            "text": outcome.text,
            "finish_reason": outcome.meta["finish_reason"],
            "logprobs": _completion_logprobs(outcome.meta.get("logprobs")),
            **ids,
        }

    def chunks(self, index: int, item: str | Outcome) -> list[dict[str, Any]]:
        is_text = isinstance(item, str)
        text = item if isinstance(item, str) else ""
        reason = None if is_text else item.meta["finish_reason"]  # type: ignore[union-attr]
        return [self._chunk({"index": index, "text": text, "finish_reason": reason})]


def _chat_logprobs(entries: list[dict[str, Any]] | None) -> dict[str, Any] | None:
    if entries is None:
        return None

    def shown(entry: dict[str, Any]) -> dict[str, Any]:
        token: str = entry["token"]
        return {"token": token, "logprob": entry["logprob"], "bytes": list(token.encode())}

    content = [{**shown(e), "top_logprobs": [shown(top) for top in e["top"]]} for e in entries]
    return {"content": content, "refusal": None}


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
