"""How to compute a checkpoint's embeddings, from its sentence-transformers files, if it has them
(modules.json and the configuration of the pooling module that it names). Torch-free.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ....frontend.protocol.ir import Pooling

_PREFIX = "pooling_mode_"
_MODES: dict[str, Pooling] = {"mean_tokens": "mean", "lasttoken": "last"}
_KNOWN_MODULES = ("Transformer", "Pooling", "Normalize")


@dataclass(frozen=True, slots=True)
class EmbeddingConfig:
    """A model without such files pools its last token: the only one that attends to the whole
    text."""

    pooling: Pooling = "last"
    refusal: str | None = None  # why this runtime cannot make this model's embeddings
    is_declared: bool = False  # there are such files: the model was trained for embeddings

    @classmethod
    def from_folder(cls, folder: Path) -> EmbeddingConfig:
        """Read a checkpoint folder; an unreadable or unsupported file only disables embeddings."""
        if not (folder / "modules.json").is_file():
            return cls()
        try:
            return cls(_pooling(folder), is_declared=True)
        except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            return cls(refusal=f"its sentence-transformers files: {error}", is_declared=True)


def _pooling(folder: Path) -> Pooling:
    """Raises ValueError for what is not supported, and other errors for malformed files."""
    modules = {
        str(module["type"]).rpartition(".")[2]: str(module["path"])
        for module in json.loads((folder / "modules.json").read_text(encoding="utf-8"))
    }
    unknown = sorted(set(modules).difference(_KNOWN_MODULES))
    if unknown:
        raise ValueError(f"modules {unknown} are not supported, only {list(_KNOWN_MODULES)}")
    path = folder / modules["Pooling"] / "config.json"
    config: Mapping[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    modes = [name.removeprefix(_PREFIX) for name, is_on in config.items()
             if name.startswith(_PREFIX) and is_on]  # fmt: skip
    if len(modes) != 1 or modes[0] not in _MODES:
        raise ValueError(f"pooling {modes} is not supported, only one of {list(_MODES)}")
    return _MODES[modes[0]]
