"""Regexes and flat schemas by outlines-core: an index of tokens by the states of an automaton.

The only importer of outlines-core. Its compiler of schemas drops in silence what it does not know,
and takes a pattern's alternatives for the whole document; so a schema is checked here first, and
what the index would not hold to is refused by name. So is a value of which nothing is asked, which
the compiler writes out to a depth: its index takes up to a minute, and a key may come twice. It
writes fewer texts than a schema allows: objects have listed properties alone, and of alternatives
of which one begins another the regex takes the first.

Source: Willard and Louf, "Efficient Guided Generation for Large Language Models", 2023.
"""

from __future__ import annotations

import functools
import importlib
import json
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any, Literal

import numpy as np

from ..errors import InvalidGrammar, MissingDependency, UnsupportedSchema
from .matcher import Mask, Matcher
from .vocabulary import MASK_BITS, Vocabulary

_ANNOTATIONS = frozenset(
    ("$schema", "$id", "$comment", "$defs", "definitions", "title", "description", "default",
     "examples", "deprecated", "readOnly", "writeOnly")
)  # fmt: skip
_KEYWORDS = {  # by the type beside which they are enforced
    "string": frozenset(("minLength", "maxLength")),
    "array": frozenset(("items", "minItems", "maxItems")),
    "object": frozenset(("properties", "required", "additionalProperties")),
    "integer": frozenset[str](),
    "number": frozenset[str](),
    "boolean": frozenset[str](),
    "null": frozenset[str](),
}
_MAX_DEPTH = 32
_TYPES: dict[str, Callable[[Any], bool]] = {
    "string": lambda v: isinstance(v, str),
    "array": lambda v: isinstance(v, list),
    "object": lambda v: isinstance(v, dict),
    "integer": lambda v: isinstance(v, int) and not isinstance(v, bool),
    "number": lambda v: isinstance(v, int | float) and not isinstance(v, bool),
    "boolean": lambda v: isinstance(v, bool),
    "null": lambda v: v is None,
}


def require_outlines() -> None:
    """Raises MissingDependency where it is not installed."""
    _outlines()


def regex_of_schema(schema: object) -> str:
    """The regex of a schema's documents, compact. Raises InvalidGrammar, UnsupportedSchema."""
    _require_supported(schema, schema, "", 0)
    outlines = importlib.import_module(f"{_outlines().__name__}.json_schema")
    try:
        return str(outlines.build_regex_from_schema(json.dumps(schema), ""))
    except ValueError as error:
        raise InvalidGrammar(f"outlines: {error}") from error


