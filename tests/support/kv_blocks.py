"""Small KV blocks for tests of the disk tier: layout, sequences, payloads unique to each block."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from stemma.runtime.memory.disk.block_file import Payload, file_bytes
from stemma.runtime.memory.disk.block_key import BLOCK_TOKENS, Block, BlockLayout, blocks_of
from stemma.runtime.memory.disk.block_store import BlockStore, Fetch
from stemma.runtime.memory.disk.store import DiskStore
from stemma.runtime.memory.kv_layout import KVLayout, KVPart

PLAIN = KVPart("kv", 2, 2, "bfloat16")
LAYOUT = BlockLayout("tiny", "bfloat16", KVLayout(1, (PLAIN,)))
FILE_BYTES = file_bytes(LAYOUT)


def sequence(*numbers: int, namespace: str = "", layout: BlockLayout = LAYOUT) -> list[Block]:
    """Blocks that each repeat one token: the numbers are a path in a tree of blocks."""
    ids = array("i", [number for number in numbers for _ in range(BLOCK_TOKENS)])
    return blocks_of(layout, namespace, ids)


def payload_of(block: Block, layout: BlockLayout = LAYOUT) -> Payload:
    """Random bytes unique to this block."""
    seed = int.from_bytes(block.key[:8], "little")
    return np.random.default_rng(seed).integers(0, 256, layout.block_bytes, dtype=np.uint8)


def open_store(
    folder: Path, *, max_blocks: int = 1000, layout: BlockLayout = LAYOUT, **options: float
) -> DiskStore:
    return DiskStore(folder, layout, max_bytes=max_blocks * file_bytes(layout), **options)  # type: ignore[arg-type]


def save_all(store: BlockStore, blocks: Sequence[Block]) -> None:
    """Save, and wait until everything is on disk."""
    for block in blocks:
        assert store.save(block, payload_of(block))
    assert store.flush(30.0)


def wait_for(fetch: Fetch, store: BlockStore) -> list[Payload]:
    """The payloads, awaited as an event loop would."""
    from waiting import ready

    while not fetch.is_done:
        assert ready([store], 30.0), "no fetch was done in 30 s"
        store.collect()
    return fetch.payloads


def fetched(store: BlockStore, blocks: Sequence[Block]) -> int:
    """How many of the blocks come back; each must equal what was saved."""
    fetch = store.fetch(blocks)
    payloads = wait_for(fetch, store)
    for block, payload in zip(blocks, payloads):
        assert np.array_equal(payload, payload_of(block, store.layout))
    fetch.release()
    return len(payloads)
