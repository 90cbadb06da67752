"""Finds fields of a body that neither its model nor the models in it declare.

A model that keeps unknown fields (`extra="allow"`) is not searched, nor is a field declared as a
plain object: a JSON schema, a tool's parameters.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from typing import Annotated, Any, TypeVar, get_args

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

MAX_ENTRIES = 1024  # of a mapping, and of a list that is not prompts: each is looked at by itself


def few(value: object) -> object:
    """Accepts an object of at most MAX_ENTRIES entries. Raises ValueError."""
    if isinstance(value, dict) and len(value) > MAX_ENTRIES:
        raise ValueError(f"at most {MAX_ENTRIES} entries")
    return value


_K = TypeVar("_K")
_V = TypeVar("_V")
Items = Annotated[list[_V], Field(fail_fast=True)]
FewItems = Annotated[list[_V], Field(fail_fast=True, max_length=MAX_ENTRIES)]
Entries = Annotated[dict[_K, _V], BeforeValidator(few)]


class NullableFields(BaseModel):
    """A body in which a field that is null is one that was left out."""

    model_config = ConfigDict(extra="ignore", strict=True)

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, body: Any) -> Any:
        if not isinstance(body, dict):
            return body
        return {name: value for name, value in body.items() if value is not None}


MAX_REPORTED = 16
MAX_SHOWN_CHARS = 64


@dataclass(slots=True, eq=False)
class KnownFields:
    """The names of a model's fields, and the models that their values may be."""

    names: frozenset[str] | None  # None: any
    nested: dict[str, KnownFields] = field(default_factory=dict)

    @classmethod
    def of(cls, annotation: object) -> KnownFields | None:
        """For a type; None where it holds no model."""
        models = tuple(_models_in(annotation))
        return _known_of(models) if models else None

    def unknown_in(self, value: object, path: str = "") -> Iterator[str]:
        """Paths of unknown fields, as `messages.0.name`."""
        if isinstance(value, list):
            for index, item in enumerate(value):
                yield from self.unknown_in(item, f"{path}{index}.")
        elif isinstance(value, dict):
            if self.names is not None:
                for name in value.keys() - self.names:
                    yield path + _shown(name)
            for name in value.keys() & self.nested.keys():
                yield from self.nested[name].unknown_in(value[name], f"{path}{name}.")


@cache
def _known_of(models: tuple[type[BaseModel], ...]) -> KnownFields:
    """For a value of any of `models`: a field that one of them declares is known."""
    names: set[str] = set()
    types: dict[str, list[object]] = {}
    for model in models:
        for name, info in model.model_fields.items():
            alias = info.validation_alias if isinstance(info.validation_alias, str) else info.alias
            for spelling in {alias or name, name}:
                names.add(spelling)
                types.setdefault(spelling, []).append(info.annotation)
    is_open = any(model.model_config.get("extra") == "allow" for model in models)
    known = KnownFields(None if is_open else frozenset(names))
    for spelling, choices in types.items():
        within = tuple(dict.fromkeys(m for choice in choices for m in _models_in(choice)))
        if within and not set(within) & set(models):  # a recursive model is searched once
            known.nested[spelling] = _known_of(within)
    return known


def _models_in(annotation: object) -> Iterator[type[BaseModel]]:
    """Models that a value of this type is, or is a list of; not those in an object's values."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
        return
    origin = getattr(annotation, "__origin__", None)
    if origin is dict:
        return
    for part in get_args(annotation):
        yield from _models_in(part)


def warning_of(unknown: list[str]) -> str:
    """For a response header: ASCII, and bounded."""
    told = [f"unknown field {name!r} ignored" for name in unknown[:MAX_REPORTED]]
    if len(unknown) > MAX_REPORTED:
        told.append("and more")
    return "; ".join(told)


def _shown(name: str) -> str:
    return ascii(name[:MAX_SHOWN_CHARS])[1:-1]
