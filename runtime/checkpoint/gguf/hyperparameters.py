"""Checked access to the model metadata of a GGUF file. Torch-free."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from ....errors import ModelLoadError
from ..config.fields import Fields
from .shards import GgufModel


class Hyperparameters:
    """The metadata below `general.architecture`'s name, and the few tensors that complete it.

    Errors name the file and the whole key.
    """

    def __init__(self, file: GgufModel) -> None:
        self.fields = Fields(file.path, file.metadata)
        self.architecture = self._text("general.architecture")
        self._file = file

    @property
    def path(self) -> Path:
        return self._file.path

    def get(self, key: str) -> Any:
        """The value, or None where absent."""
        return self.fields.get(f"{self.architecture}.{key}")

    def integer(self, key: str, default: int | None = None) -> int:
        """A positive integer; a list of one for each layer is allowed if all are equal."""
        full = f"{self.architecture}.{key}"
        value = self.fields.get(full)
        if isinstance(value, list) and value and all(item == value[0] for item in value):
            return Fields(self.path, {full: value[0]}).integer(full)
        return self.fields.integer(full, default)

    def kv_heads(self, num_heads: int) -> int:
        """How many heads of keys a layer has, `num_heads` if the file does not say it. Where it has
        a number for each layer, that of recurrent ones is 0."""
        key = f"{self.architecture}.attention.head_count_kv"
        values = self.fields.get(key)
        if not isinstance(values, list):
            return self.integer("attention.head_count_kv", num_heads)
        others = {value for value in values if value != 0}
        if len(others) != 1:
            raise self.fields.fail(key, "one number of heads, or 0, for each layer")
        return Fields(self.path, {key: others.pop()}).integer(key)

    @property
    def num_layers(self) -> int:
        """Without those behind them that draft further tokens, which are not read."""
        blocks, drafting = self.integer("block_count"), self.count("nextn_predict_layers")
        if drafting >= blocks:
            raise self.fail("nextn_predict_layers", f"less than block_count={blocks}")
        return blocks - drafting

    def count(self, key: str, default: int = 0) -> int:
        """An integer that may be 0."""
        value = self.get(key)
        return 0 if value == 0 and not isinstance(value, bool) else self.integer(key, default)

    def number(self, key: str, default: float) -> float:
        """A positive number, as its shortest decimal: files have single precision."""
        value = self.fields.number(f"{self.architecture}.{key}", default)
        return float(str(np.float32(value)))

    def optional_number(self, key: str) -> float | None:
        """A positive number, or None if it is absent or 0."""
        value = self.get(key)
        return None if value is None or value == 0 else self.number(key, 0.0)

    def flag(self, key: str, default: bool) -> bool:
        return self.fields.flag(f"{self.architecture}.{key}", default)

    def fail(self, key: str, expected: str) -> ModelLoadError:
        return self.fields.fail(f"{self.architecture}.{key}", expected)

    def has_tensor(self, name: str) -> bool:
        return name in self._file.tensors

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of a tensor. Raises ModelLoadError if it is missing."""
        if not self.has_tensor(name):
            raise ModelLoadError(f"{self.path}: tensor {name!r} is missing")
        return self._file.tensors[name].shape

    def format_name(self, name: str) -> str:
        """The format of a tensor's numbers."""
        self.shape(name)
        return self._file.tensors[name].format.name

    def factors(self, name: str, size: int) -> list[float]:
        """A small tensor of `size` positive float32 numbers."""
        self.shape(name)
        place = self._file.tensors[name]
        if place.format.name != "F32" or place.shape != (size,):
            found = f"{place.format.name} {list(place.shape)}"
            raise ModelLoadError(f"{self.path}: tensor {name!r}: expected F32 [{size}], {found=}")
        values = self._file.read(place, 0, 1).view(np.float32)[0]
        if not np.isfinite(values).all() or values.min() <= 0:
            raise ModelLoadError(f"{self.path}: tensor {name!r}: expected positive numbers")
        return [float(str(value)) for value in values]

    def _text(self, key: str) -> str:
        value = self.fields.get(key)
        if not isinstance(value, str):
            raise self.fields.fail(key, "a name")
        return value
