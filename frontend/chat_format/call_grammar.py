"""The constraint under which an output may call functions: free text until a call begins, then a
call as the model was trained to write it, with arguments of the function's schema."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ...errors import InvalidProgram
from ..protocol.constraint import Constraint, constraint_of
from ..protocol.ir import MAX_TOOLS_CHARS
from ..protocol.json_text import json_text
from .tool_format import TaughtFormat


@dataclass(frozen=True, slots=True)
class OfferedFunction:
    """A function that may be called; `schema`: of its arguments."""

    name: str
    schema: object


def calls_constraint(
    taught: TaughtFormat,
    functions: Sequence[OfferedFunction],
    *,
    is_lenient: bool = True,
    is_parallel: bool = True,
) -> Constraint | None:
    """`is_lenient`: what of a schema cannot be enforced is left out; `is_parallel`: several calls
    may come. None where nothing need be constrained. Raises InvalidProgram for a schema."""
    if taught.needs_no_grammar and is_lenient and is_parallel:
        return None
    structures = [s for f in functions for s in taught.structures(f.name, f.schema)]
    tags = [tag_of(s["begin"], s["schema"], s["end"]) for s in structures]
    triggers = [t for t in taught.triggers if tags[0]["begin"].startswith(t)]
    body = {
        "type": "triggered_tags",
        "triggers": triggers or ['{"name": "'],
        "tags": tags,
        "stop_after_first": not is_parallel,
    }
    tag = {"type": "structural_tag", "format": body}
    return constraint_of(structural_tag=tag, lenient=is_lenient)


def tools_text(tools: Sequence[Mapping[str, Any]]) -> str:
    """Tools in OpenAI's format as JSON for a chat template. Raises InvalidProgram for too much."""
    text = json_text(tools, MAX_TOOLS_CHARS)
    if text is None:
        allowed = f"at most {MAX_TOOLS_CHARS} characters of JSON"
        raise InvalidProgram.of("tools", "more", allowed)
    return text


def tag_of(begin: str, schema: object, end: str) -> dict[str, Any]:
    """JSON of a schema between two texts, as an item of a structural tag."""
    content = {"type": "json_schema", "json_schema": schema}
    return {"begin": begin, "content": content, "end": end}
