"""A Python function's parameters as JSON Schema, and arguments checked against them, by pydantic.

Descriptions come from the docstring, in Google's, NumPy's or Sphinx' style, or from
`Annotated[str, "what it is"]`.
"""

from __future__ import annotations

import functools
import inspect
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import docstring_parser
import pydantic
from pydantic.json_schema import GenerateJsonSchema

from ...errors import InvalidProgram, InvalidRequest
from .typed import problems_of

_BY_NAME = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
_LITERAL_KEYS = frozenset(("default", "const", "enum", "examples"))  # whose values are no schemas


@dataclass(frozen=True, slots=True)
class ToolSignature:
    """What a function takes. `parameters`: JSON Schema of an object with its arguments."""

    description: str
    parameters: dict[str, Any]
    _model: type[pydantic.BaseModel]
    _names: Mapping[str, str]  # of parameters, by the model's fields

    def arguments(self, text: str) -> dict[str, Any]:
        """Keyword arguments, as the annotations say, from JSON text. Raises InvalidRequest that
        says of each what is wrong with it."""
        try:
            values = self._model.model_validate_json(text or "{}")
        except pydantic.ValidationError as error:
            raise InvalidRequest(problems_of(error)) from error
        given = values.model_fields_set
        return {
            name: getattr(values, field) for field, name in self._names.items() if field in given
        }


def signature_of(fn: Callable[..., Any], name: str) -> ToolSignature:
    """Raises InvalidProgram for a parameter that a model could not give."""
    told = docstring_parser.parse(inspect.getdoc(_called(fn)) or "")
    described = {param.arg_name: param.description or "" for param in told.params}
    hints = _hints_of(fn, name)
    fields: dict[str, Any] = {}
    names: dict[str, str] = {}
    for index, parameter in enumerate(_parameters_of(fn, name)):
        _require_usable(parameter, hints, name)
        field = f"f{index}"  # a parameter may be called like an attribute of the model
        names[field] = parameter.name
        fields[field] = _field(parameter, hints[parameter.name], described)
    try:
        config = pydantic.ConfigDict(extra="forbid", arbitrary_types_allowed=False)
        model = pydantic.create_model(name, __config__=config, **fields)
        schema = model.model_json_schema(by_alias=True, schema_generator=_Untitled)
    except (pydantic.errors.PydanticUserError, TypeError, NameError) as error:
        raise InvalidProgram(f"tool {name}: its parameters are no JSON: {error}", name) from error
    text = "\n\n".join(part for part in (told.short_description, told.long_description) if part)
    shown = {"type": "object", "properties": {}, **_without_titles(schema)}
    return ToolSignature(text, shown, model, names)


class _Untitled(GenerateJsonSchema):
    """Without titles, which are prompt tokens that say nothing."""

    ignored_warning_kinds = {"skipped-choice", "non-serializable-default"}  # noqa: RUF012

    def field_title_should_be_set(self, schema: Any) -> bool:
        return False


def _called(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Of which a partial is."""
    while isinstance(fn, functools.partial):
        fn = fn.func
    return fn


def _parameters_of(fn: Callable[..., Any], name: str) -> list[inspect.Parameter]:
    """Without those that a partial has given: these are not the model's to choose."""
    try:
        parameters = inspect.signature(fn).parameters.values()
    except ValueError as error:
        raise InvalidProgram(f"tool {name}: {error}", name) from error
    given = fn.keywords if isinstance(fn, functools.partial) else {}
    return [parameter for parameter in parameters if parameter.name not in given]


def _hints_of(fn: Callable[..., Any], name: str) -> dict[str, Any]:
    fn = _called(fn)
    called = fn if inspect.isroutine(fn) else getattr(fn, "__call__", fn)  # noqa: B004
    try:
        return typing.get_type_hints(called, include_extras=True)
    except (NameError, TypeError) as error:
        raise InvalidProgram(
            f"tool {name}: an annotation cannot be read: {error}; with `from __future__ import "
            "annotations` types have to be those of the module",
            name,
        ) from error


def _require_usable(parameter: inspect.Parameter, hints: Mapping[str, Any], name: str) -> None:
    if parameter.kind not in _BY_NAME:
        allowed = "parameters with names: a model's call has its arguments by name"
        raise InvalidProgram.of(f"tool {name}", str(parameter), allowed)
    if parameter.name not in hints:
        allowed = f"an annotation, as in {parameter.name}: str, from which the model is told"
        raise InvalidProgram.of(f"tool {name}: {parameter.name}", "no annotation", allowed)


def _field(
    parameter: inspect.Parameter, annotation: Any, described: Mapping[str, str]
) -> tuple[Any, Any]:
    metadata = getattr(annotation, "__metadata__", ())
    said = described.get(parameter.name) or next((m for m in metadata if isinstance(m, str)), None)
    default = ... if parameter.default is parameter.empty else parameter.default
    return annotation, pydantic.Field(default, alias=parameter.name, description=said)


def _without_titles(schema: Any) -> Any:
    if isinstance(schema, list):
        return [_without_titles(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    return {
        key: value if key in _LITERAL_KEYS else _without_titles(value)
        for key, value in schema.items()
        if not (key == "title" and isinstance(value, str))
    }
