"""The tables of formats in `docs/use/tools.md`, from the formats themselves:
`python -m stemma.cli.format_table [--write]`."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from pathlib import Path

from ..frontend.chat_format.harmony import EXAMPLE, TOLD_BY
from ..frontend.chat_format.reasoning import PAIRS, ReasoningTags
from ..frontend.chat_format.registry import FORMATS, HARMONY, KnownFormat

PAGE = Path(__file__).parents[1] / "docs" / "use" / "tools.md"


def page(text: str) -> str:
    """The page's text with its tables as they are now."""
    text = _replaced(text, "formats", _formats())
    return _replaced(text, "reasoning", _reasoning())


def _formats() -> str:
    head = "| `--tool-call-parser` | Models | A call | Found by | Under `auto` |\n"
    first = _line((HARMONY,), "gpt-oss", EXAMPLE, (TOLD_BY,), "free, unless a function is `strict`")
    return head + "| --- | --- | --- | --- | --- |\n" + first + "".join(map(_row, FORMATS))


def _row(row: KnownFormat) -> str:
    taught = row.make(())
    led = "free" if taught.needs_no_grammar else "the grammar leads from the mark on"
    if taught.needs_no_grammar and taught.grammar_triggers:
        led = "free, unless a function is `strict` or only one call is allowed"
    elif taught.needs_no_grammar:
        led = "free; `strict` and only one call are refused"
    return _line((row.name, *row.aliases), row.models, row.example, row.marks, led)


def _line(
    names: Sequence[str], models: str, example: str, marks: Sequence[Sequence[str]], led: str
) -> str:
    named = ", ".join(f"`{name}`" for name in names)
    lines = " ".join(map(_code, example.split("\n")))
    found = " or ".join(" and ".join(map(_code, group)) for group in marks)
    return f"| {named} | {models} | {lines} | {found} | {led} |\n"


def _reasoning() -> str:
    head = "| `--reasoning-parser` | Tags |\n| --- | --- |\n"
    return head + "".join(_tags(name, tags) for name, tags in PAIRS.items())


def _tags(name: str, tags: ReasoningTags) -> str:
    return f"| `{name}` | {_code(tags.begin)} ... {_code(tags.end)} |\n"


def _code(text: str) -> str:
    """As code in a table's cell, where a bar would end it."""
    if "|" not in text and "`" not in text:
        return f"`{text}`"
    shown = text.replace("&", "&amp;").replace("<", "&lt;").replace("|", "&#124;")
    return f"<code>{shown.replace('`', '&#96;')}</code>"


def _replaced(text: str, name: str, table: str) -> str:
    begin, end = f"<!-- {name}: python -m stemma.cli.format_table --write -->", f"<!-- {name} -->"
    pattern = re.compile(f"({re.escape(begin)}\n\n).*?(\n{re.escape(end)})", re.DOTALL)
    found, num = pattern.subn(lambda match: f"{match[1]}{table}{match[2]}", text)
    assert num == 1, f"the page has the marks of one table of {name}"
    return found


if __name__ == "__main__":
    written = page(PAGE.read_text(encoding="utf-8"))
    if sys.argv[1:] == ["--write"]:
        PAGE.write_text(written, encoding="utf-8")
    else:
        print(written, end="")
