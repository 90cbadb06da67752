"""Tensors of a Hugging Face safetensors checkpoint, single file or sharded, read through mmap.

Nothing is read until a tensor is asked for; it is then converted straight into its final dtype
and place, so the peak is the model in its target dtype plus one tensor.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from ...errors import ModelLoadError
from .source import ProgressCallback, empty_stack

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
# Recomputed from the config; old checkpoints store it.
_IGNORED_SUFFIXES = ("rotary_emb.inv_freq",)

logger = logging.getLogger(__name__)


class CheckpointWeights:
    """A `WeightSource` over the safetensors files of a folder; use as a context manager.

    Owns the open files until `close`; tensors handed out are copies and outlive it.
    """

    def __init__(
        self,
        folder: str | Path,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
        on_progress: ProgressCallback | None = None,
    ) -> None:
        self.folder = Path(folder)
        self.dtype = dtype
        self.device = torch.device(device)
        self._on_progress = on_progress
        self._files: dict[Path, Any] = {}
        self._open_files = ExitStack()
        self._file_of = _locate_tensors(self.folder, self._open)
        self._not_taken = set(self._file_of)
        self._bytes_total = sum(file.stat().st_size for file in set(self._file_of.values()))
        self._bytes_done = 0

    def take(self, name: str, shape: Sequence[int]) -> Tensor:
        target = torch.empty(tuple(shape), dtype=self.dtype, device=self.device)
        self._read_into(name, target)
        return target

    def take_stacked(self, names: Sequence[str], shapes: Sequence[Sequence[int]]) -> Tensor:
        stack, parts = empty_stack(shapes, self.dtype, self.device)
        for name, part in zip(names, parts, strict=True):
            self._read_into(name, part)
        return stack

    def skip(self, name: str) -> None:
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
        self._open_files.close()
        self._files.clear()

    def __enter__(self) -> CheckpointWeights:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _open(self, file: Path) -> Any:
        if file not in self._files:
            try:
                handle: Any = safe_open(str(file), framework="pt")
                self._files[file] = self._open_files.enter_context(handle)
            except FileNotFoundError:
                raise ModelLoadError(f"{file} is missing") from None
            except (OSError, SafetensorError) as error:
                raise ModelLoadError(
                    f"{file} is not a readable safetensors file: {error}"
                ) from None
        return self._files[file]

    def _read_into(self, name: str, target: Tensor) -> None:
        stored = self._read(name)
        if tuple(stored.shape) != tuple(target.shape):
            raise ModelLoadError(
                f"{self._file_of[name]}: tensor {name!r}: expected shape {list(target.shape)}, "
                f"found {list(stored.shape)}"
            )
        target.copy_(stored)
        self._not_taken.discard(name)
        self._bytes_done += stored.nbytes
        if self._on_progress is not None:
            self._on_progress(min(self._bytes_done, self._bytes_total), self._bytes_total)

    def _read(self, name: str) -> Tensor:
        if name not in self._file_of:
            raise ModelLoadError(f"{self.folder}: tensor {name!r} is missing from the checkpoint")
        file = self._file_of[name]
        try:
            tensor: Tensor = self._open(file).get_tensor(name)
        except SafetensorError as error:
            raise ModelLoadError(f"{file}: tensor {name!r} cannot be read: {error}") from None
        if not tensor.is_floating_point():
            raise ModelLoadError(
                f"{file}: tensor {name!r}: expected floating point, found {tensor.dtype}; "
                "quantized checkpoints are not supported"
            )
        return tensor


def _locate_tensors(folder: Path, open_file: Any) -> Mapping[str, Path]:
    """The file of each tensor, from the index where there is one."""
    index = folder / INDEX_FILE
    if index.exists():
        return {name: folder / file for name, file in _read_index(index).items()}
    single = folder / SINGLE_FILE
    if not single.exists():
        raise ModelLoadError(f"{folder} holds neither {SINGLE_FILE} nor {INDEX_FILE}")
    return dict.fromkeys(open_file(single).keys(), single)


def _read_index(index: Path) -> Mapping[str, str]:
    try:
        weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ModelLoadError(f"{index} is not a valid index: {error!r}") from None
    if not isinstance(weight_map, dict) or not weight_map:
        raise ModelLoadError(f"{index}: field 'weight_map': expected a non-empty object")
    for file in {str(value) for value in weight_map.values()}:
        if Path(file).name != file:
            raise ModelLoadError(f"{index}: {file!r} is not a plain file name")
        if not (index.parent / file).exists():
            raise ModelLoadError(f"{index.parent / file} is missing, but {index.name} names it")
    return weight_map
