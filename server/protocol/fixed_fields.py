"""Fields of a body that may ask for one thing only: what is done anyhow.

A field that would have changed the output is refused unless its value asks for what happens
without it.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

from pydantic import BaseModel, Field

from ...errors import InvalidRequest


@dataclass(frozen=True, slots=True)
class Only:
    """What may be asked for, and the same in words."""

    harmless: tuple[Any, ...]
    allowed: str

    def is_fine(self, value: object) -> bool:
        """Whether the value changes nothing."""
        return any(type(value) is type(item) and value == item for item in self.harmless)


def only(harmless: tuple[Any, ...], allowed: str) -> Any:
    """A field whose value must be one of `harmless`; `allowed` tells these in an error."""
    info: Any = Field(default=None)
    info.metadata.append(Only(harmless, allowed))
    return info


def refuse_others(body: BaseModel, prefix: str = "") -> None:
    """Raises InvalidRequest naming a field that cannot be honoured; `prefix`: of its name."""
    fixed = _fixed_fields(type(body))
    for name in body.model_fields_set & fixed.keys():
        value = getattr(body, name)
        if not fixed[name].is_fine(value):
            raise InvalidRequest.of(prefix + name, value, fixed[name].allowed)


@cache
def _fixed_fields(kind: type[BaseModel]) -> dict[str, Only]:
    return {
        name: each
        for name, info in kind.model_fields.items()
        for each in info.metadata
        if isinstance(each, Only)
    }