class OutlinesGrammar:
    """A regex's index over a vocabulary. Raises InvalidGrammar."""

    path: Literal["outlines"] = "outlines"
    warnings: tuple[str, ...] = ()

    def __init__(self, regex: str, vocabulary: Vocabulary, reason: str = "") -> None:
        self.reason = reason
        self.vocabulary = vocabulary
        self._num_bytes = len(regex)
        try:
            self.index: Any = _outlines().Index(regex, _vocabulary(vocabulary))
        except ValueError as error:
            raise InvalidGrammar(f"outlines: {error}") from error
        self._masks: dict[int, Mask] = {}

    @property
    def num_bytes(self) -> int:
        """Of its masks; the library does not say what the index holds. The process that it runs in
        is bounded."""
        return self._num_bytes + sum(mask.nbytes for mask in self._masks.values())

    def matcher(self) -> Matcher:
        return OutlinesMatcher(self, [self.index.get_initial_state()])

    def mask_of(self, state: int) -> Mask:
        """The tokens that may come next; kept, as few states are ever visited."""
        known = self._masks.get(state)
        if known is None:
            size = self.vocabulary.vocab_size
            allowed = self.index.get_allowed_tokens(state) or ()
            ids = np.fromiter((token for token in allowed if token < size), np.int64)
            known = np.zeros(self.vocabulary.num_words, np.uint32)
            bits = np.uint32(1) << (ids % MASK_BITS).astype(np.uint32)
            np.bitwise_or.at(known, ids // MASK_BITS, bits)
            self._masks[state] = known
        return known


class OutlinesMatcher:
    """One output's states, of which the last is where it stands."""

    def __init__(self, grammar: OutlinesGrammar, states: list[int]) -> None:
        self._grammar = grammar
        self._states = states

    def mask(self, out: Mask) -> None:
        out[:] = self._grammar.mask_of(self._states[-1])

    def consume(self, token_id: int) -> bool:
        following = None
        if token_id < self._grammar.vocabulary.vocab_size:
            following = self._grammar.index.get_next_state(self._states[-1], token_id)
        if following is None:
            return False
        self._states.append(following)
        return True

    def rollback(self, num_tokens: int) -> None:
        assert num_tokens < len(self._states), (num_tokens, len(self._states))
        del self._states[len(self._states) - num_tokens :]

    def fork(self) -> OutlinesMatcher:
        return OutlinesMatcher(self._grammar, self._states[:])

    def is_accepting(self) -> bool:
        return bool(self._grammar.index.is_final_state(self._states[-1]))

    def forced_tokens(self) -> Sequence[int]:
        """None: the library says nothing of text that must follow."""
        return ()

    def is_finished(self) -> bool:
        return self.is_accepting() and not self._grammar.mask_of(self._states[-1]).any()

    def error(self) -> str | None:
        return None


@functools.lru_cache(maxsize=1)
def _vocabulary(vocabulary: Vocabulary) -> Any:
    """Its end of sequence is a token behind the vocabulary, for which callers have their own."""
    ids: dict[bytes, list[int]] = {}
    for token_id, data in enumerate(vocabulary.token_bytes):
        if data:
            ids.setdefault(bytes(data), []).append(token_id)
    return _outlines().Vocabulary(vocabulary.vocab_size, ids)


def _require_supported(schema: object, root: object, pointer: str, depth: int) -> None:
    if depth > _MAX_DEPTH:
        raise _unsupported(pointer, "$ref", "it is recursive, or nested too deeply")
    if not isinstance(schema, dict):
        raise _unsupported(pointer, str(schema), "the backend has no schemas true and false")
    words = schema.keys() - _ANNOTATIONS
    kind = schema.get("type")
    if "$ref" in words:
        target = _only(words, "$ref", pointer) and _target(schema["$ref"], root, pointer)
        return _require_supported(target, root, f"{pointer}/$ref", depth + 1)
    if "anyOf" in words:
        _only(words, "anyOf", pointer)
        for number, part in enumerate(_listed(schema["anyOf"], pointer, "anyOf")):
            _require_supported(part, root, f"{pointer}/anyOf/{number}", depth + 1)
        return None
    if values := words & {"enum", "const"}:
        name = next(iter(values))
        found = [schema["const"]] if name == "const" else schema["enum"]
        for word in words - {name, "type"}:
            raise _unsupported(pointer, word, f"the backend does not enforce it beside {name}")
        types = [kind] if isinstance(kind, str) else kind or [*_TYPES]
        if not all(any(_TYPES[one](value) for one in types) for value in found):
            raise _unsupported(pointer, "type", f"the backend does not enforce it beside {name}")
        return None
    if isinstance(kind, list):
        _only(words, "type", pointer)
        if not {"array", "object"}.isdisjoint(kind):
            raise _unsupported(pointer, "type", "of several types none may be array or object")
        return None
    if not isinstance(kind, str) or kind not in _KEYWORDS:
        word = next(iter(sorted(words)), "type")
        raise _unsupported(pointer, word, 'the backend enforces it only beside one "type"')
    for word in sorted(words - _KEYWORDS[kind] - {"type"}):
        raise _unsupported(pointer, word, f"the backend does not enforce it of {kind!r}")
    if kind == "array":
        if "items" not in schema:
            raise _unsupported(pointer, "type", "the backend needs items beside 'array'")
        _require_supported(schema["items"], root, f"{pointer}/items", depth + 1)
    if kind == "object":
        _require_object(schema, root, pointer, depth)
    return None


def _require_object(schema: dict[str, Any], root: object, pointer: str, depth: int) -> None:
    listed = schema.get("properties", {})
    for name in schema.get("required", ()):
        if name not in listed:
            raise _unsupported(pointer, "required", f"{name!r} is not among properties")
    if not listed:
        raise _unsupported(pointer, "type", "the backend needs properties beside 'object'")
    for name, part in listed.items():
        _require_supported(part, root, f"{pointer}/properties/{name}", depth + 1)


def _only(words: frozenset[str] | set[str], name: str, pointer: str) -> bool:
    for word in sorted(words - {name}):
        raise _unsupported(pointer, word, f"the backend does not enforce it beside {name}")
    return True


def _listed(value: object, pointer: str, keyword: str) -> Sequence[object]:
    if not isinstance(value, list) or not value:
        raise _unsupported(pointer, keyword, "a list of schemas is expected")
    return value


def _target(reference: object, root: object, pointer: str) -> object:
    if not isinstance(reference, str) or not reference.startswith("#/"):
        raise _unsupported(pointer, "$ref", "the backend follows `#/..` alone")
    found = root
    for step in reference[2:].split("/"):
        name = step.replace("~1", "/").replace("~0", "~")
        if not isinstance(found, dict) or name not in found:
            raise _unsupported(pointer, "$ref", f"{reference!r} is not in the document")
        found = found[name]
    return found


def _unsupported(pointer: str, keyword: str, reason: str) -> UnsupportedSchema:
    remedy = "leave it out, or use --grammar-backend stemma"
    return UnsupportedSchema(pointer, keyword, f"{reason}; {remedy}")


@functools.cache
def _outlines() -> ModuleType:
    try:
        return importlib.import_module("outlines_core")
    except ImportError as error:
        raise MissingDependency(
            "outlines-core", "outlines", "--grammar-backend outlines"
        ) from error
