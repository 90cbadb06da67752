"""The interface of stores of KV blocks: what the scheduler needs of a disk, or of another machine.

None of these calls blocks or raises: what a store does not have, or cannot say in time, is computed
again. Any doubt about a block is a miss.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, Protocol

from .block_file import Payload
from .block_key import Block, StoredLayout


class StoreMode(Enum):
    """What a store does."""

    WRITER = "writer"  # it reads and writes
    READER = "reader"  # another process writes
    FAILED = "failed"  # writing has failed: reads only
    OFF = "off"  # it cannot be used, or is closed


@dataclass(slots=True)
class StoreStats:
    """Blocks since the start."""

    num_saved: int = 0
    num_dropped: int = 0  # not saved: the queue was full, or the block before was not there
    num_evicted: int = 0
    num_fetched: int = 0
    num_corrupt: int = 0
    num_lost: int = 0  # files that were gone
    write_s: float = 0.0
    read_s: float = 0.0


class Fetch:
    """Blocks on their way into memory. `payloads` are those of the first blocks, up to one that
    could not be had; final once `is_done`. Its memory counts until `release`."""

    def __init__(self, store: BlockStore, blocks: Sequence[Block]) -> None:
        self.blocks = tuple(blocks)
        self.payloads: list[Payload] = []
        self.is_done = False
        self.is_released = False
        self._store = store

    def release(self) -> None:
        """Drop the payloads; before it is done: cancel it. May be called twice."""
        self._store.release(self)


class BlockStore(Protocol):
    """The blocks of one layout. Its methods belong to one thread (the engine's)."""

    layout: StoredLayout
    stats: StoreStats
    num_fetches_ended: int

    @property
    def mode(self) -> StoreMode:
        """What it does now."""

    def fileno(self) -> int:
        """Readable when a fetch may be done; then call `collect`."""

    def collect(self) -> None:
        """Make `fileno` unreadable until another fetch is done."""

    def longest(self, blocks: Sequence[Block]) -> int:
        """How many of a sequence's first blocks can be fetched, as far as is known."""

    def note_use(self, blocks: Sequence[Block]) -> int:
        """A sequence's first blocks are used again: how many of them need not be saved, as they
        are here or will be."""

    def num_accepted(self) -> int:
        """How many blocks `save` would take now."""

    def save(self, block: Block, payload: Payload) -> bool:
        """Keep a block some time soon; parents first. False if it was dropped. The payload
        ([layout.block_bytes] uint8, contiguous) is the store's from here on."""

    def fetch(self, blocks: Sequence[Block]) -> Fetch:
        """Begin to read consecutive blocks of a sequence; of more than fit the bound on fetched
        bytes, only the first ones. Poll `is_done`."""

    def release(self, fetch: Fetch) -> None:
        """See Fetch.release."""

    def flush(self, timeout_s: float) -> bool:
        """Wait until all that was saved is kept; False if it took too long. Not for the engine's
        loop."""

    def close(self, timeout_s: float = 10.0) -> None:
        """Keep what waits, as far as the time allows, and end."""

    def describe(self) -> dict[str, Any]:
        """Its state and counters as plain data."""
