"""A GGUF model's files as one: a single file, or the parts made by `llama-gguf-split`.

The first part has all metadata; tensors may be in any part. Each part has its number `split.no`
(from 0), the number of parts (`split.count`) and of tensors (`split.tensors.count`). The others are
found by name in the same folder. Torch-free.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ....errors import ModelLoadError
from ..config.fields import Fields
from ..parts import Range
from .reader import GgufFile, TensorPlace

_SUFFIX = ".gguf"
_SHARD = re.compile(r"(?P<name>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf", re.DOTALL)


def shard_name(name: str, number: int, count: int) -> str:
    """The name of part `number` (from 1 on) of `count`."""
    return f"{name}-{number:05}-of-{count:05}{_SUFFIX}"


def shard_names(file_name: str) -> list[str]:
    """All files of the model that has a file of this name, in order; a name without a part number
    is the only one."""
    match = _SHARD.fullmatch(file_name)
    if match is None or not 1 <= int(match["number"]) <= int(match["count"]):
        return [file_name]
    count = int(match["count"])
    return [shard_name(match["name"], number, count) for number in range(1, count + 1)]


def model_stem(file_name: str) -> str:
    """The model's name, without the number of a part."""
    match = _SHARD.fullmatch(file_name)
    return file_name.removesuffix(_SUFFIX) if match is None else match["name"]


_NUMBER, _COUNT, _NUM_TENSORS = "split.no", "split.count", "split.tensors.count"


class GgufModel:
    """Owns the open files until `close`.

    Raises ModelLoadError as `GgufFile` does, and for parts that are missing, do not match their
    names, or belong to different models.
    """

    def __init__(self, path: str | Path) -> None:
        """path: of the file, or of any part."""
        with ExitStack() as opened:
            given = opened.enter_context(closing(GgufFile(path)))
            self.files: Sequence[GgufFile] = [
                given if each == given.path else opened.enter_context(closing(GgufFile(each)))
                for each in _paths_of(given)
            ]
            if len(self.files) > 1:
                _require_parts(self.files)
            self._file_of = _files_by_tensor(self.files)
            self._opened = opened.pop_all()
        self.path = self.files[0].path
        self.metadata: Mapping[str, Any] = self.files[0].metadata
        self.tensors: Mapping[str, TensorPlace] = {
            name: file.tensors[name] for name, file in self._file_of.items()
        }

    @property
    def is_quantized(self) -> bool:
        """Whether any tensor has fewer than 16 bits."""
        return any(place.format.is_quantized for place in self.tensors.values())

    def read(
        self, place: TensorPlace, first_row: int, num_rows: int, columns: Range | None = None
    ) -> NDArray[np.uint8]:
        """See `GgufFile.read`."""
        return self._file_of[place.name].read(place, first_row, num_rows, columns)

    def close(self) -> None:
        self._opened.close()


def _paths_of(given: GgufFile) -> list[Path]:
    """The paths of all parts, in order."""
    fields = Fields(given.path, given.metadata)
    # A merged file has a count of 0.
    count = 1 if fields.get(_COUNT) is None else fields.count(_COUNT)
    if count <= 1:
        return [given.path]
    names = shard_names(given.path.name)
    if len(names) == 1:
        example = shard_name("NAME", 1, count)
        raise fields.fail(_COUNT, f"1, or a name like {example}, by which other parts are found")
    if len(names) != count:
        raise fields.fail(_COUNT, f"{len(names)}, as its name says")
    paths = [given.path.with_name(name) for name in names]
    for path in paths:
        if not path.exists():
            raise ModelLoadError(f"{path} is missing: {given.path.name} is one of {count} parts")
    return paths


def _require_parts(files: Sequence[GgufFile]) -> None:
    num_tensors = sum(len(file.tensors) for file in files)
    for number, file in enumerate(files):
        fields = Fields(file.path, file.metadata)
        for field, expected, reason in (
            (_COUNT, len(files), "as its name says"),
            (_NUMBER, number, "as its name says, counted from 0"),
            (_NUM_TENSORS, num_tensors, "which all parts have together"),
        ):
            if fields.get(field) != expected:
                raise fields.fail(field, f"{expected}, {reason}")


def _files_by_tensor(files: Sequence[GgufFile]) -> dict[str, GgufFile]:
    found: dict[str, GgufFile] = {}
    for file in files:
        for name in file.tensors:
            if name in found:
                raise ModelLoadError(
                    f"{file.path}: tensor {name!r} is in {found[name].path.name}, too"
                )
            found[name] = file
    return found
