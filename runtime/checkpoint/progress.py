"""The bar of what takes long to read or to fetch, on a terminal."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TextIO

ByteProgress = Callable[[int, int], None]  # (bytes done, bytes in total)


@contextmanager
def byte_progress(out: TextIO, title: str) -> Iterator[ByteProgress | None]:
    """Who is to be told of the bytes done; a bar shows them from the first on, and is gone at the
    end. None where `out` is no terminal: nothing is shown there."""
    if not out.isatty():
        yield None
        return
    # Slow to import.
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

    text = TextColumn("{task.description}", markup=False)
    columns = (text, BarColumn(), DownloadColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(file=out), transient=True) as progress:
        task = progress.add_task(title, total=None, visible=False)

        def show(done: int, total: int) -> None:
            progress.update(task, completed=done, total=total, visible=True)

        yield show
