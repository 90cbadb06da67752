"""Responses of both endpoints, whole or assembled from a stream's chunks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

from ...errors import EngineError


@dataclass(slots=True)
class Answer:
    """One choice of a reply, growing."""

    text: str = ""
    finish_reason: str | None = None
    logprobs: list[dict[str, Any]] | None = None  # {"token", "logprob", "top"} per token
    offsets: list[int] = field(default_factory=list)  # of these tokens in an echoed text
    warnings: list[str] = field(default_factory=list)
    tool_calls: list[dict[str, Any]] = field(default_factory=list)


class Reply:
    """The choices of one call and its token usage."""

    def __init__(self, *, is_chat: bool, num_choices: int = 1) -> None:
        self._is_chat = is_chat
        self.answers = [Answer() for _ in range(num_choices)]
        self.id = ""
        self.usage: dict[str, Any] = {}

    def add(self, payload: dict[str, Any]) -> str:
        """Add a body or a chunk; returns the text it adds to the first choice.

        Raises EngineError for a payload that is not in OpenAI's format.
        """
        try:
            return self._add(payload)
        except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
            shown = str(payload)[:300]
            raise EngineError(f"an answer that is none of OpenAI's: {shown}") from error

    def _add(self, payload: dict[str, Any]) -> str:
        self.id = payload.get("id") or self.id
        self.usage = payload.get("usage") or self.usage
        fresh = ""
        for choice in payload["choices"]:
            index: int = choice.get("index", 0)
            text = self._text_of(choice)
            answer = self.answers[index]
            answer.text += text
            _add_calls(answer, choice.get("delta") or choice.get("message") or {})
            answer.finish_reason = choice.get("finish_reason") or answer.finish_reason
            answer.warnings += choice.get("warnings") or ()
            if choice.get("logprobs"):
                self._add_logprobs(answer, choice["logprobs"])
            fresh += text if index == 0 else ""
        return fresh

    def _text_of(self, choice: dict[str, Any]) -> str:
        if not self._is_chat:
            return choice.get("text") or ""
        message = choice.get("delta") or choice.get("message") or {}
        if message.get("refusal"):
            raise EngineError(f"the model refused: {message['refusal']}")
        return message.get("content") or ""

    def _add_logprobs(self, answer: Answer, given: dict[str, Any]) -> None:
        answer.logprobs = answer.logprobs or []
        answer.logprobs += _chat_logprobs(given) if self._is_chat else _text_logprobs(given)
        answer.offsets += given.get("text_offset") or ()

    def counts(self) -> dict[str, int | None]:
        """Token counts as `get_meta_info` has them; None where the server did not report them."""
        details = self.usage.get("prompt_tokens_details") or {}
        return {
            "prompt_tokens": self.usage.get("prompt_tokens"),
            "cached_tokens": details.get("cached_tokens", 0),
            "completion_tokens": self.usage.get("completion_tokens"),
        }


def _add_calls(answer: Answer, message: dict[str, Any]) -> None:
    """Calls of a message, or pieces of them from a stream."""
    for position, part in enumerate(message.get("tool_calls") or ()):
        index = part.get("index", len(answer.tool_calls) if "id" in part else position)
        if index >= len(answer.tool_calls):
            function = {"name": "", "arguments": ""}
            call = {"id": part.get("id") or "", "type": "function", "function": function}
            answer.tool_calls.append(call)
        call = answer.tool_calls[index]
        given = part.get("function") or {}
        call["id"] = part.get("id") or call["id"]
        for name in ("name", "arguments"):
            call["function"][name] += given.get(name) or ""


def _chat_logprobs(given: dict[str, Any]) -> list[dict[str, Any]]:
    def shown(entry: dict[str, Any]) -> dict[str, Any]:
        return {"token": entry["token"], "logprob": entry["logprob"]}

    return [
        {**shown(entry), "top": [shown(top) for top in entry.get("top_logprobs") or ()]}
        for entry in given.get("content") or ()
    ]


def _text_logprobs(given: dict[str, Any]) -> list[dict[str, Any]]:
    tokens: Sequence[str] = given.get("tokens") or ()
    tops = given.get("top_logprobs") or [None] * len(tokens)
    return [
        {
            "token": token,
            "logprob": logprob,
            "top": [{"token": t, "logprob": value} for t, value in (top or {}).items()],
        }
        for token, logprob, top in zip(tokens, given["token_logprobs"], tops)
    ]


def choice_logprobs(answer: Answer, text: str, choice: str) -> tuple[float, ...]:
    """Log probabilities of the tokens of `choice`, which ends the prompt `text`; a token that also
    has characters before it counts.

    Aligned from the end by the tokens' own texts: not every server reports offsets, and a first
    token without text shifts them. Raises EngineError where that does not work.
    """
    entries = answer.logprobs or []
    num_generated = 1 if len(answer.text) > len(text) else 0
    for dropped in (num_generated, 1):
        prompt_entries = entries[: len(entries) - dropped]
        lengths = accumulate(len(entry["token"]) for entry in reversed(prompt_entries))
        num = next((n for n, length in enumerate(lengths, 1) if length >= len(choice)), 0)
        tail = prompt_entries[len(prompt_entries) - num :]
        logprobs = tuple(entry["logprob"] for entry in tail)
        is_aligned = num and "".join(entry["token"] for entry in tail).endswith(choice)
        if is_aligned and all(isinstance(logprob, int | float) for logprob in logprobs):
            return logprobs
    raise EngineError(
        f"choices: the endpoint gives no log probabilities for the tokens of {choice!r} "
        "(completions with echo and logprobs); use a gen with a constraint instead"
    )
