"""How a stream's bytes come: which memory a receiver offers, and how a sender writes there."""

from __future__ import annotations

import sys

from ..disk.block_key import BlockLayout
from .nixl_memory import NixlMemory, NixlOffers, NixlWorker
from .written_memory import NIXL, SHARED, Offers, OpenedMemory, SharedMemory, SharedOffers


def offers_by(kv_transport: str) -> Offers | None:
    """What a receiver offers; None: nothing, all comes in messages. Raises MissingDependency."""
    if kv_transport == "nixl":
        return NixlOffers()
    is_shared = kv_transport == "auto" and sys.platform == "linux"
    return SharedOffers() if is_shared else None


def opened(
    offer: str, layout: BlockLayout, num_blocks: int, nixl: NixlWorker | None
) -> OpenedMemory:
    """What a receiver has offered. Raises OSError, and ValueError for what cannot be written."""
    kind = offer.partition(" ")[0]
    if kind == SHARED:
        return SharedMemory(offer, layout, num_blocks)
    if kind == NIXL and nixl is not None:
        return NixlMemory(offer, layout, nixl)
    raise ValueError(f"nothing here writes by {kind:.20}")
