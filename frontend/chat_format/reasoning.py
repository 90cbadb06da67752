"""Separates a model's reasoning from its content: text between a pair of tags that comes first.

Whitespace around the tags belongs to neither. Where the chat template's generation prompt opens the
reasoning itself, the output begins inside it. A call within reasoning ends that, too.
"""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Literal

from .call_beginnings import CallBeginnings
from .matching import overlap, pieces


@dataclass(frozen=True, slots=True)
class ReasoningTags:
    """The pair; `end_id` is the token of the closing tag, where it is one token; `gap`: what models
    write between that and the answer."""

    begin: str
    end: str
    end_id: int | None = None
    gap: str = "\n\n"

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


PAIRS = {
    "think": ReasoningTags("<think>", "</think>"),
    "mistral": ReasoningTags("[THINK]", "[/THINK]"),
    "seed_oss": ReasoningTags("<seed:think>", "</seed:think>", gap="\n"),
    "cohere": ReasoningTags("<|START_THINKING|>", "<|END_THINKING|>", gap=""),
    "gemma4": ReasoningTags("<|channel>thought", "<channel|>", gap=""),
    "granite": ReasoningTags("Here is my thought process:", "Here is my response:", gap="\n"),
}
REASONING_PARSERS = ("auto", *PAIRS, "none")
REASONING_TOKENS = ("<think>", "</think>", "[THINK]", "[/THINK]", "<seed:think>", "</seed:think>",
                    "<|START_THINKING|>", "<|END_THINKING|>", "<|channel>",
                    "<channel|>")  # fmt: skip


def tags_of(
    parser: str, marks: Mapping[str, int | None], written: Container[str] | None = None
) -> ReasoningTags | None:
    """The tags for `parser`, one of REASONING_PARSERS; "auto": those whose closing tag the template
    has (it is in `written`), or else the tokenizer (it is in `marks`)."""
    name: str | None = parser
    if parser == "auto":
        in_template = (n for n, tags in PAIRS.items() if tags.end in (written or ()))
        in_tokenizer = (n for n, tags in PAIRS.items() if tags.end in marks)
        name = next(chain(in_template, in_tokenizer), None)
    tags = PAIRS.get(name or "")
    return None if tags is None else replace(tags, end_id=marks.get(tags.end))


@dataclass(frozen=True, slots=True)
class Split:
    """Fresh text, separated."""

    reasoning: str = ""
    content: str = ""


class ReasoningSplitter:
    """Separates one output, as it streams. `calls`: what ends the reasoning beside its tag."""

    def __init__(
        self, tags: ReasoningTags, *, starts_inside: bool, calls: CallBeginnings | None = None
    ) -> None:
        self._tags = tags
        self._call_beginnings = calls
        self._held = ""
        self._has_said = False  # the current part has had text
        self._part: Literal["start", "reasoning", "content"] = "start"
        if starts_inside:
            self._part = "reasoning"
        self.has_reasoning = starts_inside
        self.is_interrupted = False  # a call ended the reasoning; its tag may still come

    @property
    def has_ended(self) -> bool:
        """Whether the reasoning, if any, is over."""
        return self._part != "reasoning"

    def feed(self, text: str) -> Split:
        splits = [self._feed(piece) for piece in pieces(text)]
        reasoning = "".join(split.reasoning for split in splits)
        return Split(reasoning, "".join(split.content for split in splits))

    def _feed(self, text: str) -> Split:
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
        place, is_call = len(before), False
        if self._call_beginnings is not None:
            place, is_call = self._call_beginnings.first_in(before)
        if is_call:
            behind, before = self._held[place:], before[:place]
            self.is_interrupted = True
        text = before if self._has_said else before.lstrip()
        if found or is_call:
            self._part, self._has_said, self._held = "content", False, behind
            return text.rstrip()
        kept = max(overlap(text, self._tags.end), len(before) - place)
        said = text[: len(text) - min(kept, len(text))].rstrip()
        self._held = text[len(said) :]
        self._has_said = self._has_said or bool(said)
        return said

    def _take_content(self) -> str:
        text, self._held = self._held, ""
        text = text if self._has_said else text.lstrip()
        self._has_said = self._has_said or bool(text)
        return text
