"""A progress bar for work of known length; nothing where output is not a terminal or not asked."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def progress_bar(total: int, title: str, is_shown: bool) -> Iterator[Callable[[], None]]:
    """Yields `advance()`, to be called once for each of `total` items."""
    if not is_shown:
        yield lambda: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    console = Console(stderr=True)
    with Progress(*columns, TimeElapsedColumn(), console=console) as progress:
        task = progress.add_task(title, total=total)
        yield lambda: progress.advance(task)
