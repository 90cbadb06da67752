"""The tokens' bytes as grammars need them: as a trie, and with plain text separated.

A grammar reads bytes, a model writes tokens.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from .mask_cache import MaskCache
from .matcher import Mask
from .token_trie import Ints, Trie, build_trie

MASK_BITS = 32
MASK_CACHE_BYTES = 256 * 1024 * 1024  # 16,000 masks of 128k tokens, or 0.8 million of 256
MAX_RUN = 64  # characters; longer tokens are rare, and every length costs a mask
_PLAIN = re.compile(rb'[^\x00-\x1f"\\]+')


class Vocabulary:
    """The bytes of every token id. Shared by all grammars of an engine, as is its mask cache.

    `token_bytes[i]` is None or b"" for an id that is never part of a grammar's text (special
    tokens, unused ids); ids from its end up to `vocab_size` are unused. `encode` gives the
    canonical ids of plain text, as the model was trained to see it.
    """

    def __init__(
        self,
        token_bytes: Sequence[bytes | None],
        encode: Callable[[str], Sequence[int]],
        vocab_size: int,
        mask_cache_bytes: int = MASK_CACHE_BYTES,
    ) -> None:
        assert len(token_bytes) <= vocab_size, (len(token_bytes), vocab_size)
        padding = (b"",) * (vocab_size - len(token_bytes))
        self.token_bytes = tuple(data or b"" for data in token_bytes) + padding
        self.encode = encode
        self.vocab_size = vocab_size
        self.masks = MaskCache(mask_cache_bytes)

    def __reduce__(self) -> tuple[object, ...]:
        """Without what is built on use. `encode` has to be picklable."""
        fields = (self.token_bytes, self.encode, self.vocab_size, self.masks.max_bytes)
        return type(self), fields

    @property
    def num_words(self) -> int:
        """Number of words in a mask."""
        return -(-self.vocab_size // MASK_BITS)

    @functools.cached_property
    def written_ids(self) -> tuple[int, ...]:
        """Ids that write something, ascending."""
        return tuple(i for i, data in enumerate(self.token_bytes) if data)

    @functools.cached_property
    def writes_all_bytes(self) -> bool:
        """Whether every byte is a token, so that every text can be written."""
        return len({data for data in self.token_bytes if len(data) == 1}) == 256

    @functools.cached_property
    def max_token_bytes(self) -> int:
        """Length of the longest token."""
        return max(map(len, self.token_bytes), default=0)

    @functools.cached_property
    def trie(self) -> Trie:
        """The trie of all tokens that write something."""
        return build_trie(self.token_bytes, self.written_ids)

    @functools.cached_property
    def slices(self) -> Slices:
        """The tokens that are plain text, separate from the others."""
        return _slices(self)

    def mask_of(self, token_ids: npt.ArrayLike) -> Mask:
        """A mask with these bits set."""
        bits = np.zeros(self.num_words * MASK_BITS, np.bool_)
        bits[np.asarray(token_ids, np.int64)] = True
        return np.packbits(bits, bitorder="little").view("<u4").astype(np.uint32, copy=False)


def single_bytes(vocab_size: int = 256) -> Vocabulary:
    """Each byte a token: what a grammar allows, byte by byte."""
    return Vocabulary([bytes([i]) for i in range(256)], _encode_bytes, vocab_size)


def _encode_bytes(text: str) -> list[int]:
    return list(text.encode())


@dataclass(frozen=True, slots=True, eq=False)
class Slices:
    """Tokens that lie wholly within the body of a JSON string, by their number of characters.

    Such a token is plain text: whole UTF-8 characters without control, quote or backslash. Where a
    grammar lets any such text follow, their mask needs no walk; only the others do.
    """

    upto: npt.NDArray[np.uint32]  # [max_run + 1, num_words]: with at most that many characters
    other: Trie  # the tokens that are not plain text, or longer than max_run
    plain: Trie
    longest: Ints  # [num_nodes of plain]: most characters of a token of the subtree

    @property
    def max_run(self) -> int:
        """Characters of the longest plain token."""
        return len(self.upto) - 1


def plain_length(data: bytes) -> int:
    """Characters of a token that is plain text; 0: it is not."""
    if not _PLAIN.fullmatch(data):
        return 0
    try:
        return len(data.decode())
    except UnicodeDecodeError:
        return 0


def _slices(vocabulary: Vocabulary) -> Slices:
    lengths = np.array([plain_length(data) for data in vocabulary.token_bytes], np.int32)
    lengths[lengths > MAX_RUN] = 0
    upto = [vocabulary.mask_of(np.flatnonzero((lengths > 0) & (lengths <= most)))
            for most in range(int(lengths.max(initial=0)) + 1)]  # fmt: skip
    plain = build_trie(vocabulary.token_bytes, np.flatnonzero(lengths).tolist())
    other = [i for i in vocabulary.written_ids if not lengths[i]]
    bounds = np.stack([plain.first[:-1], plain.first[plain.end]], axis=1).ravel()
    in_order = np.append(lengths[plain.token_ids], np.int32(0))
    return Slices(
        upto=np.stack(upto),
        other=build_trie(vocabulary.token_bytes, other),
        plain=plain,
        longest=np.maximum.reduceat(in_order, bounds)[::2],
    )
