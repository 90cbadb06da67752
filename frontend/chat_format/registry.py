"""The tool call formats, and how the format of a chat template is detected."""

from __future__ import annotations

from collections.abc import Container, Mapping
from typing import Literal, get_args

from .harmony import Harmony, is_harmony
from .hermes import BEGIN, Hermes
from .llama3 import PYTHON_TAG, Llama3
from .mistral import ARGS, TOOL_CALLS, Mistral
from .tool_format import TaughtFormat

ToolCallParser = Literal["auto", "harmony", "hermes", "llama3", "mistral", "none"]
TOOL_CALL_PARSERS: tuple[str, ...] = get_args(ToolCallParser)
_OTHER_CALLS = ("<function=", "<arg_key>")  # calls within the same tags that are not JSON


def channels_of(parser: ToolCallParser, marks: Mapping[str, int | None]) -> Harmony | None:
    """The format of whole outputs for `parser`, where it is harmony."""
    is_it = parser == "harmony" or (parser == "auto" and is_harmony(marks))
    return Harmony.of(marks) if is_it else None


def format_of(
    parser: ToolCallParser, marks: Container[str], *, knows_tools: bool
) -> TaughtFormat | None:
    """The format for `parser`; "auto": detected in the template and the tokenizer."""
    if parser == "auto":
        parser = _detected(marks, knows_tools)
    if parser == "hermes":
        return Hermes()
    if parser == "llama3":
        return Llama3()
    return Mistral(is_newer=ARGS in marks) if parser == "mistral" else None


def _detected(marks: Container[str], knows_tools: bool) -> ToolCallParser:
    if is_harmony(marks):
        return "harmony"
    if TOOL_CALLS in marks:
        return "mistral"
    if BEGIN in marks:
        return "none" if any(mark in marks for mark in _OTHER_CALLS) else "hermes"
    if PYTHON_TAG in marks or "ipython" in marks:
        return "llama3"
    return "hermes" if knows_tools else "none"
