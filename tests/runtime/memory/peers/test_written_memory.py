"""Memory into which a sender writes by itself: the right bytes, or none; never another stream's."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from nixl_worker import skip_without_nixl

from stemma.runtime.memory.disk.block_key import BLOCK_TOKENS, BlockLayout
from stemma.runtime.memory.kv_layout import KVLayout, KVPart
from stemma.runtime.memory.peers.nixl_memory import NixlMemory, NixlOffers, NixlWorker
from stemma.runtime.memory.peers.piece_places import places_of, put_piece, spans_of
from stemma.runtime.memory.peers.written_memory import (
    Offers,
    OpenedMemory,
    SharedMemory,
    SharedOffers,
    StreamMemory,
)

PARTS = (KVPart("values", 3, 2, "bfloat16"), KVPart("scales", 2, 1, "float32"))
LAYOUT = BlockLayout("tiny", "bfloat16", KVLayout(2, PARTS))
PLACES = places_of(LAYOUT)
NUM_BLOCKS = 3


@dataclass
class Link:
    """Both sides of one transport."""

    offers: Offers
    writer: NixlWorker | None

    def opened(self, offer: str) -> OpenedMemory:
        if self.writer is None:
            return SharedMemory(offer, LAYOUT, NUM_BLOCKS)
        return NixlMemory(offer, LAYOUT, self.writer)


@pytest.fixture(params=["shared", "nixl"])
def link(request: pytest.FixtureRequest) -> Iterator[Link]:
    if request.param == "shared":
        yield Link(SharedOffers(), None)
        return
    skip_without_nixl()
    offers, writer = NixlOffers(), NixlWorker()
    yield Link(offers, writer)
    offers.close()
    writer.close()


@pytest.fixture
def memories() -> Iterator[Any]:
    with ExitStack() as stack:

        def made() -> StreamMemory:
            memory = StreamMemory(NUM_BLOCKS, LAYOUT.block_bytes)
            stack.callback(memory.close)
            return memory

        yield made


def kv_of(piece: int, length: int, seed: int) -> np.ndarray[Any, Any]:
    place = PLACES[piece]
    shape = (place.num_vectors, length, place.vector_bytes)
    return np.random.default_rng(seed).integers(1, 255, shape, np.uint8)


def written(opened: OpenedMemory, seed: int) -> bool:
    """Whether a piece of 300 tokens from the tenth on has been written."""
    return opened.write(PLACES[1], 10, kv_of(1, 300, seed))


def test_spans_say_what_putting_a_piece_does() -> None:
    for piece, token, length in [(0, 0, 1), (1, 255, 2), (2, 10, 600), (3, 512, 256)]:
        kv, place = kv_of(piece, length, piece), PLACES[piece]
        put = np.zeros((NUM_BLOCKS, LAYOUT.block_bytes), np.uint8)
        put_piece(list(put), place, token, kv)
        copied = np.zeros(NUM_BLOCKS * LAYOUT.block_bytes, np.uint8)
        for source, target, size in spans_of(LAYOUT, place, token, length).tolist():
            copied[target : target + size] = kv.reshape(-1)[source : source + size]
        assert put.any() and (copied == put.reshape(-1)).all()


def test_pieces_are_where_they_would_be_put(link: Link, memories: Any) -> None:
    memory = memories()
    offer = link.offers.offer(memory)
    assert offer is not None
    opened, expected = link.opened(offer), np.zeros_like(np.stack(memory.blocks))
    for piece, token, length in [(0, 0, 1), (1, 255, 2), (2, 10, 600), (3, 512, 256)]:
        kv = kv_of(piece, length, piece)
        assert opened.write(PLACES[piece], token, kv)
        put_piece(list(expected), PLACES[piece], token, kv)
    assert (np.stack(memory.blocks) == expected).all()


def test_a_late_write_changes_no_other_streams_memory(link: Link, memories: Any) -> None:
    """Nor, through NIXL, anything at all."""
    first = memories()
    offer = link.offers.offer(first)
    assert offer is not None
    opened = link.opened(offer)
    assert written(opened, 1)
    before = np.stack(first.blocks)
    link.offers.withdraw(offer)
    second = memories()  # as large, so that it would be mapped at the same place
    offered = link.offers.offer(second)
    assert offered is not None
    if written(opened, 2):
        assert link.writer is None, "NIXL has written into what was withdrawn"
    else:
        assert (np.stack(first.blocks) == before).all()
    assert not np.stack(second.blocks).any()
    third = link.offers.offer(memories())  # over TCP such a write ends the receiving process
    assert third is None or written(link.opened(third), 3)


def test_nothing_is_written_where_the_receivers_process_is_gone(memories: Any) -> None:
    skip_without_nixl()
    offers, writer = NixlOffers(), NixlWorker()
    memory = memories()
    offer = offers.offer(memory)
    assert offer is not None
    opened = NixlMemory(offer, LAYOUT, writer)
    assert written(opened, 1)
    before = np.stack(memory.blocks)
    offers.close()
    assert not written(opened, 2)
    assert (np.stack(memory.blocks) == before).all()
    writer.close()


@pytest.mark.parametrize("wrong", ["nothing", "a number", "inode", "too small", "it may shrink"])
def test_what_is_no_such_memory_is_not_opened(memories: Any, wrong: str) -> None:
    """One that may shrink would end the process that writes there."""
    memory = memories()
    pid, number, inode, size = SharedOffers().offer(memory).split(" ")[1:]
    open_file = os.memfd_create("other")
    os.ftruncate(open_file, memory.num_bytes)
    offers = {
        "nothing": "shared",
        "a number": f"shared {pid} {number} {inode} x",
        "inode": f"shared {pid} {number} {int(inode) + 1} {size}",
        "too small": f"shared {pid} {number} {inode} {BLOCK_TOKENS}",
        "it may shrink": f"shared {pid} {open_file} {os.fstat(open_file).st_ino} {size}",
    }
    with pytest.raises((OSError, ValueError)):
        SharedMemory(offers[wrong], LAYOUT, NUM_BLOCKS)
    os.close(open_file)
