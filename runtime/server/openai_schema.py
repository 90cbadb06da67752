"""Bodies of OpenAI's completion endpoints: what is read of a request, what a response looks like.

Fields that are not listed are ignored. Values are checked by the runtime, whose errors name the
field; here only types are.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal, Protocol

from pydantic import BaseModel, ConfigDict, Field

from ...errors import InvalidRequest
from ...frontend.ir import MAX_SAMPLES, GenParams, logit_bias_pairs
from .completion import Message, Outcome
from .constraint_fields import ConstraintFields
from .kv_hints import HintEnvelope
from .tools import BEGIN, Tool, ToolChoice, ToolUse

UNBOUNDED = 2**31 - 1  # the engine cuts max_tokens to what fits the context


class StreamOptions(BaseModel):
    """What a stream carries besides text."""

    include_usage: bool = False


class _SamplingFields(ConstraintFields):
    """Fields that both endpoints share; `top_k`, `min_p`, `repetition_penalty`, `min_tokens`,
    `stop_token_ids` and `ignore_eos` are extras that vLLM has too."""

    model_config = ConfigDict(extra="ignore", strict=True)

    model: str | None = None
    n: int = Field(default=1, ge=1, le=MAX_SAMPLES)
    kv_hints: HintEnvelope | None = None
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
            constraint=self.constraint(),
            jump_forward=self.jump_forward,
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
    tools: list[Tool] | None = None
    tool_choice: ToolChoice | None = None

    def tool_use(self, template_knows_tools: bool) -> ToolUse:
        """Raises InvalidRequest."""
        choice = self.tool_choice or ("auto" if self.tools else "none")
        return ToolUse(self.tools or (), choice, template_knows_tools)

    def params(self, tool_use: ToolUse | None = None) -> GenParams:
        """Sampling as the program's gen takes it."""
        given = (self.max_completion_tokens, self.max_tokens, UNBOUNDED)
        wanted = next(value for value in given if value is not None)
        params = self._params(wanted, (self.top_logprobs or 0) if self.logprobs else None)
        of_tools = None if tool_use is None else tool_use.constraint()
        if of_tools is None:
            return params
        if params.constraint is None:
            return replace(params, constraint=of_tools)
        if tool_use is not None and tool_use.is_forced:
            raise InvalidRequest.of(
                self.constraint_field or "tools",
                "...",
                "left out where tool_choice asks for a call",
            )
        return params


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

    @property
    def id(self) -> str:
        """Of the answer."""

    def choice(self, index: int, outcome: Outcome) -> dict[str, Any]:
        """A finished choice."""

    def whole(self, choices: list[dict[str, Any]], used: dict[str, Any]) -> dict[str, Any]:
        """The body of an answer that is not streamed."""

    def chunks(self, index: int, item: str | Outcome) -> list[dict[str, Any]]:
        """What a stream says of a piece of text, or of the end of a choice."""

    def usage_chunk(self, used: dict[str, Any]) -> dict[str, Any]:
        """The last chunk of a stream that was asked for usage."""

    def hints_chunk(self, answer: dict[str, Any]) -> dict[str, Any]:
        """The chunk of a stream that answers its `kv_hints`."""


class _Reply:
    """Id, model and time that all bodies of one answer share."""

    prefix = ""
    whole_object = ""
    chunk_object = ""

    def __init__(self, model: str) -> None:
        created = int(time.time())
        self.id = f"{self.prefix}-{secrets.token_hex(12)}"
        self._head = {"id": self.id, "created": created, "model": model}

    def whole(self, choices: list[dict[str, Any]], used: dict[str, Any]) -> dict[str, Any]:
        return {**self._head, "object": self.whole_object, "choices": choices, "usage": used}

    def usage_chunk(self, used: dict[str, Any]) -> dict[str, Any]:
        return {**self._head, "object": self.chunk_object, "choices": [], "usage": used}

    def hints_chunk(self, answer: dict[str, Any]) -> dict[str, Any]:
        return {**self._head, "object": self.chunk_object, "choices": [], "kv_hints": answer}

    def _chunk(self, choice: dict[str, Any]) -> dict[str, Any]:
        return {**self._head, "object": self.chunk_object, "choices": [choice]}


