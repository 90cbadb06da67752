"""Lists and mappings in bodies, refused at the first invalid entry.

Pydantic would format an error for each: 2 MB of wrong items held the event loop for 50 s.
"""

from __future__ import annotations

from typing import Annotated, TypeVar

from pydantic import BeforeValidator, Field

MAX_ENTRIES = 1024  # of a mapping: logit biases at a time


def few(value: object) -> object:
    """Accepts an object of at most MAX_ENTRIES entries. Raises ValueError."""
    if isinstance(value, dict) and len(value) > MAX_ENTRIES:
        raise ValueError(f"at most {MAX_ENTRIES} entries")
    return value


_K = TypeVar("_K")
_V = TypeVar("_V")
Items = Annotated[list[_V], Field(fail_fast=True)]
Entries = Annotated[dict[_K, _V], BeforeValidator(few)]
