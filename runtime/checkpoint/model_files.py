"""Opens a model's files, or refuses them with the reason. Torch-free."""

from __future__ import annotations

import os
import stat
from collections.abc import Sequence
from pathlib import Path

from ...errors import ModelLoadError


def open_plain_file(path: Path) -> int:
    """A descriptor for reading, which the caller closes.

    Raises ModelLoadError for a file that is missing, cannot be opened or is not a regular one: a
    named pipe would block, and reading a device might never end.
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


PICKLED_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt")


def why_not_pickled(model: str, names: Sequence[str]) -> str:
    """`names`: the pickled files of `model`, at least one."""
    shown = ", ".join(sorted(names)[:3]) + (", ..." if len(names) > 3 else "")
    return (
        f"{model} has its weights as PyTorch pickles only ({shown}), which can run code of their "
        "own when they are read; convert them once, on a machine where that may be, with "
        "transformers: AutoModelForCausalLM.from_pretrained(MODEL).save_pretrained(FOLDER, "
        "safe_serialization=True)"
    )
