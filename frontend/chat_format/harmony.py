"""The harmony format of gpt-oss: an answer is messages on channels, each behind a header.

<|channel|>analysis<|message|>It asks for the weather.<|end|>
<|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json<|message|>{..}<|call|>
<|start|>assistant<|channel|>final<|message|>It rains.<|return|>

(Without the line breaks; the prompt ends with <|start|>assistant.) The channel "analysis" is
reasoning, a message to functions.NAME is a call, all else is what the user reads. A call may also
be named before its channel: "assistant to=functions.f<|channel|>commentary json<|message|>".
<|return|> and <|call|> end an output, which thus has one call at most.

Source: github.com/openai/harmony, docs/format.md.
"""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, replace

from ..protocol.constraint import Constraint
from .call_grammar import tag_constraint
from .contents import Content, document, tag
from .harmony_reader import CHANNEL, CONSTRAIN, END, MESSAGE, START, HarmonyReader
from .reasoning import ReasoningTags
from .tool_format import OfferedFunction, long_id

TOLD_BY = (CHANNEL, START, MESSAGE)
"""The marks of its templates."""
ANALYSIS = f"{CHANNEL}analysis{MESSAGE}"
_FINAL = f"{CHANNEL}final"
_CALL = f"{CHANNEL}commentary to=functions."
_CALL_BY_ROLE = f"{START}assistant to=functions."
_JSON = f" {CONSTRAIN}json{MESSAGE}"
EXAMPLE = f'{_CALL}weather{_JSON}{{"city": "Ulm"}}'


def is_harmony(marks: Container[str]) -> bool:
    """Whether a template has the marks of this format."""
    return all(mark in marks for mark in TOLD_BY)


@dataclass(frozen=True, slots=True)
class Harmony:
    """The format. `end_id`: of the token that ends a message, where it is one token."""

    end_id: int | None = None

    @classmethod
    def of(cls, marks: Mapping[str, int | None]) -> Harmony:
        return cls(marks.get(END))

    @property
    def reasoning(self) -> ReasoningTags:
        """Around the first message, where that is reasoning."""
        return ReasoningTags(ANALYSIS, END, self.end_id)

    def reader(self, functions: Container[str] = (), *, may_call: bool) -> HarmonyReader:
        """Of one output; `functions`: there are; `may_call`: whether messages to them are calls."""
        return HarmonyReader(may_call=may_call, functions=functions)

    def new_id(self) -> str:
        """A new call's id."""
        return long_id()

    def calls_constraint(
        self, functions: Sequence[OfferedFunction], *, is_forced: bool, is_lenient: bool
    ) -> Constraint | None:
        """An output with at most one call, behind which it ends. `is_forced`: with one, behind one
        message at most. None where nothing need be constrained. Raises InvalidProgram for a schema.
        """
        if not is_forced and is_lenient:
            return None
        heads = _FORCED if is_forced else _CHOSEN
        tags = _calls(functions, heads)
        return _tags(_triggers(heads), tags, at_least_one=is_forced, is_lenient=is_lenient)

    def in_final(
        self, constraint: Constraint, functions: Sequence[OfferedFunction] = ()
    ) -> Constraint | None:
        """A constraint to JSON as one of the final message, in whose place a call of a function may
        come; None: it is no such constraint. Raises InvalidProgram for a function's schema."""
        if not constraint.is_document:
            return None
        heads = _CHOSEN if functions else ()
        tags = [
            tag(f"{_FINAL}{rest}", document(constraint.schema), "") for rest in (MESSAGE, _JSON)
        ]
        tags += _calls(functions, heads)
        tagged = _tags([_FINAL, *_triggers(heads)], tags, at_least_one=True, is_lenient=True)
        return replace(constraint, kind="structural_tag", source=tagged.source)


# Of a call: what triggers it, the header up to the function's name, and what is behind that.
_CHOSEN = (
    (_CALL, _CALL, _JSON),
    (_CALL_BY_ROLE, _CALL_BY_ROLE, f"{CHANNEL}commentary json{MESSAGE}"),
)
_FORCED = ((_CALL, _CALL, _JSON), (END, f"{END}{START}assistant{_CALL}", _JSON))
_Heads = Sequence[tuple[str, str, str]]


def _triggers(heads: _Heads) -> list[str]:
    return [trigger for trigger, _, _ in heads]


def _calls(functions: Sequence[OfferedFunction], heads: _Heads) -> list[Content]:
    return [
        tag(f"{begin}{function.name}{rest}", document(function.schema), "")
        for function in functions
        for _, begin, rest in heads
    ]


def _tags(
    triggers: Sequence[str],
    tags: Sequence[Content],
    *,
    at_least_one: bool,
    is_lenient: bool,
) -> Constraint:
    body = {
        "type": "triggered_tags",
        "triggers": [*triggers],
        "tags": [*tags],
        "at_least_one": at_least_one,
        "text_first": True,
        "stop_after_first": True,
    }
    return tag_constraint(body, is_lenient=is_lenient)
