"""What an endpoint asks of the engine, and how it words what comes of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from ...frontend.protocol.ir import GenParams
from .hint_envelope import HintEnvelope
from .pieces import GenerationFailed, Outcome, Piece


@dataclass(frozen=True, slots=True)
class Message:
    """A chat message."""

    role: str
    content: str
    fields: str | None = None  # what the template sees beside these, as JSON; see ir.RoleBegin


MAX_MESSAGES = 1024  # of a chat: marks are laid for each within the engine's loop, in 0.3 s
UNBOUNDED = 2**31 - 1  # a max_tokens that nobody asked for: the engine cuts it to what fits

Prompt = str | Sequence[int] | Sequence[Message]
MAX_PROMPTS = 2048  # of a request: as many as OpenAI embeds at once


@dataclass(frozen=True, slots=True)
class Task:
    """One request: `n` samples of each prompt. Samples are numbered through all prompts."""

    prompts: Sequence[Prompt]
    params: GenParams
    n: int = 1
    stream: bool = False
    has_token_ids: bool = False  # of what streams
    tools: str | None = None  # what the chat template is to tell the model of, as JSON
    template_kwargs: str | None = None  # variables of the chat template, as JSON
    hints: HintEnvelope | None = None
    cache_salt: str | None = None  # KV is shared with who knows it only
    constraint_field: str | None = None  # what the client called a grammar that may be refused
    rid: str | None = None  # an id of the client's, by which it may abort this beside the reply's
    each_params: Sequence[GenParams] = ()  # where prompts differ in them, one for each
    lora_path: str | None = None  # name of an adapter
    each_lora_path: Sequence[str | None] = ()  # where prompts differ in it, one for each
    fails_apart: bool = False  # a sample that the engine fails leaves the others be

    def lora_path_of(self, number: int) -> str | None:
        """Of the prompt of this number."""
        return self.each_lora_path[number] if self.each_lora_path else self.lora_path

    def params_of(self, number: int) -> GenParams:
        """Of the prompt of this number."""
        return self.each_params[number] if self.each_params else self.params

    @property
    def num_samples(self) -> int:
        """Of all prompts."""
        return len(self.prompts) * self.n


class Reply(Protocol):
    """How one endpoint words one answer. Streams are server-sent events, ready to be sent."""

    @property
    def id(self) -> str:
        """Of the answer; hints and `/abort` may name it."""

    def whole(
        self, outcomes: Sequence[Outcome], hints: dict[str, Any] | None
    ) -> dict[str, Any] | list[Any]:
        """The body of an answer that is not streamed; `hints`: what became of them."""

    def piece(self, piece: Piece) -> bytes:
        """What a stream says of fresh text; the first one also begins the stream."""

    def end(self, outcome: Outcome) -> bytes:
        """What a stream says when a sample ends; it may be the first thing that it says."""

    def close(self, outcomes: Sequence[Outcome], hints: dict[str, Any] | None) -> bytes:
        """The end of a stream, outcomes in order of their index."""

    def failed(self, error: GenerationFailed) -> bytes:
        """The end of a stream that was begun and cannot go on."""
