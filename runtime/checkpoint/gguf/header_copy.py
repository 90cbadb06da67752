"""A GGUF file of which only the header is there, for whoever asks what is in it. Torch-free."""

from __future__ import annotations

from pathlib import Path
from typing import BinaryIO

from .reader import GgufHeader


def copy_header(stream: BinaryIO, num_bytes: int, name: str, copy: Path) -> None:
    """Write the header of the file that `stream` begins to `copy`, which is as long as that file
    (`num_bytes`) and takes no space for its data. Nothing behind the header is read.

    Raises ModelLoadError, calling the file `name`, for what is malformed.
    """
    with copy.open("wb") as out:
        GgufHeader(_Copied(stream, out), name, num_bytes)
        out.truncate(num_bytes)


class _Copied:
    """What is read of `stream` is written to `out`, too."""

    def __init__(self, stream: BinaryIO, out: BinaryIO) -> None:
        self._stream = stream
        self._out = out

    def read(self, count: int, /) -> bytes:
        data = self._stream.read(count)
        self._out.write(data)
        return data
