"""Other engines' compilers behind the same grammars: what each takes, and what it refuses by name.

    llguidance   regexes, choices, schemas by its own compiler, Lark and GBNF; no structural tags
    outlines     regexes, choices, and flat schemas (`outlines_index.py`); nothing recursive

Each is followed as its own project does, in a process beside the engine as a parser is. llguidance
does not keep a key that a schema leaves open from coming twice.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import get_args

from ..errors import InvalidGrammar
from .compiled_grammar import CompiledGrammar
from .gbnf import is_gbnf
from .lark import regex_of_text
from .outlines_index import regex_of_schema, require_outlines
from .pushdown import check_lark, gbnf_to_lark
from .spec import Backend, GrammarSpec

BACKENDS: tuple[Backend, ...] = get_args(Backend)


def require_backend(backend: Backend) -> None:
    """Raises MissingDependency where its package is not installed."""
    if backend == "outlines":
        require_outlines()


def compile_by_backend(spec: GrammarSpec) -> CompiledGrammar:
    """By the spec's backend, which is another than ours. Raises InvalidGrammar."""
    if spec.property_order != "schema":
        raise _unsupported(spec, "property_order", spec.property_order, "schema")
    compilers = _LLGUIDANCE if spec.backend == "llguidance" else _OUTLINES
    if spec.kind not in compilers:
        raise InvalidGrammar(
            f"the grammar backend {spec.backend!r} has no {spec.kind}, but has: "
            f"{', '.join(compilers)}; --grammar-backend stemma has all",
            spec.kind,
        )
    source = compilers[spec.kind](spec)
    reason = f"--grammar-backend {spec.backend}"
    schema = spec.source if spec.kind == "json_schema" and spec.is_lenient else None
    if spec.backend == "outlines":
        return CompiledGrammar("outlines", reason, regex=source)
    warnings = check_lark(source)
    return CompiledGrammar("llguidance", reason, lark=source, warnings=warnings, schema=schema)


def _choices(spec: GrammarSpec) -> list[str]:
    choices = _json(spec)
    if not isinstance(choices, list) or not all(isinstance(text, str) for text in choices):
        raise InvalidGrammar("a JSON array of texts is expected")
    return choices


def _json(spec: GrammarSpec) -> object:
    try:
        return json.loads(spec.source or '{"type":"object"}')
    except ValueError as error:
        raise InvalidGrammar(f"not JSON: {error}") from error


def _lark_of_regex(spec: GrammarSpec) -> str:
    source = spec.source.replace("\\/", "/").replace("/", "\\/").replace("\n", "\\n")
    return f"start: /{source or '(?:)'}/"


def _lark_of_choices(spec: GrammarSpec) -> str:
    return f"start: /{'|'.join(map(regex_of_text, _choices(spec))) or '(?:)'}/"


def _lark_of_schema(spec: GrammarSpec) -> str:
    schema = _json(spec)
    if spec.formats != "enforce":
        raise _unsupported(spec, "formats", spec.formats, "enforce")
    if schema is False:
        raise InvalidGrammar("the schema matches no document")
    if not isinstance(schema, dict):
        schema = {}
    options = {"whitespace_flexible": spec.whitespace == "flexible", "lenient": spec.is_lenient}
    return f"start: %json {json.dumps({**schema, 'x-guidance': options})}"


def _lark_of_rules(spec: GrammarSpec) -> str:
    return gbnf_to_lark(spec.source) if is_gbnf(spec.source) else spec.source


def _regex_of_choices(spec: GrammarSpec) -> str:
    # The first alternative that matches is taken: longer ones come first.
    return "|".join(map(regex_of_text, sorted(_choices(spec), key=len, reverse=True)))


def _regex_of_schema(spec: GrammarSpec) -> str:
    if spec.whitespace != "compact":
        raise _unsupported(spec, "whitespace", spec.whitespace, "compact")
    if spec.is_lenient:
        raise _unsupported(spec, "lenient", True, "false")
    return regex_of_schema(_json(spec))


def _unsupported(spec: GrammarSpec, name: str, value: object, allowed: str) -> InvalidGrammar:
    return InvalidGrammar(
        f"{name}: {value!r} is not supported by the grammar backend {spec.backend!r}, but "
        f"{allowed!r} is; --grammar-backend stemma has all",
        spec.kind,
    )


_LLGUIDANCE: dict[str, Callable[[GrammarSpec], str]] = {
    "regex": _lark_of_regex,
    "choices": _lark_of_choices,
    "json_schema": _lark_of_schema,
    "json_object": _lark_of_schema,
    "ebnf": _lark_of_rules,
}
_OUTLINES: dict[str, Callable[[GrammarSpec], str]] = {
    "regex": lambda spec: spec.source,
    "choices": _regex_of_choices,
    "json_schema": _regex_of_schema,
}
