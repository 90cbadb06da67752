"""Layers behind the pooling (sentence-transformers' Dense), of float32 weights on the host: there
is one vector a text."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from ....errors import ModelLoadError
from ...checkpoint.config.embedding_config import DenseModule
from ...checkpoint.safetensors.safetensors_file import SafetensorsFile

_Array = npt.NDArray[np.float64]


class DenseLayers:
    """Applied in order; none: vectors stay as they are."""

    def __init__(self, folder: Path, modules: Sequence[DenseModule]) -> None:
        """Raises ModelLoadError for weights that are missing, or do not fit their config."""
        self._layers = [_layer(folder / each.path, each) for each in modules]

    def __call__(self, vectors: _Array) -> _Array:
        """[N, size] -> [N, size of the last layer], each vector by itself."""
        for weight, bias, has_tanh in self._layers:
            rows = [weight @ vector + bias for vector in vectors]
            vectors = np.tanh(rows) if has_tanh else np.array(rows)
        return vectors


def _layer(folder: Path, module: DenseModule) -> tuple[_Array, _Array, bool]:
    path = folder / "model.safetensors"
    if not path.is_file():
        raise ModelLoadError(f"{path} is missing: a module of modules.json needs its weights there")
    file = SafetensorsFile(path, unstacks=False)
    try:
        weight = _taken(file, "linear.weight", (module.out_features, module.in_features))
        bias = np.zeros(module.out_features)
        if module.has_bias:
            bias = _taken(file, "linear.bias", (module.out_features,))
    finally:
        file.close()
    return weight, bias, module.has_tanh


def _taken(file: SafetensorsFile, name: str, shape: tuple[int, ...]) -> _Array:
    if name not in file or file.shape(name) != shape:
        raise ModelLoadError(f"{file.path}: expected a tensor {name!r} of shape {list(shape)}")
    taken: _Array = file.read(name).double().numpy()
    return taken
