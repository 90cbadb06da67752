"""The tokens' bytes as grammars need them: a flat trie in depth-first order.

A grammar reads bytes, a model writes tokens: a mask is found by walking all tokens at once, sharing
their common prefixes (the trie is that of SGLang's and llguidance's token walks). Depth-first order
makes a walk one forward scan in which a dead branch is one jump.
"""

from __future__ import annotations

import bisect
import functools
import itertools
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from .mask_cache import MaskCache
from .matcher import Mask

Ints = npt.NDArray[np.int32]
MASK_BITS = 32
MASK_CACHE_BYTES = 256 * 1024 * 1024  # 16,000 masks of 128k tokens
MAX_RUN = 64  # characters; longer tokens are rare, and every length costs a mask
_PLAIN = re.compile(rb'[^\x00-\x1f"\\]+')


class Vocabulary:
    """What every token id writes. Shared by all grammars of an engine, as is its cache of masks.

    `token_bytes[i]` is None or b"" for an id that is never part of a grammar's text (special
    tokens, unused ids); ids from its end up to `vocab_size` are unused. `encode` gives the ids of
    plain text, canonical: as the model was trained to see it.
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

    @property
    def num_words(self) -> int:
        """Words of a mask."""
        return -(-self.vocab_size // MASK_BITS)

    @functools.cached_property
    def written_ids(self) -> tuple[int, ...]:
        """Ids that write something, ascending."""
        return tuple(i for i, data in enumerate(self.token_bytes) if data)

    @functools.cached_property
    def max_token_bytes(self) -> int:
        """Length of the longest token."""
        return max(map(len, self.token_bytes), default=0)

    @functools.cached_property
    def trie(self) -> Trie:
        """Of all tokens that write something."""
        return build_trie(self.token_bytes, self.written_ids)

    @functools.cached_property
    def slices(self) -> Slices:
        """The tokens that are plain text, apart from the others."""
        return _slices(self)

    def mask_of(self, token_ids: npt.ArrayLike) -> Mask:
        """A mask with these bits set."""
        bits = np.zeros(self.num_words * MASK_BITS, np.bool_)
        bits[np.asarray(token_ids, np.int64)] = True
        return np.packbits(bits, bitorder="little").view("<u4").astype(np.uint32, copy=False)


@dataclass(frozen=True, slots=True, eq=False)
class Slices:
    """Tokens that lie wholly within the body of a JSON string, by their number of characters.

    Such a token is plain text: whole UTF-8 characters without control, quote or backslash. Where a
    grammar lets any such text follow, their mask needs no walk; only the others do.
    """

    upto: npt.NDArray[np.uint32]  # [max_run + 1, num_words]: of at most so many characters
    other: Trie  # the tokens that are not plain text, or longer than max_run
    plain: Trie
    longest: Ints  # [num_nodes of plain]: most characters of a token of the subtree

    @property
    def max_run(self) -> int:
        """Characters of the longest plain token."""
        return len(self.upto) - 1


@dataclass(frozen=True, slots=True, eq=False)
class Trie:
    """Nodes in depth-first order, children by ascending byte; node 0 is the root.

    The subtree of a node is `[node, end[node])`. The tokens that end at a node, which are several
    where ids write the same bytes, are `token_ids[first[node]:first[node + 1]]`; so the tokens of a
    whole subtree are one slice as well, and `token_ids` is in the order of the tokens' bytes.
    """

    byte: npt.NDArray[np.uint8]  # [num_nodes]: on the edge from the parent
    depth: Ints  # [num_nodes]
    end: Ints  # [num_nodes]
    first: Ints  # [num_nodes + 1]
    token_ids: Ints  # [num_tokens]
    keys: list[bytes]  # of token_ids, ascending

    @property
    def num_nodes(self) -> int:
        """The root included."""
        return len(self.byte)

    def find(self, prefix: bytes) -> int | None:
        """The node at which tokens with this prefix begin; None: there are none."""
        token = bisect.bisect_left(self.keys, prefix)
        if token == len(self.keys) or not self.keys[token].startswith(prefix):
            return None
        node = int(np.searchsorted(self.first, token, side="right")) - 1
        # The token before has not this prefix, so the nodes from there on follow one another.
        return node - (len(self.keys[token]) - len(prefix))

    def tokens_below(self, node: int) -> Ints:
        """Of the node and its subtree."""
        return self.token_ids[self.first[node] : self.first[self.end[node]]]


def build_trie(token_bytes: Sequence[bytes], ids: Sequence[int]) -> Trie:
    """The trie of some tokens, none of them empty.

    Tokens are sorted; each adds the nodes beyond the prefix that it shares with the one before it.
    A node ends where the first later token shares less than the node's depth.
    """
    ids = sorted(ids, key=token_bytes.__getitem__)
    keys = [token_bytes[i] for i in ids]
    lengths = np.array([len(key) for key in keys], np.int64)
    data = np.frombuffer(b"".join(keys), np.uint8)
    starts = np.cumsum(lengths) - lengths
    shared = _shared_prefixes(data, starts, lengths)
    token_of = np.repeat(np.arange(len(ids)), lengths)
    depth = np.arange(len(data)) - starts[token_of] + 1
    is_new = depth > shared[token_of]
    depth, token_of = depth[is_new], token_of[is_new]
    first_node = np.concatenate([[1], 1 + np.cumsum(lengths - shared)])  # of each token; then all
    num_nodes = int(first_node[-1])
    tokens_at = np.bincount(first_node[1:] - 1, minlength=num_nodes)
    return Trie(
        byte=np.concatenate([np.zeros(1, np.uint8), data[is_new]]),
        depth=_ints(np.concatenate([[0], depth])),
        end=_ints(np.concatenate([[num_nodes], _ends(depth, token_of, shared, first_node)])),
        first=_ints(np.concatenate([[0], np.cumsum(tokens_at)])),
        token_ids=_ints(np.array(ids, np.int64)),
        keys=keys,
    )


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


def _shared_prefixes(
    data: npt.NDArray[np.uint8], starts: npt.NDArray[np.int64], lengths: npt.NDArray[np.int64]
) -> npt.NDArray[np.int64]:
    """How many bytes each token has in common with the one before it."""
    shared = np.zeros(len(starts), np.int64)
    alike = np.arange(1, len(starts))
    length = 0
    while len(alike):
        alike = alike[(lengths[alike] > length) & (lengths[alike - 1] > length)]
        alike = alike[data[starts[alike] + length] == data[starts[alike - 1] + length]]
        length += 1
        shared[alike] = length
    return shared


def _ends(
    depth: npt.NDArray[np.int64],
    token_of: npt.NDArray[np.int64],
    shared: npt.NDArray[np.int64],
    first_node: npt.NDArray[np.int64],
) -> npt.NDArray[np.int64]:
    """For each node but the root, depth by depth."""
    ends = np.empty(len(depth), np.int64)
    by_depth = np.argsort(depth, kind="stable")
    bounds = np.searchsorted(depth[by_depth], np.arange(1, depth.max(initial=0) + 2))
    for level, (low, high) in enumerate(itertools.pairwise(bounds), start=1):
        nodes = by_depth[low:high]
        leavers = np.append(np.flatnonzero(shared < level), len(shared))
        ends[nodes] = first_node[leavers[np.searchsorted(leavers, token_of[nodes], side="right")]]
    return ends


def _ints(values: npt.NDArray[np.int64]) -> Ints:
    return np.ascontiguousarray(values, np.int32)
