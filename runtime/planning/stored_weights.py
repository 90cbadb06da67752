"""What a checkpoint's safetensors files hold, by their headers alone. Torch-free."""

from __future__ import annotations

import os
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from ...errors import ModelLoadError
from ..pickled import PICKLED_SUFFIXES, why_not_pickled
from ..weights.checkpoint_files import checkpoint_files
from ..weights.gguf.unfold import weights_files
from ..weights.safetensors_header import open_header


@dataclass(frozen=True, slots=True)
class StoredWeights:
    """Of the files of a folder that loading it reads."""

    num_files: int
    num_tensors: int
    num_bytes: int
    dtypes: tuple[str, ...]  # as the format names them, the most frequent first


def stored_weights(folder: Path) -> StoredWeights | None:
    """None where there is no safetensors file: a description alone, or a GGUF file.

    Raises ModelLoadError for a file that is broken or cut, and where all weights are pickled.
    """
    if weights_files(folder):  # which loading takes first
        return None
    files = checkpoint_files(folder)
    if not files:
        _require_no_pickles(folder)
        return None
    num_bytes, dtypes = 0, Counter[str]()
    for file in files:
        descriptor, places = open_header(file)
        os.close(descriptor)
        num_bytes += sum(place.num_bytes for place in places.values())
        dtypes.update(place.dtype for place in places.values())
    names = tuple(name for name, _ in dtypes.most_common())
    return StoredWeights(len(files), dtypes.total(), num_bytes, names)


def _require_no_pickles(folder: Path) -> None:
    pickled = [file.name for file in folder.iterdir() if file.suffix in PICKLED_SUFFIXES]
    if pickled:
        raise ModelLoadError(why_not_pickled(str(folder), pickled))
