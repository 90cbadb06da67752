"""The tables of formats in the documentation are those of the formats."""

from __future__ import annotations

from stemma.cli.format_table import PAGE, page
from stemma.frontend.chat_format.registry import FORMATS


def test_the_tables_of_formats_are_up_to_date() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert text == page(text), "python -m stemma.cli.format_table --write"
    assert all(f"| `{row.name}`" in text for row in FORMATS)
