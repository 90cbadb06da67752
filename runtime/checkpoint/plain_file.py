"""Opens a model's file, be it a tensor file of whichever format. Torch-free."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from ...errors import ModelLoadError


def open_plain_file(path: Path) -> int:
    """A descriptor for reading, the caller's to close.

    Raises ModelLoadError for what is missing, cannot be opened or is no file: a named pipe would be
    waited for, a device read to no end.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        raise ModelLoadError(f"{path} is missing") from None
    except OSError as error:
        raise ModelLoadError(f"{path} cannot be opened: {error.strerror}") from None
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise ModelLoadError(f"{path} is a folder, a device or a pipe, not a file")
    return descriptor
