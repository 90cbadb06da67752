"""`--model NAME=MODEL`, as `stemma serve` takes it several times."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass

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
    if not given or (len(given) == 1 and not _is_named(given[0])):
        return []
    named = [_named(text) for text in given]
    require_names([model.name for model in named])
    return named


def _is_named(text: str) -> bool:
    """Whether a single one is NAME=MODEL, and no path with a "=" that is not there."""
    name, separator, source = text.partition("=")
    return bool(separator) and not _exists(text) and ("/" not in name or _exists(source))


def _named(text: str) -> NamedModel:
    name, separator, source = text.partition("=")
    if not separator or _exists(text):
        return NamedModel(_own_name(text), text)
    if not name or not source:
        raise InvalidRequest.of("model", text, "NAME=MODEL, or a MODEL alone")
    return NamedModel(name, source)


def _exists(path: str) -> bool:
    return os.path.exists(os.path.expanduser(path))


def _own_name(source: str) -> str:
    return EngineConfig(model=source).model_name
