"""The line that says how far the capture of graphs is, while an engine starts on a GPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import TextIO


def graph_progress(out: TextIO) -> Callable[[int, int], None]:
    """(graphs captured so far, graphs in all) -> a line that is overwritten on a terminal; on
    anything else one line at the end."""

    def show(done: int, total: int) -> None:
        is_last = done == total
        line = f"captured {done} of {total} step graphs"
        if out.isatty():
            print(f"\r{line}", end="\n" if is_last else "", file=out, flush=True)
        elif is_last:
            print(line, file=out, flush=True)

    return show
