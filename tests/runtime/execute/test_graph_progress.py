"""What is said while graphs are captured."""

from __future__ import annotations

import io

from stemma.frontend.client.progress import graph_progress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_terminal_sees_one_line_grow_and_a_log_one_line_at_the_end() -> None:
    for out, expected in (
        (Terminal(), "\rcaptured 1 of 2 step graphs\rcaptured 2 of 2 step graphs\n"),
        (io.StringIO(), "captured 2 of 2 step graphs\n"),
    ):
        show = graph_progress(out)
        show(1, 2)
        show(2, 2)
        assert out.getvalue() == expected
