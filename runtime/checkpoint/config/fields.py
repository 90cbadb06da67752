"""Checked access to a checkpoint's JSON files; every error names the file and the field."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeGuard

from ....errors import ModelLoadError

MAX_INTEGER = (1 << 31) - 1  # no size of a model is larger
_FLOAT32_RANGE = (2.0**-126, 2.0**127)  # within float32's normal numbers, used in computing


@dataclass(frozen=True, slots=True)
class Fields:
    """A JSON object with checked access; errors name the file and the field."""

    file: Path
    values: Mapping[str, Any]

    @classmethod
    def read(cls, file: Path) -> Fields:
        if file.exists() and not (file.is_file() or file.is_dir()):  # a read might never end
            raise ModelLoadError(f"{file} is a device or a pipe, not a file")
        try:
            text = file.read_bytes()
        except FileNotFoundError:
            raise ModelLoadError(f"{file} is missing: not a Hugging Face checkpoint") from None
        except OSError as error:
            raise ModelLoadError(f"{file} cannot be read: {error}") from error
        return cls.parse(file, text)

    @classmethod
    def parse(cls, file: Path, text: bytes) -> Fields:
        """`text`: the file's contents, as UTF-8."""
        try:
            values = json.loads(text.decode())
        except (ValueError, RecursionError) as error:
            raise ModelLoadError(f"{file} cannot be read as JSON: {error}") from error
        if not isinstance(values, dict):
            raise ModelLoadError(f"{file}: expected a JSON object, found {_shown(values)}")
        return cls(file, values)

    def fail(self, field: str, expected: str) -> ModelLoadError:
        found = _shown(self.values[field]) if field in self.values else "nothing"
        return ModelLoadError(f"{self.file}: field {field!r}: expected {expected}, found {found}")

    def get(self, field: str) -> Any:
        """The value, or None if absent or null."""
        return self.values.get(field)

    def nested(self, field: str) -> Fields | None:
        """An object within this one, or None if absent or null."""
        value = self.get(field)
        if value is None:
            return None
        if not isinstance(value, dict):
            raise self.fail(field, "an object or null")
        return Fields(self.file, value)

    def with_defaults(self, defaults: Mapping[str, Any]) -> Fields:
        """A copy with these values for absent fields (null is a value)."""
        return Fields(self.file, {**defaults, **self.values})

    def restrict(self, field: str, *allowed: Any) -> None:
        """Raises ModelLoadError for a value that is not implemented; absent and null pass."""
        value = self.get(field)
        if value is not None and value not in allowed:
            shown = " or ".join(repr(each) for each in allowed) or "null"
            raise self.fail(field, f"{shown}, nothing else is implemented")

    def integer(self, field: str, default: int | None = None, *, most: int = MAX_INTEGER) -> int:
        value = self.get(field)
        if value is None and default is not None:
            return default
        if not _is_int(value) or value < 1:
            raise self.fail(field, "a positive integer")
        if value > most:
            raise self.fail(field, f"an integer in [1, {most:,}]")
        return int(value)

    def optional_integer(self, field: str) -> int | None:
        """None if absent or null."""
        return None if self.get(field) is None else self.integer(field)

    def count(self, field: str) -> int:
        """An integer >= 0."""
        value = self.get(field)
        if not _is_int(value) or not 0 <= value <= MAX_INTEGER:
            raise self.fail(field, "an integer >= 0")
        return int(value)

    def optional_number(self, field: str) -> float | None:
        """None if absent or null."""
        return None if self.get(field) is None else self.number(field, 1.0)

    def number(self, field: str, default: float) -> float:
        value = self.get(field)
        if value is None:
            return default
        if not is_finite(value) or not value > 0:
            raise self.fail(field, "a positive number")
        least, most = _FLOAT32_RANGE
        if not least <= value <= most:
            raise self.fail(field, f"a number in [{least:.2g}, {most:.2g}]")
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
        if not all(_is_int(token_id) and 0 <= token_id <= MAX_INTEGER for token_id in ids):
            raise self.fail(field, "a token id or a list of token ids")
        return tuple(ids)


def is_finite(value: object) -> TypeGuard[int | float]:
    """Whether it is a number that fits a float (JSON's may have any size, or be infinite)."""
    if not isinstance(value, int | float) or isinstance(value, bool):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:
        return False


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 100 else text[:100] + "..."
