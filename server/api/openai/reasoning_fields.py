"""Fields of a chat request about reasoning and the chat template's own variables."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, Field

from ....errors import InvalidRequest
from ....frontend.chat_format.chat_format import ChatFormat
from ....frontend.protocol.json_text import json_text
from ...parsers.output_reader import ReasoningUse

MAX_TEMPLATE_KWARGS_CHARS = 16 * 1024
_NOT_THE_CLIENTS = ("messages", "tools", "add_generation_prompt", "bos_token", "eos_token")
_SWITCHES = ("enable_thinking", "thinking")


class ReasoningFields(BaseModel):
    """`separate_reasoning` and `stream_reasoning` are SGLang's, `include_reasoning` vLLM's,
    `chat_template_kwargs` both's, `reasoning_effort` OpenAI's."""

    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: str | None = Field(default=None, max_length=32)
    separate_reasoning: bool = True
    stream_reasoning: bool = True
    include_reasoning: bool = True

    def template_variables(self, chat_format: ChatFormat) -> dict[str, Any]:
        """The fields that the model's template reads. Raises InvalidRequest."""
        given = self.chat_template_kwargs or {}
        for name in _NOT_THE_CLIENTS:
            if name in given:
                raise InvalidRequest.of("chat_template_kwargs", name, "variables of the template's")
        effort: dict[str, Any] = {}
        if self.reasoning_effort is not None:
            effort["reasoning_effort"] = self.reasoning_effort
        if self.reasoning_effort == "none":
            effort |= dict.fromkeys(_SWITCHES, False)
        read = chat_format.variables
        variables = {name: value for name, value in {**effort, **given}.items() if name in read}
        self._require_small(variables)
        return variables

    def reasoning_warnings(
        self, variables: Mapping[str, Any], chat_format: ChatFormat
    ) -> list[str]:
        """Warnings for fields that change nothing, as the template does not read them."""
        unread = sorted(set(self.chat_template_kwargs or ()) - set(variables))
        found = []
        if unread:
            names = ", ".join(name[:64] for name in unread[:8])
            found.append(f"chat_template_kwargs: the chat template does not read {names}")
        can_reason = chat_format.reasoning is not None
        is_heeded = not {"reasoning_effort", *_SWITCHES}.isdisjoint(variables)
        if self.reasoning_effort is not None and can_reason and not is_heeded:
            found.append("reasoning_effort: the chat template does not read it")
        return found

    def reasoning_use(
        self, chat_format: ChatFormat, *, starts_inside: bool, must_split: bool
    ) -> ReasoningUse | None:
        """`must_split`: what follows the reasoning can be parsed only without it."""
        if chat_format.reasoning is None or not (self.separate_reasoning or must_split):
            return None
        return ReasoningUse(
            chat_format.reasoning, starts_inside, self.include_reasoning, self.stream_reasoning
        )

    def _require_small(self, variables: Mapping[str, Any]) -> None:
        try:
            text = json_text(variables, MAX_TEMPLATE_KWARGS_CHARS)
        except RecursionError:
            text = None
        if text is None:
            allowed = f"at most {MAX_TEMPLATE_KWARGS_CHARS} characters of JSON"
            raise InvalidRequest.of("chat_template_kwargs", "...", allowed)
