"""A requested grammar: a language, as regex, choices, JSON Schema, grammar or tags."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

GrammarKind = Literal["regex", "choices", "json_schema", "json_object", "ebnf", "structural_tag"]
Whitespace = Literal["compact", "flexible"]
PropertyOrder = Literal["schema", "any"]
Formats = Literal["enforce", "ignore"]
Backend = Literal["stemma", "llguidance", "outlines"]
"""Whose compiler makes the grammar."""


@dataclass(frozen=True, slots=True)
class GrammarSpec:
    """A language as the caller specified it; hashable, so that equal ones are compiled once.

    `source` is, by kind: the regex; a JSON array of texts; the schema as JSON text; nothing; a
    grammar in Lark's or GBNF's syntax; a structural tag as JSON text.
    """

    kind: GrammarKind
    source: str = ""
    whitespace: Whitespace = "compact"  # between JSON's tokens
    property_order: PropertyOrder = "schema"
    is_lenient: bool = False  # enforce what can be, validate the rest afterwards
    formats: Formats = "enforce"  # of strings in a schema
    backend: Backend = "stemma"