class ChatReply(_Reply):
    """Answers of /v1/chat/completions. Where tools may be called, a stream holds back what may be a
    call, and sends calls whole."""

    prefix = "chatcmpl"
    whole_object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def __init__(self, model: str, tool_use: ToolUse | None = None) -> None:
        super().__init__(model)
        self._tool_use = tool_use if tool_use is not None and tool_use.may_call else None
        self._begun: set[int] = set()
        self._held: dict[int, str] = {}  # text that may be the beginning of a call

    def choice(self, index: int, outcome: Outcome) -> dict[str, Any]:
        message, reason = self._message(outcome)
        return {
            "index": index,
            "message": {"role": "assistant", **message},
            "finish_reason": reason,
            "logprobs": _chat_logprobs(outcome.meta.get("logprobs")),
            **_warnings(outcome),
        }

    def _message(self, outcome: Outcome) -> tuple[dict[str, Any], str]:
        """Content and tool calls, and the finish reason."""
        reason: str = outcome.meta["finish_reason"]
        if self._tool_use is None:
            return {"content": outcome.text}, reason
        content, calls = self._tool_use.read(outcome.text)
        if not calls:
            return {"content": content}, reason
        items = [call.as_openai() for call in calls]
        message = {"content": content.strip() or None, "tool_calls": items}
        return message, "tool_calls" if reason == "stop" else reason

    def chunks(self, index: int, item: str | Outcome) -> list[dict[str, Any]]:
        deltas: list[tuple[dict[str, Any], str | None]] = []
        if index not in self._begun:
            self._begun.add(index)
            deltas.append(({"role": "assistant", "content": ""}, None))
        if isinstance(item, str):
            text = item if self._tool_use is None else self._sendable(index, item)
            if text:
                deltas.append(({"content": text}, None))
        else:
            deltas += self._last_deltas(index, item)
        chunks = [
            self._chunk({"index": index, "delta": delta, "finish_reason": reason})
            for delta, reason in deltas
        ]
        if isinstance(item, Outcome):
            chunks[-1]["choices"][0].update(_warnings(item))
        return chunks

    def _sendable(self, index: int, fresh: str) -> str:
        """What of a stream's text is surely no part of a call."""
        assert self._tool_use is not None
        held = self._held.get(index, "") + fresh
        sizes = range(min(len(BEGIN), len(held)), 0, -1)
        keep = next((n for n in sizes if BEGIN.startswith(held[-n:])), 0)
        end = held.find(BEGIN) if BEGIN in held else len(held) - keep
        end = 0 if self._tool_use.is_forced else end
        self._held[index] = held[end:]
        return held[:end]

    def _last_deltas(self, index: int, outcome: Outcome) -> list[tuple[dict[str, Any], str | None]]:
        """What was held back, as calls or as text, and the end."""
        message, reason = self._message(outcome)
        held = self._held.pop(index, "")
        last: list[tuple[dict[str, Any], str | None]] = []
        if calls := message.get("tool_calls"):
            assert self._tool_use is not None
            held = self._tool_use.read(held)[0]
            numbered = [{"index": i, **call} for i, call in enumerate(calls)]
            last.append(({"tool_calls": numbered}, None))
        if held.strip() or (held and not calls):
            last.insert(0, ({"content": held}, None))
        return [*last, ({}, reason)]


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
            **_warnings(outcome),
        }

    def chunks(self, index: int, item: str | Outcome) -> list[dict[str, Any]]:
        if isinstance(item, str):
            return [self._chunk({"index": index, "text": item, "finish_reason": None})]
        end = {"text": "", "finish_reason": item.meta["finish_reason"], **_warnings(item)}
        return [self._chunk({"index": index, **end})]


def _warnings(outcome: Outcome) -> dict[str, Any]:
    """What of a schema was not enforced, or not fulfilled; an extra field, where there is any."""
    found = outcome.meta.get("warnings")
    return {"warnings": found} if found else {}


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
