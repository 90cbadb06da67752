"""Copies of KV and of recurrent states between tiers, as plain data: a step lists them, `memory/`
executes them."""

from __future__ import annotations

from array import array
from typing import Literal, NamedTuple

from .disk.block_file import Payload
from .disk.block_key import Block


class Transfer(NamedTuple):
    """A copy of whole pages between device and host: `device_pages[i]` and `host_pages[i]` are a
    pair. No two entries of one transfer write the same page."""

    kind: Literal["store", "load"]  # device to host, host to device
    device_pages: array[int]  # 'i'
    host_pages: array[int]  # 'i'


class PageFork(NamedTuple):
    """A copy of pages of the device to others there (copy-on-write), whose owner goes on from a
    part of their tokens: `targets[i]` gets what `sources[i]` has. No target is another's source."""

    sources: array[int]  # 'i'
    targets: array[int]  # 'i'


class BlockSave(NamedTuple):
    """A copy of a block out of the device's pages; the result carries its payload."""

    block: Block
    pages: array[int]  # 'i', BLOCK_TOKENS / page_size


class BlockRestore(NamedTuple):
    """A copy of a block's tokens from `first_token` on into the device's pages."""

    payload: Payload
    first_token: int
    pages: array[int]  # 'i', at most (BLOCK_TOKENS - first_token) / page_size


class StateSave(NamedTuple):
    """A copy of a recurrent state out of a slot; the result carries its payload."""

    block: Block
    slot: int


class StateRestore(NamedTuple):
    """A copy of a recurrent state into a slot."""

    payload: Payload
    slot: int


SlotCopy = tuple[int, int]
"""From a slot of the pool of states to another one, on any tier."""

StateCopy = SlotCopy | StateSave | StateRestore

TierCopy = Transfer | PageFork | BlockSave | BlockRestore
