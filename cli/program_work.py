"""What a user's file asks of a model: programs to run, or chats and prompts to answer."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable
from pathlib import Path

from ..errors import InvalidRequest, StemmaError
from ..frontend.backend import set_default_backend
from ..frontend.client.backend import Backend
from .program_file import failure_of, run_script


def require_work(file: Path, field: str) -> None:
    """Raises InvalidRequest, of this field, where there is no file."""
    if not file.is_file():
        raise InvalidRequest.of(field, str(file), "an existing file")


def work_of(file: Path, field: str) -> Callable[[Backend], None]:
    """Runs what a file asks: a Python file's main block, or JSON lines. Raises InvalidRequest, of
    this field, for a file that cannot be read, or a line that fails."""
    if file.suffix == ".py":
        return lambda backend: _run_file(file, backend)
    from ..training.chats import read_chats, run_chats

    chats = read_chats(file, field)
    if not chats:
        raise InvalidRequest.of(field, str(file), "a file with at least one chat or prompt")
    return lambda backend: run_chats(chats, backend, field)


def _run_file(file: Path, backend: Backend) -> None:
    set_default_backend(backend)
    try:
        with contextlib.redirect_stdout(sys.stderr):  # what is printed here is the report
            run_script(file)
    except StemmaError:
        raise
    except (Exception, SystemExit) as error:
        if isinstance(error, SystemExit) and not error.code:
            return
        raise failure_of(file, error) from error
    finally:
        set_default_backend(None)
