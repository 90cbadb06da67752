"""Tokens by their bytes: a flat trie in depth-first order.

Depth-first order makes a walk of all tokens one forward scan, in which a dead branch is one jump
(the layout of llguidance's token trie). Building is one sort, then one pass over neighbours:
`native/src/trie.cpp`, or numpy.
"""

from __future__ import annotations

import bisect
import ctypes
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from .native.bindings import library

Ints: TypeAlias = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True, eq=False)
class Trie:
    """Nodes in depth-first order, children by ascending byte; node 0 is the root.

    The subtree of a node is `[node, end[node])`. The tokens that end at a node (several where ids
    write the same bytes) are `token_ids[first[node]:first[node + 1]]`; so the tokens of a whole
    subtree are one slice as well, and `token_ids` is in the order of the tokens' bytes.
    """

    byte: npt.NDArray[np.uint8]  # [num_nodes]: on the edge from the parent
    depth: Ints  # [num_nodes]
    end: Ints  # [num_nodes]
    first: Ints  # [num_nodes + 1]
    token_ids: Ints  # [num_tokens]
    keys: list[bytes]  # of token_ids, ascending

    @property
    def num_nodes(self) -> int:
        """Including the root."""
        return len(self.byte)

    def find(self, prefix: bytes) -> int | None:
        """The node at which tokens with this prefix begin; None: there are none."""
        token = bisect.bisect_left(self.keys, prefix)
        if token == len(self.keys) or not self.keys[token].startswith(prefix):
            return None
        # NOTE: an int would have numpy copy the whole array first.
        node = int(self.first.searchsorted(np.int32(token), side="right")) - 1
        # The token before lacks this prefix, so the nodes from there on follow one another.
        return node - (len(self.keys[token]) - len(prefix))

    def tokens_below(self, node: int) -> Ints:
        """Tokens of the node and its subtree."""
        return self.token_ids[self.first[node] : self.first[self.end[node]]]


def build_trie(token_bytes: Sequence[bytes], ids: Sequence[int]) -> Trie:
    """The trie of some tokens, none of them empty; `ids` ascending."""
    native = library()
    if native is None:
        return numpy_trie(token_bytes, ids)
    return native_trie(native, token_bytes, ids)


def native_trie(native: ctypes.CDLL, token_bytes: Sequence[bytes], ids: Sequence[int]) -> Trie:
    """The trie, built in C++."""
    texts = [token_bytes[i] for i in ids]
    data = b"".join(texts)
    offsets = np.zeros(len(texts) + 1, np.int64)
    np.cumsum([len(text) for text in texts], out=offsets[1:])
    order, byte = np.empty(len(texts), np.int32), np.empty(len(data) + 1, np.uint8)
    depth, end = (np.empty(len(data) + 1, np.int32) for _ in range(2))
    first = np.empty(len(data) + 2, np.int32)
    num_nodes = native.stemma_build_trie(
        data, offsets.ctypes.data, len(texts), order.ctypes.data, byte.ctypes.data,
        depth.ctypes.data, end.ctypes.data, first.ctypes.data,
    )  # fmt: skip
    return Trie(
        byte=byte[:num_nodes].copy(),
        depth=depth[:num_nodes].copy(),
        end=end[:num_nodes].copy(),
        first=first[: num_nodes + 1].copy(),
        token_ids=np.asarray(ids, np.int32)[order],
        keys=[texts[i] for i in order.tolist()],
    )


def numpy_trie(token_bytes: Sequence[bytes], ids: Sequence[int]) -> Trie:
    """The trie, built without a compiler.

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
    """The end of each node but the root, depth by depth."""
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
