"""The served model's chat format: how it writes calls and reasoning, and what its template
reads."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from .harmony import Harmony
from .reasoning import ReasoningParser, ReasoningTags, tags_of
from .registry import ToolCallParser, channels_of, format_of
from .tool_format import TaughtFormat


@dataclass(frozen=True, slots=True)
class ChatFormat:
    """The chat format of the served model."""

    tool_format: TaughtFormat | None = None
    reasoning: ReasoningTags | None = None
    channels: Harmony | None = None  # reads whole outputs, instead of `tool_format` and tags
    knows_tools: bool = False  # the template writes tool definitions
    knows_calls: bool = False  # and messages with calls
    knows_reasoning: bool = False  # and an earlier message's reasoning
    variables: frozenset[str] = frozenset()
    generation_prompts: tuple[tuple[Mapping[str, Any], str, str], ...] = (({}, "", ""),)

    @classmethod
    def of(
        cls,
        info: Mapping[str, Any],
        tool_call_parser: ToolCallParser,
        reasoning_parser: ReasoningParser,
    ) -> ChatFormat:
        """`info`: the engine's description of itself."""
        described = info["chat_format"]
        marks, knows_tools = described["marks"], bool(info["template_knows_tools"])
        channels = channels_of(tool_call_parser, marks)
        tags = tags_of(reasoning_parser, marks)
        if channels is not None:
            tags = None if reasoning_parser == "none" else channels.reasoning
        return cls(
            format_of(tool_call_parser, marks, knows_tools=knows_tools),
            tags,
            channels,
            knows_tools,
            "tool_calls" in marks,
            "reasoning_content" in marks,
            frozenset(described["variables"]),
            tuple((given, *prompts) for given, *prompts in described["generation_prompts"]),
        )

    def will_reason(self, variables: Mapping[str, Any], *, after_tool: bool = False) -> bool:
        """Whether an output certainly begins with reasoning: the generation prompt opens it, or
        differs from the one with reasoning switched off."""
        if self.reasoning is None or self.opens_reasoning(variables, after_tool=after_tool):
            return self.reasoning is not None
        off = [prompts[after_tool] for given, *prompts in self.generation_prompts
               if False in given.values()]  # fmt: skip
        return bool(off) and self._generation_prompt(variables, after_tool) not in off

    def opens_reasoning(self, variables: Mapping[str, Any], *, after_tool: bool = False) -> bool:
        """Whether an output begins within reasoning, given the template's `variables` and whether
        the last message was a tool's result."""
        if self.reasoning is None:
            return False
        return self.reasoning.is_open_after(self._generation_prompt(variables, after_tool))

    def _generation_prompt(self, variables: Mapping[str, Any], after_tool: bool) -> str:
        """The generation prompt under these variables, as far as it is known."""
        known = self.generation_prompts
        return [p[after_tool] for given, *p in known if given.items() <= variables.items()][-1]
