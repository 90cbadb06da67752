"""Sets of a vocabulary's tokens, asked for what a mask has of them."""

from __future__ import annotations

import bisect
import ctypes
from collections.abc import Collection, Iterable

import numpy as np

from .matcher import Mask
from .native.bindings import library
from .token_trie import Trie
from .vocabulary import MASK_BITS, Vocabulary


class TokenSet:
    """Some tokens, ascending. Thread-safe."""

    def __init__(self, tokens: Iterable[int]) -> None:
        self._ids = np.array(sorted(tokens), np.int32)
        self._room = ctypes.c_int32 * len(self._ids)
        self._own = (self._ids.ctypes.data, len(self._ids))
        self._native = library()

    def __contains__(self, token: int) -> bool:
        at = bisect.bisect_left(self._ids, token)
        return at < len(self._ids) and bool(self._ids[at] == token)

    def among(self, mask: Mask, but_for: Mask | None = None) -> list[int]:
        """Those that a mask allows, without those of another mask."""
        if not self._own[1]:
            return []
        if self._native is None:
            return self._among(mask, but_for)
        without = 0 if but_for is None else _address(but_for)
        found = self._room()
        num = self._native.stemma_tokens_among(*self._own, _address(mask), without, found)
        return found[:num] if num else []

    def any_among(self, mask: Mask, but_for: Mask | None = None) -> bool:
        """Whether there is one of those."""
        if not self._own[1]:
            return False
        if self._native is None:
            return bool(self._among(mask, but_for))
        without = 0 if but_for is None else _address(but_for)
        return bool(self._native.stemma_tokens_among(*self._own, _address(mask), without, None))

    def _among(self, mask: Mask, but_for: Mask | None) -> list[int]:
        allowed = mask if but_for is None else mask & ~but_for
        ids = self._ids
        bits = allowed[ids // MASK_BITS] >> (ids % MASK_BITS).astype(np.uint32) & 1
        found: list[int] = ids[bits.astype(np.bool_)].tolist()
        return found


def _address(mask: Mask) -> int:
    return ctypes.addressof(ctypes.c_uint32.from_buffer(mask.data))


def is_set(mask: Mask, token: int) -> bool:
    """Whether a mask has a token."""
    return bool(mask[token >> 5] >> (token & 31) & 1)


def set_token(mask: Mask, token: int) -> None:
    """Add a token to a mask."""
    mask[token >> 5] |= np.uint32(1 << (token & 31))


def clear_tokens(mask: Mask, tokens: Collection[int]) -> None:
    """Remove tokens from a mask."""
    if not tokens:
        return
    ids = np.fromiter(tokens, np.int64, len(tokens))
    bits = np.uint32(1) << (ids % MASK_BITS).astype(np.uint32)
    np.bitwise_and.at(mask, ids // MASK_BITS, ~bits)


def tokens_of(trie: Trie, data: bytes) -> list[int]:
    """Those that write exactly these bytes."""
    low, high = bisect.bisect_left(trie.keys, data), bisect.bisect_right(trie.keys, data)
    ids: list[int] = trie.token_ids[low:high].tolist()
    return ids


def tokens_from(trie: Trie, data: bytes) -> list[int]:
    """Those that begin with these bytes."""
    node = trie.find(data)
    ids: list[int] = [] if node is None else trie.tokens_below(node).tolist()
    return ids


def byte_tokens(vocabulary: Vocabulary) -> list[int]:
    """[256]: the token that writes each byte alone, or -1."""
    of_byte = {data[0]: i for i, data in enumerate(vocabulary.token_bytes) if len(data) == 1}
    return [of_byte.get(byte, -1) for byte in range(256)]
