"""KV that leaves or enters an engine of several processes, each of which has a part of it: some of
the heads (tensor parallelism), of the tokens (context parallelism), of the layers (stages).

Outside of the engine KV is of all: its process joins what they have, and sends each its part. So
stored blocks, and KV that engines send each other, are the same for any number of processes.

    tokens   in each column of a stage, to its first rank, which has them of its heads
    heads    in the first row, to rank 0, which has all of the stage's layers
    layers   from stage to stage, to the last one, whose rank 0 is the engine

KV that enters goes the other way; to the stages before it comes with the plan (parallel/orders.py).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch

from ...kernels.context_share import PageShare
from ...kernels.ops import Communicator
from ..checkpoint.parts import Range
from .block_copy import Bytes, Slots, gather_block, scatter_block
from .disk.block_file import Payload
from .disk.block_key import BLOCK_TOKENS
from .kv_layout import KVLayout

Shape = tuple[int, ...]
Places = Sequence[npt.NDArray[np.int64]]
"""Along an axis, what each rank has."""

_NOTHING = np.empty(0, dtype=np.uint8)


class KVMessages(Protocol):
    """Between the rank 0 of one stage and of the next, in their order."""

    has_previous: bool
    has_next: bool

    def send(self, message: Any) -> None:
        """To the stage behind; anything that can be pickled. Waits if that is far behind."""

    def receive(self) -> Any:
        """From the stage before. Waits for it; raises RankLost where it will not come."""


@dataclass(frozen=True, slots=True)
class StagePieces:
    """Which pieces of a model's KV each stage has: a layer's part each, in a payload's order."""

    vector_bytes: Sequence[int]  # of a token in each of the model's pieces, of all heads
    numbers: Sequence[Sequence[int]]  # of the model's pieces, each stage's, in its own order

    @classmethod
    def of(cls, whole: KVLayout, stages: Sequence[KVLayout]) -> StagePieces:
        """Layouts of all heads; those of the stages number their layers from 0."""
        names = list(_names(whole, 0))
        first = accumulate((stage.num_layers for stage in stages), initial=0)
        numbers = [[names.index(name) for name in _names(*each)] for each in zip(stages, first)]
        return cls([part.bytes_per_token for part, _ in names], numbers)

    def cut(self, payload: Payload) -> list[Payload]:
        """A block's bytes of all layers -> of each stage's."""
        pieces = np.split(payload, self._ends(range(len(self.vector_bytes)))[:-1])
        return [np.concatenate([pieces[number] for number in own]) for own in self.numbers]

    def joined(self, payloads: Sequence[Payload]) -> Payload:
        """The reverse."""
        pieces: list[Payload] = [_NOTHING] * len(self.vector_bytes)
        for own, payload in zip(self.numbers, payloads, strict=True):
            for number, piece in zip(own, np.split(payload, self._ends(own)[:-1]), strict=True):
                pieces[number] = piece
        return np.concatenate(pieces)

    def _ends(self, numbers: Sequence[int]) -> list[int]:
        """Of these pieces of a block, one behind the other."""
        return [*accumulate(self.vector_bytes[number] * BLOCK_TOKENS for number in numbers)]


def _names(layout: KVLayout, first_layer: int) -> Iterator[tuple[Any, int]]:
    """(part, layer) of each piece."""
    for part in layout.parts:
        for layer in layout.layers_of(part):
            yield replace(part, layers=None), first_layer + layer


@dataclass(frozen=True, slots=True)
class HeadPlaces:
    """The KV heads of each rank that has a part of each layer."""

    communicator: Communicator
    vectors: Places | None  # of a piece's keys, then values; None: all ranks have all

    @classmethod
    def of(
        cls, communicator: Communicator, kv_heads: Sequence[Range], num_kv_heads: int
    ) -> HeadPlaces:
        """kv_heads: of each rank; two may have the same one."""
        if set(kv_heads) == {(0, num_kv_heads)}:
            return cls(communicator, None)
        heads = [np.arange(*each) for each in kv_heads]
        return cls(communicator, [np.concatenate((own, num_kv_heads + own)) for own in heads])


