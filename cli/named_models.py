"""`--model NAME=MODEL`, as `stemma serve` takes it several times."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ..errors import InvalidRequest
from ..runtime.config import EngineConfig
from ..server.models.allowed_names import require_names


@dataclass(frozen=True, slots=True)
class NamedModel:
    """One of several `--model`s."""

    name: str
    source: str  # a folder, a .gguf file or a hub id


def named_models(given: Sequence[str]) -> list[NamedModel]:
    """Those of a server of several models; none where it is of one, which has no name. Raises
    InvalidRequest for names that cannot be used, or are there twice."""
    split = [_split(each) for each in given]
    if len(split) < 2 and not any(name for name, _ in split):
        return []
    named = [NamedModel(name or _own_name(source), source) for name, source in split]
    require_names([model.name for model in named])
    return named


def _split(text: str) -> tuple[str | None, str]:
    """Its name, if it has one, and the model."""
    name, separator, source = text.partition("=")
    if not separator or os.path.exists(Path(text).expanduser()):
        return None, text
    if not source:
        raise InvalidRequest.of("model", text, "NAME=MODEL, or a MODEL alone")
    return name, source


def _own_name(source: str) -> str:
    return EngineConfig(model=source).model_name
