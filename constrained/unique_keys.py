"""Objects whose keys come once each, where the grammar cannot say so.

RFC 8259, section 4, leaves a key that comes twice without a meaning. Keys that a schema lists are
each written once by its grammar; of free keys no automaton knows which it has seen. A matcher put
around another scans what is written as JSON and takes out of each mask the tokens that would end a
key already seen in its object: those that continue the key up to its quote, a contiguous range in
the order of tokens' bytes, and those that contain it quoted as a whole.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from .matcher import BoundGrammar, Mask, Matcher, Path
from .vocabulary import Vocabulary

QUOTE, BACKSLASH = 0x22, 0x5C
_QUOTED = re.compile(rb'(?="((?:[^"\\]|\\.)*)")', re.DOTALL)


@dataclass(frozen=True, slots=True)
class Scan:
    """Where in a JSON text the bytes so far end."""

    objects: tuple[frozenset[str] | None, ...] = ()  # keys of each open object; None: an array
    awaits_key: bool = False
    string: bytes | None = None  # what of the open string is written, after its quote
    repeats: bool = False  # a key has come twice

    @property
    def is_in_key(self) -> bool:
        """Whether a key is open."""
        return self.string is not None and self.awaits_key

    def after(self, data: bytes) -> Scan:
        """The place some bytes further."""
        scan = self
        for byte in data:
            scan = scan._inside(byte) if scan.string is not None else scan._outside(byte)
        return scan

    def _inside(self, byte: int) -> Scan:
        assert self.string is not None
        is_escaped = _is_escaping(self.string)
        if byte != QUOTE or is_escaped:
            if self.awaits_key:
                return replace(self, string=self.string + bytes([byte]))
            # Of a value, only whether the next character is escaped matters.
            is_escaping = byte == BACKSLASH and not is_escaped
            return replace(self, string=b"\\" if is_escaping else b"")
        if not self.awaits_key:
            return replace(self, string=None)
        keys = self.objects[-1]
        assert keys is not None
        key = _decoded(self.string)
        return Scan(
            objects=(*self.objects[:-1], keys | {key}),
            repeats=self.repeats or key in keys,
        )

    def _outside(self, byte: int) -> Scan:
        if byte == QUOTE:
            return replace(self, string=b"")
        if byte in b"{[":
            keys = frozenset[str]() if byte == ord("{") else None
            return replace(self, objects=(*self.objects, keys), awaits_key=byte == ord("{"))
        if byte in b"}]":
            return replace(self, objects=self.objects[:-1], awaits_key=False)
        if byte == ord(",") and self.objects:
            return replace(self, awaits_key=self.objects[-1] is not None)
        return self


class UniqueKeys:
    """A grammar of JSON texts, without those in which a key comes twice."""

    def __init__(self, inner: BoundGrammar, vocabulary: Vocabulary) -> None:
        self._inner = inner
        self._vocabulary = vocabulary

    @property
    def path(self) -> Path:
        return self._inner.path

    @property
    def reason(self) -> str:
        return self._inner.reason

    @property
    def warnings(self) -> tuple[str, ...]:
        return self._inner.warnings

    def matcher(self) -> Matcher:
        """At the grammar's beginning."""
        return UniqueKeysMatcher(self._inner.matcher(), self._vocabulary)


class UniqueKeysMatcher:
    """A matcher whose masks repeat no key, as long as anything else is allowed.

    `consume` and the forced tokens are those of the matcher within.
    """

    def __init__(self, inner: Matcher, vocabulary: Vocabulary) -> None:
        self._inner = inner
        self._vocabulary = vocabulary
        self._scans = [Scan()]

    def mask(self, out: Mask) -> None:
        self._inner.mask(out)
        candidates = _candidates(self._scans[-1], self._vocabulary)
        repeating = [token for token in candidates if _is_set(out, token) and self._repeats(token)]
        if not repeating:
            return
        kept = out.copy()
        for token in repeating:
            out[token >> 5] &= np.uint32(~(1 << (token & 31)) & 0xFFFFFFFF)
        if not out.any() and not self._inner.is_accepting():
            np.copyto(out, kept)

    def consume(self, token_id: int) -> bool:
        if not self._inner.consume(token_id):
            return False
        self._scans.append(self._scans[-1].after(self._vocabulary.token_bytes[token_id]))
        return True

    def _repeats(self, token: int) -> bool:
        before = replace(self._scans[-1], repeats=False)
        return before.after(self._vocabulary.token_bytes[token]).repeats

    def rollback(self, num_tokens: int) -> None:
        self._inner.rollback(num_tokens)
        if num_tokens:
            del self._scans[-num_tokens:]

    def is_accepting(self) -> bool:
        return self._inner.is_accepting()

    def forced_tokens(self) -> Sequence[int]:
        return self._inner.forced_tokens()

    def is_finished(self) -> bool:
        return self._inner.is_finished()

    def error(self) -> str | None:
        return self._inner.error()


def _candidates(scan: Scan, vocabulary: Vocabulary) -> set[int]:
    """Tokens that may end a key as one that was seen."""
    seen = [key for keys in scan.objects if keys for key in keys]
    if not seen:
        return set()
    whole = _tokens_with_key(vocabulary)
    candidates = {token for key in seen for token in whole.get(key, ())}
    return candidates.union(_closing_tokens(scan, vocabulary) if scan.is_in_key else ())


def _is_set(mask: Mask, token: int) -> bool:
    return bool(mask[token >> 5] >> (token & 31) & 1)


def _closing_tokens(scan: Scan, vocabulary: Vocabulary) -> Sequence[int]:
    """Those that may end the key that is open."""
    assert scan.string is not None and scan.objects[-1] is not None
    try:
        begun = _decoded(scan.string)
    except ValueError:  # within an escape or a character: few tokens continue that
        return _tokens_with_quote(vocabulary)
    closing: list[int] = []
    for key in scan.objects[-1]:
        if key.startswith(begun):
            rest = json.dumps(key[len(begun) :], ensure_ascii=False)[1:].encode()
            node = vocabulary.trie.find(rest)
            if node is not None:
                closing.extend(vocabulary.trie.tokens_below(node).tolist())
    return closing


@functools.lru_cache(maxsize=8)
def _tokens_with_key(vocabulary: Vocabulary) -> dict[str, list[int]]:
    """By each quoted text that they contain as a whole."""
    found: dict[str, list[int]] = {}
    for token in _tokens_with_quote(vocabulary):
        for quoted in _QUOTED.findall(vocabulary.token_bytes[token]):
            try:
                found.setdefault(_decoded(quoted), []).append(token)
            except ValueError:
                continue
    return found


@functools.lru_cache(maxsize=8)
def _tokens_with_quote(vocabulary: Vocabulary) -> list[int]:
    return [i for i in vocabulary.written_ids if QUOTE in vocabulary.token_bytes[i]]


def _decoded(string: bytes) -> str:
    """The text of a string's body. Raises ValueError where it ends within an escape."""
    if BACKSLASH not in string:
        return string.decode()
    text: str = json.loads(b'"' + string + b'"')
    return text


def _is_escaping(string: bytes) -> bool:
    """Whether the next character is escaped."""
    return (len(string) - len(string.rstrip(b"\\"))) % 2 == 1
