"""The served model's chat format: how it writes calls and reasoning, and what its template
reads."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from .harmony import Harmony
from .reasoning import ReasoningTags, tags_of
from .registry import FORMATS, HARMONY, channels_of, format_of
from .tool_format import TaughtFormat

UNKNOWN_FORMAT = (
    "the chat template has no mark of a known format, so calls can neither be read from the "
    f"model's output nor forced; known are: {', '.join((HARMONY, *(row.name for row in FORMATS)))}"
)


@dataclass(frozen=True, slots=True)
class ChatFormat:
    """The chat format of the served model.

    `is_unknown`: its template tells the model of tools, and in which format it then writes calls is
    not known.
    """

    tool_format: TaughtFormat | None = None
    reasoning: ReasoningTags | None = None
    channels: Harmony | None = None  # reads whole outputs, instead of `tool_format` and tags
    knows_tools: bool = False  # the template writes tool definitions
    knows_calls: bool = False  # and messages with calls
    knows_reasoning: bool = False  # and an earlier message's reasoning
    takes_one_call: bool = False  # fails over a message with several calls
    variables: frozenset[str] = frozenset()
    generation_prompts: tuple[tuple[Mapping[str, Any], str, str], ...] = (({}, "", ""),)
    is_unknown: bool = False

    @classmethod
    def of(
        cls, info: Mapping[str, Any], tool_call_parser: str, reasoning_parser: str
    ) -> ChatFormat:
        """`info`: the engine's description of itself; the parsers: of TOOL_CALL_PARSERS and of
        REASONING_PARSERS."""
        described = info["chat_format"]
        marks, written = described["marks"], frozenset(described["written_marks"])
        knows_tools = bool(info["template_knows_tools"])
        taught = format_of(tool_call_parser, marks, written)
        tags = tags_of(reasoning_parser, marks, written)
        channels = channels_of(tool_call_parser, marks, written)
        if channels is not None:
            taught = None
            tags = None if reasoning_parser == "none" else channels.reasoning
        is_known = taught is not None or channels is not None or tool_call_parser != "auto"
        return cls(
            taught,
            tags,
            channels,
            knows_tools,
            "tool_calls" in marks,
            "reasoning_content" in marks,
            bool(described.get("takes_one_call")),
            frozenset(described["variables"]),
            tuple((given, *prompts) for given, *prompts in described["generation_prompts"]),
            is_unknown=knows_tools and not is_known,
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
