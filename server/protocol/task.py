"""What an endpoint asks of the engine, and how it formats the results."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Protocol

from ...errors import InvalidRequest
from ...frontend.protocol.chat_message import Message
from ...frontend.protocol.constraint import Constraint
from ...frontend.protocol.ir import GenParams
from .caller import digest_of
from .constraint_words import ConstraintWords
from .hint_envelope import HintEnvelope
from .pieces import GenerationFailed, Outcome, Piece

UNBOUNDED = 2**31 - 1  # max_tokens by default: the engine cuts it to what fits

Prompt = str | Sequence[int] | Sequence[Message]
_SYSTEM = ("system", "developer")
MESSAGE_CHARS = 256  # to send a message's ops takes as long as so many characters more (guess)
LARGE = 65_536  # characters and token ids: sending them takes milliseconds
MAX_PROMPTS = 2048  # of a request: as many as OpenAI embeds at once
MAX_TOGETHER = 1 << 25  # characters, or ids, of prompts that a text of the request is part of each


@dataclass(frozen=True, slots=True)
class Task:
    """One request: `n` samples of each prompt. Samples are numbered over all prompts."""

    prompts: Sequence[Prompt]
    params: GenParams
    n: int = 1
    stream: bool = False
    has_token_ids: bool = False  # streams include token ids
    tools: str | None = None  # the tools for the chat template, as JSON
    template_kwargs: str | None = None  # variables of the chat template, as JSON
    hints: HintEnvelope | None = None
    cache_salt: str | None = None  # only requests with the same salt share KV
    constraint_field: str | None = None  # the client's field of a grammar that may be refused
    words: ConstraintWords | None = None  # in which the client is told of the grammar
    rid: str | None = None  # the client's own id, by which it may abort this beside the reply's
    each_params: Sequence[GenParams] = ()  # where prompts differ in them, one for each
    lora_path: str | None = None  # name of an adapter
    each_lora_path: Sequence[str | None] = ()  # where prompts differ in it, one for each
    fails_apart: bool = False  # the failure of one sample leaves the others running
    history: str | None = None  # the client's name for the texts that belong together

    def lora_path_of(self, number: int) -> str | None:
        """The adapter of prompt `number`."""
        return self.each_lora_path[number] if self.each_lora_path else self.lora_path

    def params_of(self, number: int) -> GenParams:
        """The parameters of prompt `number`."""
        return self.each_params[number] if self.each_params else self.params

    @property
    def op_keys(self) -> list[str | None]:
        """Of each prompt a digest of what makes calls alike: the output's form, the tools and the
        system messages; None where it has none of these."""
        key_of = cache(_op_key)  # these may be long, and are mostly those of all prompts
        forms = (self.params_of(number).constraint for number in range(len(self.prompts)))
        return [
            key_of(isinstance(prompt, str), form, self.tools, _system_text(prompt))
            for prompt, form in zip(self.prompts, forms)
        ]

    @property
    def is_large(self) -> bool:
        """Whether an event loop should not send it itself."""
        num_chars = len(self.tools or "") + sum(map(_size_of, self.prompts))
        for params in self.each_params or (self.params,):
            form = params.constraint
            num_chars += len(params.prediction or "") + (0 if form is None else len(form.source))
        return num_chars > LARGE

    @property
    def num_samples(self) -> int:
        """Samples of all prompts."""
        return len(self.prompts) * self.n

    @property
    def num_rows(self) -> int:
        """What it has the engine run: its samples, of beam searches their hypotheses."""
        return len(self.prompts) * (self.params.beam or self.n)


def require_together(field: str, num_each: int, num_prompts: int) -> None:
    """For a text that is part of every prompt: it is small in the request, and large in all of
    these. Raises InvalidRequest."""
    if num_each * num_prompts > MAX_TOGETHER:
        most = MAX_TOGETHER // num_prompts
        allowed = f"at most {most} characters or ids, as {num_prompts} prompts have them"
        raise InvalidRequest.of(field, f"{num_each} of them", allowed)


def _op_key(is_text: bool, form: Constraint | None, tools: str | None, system: str) -> str | None:
    told = "" if form is None else f"{form.kind} {form.source}"
    alike = (told, tools or "", system)
    return digest_of(repr((is_text, *alike))) if any(alike) else None


def _system_text(prompt: Prompt) -> str:
    if not prompt or not isinstance(prompt[0], Message):
        return ""
    messages = [message for message in prompt if isinstance(message, Message)]
    return "".join(message.content for message in messages if message.role in _SYSTEM)


def _size_of(prompt: Prompt) -> int:
    if prompt and isinstance(prompt[0], Message):
        messages = [message for message in prompt if isinstance(message, Message)]
        chars = sum(len(message.content) for message in messages)
        chars += sum(len(url) for message in messages for _, url in message.images)
        return chars + MESSAGE_CHARS * len(prompt)
    return len(prompt)


class Reply(Protocol):
    """Formats one response of an endpoint. What it returns for streams is encoded, as
    server-sent events unless the endpoint has another stream format."""

    @property
    def id(self) -> str:
        """The response's id; hints and `/abort` may name it."""

    def whole(
        self, outcomes: Sequence[Outcome], hints: dict[str, Any] | None
    ) -> dict[str, Any] | list[Any]:
        """The body of a response that is not streamed; `hints`: their outcomes."""

    def piece(self, piece: Piece) -> bytes:
        """A stream's events for fresh text; the first one also begins the stream."""

    def end(self, outcome: Outcome) -> bytes:
        """A stream's events when a sample ends; may be its first call."""

    def close(self, outcomes: Sequence[Outcome], hints: dict[str, Any] | None) -> bytes:
        """The end of a stream, outcomes in order of their index."""

    def failed(self, error: GenerationFailed) -> bytes:
        """The end of a stream that has begun and cannot continue."""