class WholeKV:
    """A process's part of its stage's KV, and its ways to the engine and back. Pieces are of one
    layer's part each, [vectors, tokens, bytes of a vector]. All ranks call a method together."""

    def __init__(
        self,
        page_size: int,
        heads: HeadPlaces | None,
        tokens: tuple[Communicator, PageShare] | None,
        messages: KVMessages | None = None,
        stages: StagePieces | None = None,
    ) -> None:
        """heads, tokens: None: all of the stage's are here. messages: of rank 0 of a stage, where
        there are others; stages: where there are, too."""
        self._page_size = page_size
        self._heads, self._tokens = heads, tokens
        self.messages, self._stages = messages, stages

    def save(self, memory: Sequence[Bytes], slots: Slots) -> Payload:
        """A block's bytes of all, at the engine; of other processes nobody reads them. slots: of
        all ranks' pool."""
        own = self.own_slots(slots)
        shapes = [(len(pool), len(own), pool.shape[2]) for pool in memory]
        pieces = self.join(_pieces(gather_block(memory, own), shapes), slots)
        payload = _flat(pieces)
        if self.messages is None:
            return payload
        payloads = [*(self.messages.receive() if self.messages.has_previous else ()), payload]
        if self.messages.has_next:
            self.messages.send(payloads)
            return payload
        assert self._stages is not None, "there are stages"
        return self._stages.joined(payloads)

    def restore(
        self, memory: Sequence[Bytes], slots: Slots, payload: Payload, first_token: int
    ) -> None:
        """A block's tokens from `first_token` on, into as many slots. payload: of the stage's
        layers, which its rank 0 alone has."""
        whole: Sequence[Bytes] = ()
        if payload.size:
            shapes = [(self.num_vectors(len(pool)), BLOCK_TOKENS, pool.shape[2]) for pool in memory]
            end = first_token + len(slots)
            whole = [piece[:, first_token:end] for piece in _pieces(payload, shapes)]
        own_slots = self.own_slots(slots)
        own = self._split(whole, [(len(pool), pool.shape[2]) for pool in memory], slots)
        scatter_block(memory, own_slots, _flat(own), num_tokens=len(own_slots))

    def own_slots(self, slots: Slots) -> Slots:
        """Of all ranks' pool -> of this one's, where its tokens are."""
        if self._tokens is None:
            return slots
        pages, offsets = np.divmod(slots, self._page_size)
        own = self._tokens[1].is_own(pages)
        local: Slots = self._tokens[1].local(pages[own]) * self._page_size + offsets[own]
        return local

    def num_vectors(self, num_own: int) -> int:
        """Of all ranks, in a piece of which this one has `num_own`."""
        if self._heads is None or self._heads.vectors is None:
            return num_own
        return 1 + int(max(each.max() for each in self._heads.vectors))

    def join(self, own: Sequence[Bytes], slots: Slots) -> Sequence[Bytes]:
        """Pieces of this rank's heads and tokens -> of the stage's, at its rank 0; of other ranks
        nobody reads them."""
        if self._tokens is not None:
            communicator = self._tokens[0]
            own = _joined(communicator, own, self._token_places(slots), axis=1)
            if communicator.rank:
                return own
        if self._heads is not None and self._heads.vectors is not None:
            own = _joined(self._heads.communicator, own, self._heads.vectors, axis=0)
        return own

    def _split(
        self, whole: Sequence[Bytes], own: Sequence[tuple[int, int]], slots: Slots
    ) -> Sequence[Bytes]:
        """The reverse. own: of each piece this rank's vectors, and their bytes."""
        pieces, tokens = whole, self._tokens
        if self._heads is not None and (tokens is None or not tokens[0].rank):
            communicator = self._heads.communicator
            shapes = [(count, len(slots), size) for count, size in own]
            places: Sequence[npt.NDArray[np.int64] | None] = [None] * communicator.num_ranks
            places = self._heads.vectors or places
            pieces = _split(communicator, pieces, places, 0, shapes)
        if tokens is not None:
            num_own = len(self.own_slots(slots))
            shapes = [(count, num_own, size) for count, size in own]
            pieces = _split(tokens[0], pieces, self._token_places(slots), 1, shapes)
        return pieces

    def _token_places(self, slots: Slots) -> Places:
        assert self._tokens is not None, "tokens are divided"
        num_ranks = self._tokens[0].num_ranks
        owners = slots // self._page_size % num_ranks
        return [np.flatnonzero(owners == rank) for rank in range(num_ranks)]


def _joined(
    communicator: Communicator, own: Sequence[Bytes], places: Places, axis: int
) -> Sequence[Bytes]:
    """Pieces of each rank's places along the axis -> of all of these, on rank 0."""
    given = [_flat(own), *(_NOTHING for _ in places[1:])]
    received = _exchange(communicator, given)
    if communicator.rank:
        return own
    size = 1 + int(max(each.max(initial=-1) for each in places))
    wholes = [np.empty(_resized(piece.shape, axis, size), dtype=np.uint8) for piece in own]
    for each, part in zip(places, received, strict=True):
        shapes = [_resized(piece.shape, axis, len(each)) for piece in own]
        for whole, piece in zip(wholes, _pieces(part, shapes), strict=True):
            whole[_at(each, axis)] = piece
    return wholes


def _split(
    communicator: Communicator,
    wholes: Sequence[Bytes],
    places: Sequence[npt.NDArray[np.int64] | None],
    axis: int,
    own: Sequence[Shape],
) -> Sequence[Bytes]:
    """The reverse: of rank 0's pieces this rank's, of these shapes. None: all places."""
    given = [_NOTHING] * communicator.num_ranks
    if not communicator.rank:
        given = [
            _flat([piece if each is None else piece[_at(each, axis)] for piece in wholes])
            for each in places
        ]
    return _pieces(_exchange(communicator, given)[0], own)


def _exchange(communicator: Communicator, parts: Sequence[Payload]) -> list[Payload]:
    """For each rank -> of each rank."""
    received = communicator.all_to_all([torch.from_numpy(part) for part in parts])
    return [part.numpy() for part in received]


def _at(places: npt.NDArray[np.int64], axis: int) -> tuple[Any, ...]:
    return (slice(None),) * axis + (places,)


def _resized(shape: Shape, axis: int, size: int) -> Shape:
    return (*shape[:axis], size, *shape[axis + 1 :])


def _pieces(payload: Payload, shapes: Sequence[Shape]) -> list[Bytes]:
    """Views of a payload."""
    ends = accumulate(map(math.prod, shapes), initial=0)
    return [
        payload[first:end].reshape(shape)
        for (first, end), shape in zip(pairwise(ends), shapes, strict=True)
    ]


def _flat(pieces: Sequence[Bytes]) -> Payload:
    """A copy, piece after piece."""
    return np.concatenate([piece.ravel() for piece in pieces])
