"""Memory of a receiver into which the sender itself writes a stream's KV.

    receiver's thread                                sender's thread
    offers a stream's blocks, and nothing else  -->  opens what is offered
                                                     writes a piece, then says that it has
    withdraws them when the stream has ended

What is offered is a text; its first word says how to write there. Who cannot, or whose write fails,
sends the bytes in messages, as for a receiver that offers nothing. Each stream has memory of its
own. Another one gets it afterwards if the sender has said that it is done, and only then: a late
write changes no other stream.

Here: within one host, by mapping the same memory. Through NIXL: nixl_memory.py.
"""

from __future__ import annotations

import fcntl
import mmap
import os
from typing import Protocol

import numpy as np

from ..disk.block_file import Payload
from ..disk.block_key import BlockLayout
from .piece_places import Place, put_piece

SHARED, NIXL = "shared", "nixl"  # an offer's first word


class StreamMemory:
    """The blocks of one stream at a time. It can be mapped by who may open its descriptor, and
    cannot shrink. The descriptor lives until `close`, the memory as long as its blocks are used."""

    def __init__(self, num_blocks: int, block_bytes: int) -> None:
        """Raises OSError."""
        self.num_bytes = num_blocks * block_bytes
        self.offer: str | None = None  # what its sender was told
        self.is_over = False  # the sender has said that it writes nothing more
        self.spare_s = 0.0  # time.monotonic() since when no stream has it
        self.descriptor = os.memfd_create("stemma-kv", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(self.descriptor, self.num_bytes)
            fcntl.fcntl(self.descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
            memory = mmap.mmap(self.descriptor, self.num_bytes)
        except OSError:
            self.close()
            raise
        self.blocks: list[Payload] = _blocks_of(memory, block_bytes)

    def close(self) -> None:
        """It cannot be opened any more."""
        os.close(self.descriptor)


class Offers(Protocol):
    """The receiving side. Called by the receiver's thread, but for `close`."""

    kind: str

    def offer(self, memory: StreamMemory) -> str | None:
        """What the sender needs to write there; None: it cannot now."""

    def withdraw(self, offer: str) -> None:
        """Nothing is written there any more."""

    def close(self) -> None:
        """Withdraw all."""


class OpenedMemory(Protocol):
    """The sending side: what a receiver has offered for a stream. Called by the sender's thread."""

    def write(self, place: Place, token: int, kv: Payload) -> bool:
        """Whether a piece is where `put_piece` would put it."""


class SharedOffers:
    """Of memory that other processes of this user map."""

    kind = SHARED

    def offer(self, memory: StreamMemory) -> str:
        inode = os.fstat(memory.descriptor).st_ino
        return f"{SHARED} {os.getpid()} {memory.descriptor} {inode} {memory.num_bytes}"

    def withdraw(self, offer: str) -> None:
        """Nothing: what the sender has mapped is no other stream's."""

    def close(self) -> None:
        pass


class SharedMemory:
    """What SharedOffers has offered, mapped."""

    def __init__(self, offer: str, layout: BlockLayout, num_blocks: int) -> None:
        """Raises OSError, and ValueError for what is no such offer or too small."""
        pid, number, inode, num_bytes = (int(word) for word in offer.split(" ")[1:])
        if num_bytes < num_blocks * layout.block_bytes:
            raise ValueError(f"{num_bytes} bytes for {num_blocks} blocks")
        descriptor = os.open(f"/proc/{pid}/fd/{number}", os.O_RDWR | os.O_CLOEXEC)
        try:
            # NOTE: a number may be another file's by now; one that shrinks would end this process.
            found = os.fstat(descriptor)
            if (found.st_ino, found.st_size) != (inode, num_bytes):
                raise ValueError("it is gone")
            if not fcntl.fcntl(descriptor, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK:
                raise ValueError("it may shrink")
            memory = mmap.mmap(descriptor, num_bytes)
        finally:
            os.close(descriptor)
        self._blocks = _blocks_of(memory, layout.block_bytes)

    def write(self, place: Place, token: int, kv: Payload) -> bool:
        put_piece(self._blocks, place, token, kv)
        return True


def _blocks_of(memory: mmap.mmap, block_bytes: int) -> list[Payload]:
    return list(np.frombuffer(memory, np.uint8).reshape(-1, block_bytes))
