"""The bar of long reads: on a terminal, and only there."""

from __future__ import annotations

import io
import re

from stemma.frontend.client.progress import byte_progress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_terminal_gets_a_bar_that_is_gone_at_the_end() -> None:
    out = Terminal()
    with byte_progress(out, "loading {0} [b]model[/b]") as on_progress:
        assert on_progress is not None
        on_progress(1_500_000, 3_000_000)
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", out.getvalue())
    assert "loading {0} [b]model[/b]" in text and "1.5/3.0 MB" in text
    assert out.getvalue().endswith("\x1b[2K")  # the line is erased


def test_a_file_gets_nothing() -> None:
    out = io.StringIO()
    with byte_progress(out, "loading") as on_progress:
        assert on_progress is None
    assert out.getvalue() == ""


def test_nothing_is_shown_before_there_is_something() -> None:
    out = Terminal()
    with byte_progress(out, "loading"):
        pass
    assert "loading" not in out.getvalue()
