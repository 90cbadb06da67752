"""Progress on a terminal: items of a batch, bytes read or downloaded, captured graphs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol, TextIO


class BatchProgress(Protocol):
    """A bar of a batch."""

    def advance(self, told: str) -> None:
        """One more is done; `told`: what to show beside it."""


class _NoBar:
    def advance(self, told: str) -> None:
        """Nothing is shown."""


@contextmanager
def batch_progress(total: int | None, title: str, is_shown: bool) -> Iterator[BatchProgress]:
    """A bar of `total` items (None: nobody knows), with a text beside it."""
    if not is_shown:
        yield _NoBar()
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    told = TextColumn("{task.fields[told]}", markup=False)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), told)
    with Progress(*columns, TimeElapsedColumn(), console=Console(stderr=True)) as progress:
        task = progress.add_task(title, total=total, told="")

        class Bar:
            def advance(self, told: str) -> None:
                progress.update(task, advance=1, told=told)

        yield Bar()


@contextmanager
def progress_bar(total: int, title: str, is_shown: bool) -> Iterator[Callable[[], None]]:
    """Yields `advance()`, to be called once for each of `total` items."""
    with batch_progress(total, title, is_shown) as bar:
        yield lambda: bar.advance("")


ByteProgress = Callable[[int, int], None]  # (bytes done, bytes in total)


@contextmanager
def byte_progress(out: TextIO, title: str) -> Iterator[ByteProgress | None]:
    """Yields a callback for the bytes done; a bar appears with the first call and is removed at the
    end. Yields None where `out` is not a terminal: nothing is shown there."""
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


def graph_progress(out: TextIO) -> Callable[[int, int], None]:
    """(graphs captured so far, graphs in all) -> a line that is overwritten on a terminal;
    elsewhere one line at the end."""

    def show(done: int, total: int) -> None:
        is_last = done == total
        line = f"captured {done} of {total} step graphs"
        if out.isatty():
            print(f"\r{line}", end="\n" if is_last else "", file=out, flush=True)
        elif is_last:
            print(line, file=out, flush=True)

    return show
