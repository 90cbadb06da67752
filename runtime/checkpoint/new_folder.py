"""A folder that appears when all that belongs into it is written."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ...errors import InvalidRequest, ModelLoadError


def require_new(out: Path) -> None:
    """Raises InvalidRequest where there is something already."""
    if os.path.lexists(out):
        raise InvalidRequest.of("out", str(out), "a folder that does not exist yet")


@contextmanager
def new_folder(out: Path) -> Iterator[Path]:
    """A folder beside `out`, renamed to it at the end, or removed after an error.

    Raises InvalidRequest where none can be made, and ModelLoadError where there is no room.
    """
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        draft = Path(tempfile.mkdtemp(prefix=f".{out.name}-", dir=out.parent))
    except OSError as error:
        allowed = f"a folder that can be made: {error.strerror}"
        raise InvalidRequest.of("out", str(out), allowed) from None
    try:
        yield draft
        draft.chmod(0o755)  # mkdtemp makes it private to its owner
        draft.rename(out)
    except BaseException as error:
        shutil.rmtree(draft, ignore_errors=True)
        if isinstance(error, OSError):  # no room on the disk
            raise ModelLoadError(f"{out} could not be written: {error}") from None
        raise
