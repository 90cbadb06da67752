"""Separates a model's reasoning from its content: text between a pair of tags that comes first.

Whitespace around the tags belongs to neither. Where the chat template's generation prompt opens the
reasoning itself, the output begins inside it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from .matching import overlap

ReasoningParser = Literal["auto", "think", "mistral", "none"]
REASONING_PARSERS: tuple[str, ...] = get_args(ReasoningParser)


@dataclass(frozen=True, slots=True)
class ReasoningTags:
    """The pair; `end_id` is the token of the closing tag, where it is one token."""

    begin: str
    end: str
    end_id: int | None = None

    def is_open_after(self, prompt: str) -> bool:
        """Whether `prompt` ends within reasoning."""
        return prompt.rfind(self.begin) > prompt.rfind(self.end)

    def num_tokens(self, output_ids: Sequence[int], *, has_ended: bool) -> int:
        """How many of an output's tokens were reasoning, its tags included; 0 (unknown) where the
        closing tag is not a single token."""
        if not has_ended:
            return len(output_ids)
        if self.end_id is None or self.end_id not in output_ids:
            return 0
        return output_ids.index(self.end_id) + 1


PAIRS = {"think": ("<think>", "</think>"), "mistral": ("[THINK]", "[/THINK]")}


def tags_of(parser: ReasoningParser, marks: Mapping[str, int | None]) -> ReasoningTags | None:
    """The tags for `parser`; "auto": those whose closing tag is in `marks`."""
    if parser == "auto":
        name = next((name for name, (_, end) in PAIRS.items() if end in marks), None)
    else:
        name = parser if parser in PAIRS else None
    if name is None:
        return None
    begin, end = PAIRS[name]
    return ReasoningTags(begin, end, marks.get(end))


@dataclass(frozen=True, slots=True)
class Split:
    """Fresh text, separated."""

    reasoning: str = ""
    content: str = ""


class ReasoningSplitter:
    """Separates one output, as it streams."""

    def __init__(self, tags: ReasoningTags, *, starts_inside: bool) -> None:
        self._tags = tags
        self._held = ""
        self._has_said = False  # the current part has had text
        self._part: Literal["start", "reasoning", "content"] = "start"
        if starts_inside:
            self._part = "reasoning"
        self.has_reasoning = starts_inside

    @property
    def has_ended(self) -> bool:
        """Whether the reasoning, if any, is over."""
        return self._part != "reasoning"

    def feed(self, text: str) -> Split:
        self._held += text
        if self._part == "start" and not self._start():
            return Split()
        reasoning = self._take_reasoning() if self._part == "reasoning" else ""
        return Split(reasoning, self._take_content() if self._part == "content" else "")

    def finish(self) -> Split:
        """The held text, when no more comes."""
        held, self._held = self._held, ""
        if self._part == "reasoning":
            return Split(reasoning=held.rstrip() if self._has_said else held.strip())
        return Split(content=held if self._part == "start" else "")

    def _start(self) -> bool:
        """Decide whether it begins with reasoning; False while that is undecided."""
        begin, text = self._tags.begin, self._held.lstrip()
        if text.startswith(begin):
            self._part, self.has_reasoning = "reasoning", True
            self._held = text[len(begin) :]
        elif begin.startswith(text):
            return False
        else:
            self._part, self._has_said = "content", True
        return True

    def _take_reasoning(self) -> str:
        before, found, behind = self._held.partition(self._tags.end)
        text = before if self._has_said else before.lstrip()
        if found:
            self._part, self._has_said, self._held = "content", False, behind
            return text.rstrip()
        said = text[: len(text) - overlap(text, self._tags.end)].rstrip()
        self._held = text[len(said) :]
        self._has_said = self._has_said or bool(said)
        return said

    def _take_content(self) -> str:
        text, self._held = self._held, ""
        text = text if self._has_said else text.lstrip()
        self._has_said = self._has_said or bool(text)
        return text
