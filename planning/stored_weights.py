"""What the files of a checkpoint hold, by their headers alone. Torch-free."""

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
    """Of the files of a folder that loading it reads."""

    num_files: int
    num_tensors: int
    num_bytes: int
    formats: tuple[str, ...]  # as the files name them, the most frequent first


def stored_weights(folder: Path) -> StoredWeights | None:
    """None where only a description of the model is there.

    Raises ModelLoadError for a file that is broken, cut or missing, and where all weights are
    pickled.
    """
    ggufs = weights_files(folder)  # which loading takes first
    files = ggufs or checkpoint_files(folder)
    if not files:
        _require_no_pickles(folder)
        return None
    tensors = [each for file in files for each in (_in_gguf(file) if ggufs else _in_file(file))]
    formats = Counter(name for name, _ in tensors)
    names = tuple(name for name, _ in formats.most_common())
    return StoredWeights(len(files), len(tensors), sum(size for _, size in tensors), names)


def _in_file(file: Path) -> list[tuple[str, int]]:
    """Of each tensor its format and its bytes."""
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
