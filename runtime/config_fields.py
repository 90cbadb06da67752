"""Checked access to a checkpoint's JSON files; every error names the file and the field."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import ModelLoadError


@dataclass(frozen=True, slots=True)
class Fields:
    """A JSON object with checked access; errors name the file and the field."""

    file: Path
    values: Mapping[str, Any]

    @classmethod
    def read(cls, file: Path) -> Fields:
        try:
            values = json.loads(file.read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise ModelLoadError(f"{file} is missing: not a Hugging Face checkpoint") from None
        except (OSError, ValueError) as error:
            raise ModelLoadError(f"{file} cannot be read as JSON: {error}") from error
        if not isinstance(values, dict):
            raise ModelLoadError(f"{file}: expected a JSON object, found {_shown(values)}")
        return cls(file, values)

    def fail(self, field: str, expected: str) -> ModelLoadError:
        found = _shown(self.values[field]) if field in self.values else "nothing"
        return ModelLoadError(f"{self.file}: field {field!r}: expected {expected}, found {found}")

    def get(self, field: str) -> Any:
        """The value, or None where absent or null."""
        return self.values.get(field)

    def nested(self, field: str) -> Fields | None:
        """An object within this one, or None where absent or null."""
        value = self.get(field)
        if value is None:
            return None
        if not isinstance(value, dict):
            raise self.fail(field, "an object or null")
        return Fields(self.file, value)

    def integer(self, field: str, default: int | None = None) -> int:
        value = self.get(field)
        if value is None and default is not None:
            return default
        if not _is_int(value) or value < 1:
            raise self.fail(field, "a positive integer")
        return int(value)

    def number(self, field: str, default: float) -> float:
        value = self.get(field)
        if value is None:
            return default
        if not isinstance(value, int | float) or isinstance(value, bool) or not value > 0:
            raise self.fail(field, "a positive number")
        return float(value)

    def flag(self, field: str, default: bool) -> bool:
        value = self.get(field)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.fail(field, "true or false")
        return value

    def token_ids(self, field: str) -> tuple[int, ...]:
        value = self.get(field)
        if value is None:
            return ()
        ids = value if isinstance(value, list) else [value]
        if not all(_is_int(token_id) and token_id >= 0 for token_id in ids):
            raise self.fail(field, "a token id or a list of token ids")
        return tuple(ids)


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 100 else text[:100] + "..."
