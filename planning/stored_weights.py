"""The contents of a checkpoint's files, from their headers alone. Torch-free."""

from __future__ import annotations

import os
from collections import Counter
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from ..errors import ModelLoadError
from ..runtime.checkpoint.gguf.convert import weights_files
from ..runtime.checkpoint.gguf.reader import GgufFile
from ..runtime.checkpoint.model_files import PICKLED_SUFFIXES, why_not_pickled
from ..runtime.checkpoint.safetensors.checkpoint_files import checkpoint_files
from ..runtime.checkpoint.safetensors.safetensors_header import open_header


@dataclass(frozen=True, slots=True)
class StoredWeights:
    """The weights in those files of a folder that loading reads."""

    num_files: int
    num_tensors: int
    num_bytes: int
    formats: tuple[str, ...]  # as named in the files, the most frequent first


def stored_weights(folder: Path) -> StoredWeights | None:
    """None if there is only a description of the model.

    Raises ModelLoadError for a file that is malformed, truncated or missing, and if all weights
    are pickled.
    """
    ggufs = weights_files(folder)  # loading prefers these
    files = ggufs or checkpoint_files(folder)
    if not files:
        _require_no_pickles(folder)
        return None
    tensors = [each for file in files for each in (_in_gguf(file) if ggufs else _in_file(file))]
    formats = Counter(name for name, _ in tensors)
    names = tuple(name for name, _ in formats.most_common())
    return StoredWeights(len(files), len(tensors), sum(size for _, size in tensors), names)


def _in_file(file: Path) -> list[tuple[str, int]]:
    """The format and size in bytes of each tensor."""
    descriptor, places = open_header(file)
    os.close(descriptor)
    return [(place.dtype, place.num_bytes) for place in places.values()]


def _in_gguf(file: Path) -> list[tuple[str, int]]:
    with closing(GgufFile(file)) as gguf:
        return [(place.format.name, place.num_bytes) for place in gguf.tensors.values()]


def _require_no_pickles(folder: Path) -> None:
    pickled = [file.name for file in folder.iterdir() if file.suffix in PICKLED_SUFFIXES]
    if pickled:
        raise ModelLoadError(why_not_pickled(str(folder), pickled))
