"""Words in a schema that are no keywords: a validator passes them over, and so does a grammar.

Most are annotations of some tool. Some are a keyword that was meant, and nothing else would tell.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from .keywords import KEYWORDS

# The standard's words that restrict nothing, of any dialect, and OpenAPI's.
_ANNOTATIONS = frozenset(
    ("$schema", "$comment", "$vocabulary", "$recursiveAnchor", "id", "title", "description",
     "default", "examples", "deprecated", "readOnly", "writeOnly", "contentSchema",
     "discriminator", "xml", "externalDocs", "example")
)  # fmt: skip
_ONE = ("not", "if", "then", "else", "items", "additionalItems", "contains", "unevaluatedItems",
        "additionalProperties", "propertyNames", "unevaluatedProperties")  # fmt: skip
_LISTS = ("allOf", "anyOf", "oneOf", "prefixItems", "items")
_NAMED = ("$defs", "definitions", "properties", "patternProperties", "dependentSchemas",
          "dependencies")  # fmt: skip
_LIKENESS = 0.8  # of `requird` and `required` it is 0.93, of `values` and `enum` 0.2
_MEANT = {"nullable": "type", "optional": "required", "min": "minimum", "max": "maximum"}


@dataclass(frozen=True, slots=True)
class UnknownKeyword:
    """A word at a subschema, and the keyword that it may have been meant to be."""

    pointer: str
    word: str
    meant: str | None

    def __str__(self) -> str:
        asked = f"; is `{self.meant}` meant?" if self.meant else ""
        return f"{self.pointer or '/'}: {self.word} is no keyword, and ignored{asked}"


def unknown_keywords(schema: object) -> Iterator[UnknownKeyword]:
    """Those of a schema and all its subschemas, but for extensions, `x-...`."""
    pending = [("", schema)]
    while pending:
        pointer, one = pending.pop()
        if not isinstance(one, dict):
            continue
        for word in one:
            if word not in KEYWORDS and word not in _ANNOTATIONS and not word.startswith("x-"):
                yield UnknownKeyword(pointer, word, _keyword_like(word))
        pending += reversed(list(_inner(one, pointer)))


def _inner(schema: dict[str, Any], pointer: str) -> Iterator[tuple[str, object]]:
    for keyword, value in schema.items():
        at = f"{pointer}/{keyword}"
        if isinstance(value, dict) and keyword in _NAMED:
            for name, inner in value.items():
                yield f"{at}/{name.replace('~', '~0').replace('/', '~1')}", inner
        elif isinstance(value, list) and keyword in _LISTS:
            yield from ((f"{at}/{index}", inner) for index, inner in enumerate(value))
        elif keyword in _ONE:
            yield at, value


def _keyword_like(word: str) -> str | None:
    by_letters = {_letters(keyword): keyword for keyword in KEYWORDS}
    close = difflib.get_close_matches(_letters(word), by_letters, n=1, cutoff=_LIKENESS)
    return by_letters[close[0]] if close else _MEANT.get(word)


def _letters(word: str) -> str:
    return re.sub(r"[^a-z]", "", word.lower())
