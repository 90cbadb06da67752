"""Tensors of a Hugging Face safetensors checkpoint, single file or sharded.

Nothing is read until a tensor is requested; it is then read, and converted if needed, straight into
its final place, so the peak is the model in its target dtype plus one tensor.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from ....errors import ModelLoadError
from ....frontend.client.progress import ByteProgress
from ....kernels.ops import Weight
from ..model_files import PICKLED_SUFFIXES, why_not_pickled
from ..parts import WHOLE, Part, Range, Rows, num_rows
from ..weight_source import WeightSource, empty_stack
from .checkpoint_files import (
    INDEX_FILE,
    OUTPUT,
    SINGLE_FILE,
    names_asked_for,
    read_index,
    single_file,
)
from .safetensors_file import SafetensorsFile
from .stacked_experts import can_unstack, is_stack

# Recomputed from the config; old checkpoints store it.
_IGNORED_SUFFIXES = ("rotary_emb.inv_freq",)
# Instead of a weight, in GPTQ and AWQ, in compressed-tensors, and of experts in MXFP4.
_PACKED_SUFFIXES = (".qweight", ".weight_packed", "_blocks")

logger = logging.getLogger(__name__)


class CheckpointWeights(WeightSource):
    """A `WeightSource` over the safetensors files of a folder.

    Tensors have the names that models request. A checkpoint of a bare decoder (Qwen3-Embedding)
    has them without "model."; one of Gemma 3 with its vision tower may have the names of
    transformers' modules.

    Owns the open files until `close`; returned tensors are copies and outlive it.
    """

    def __init__(
        self,
        folder: str | Path,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
        on_progress: ByteProgress | None = None,
        *,
        has_stored_weights: bool = False,
    ) -> None:
        """`has_stored_weights`: `take_weight` returns floating weights as stored, not in `dtype`,
        for callers that round them further."""
        self.folder = Path(folder)
        self.dtype = dtype
        self.device = torch.device(device)
        self._on_progress = on_progress
        self._has_stored_weights = has_stored_weights
        self._files: dict[Path, SafetensorsFile] = {}
        self._unstacks = True
        located = self._locate_tensors()
        self._stored_names = names_asked_for(located)
        self._file_of = {name: located[own] for name, own in self._stored_names.items()}
        self._not_taken = set(self._file_of)
        self._bytes_total = sum(file.stat().st_size for file in set(self._file_of.values()))
        self._bytes_done = 0

    def __contains__(self, name: str) -> bool:
        """Whether the checkpoint has a tensor of this name."""
        return name in self._file_of

    def names(self) -> Iterable[str]:
        """The names of all tensors, file by file."""
        return sorted(self._file_of, key=lambda name: self._file_of[name])

    def shape(self, name: str) -> tuple[int, ...]:
        file, own = self._place(name)
        return file.shape(own)

    def dtype_of(self, name: str) -> torch.dtype:
        """The stored dtype."""
        file, own = self._place(name)
        return file.dtype(own)

    def num_bytes(self, name: str) -> int:
        """The stored size."""
        file, own = self._place(name)
        return file.num_bytes(own)

    def read(self, name: str) -> Tensor:
        """The tensor as stored, whatever its dtype, on the CPU."""
        file, own = self._place(name)
        tensor = file.read(own)
        self._note_taken(name)
        return tensor

    def require(self, name: str, shape: Sequence[int]) -> None:
        """Raises ModelLoadError unless `take` would return it."""
        file, own = self._place(name)
        dtype = file.dtype(own)
        if not dtype.is_floating_point or dtype.itemsize == 1:
            raise ModelLoadError(
                f"{file.path}: tensor {own!r}: expected floating point, found {dtype}: "
                "a quantized checkpoint whose config.json has no quantization_config"
            )
        if file.shape(own) != tuple(shape):
            raise ModelLoadError(
                f"{file.path}: tensor {own!r}: expected shape {list(shape)}, "
                f"found {list(file.shape(own))}"
            )

    def take(self, name: str, shape: Sequence[int], dtype: torch.dtype | None = None) -> Tensor:
        self.require(name, shape)  # before allocating: a config may request any size
        target = torch.empty(tuple(shape), dtype=dtype or self.dtype, device=self.device)
        self._read_into(name, target)
        return target

    def take_stacked(self, names: Sequence[str], shapes: Sequence[Sequence[int]]) -> Tensor:
        return self._stacked(names, shapes, self.dtype)

    def _stacked(
        self, names: Sequence[str], shapes: Sequence[Sequence[int]], dtype: torch.dtype
    ) -> Tensor:
        for name, shape in zip(names, shapes, strict=True):
            self.require(name, shape)
        stack, parts = empty_stack(shapes, dtype, self.device)
        for name, part in zip(names, parts, strict=True):
            self._read_into(name, part)
        return stack

    def take_weight(
        self, names: Sequence[str], out_features: Sequence[int], in_features: int
    ) -> Weight:
        full_names = [f"{name}.weight" for name in names]
        shapes = [(size, in_features) for size in out_features]
        return self._stacked(full_names, shapes, self._weight_dtype(full_names))

    def take_rows(
        self, name: str, shape: Sequence[int], rows: Rows | None, dtype: torch.dtype | None = None
    ) -> Tensor:
        if rows is None:
            return self.take(name, shape, dtype)
        self.require(name, shape)
        own = (num_rows(rows), *shape[1:])
        target = torch.empty(own, dtype=dtype or self.dtype, device=self.device)
        self._read_into(name, target, rows)
        return target

    def take_part(
        self, names: Sequence[str], out_features: Sequence[int], in_features: int, part: Part
    ) -> Weight:
        if part == WHOLE:
            return self.take_weight(names, out_features, in_features)
        full_names = [f"{name}.weight" for name in names]
        for name, size in zip(full_names, out_features, strict=True):
            self.require(name, (size, in_features))
        outputs = [[(0, size)] for size in out_features] if part.outputs is None else part.outputs
        first, end = part.inputs or (0, in_features)
        shapes = [(num_rows(rows), end - first) for rows in outputs]
        stack, targets = empty_stack(shapes, self._weight_dtype(full_names), self.device)
        for name, target, rows in zip(full_names, targets, outputs, strict=True):
            self._read_into(name, target, rows, part.inputs)
        return stack

    def take_experts(
        self, name: str, num_experts: int, out_features: int, in_features: int
    ) -> Weight:
        shape = (num_experts, in_features, out_features)
        self.require(name, shape)
        stored = self.take(name, shape, self.dtype_of(name) if self._has_stored_weights else None)
        return stored.transpose(1, 2).contiguous()

    def tie_weight(self, table: Tensor) -> Weight:
        return table

    def skip(self, name: str) -> None:
        if name.endswith("."):
            self._not_taken = {each for each in self._not_taken if not each.startswith(name)}
        self._not_taken.discard(name)

    def finish(self) -> None:
        leftover = sorted(n for n in self._not_taken if not n.endswith(_IGNORED_SUFFIXES))
        if leftover:
            shown = ", ".join(leftover[:5]) + (", ..." if len(leftover) > 5 else "")
            logger.warning(
                "%s: %d tensors of the checkpoint are not used: %s",
                self.folder,
                len(leftover),
                shown,
            )

    def close(self) -> None:
        for file in self._files.values():
            file.close()
        self._files.clear()

    def _open(self, path: Path) -> SafetensorsFile:
        if path not in self._files:
            self._files[path] = SafetensorsFile(path, unstacks=self._unstacks)
        return self._files[path]

    def _place(self, name: str) -> tuple[SafetensorsFile, str]:
        """The open file of a tensor, and the tensor's name there."""
        if name not in self._file_of:
            missing = f"{self.folder}: tensor {name!r} is missing from the checkpoint"
            raise ModelLoadError(f"{missing}{self._why_missing(name)}")
        file, own = self._open(self._file_of[name]), self._stored_names[name]
        if own not in file:
            raise ModelLoadError(f"{file.path}: tensor {own!r} is missing, but the index has it")
        return file, own

    def _why_missing(self, name: str) -> str:
        module = name.removesuffix(".weight")
        for packed in (f"{module}{suffix}" for suffix in _PACKED_SUFFIXES):
            if packed in self._file_of:
                return (
                    f", but {packed!r} is there: packed weights, of which config.json says nothing "
                    "(quantization_config)"
                )
        if OUTPUT in name:
            return (
                ": it has no output projection, and its config.json does not tie one to the "
                "embedding (tie_word_embeddings), so it gives no tokens"
            )
        return ""

    def _weight_dtype(self, names: Sequence[str]) -> torch.dtype:
        """Of a linear layer's weight made of these tensors."""
        if not self._has_stored_weights:
            return self.dtype
        stored = {self.dtype_of(name) for name in names}
        return stored.pop() if len(stored) == 1 else torch.float32

    def _read_into(
        self, name: str, target: Tensor, rows: Rows | None = None, columns: Range | None = None
    ) -> None:
        file, own = self._place(name)
        file.read_into(own, target, rows, columns)
        self._note_taken(name)

    def _note_taken(self, name: str) -> None:
        self._not_taken.discard(name)
        self._bytes_done += self.num_bytes(name)
        if self._on_progress is not None:
            self._on_progress(min(self._bytes_done, self._bytes_total), self._bytes_total)

    def _locate_tensors(self) -> Mapping[str, Path]:
        """The file of each tensor, by the tensor's name there."""
        single = single_file(self.folder)
        if single is not None:
            return dict.fromkeys(self._open(single).names(), single)
        weight_map = read_index(self.folder)
        if weight_map is not None:
            located = {}
            self._unstacks = can_unstack(weight_map)
            for name, file in weight_map.items():
                path = self.folder / file
                names = self._open(path).names_for(name) if is_stack(name) else (name,)
                located.update(dict.fromkeys(names, path))
            return located
        pickled = [file.name for file in _files_of(self.folder) if file.suffix in PICKLED_SUFFIXES]
        if pickled:
            raise ModelLoadError(why_not_pickled(str(self.folder), pickled))
        raise ModelLoadError(f"{self.folder} holds neither {SINGLE_FILE} nor {INDEX_FILE}")


def _files_of(folder: Path) -> list[Path]:
    return [file for file in folder.iterdir() if file.is_file()] if folder.is_dir() else []
