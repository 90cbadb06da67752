"""The constraint under which an output may call functions: free text until a call begins, then a
call as the model was trained to write it, with arguments of the function's schema."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ...errors import InvalidProgram
from ..protocol.constraint import Constraint, constraint_of
from ..protocol.ir import MAX_TOOLS_CHARS
from ..protocol.json_text import json_text
from .contents import Content
from .tool_format import OfferedFunction, TaughtFormat


def calls_constraint(
    taught: TaughtFormat,
    functions: Sequence[OfferedFunction],
    *,
    is_lenient: bool = True,
    is_parallel: bool = True,
) -> Constraint | None:
    """`is_lenient`: what of a schema cannot be enforced is left out; `is_parallel`: several calls
    may come. None where nothing need be constrained. Raises InvalidProgram for a schema, and where
    calls by choice cannot be constrained."""
    if taught.needs_no_grammar and is_lenient and is_parallel:
        return None
    if not taught.grammar_triggers:
        allowed = "left out for this model, whose calls by choice no grammar can lead"
        field, value = ("parallel_tool_calls", False) if is_lenient else ("strict", True)
        raise InvalidProgram.of(field, value, allowed)
    body = {
        "type": "triggered_tags",
        "triggers": [*taught.grammar_triggers],
        "tags": [*taught.tags(functions, is_parallel=is_parallel)],
        "stop_after_first": not is_parallel,
    }
    return tag_constraint(body, is_lenient=is_lenient)


def forced_constraint(
    content: Content, *, behind: tuple[str, str] | None = None, is_lenient: bool = True
) -> Constraint:
    """Of an output that is this content; `behind`: free text up to the first of these comes before,
    then the second. Raises InvalidProgram for a schema."""
    if behind is not None:
        end, gap = behind
        content = {
            "type": "triggered_tags",
            "triggers": [end],
            "tags": [{"begin": end + gap, "content": content, "end": ""}],
            "at_least_one": True,
            "text_first": True,
            "stop_after_first": True,
        }
    return tag_constraint(content, is_lenient=is_lenient)


def tag_constraint(body: Content, *, is_lenient: bool) -> Constraint:
    """A structural tag of this content. Raises InvalidProgram for a schema."""
    tag = {"type": "structural_tag", "format": body}
    found = constraint_of(structural_tag=tag, lenient=is_lenient)
    assert found is not None
    return found


def tools_text(tools: Sequence[Mapping[str, Any]]) -> str:
    """Tools in OpenAI's format as JSON for a chat template. Raises InvalidProgram for too much."""
    text = json_text(tools, MAX_TOOLS_CHARS)
    if text is None:
        allowed = f"at most {MAX_TOOLS_CHARS} characters of JSON"
        raise InvalidProgram.of("tools", "more", allowed)
    return text
