"""KV that leaves or enters an engine whose ranks have some of its heads each (tensor parallelism).

Outside of the engine KV is of all heads: rank 0 joins what the ranks have, and sends each its part.
So stored blocks, and KV that engines send each other, are the same for any number of ranks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt
import torch

from ...kernels.ops import Communicator
from ..checkpoint.parts import Range
from .copies import BlockRestore, BlockSave
from .device_pool import DeviceKVPool
from .disk.block_file import Payload
from .disk.block_key import BLOCK_TOKENS
from .host_pool import HostKVPool
from .transfer import KVTransfer

_NOTHING = np.empty(0, dtype=np.uint8)


class JoinedHeads:
    """What each rank has of a token's KV, and its ways to rank 0 and back. Bytes are piece after
    piece, a layer's part each, [vectors, bytes of a vector's tokens]: keys of the heads, then
    values. All ranks call a method together."""

    def __init__(
        self, communicator: Communicator, kv_heads: Sequence[Range], num_kv_heads: int
    ) -> None:
        """kv_heads: of each rank; two may have the same one."""
        self._communicator = communicator
        self._num_vectors = 2 * num_kv_heads
        self._vectors: list[npt.NDArray[np.int64]] | None = None  # each rank's; None: all have all
        if set(kv_heads) != {(0, num_kv_heads)}:
            heads = [np.arange(*each) for each in kv_heads]
            self._vectors = [np.concatenate((own, num_kv_heads + own)) for own in heads]

    def num_vectors(self, num_own: int) -> int:
        """Of all ranks, in a piece of which this one has `num_own`."""
        return num_own if self._vectors is None else self._num_vectors

    def join(self, own: Payload, row_bytes: Sequence[int]) -> Payload:
        """This rank's bytes -> those of all, on rank 0; of the others nobody reads them. row_bytes:
        of a vector's tokens, in each piece."""
        if self._vectors is None:
            return own
        given = [own, *(_NOTHING for _ in self._vectors[1:])]
        received = self._exchange(given)
        if self._communicator.rank:
            return own
        whole = np.empty(self._num_vectors * sum(row_bytes), dtype=np.uint8)
        for vectors, part in zip(self._vectors, received, strict=True):
            pieces = _pieces(whole, self._num_vectors, row_bytes)
            for there, here in zip(pieces, _pieces(part, len(vectors), row_bytes), strict=True):
                there[vectors] = here
        return whole

    def split(self, whole: Payload, row_bytes: Sequence[int]) -> Payload:
        """The bytes of all, which rank 0 alone has -> this rank's."""
        given = [_NOTHING for _ in range(self._communicator.num_ranks)]
        if not self._communicator.rank:
            given = [self._part(whole, rank, row_bytes) for rank in range(len(given))]
        return self._exchange(given)[0]

    def _part(self, whole: Payload, rank: int, row_bytes: Sequence[int]) -> Payload:
        if self._vectors is None:
            return whole
        pieces = _pieces(whole, self._num_vectors, row_bytes)
        return np.concatenate([piece[self._vectors[rank]].ravel() for piece in pieces])

    def _exchange(self, parts: Sequence[Payload]) -> list[Payload]:
        """For each rank -> of each rank."""
        received = self._communicator.all_to_all([torch.from_numpy(part.copy()) for part in parts])
        return [part.numpy() for part in received]


class RankedKVTransfer(KVTransfer):
    """Executes the copies of one rank's plans, in their order, as all ranks do. Blocks are of all
    heads: rank 0 alone has them."""

    def __init__(
        self, device_pool: DeviceKVPool, host_pool: HostKVPool | None, heads: JoinedHeads
    ) -> None:
        super().__init__(device_pool, host_pool)
        self._heads = heads
        self._row_bytes = [BLOCK_TOKENS * memory.shape[2] for memory in self._device]

    def _save(self, save: BlockSave) -> Payload:
        return self._heads.join(super()._save(save), self._row_bytes)

    def _restore(self, restore: BlockRestore) -> None:
        own = self._heads.split(restore.payload, self._row_bytes)
        super()._restore(restore._replace(payload=own))


def without_payload(restore: BlockRestore) -> BlockRestore:
    """As ranks other than 0 are told of it."""
    return restore._replace(payload=_NOTHING)


def _pieces(
    payload: Payload, num_vectors: int, row_bytes: Sequence[int]
) -> Iterator[npt.NDArray[np.uint8]]:
    """Each [num_vectors, bytes of its tokens]; views."""
    first = 0
    for size in row_bytes:
        end = first + num_vectors * size
        yield payload[first:end].reshape(num_vectors, size)
        first = end
