"""The residual stream on its way from stage to stage of a pipeline, between processes of one
machine.

    sender      | write slot k | "filled" ->          | write slot k + 1 | ...
    receiver                   -> "filled" | compute on slot k | "free" ->

A channel is a ring of slots in shared memory, and two pipes that count those which are filled and
those which are free. A pipe whose other end is gone says so, and so does `lost`.
"""

from __future__ import annotations

import mmap
import os
import pickle
import select
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ...errors import RankLost
from ...kernels.native.communicator import anonymous_file

_COUNT = b"\0"
_LENGTH_BYTES = 8  # of a message's length
_GONE = "a stage of the model has ended: the engine cannot go on without it"


@dataclass(frozen=True, slots=True)
class ChannelEnd:
    """One side of a channel, by descriptors, as a process is given it. The receiver reads `filled`
    and writes `free`, the sender the reverse."""

    memory: int
    filled: int
    free: int
    num_slots: int
    slot_bytes: int

    @property
    def descriptors(self) -> tuple[int, int, int]:
        return self.memory, self.filled, self.free

    def close(self) -> None:
        """Close the descriptors."""
        for descriptor in self.descriptors:
            os.close(descriptor)


def open_channel(num_slots: int, slot_bytes: int) -> tuple[ChannelEnd, ChannelEnd]:
    """(the sender's end, the receiver's)."""
    memory = anonymous_file()
    os.ftruncate(memory, num_slots * slot_bytes)
    filled_read, filled_write = os.pipe()
    free_read, free_write = os.pipe()
    os.write(free_write, _COUNT * num_slots)
    sender = ChannelEnd(memory, filled_write, free_read, num_slots, slot_bytes)
    receiver = ChannelEnd(os.dup(memory), filled_read, free_write, num_slots, slot_bytes)
    return sender, receiver


class _Ring:
    """The slots of a channel, one after the other. Owns the end."""

    def __init__(self, end: ChannelEnd, waited: int, lost: int | None) -> None:
        """waited: the pipe that counts; lost: readable when there is no use in waiting."""
        self._end = end
        self._waited = waited
        self._poll = select.poll()
        for descriptor in (waited, lost):
            if descriptor is not None:
                self._poll.register(descriptor, select.POLLIN)
        self._map = mmap.mmap(end.memory, end.num_slots * end.slot_bytes)
        self._bytes = torch.frombuffer(self._map, dtype=torch.uint8).view(end.num_slots, -1)
        self._place = -1

    def next(self) -> Tensor:
        """The next slot's bytes, once it has been counted. Raises RankLost."""
        ready = [descriptor for descriptor, _ in self._poll.poll()]
        if ready != [self._waited] or not os.read(self._waited, 1):
            raise RankLost(_GONE)
        self._place = (self._place + 1) % self._end.num_slots
        return self._bytes[self._place]

    def count(self, pipe: int) -> None:
        """Say that one slot more is filled, or free. Raises RankLost."""
        try:
            os.write(pipe, _COUNT)
        except BrokenPipeError:
            raise RankLost(_GONE) from None

    def close(self) -> None:
        del self._bytes
        self._end.close()


class ChannelMessages:
    """See `memory.whole_kv.KVMessages`. Owns the ends. A message goes in as many slots as it takes,
    its length before it."""

    def __init__(
        self, previous: ChannelEnd | None, behind: ChannelEnd | None, lost: int | None = None
    ) -> None:
        """See `ChannelNeighbours`."""
        self._inbox = None if previous is None else _Ring(previous, previous.filled, lost)
        self._outbox = None if behind is None else _Ring(behind, behind.free, lost)
        self._previous, self._behind = previous, behind
        self.has_previous = previous is not None
        self.has_next = behind is not None

    def send(self, message: Any) -> None:
        """See `KVMessages`."""
        assert self._outbox is not None and self._behind is not None
        payload = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
        data = len(payload).to_bytes(_LENGTH_BYTES, "little") + payload
        for first in range(0, len(data), self._behind.slot_bytes):
            part = np.frombuffer(data, dtype=np.uint8)[first : first + self._behind.slot_bytes]
            self._outbox.next().numpy()[: len(part)] = part
            self._outbox.count(self._behind.filled)

    def receive(self) -> Any:
        """See `KVMessages`."""
        assert self._inbox is not None and self._previous is not None
        data, size = bytearray(), _LENGTH_BYTES
        while len(data) < size:
            slot = self._inbox.next().numpy()
            if not data:
                size += int.from_bytes(slot[:_LENGTH_BYTES].tobytes(), "little")
            data += slot[: size - len(data)].tobytes()
            self._inbox.count(self._previous.free)
        return pickle.loads(memoryview(data)[_LENGTH_BYTES:])

    def close(self) -> None:
        """Nobody uses it any more."""
        for ring in (self._inbox, self._outbox):
            if ring is not None:
                ring.close()


class ChannelNeighbours:
    """See `execute.neighbours.Neighbours`. Owns the ends."""

    def __init__(
        self,
        previous: ChannelEnd | None,
        behind: ChannelEnd | None,
        hidden_size: int,
        dtype: torch.dtype,
        lost: int | None = None,
    ) -> None:
        """previous: from the stage before; behind: to the one behind; None: there is none. lost: a
        descriptor that is readable when another process of the model has ended."""
        self._hidden_size, self._dtype = hidden_size, dtype
        self._inbox = None if previous is None else _Ring(previous, previous.filled, lost)
        self._outbox = None if behind is None else _Ring(behind, behind.free, lost)
        self._previous, self._behind = previous, behind
        self._is_reading = False  # the last slot received is not free yet
        self.has_previous = previous is not None
        self.has_next = behind is not None

    def receive(self, num_tokens: int) -> Tensor:
        """See `Neighbours`."""
        return self._received(num_tokens * self._hidden_size, self._dtype).view(num_tokens, -1)

    def send(self, hidden: Tensor) -> None:
        """See `Neighbours`."""
        assert self._outbox is not None and self._behind is not None
        data = hidden.contiguous().view(torch.uint8).flatten()
        self._outbox.next()[: len(data)].copy_(data)
        self._outbox.count(self._behind.filled)

    def least(self, number: int) -> int:
        """Of the stages up to this one, which is what the last one needs to know."""
        if self.has_previous:
            number = min(number, int(self._received(1, torch.int64)))
        if self.has_next:
            self.send(torch.tensor([number]))
        return number

    def close(self) -> None:
        """Nobody uses it any more."""
        for ring in (self._inbox, self._outbox):
            if ring is not None:
                ring.close()

    def _received(self, size: int, dtype: torch.dtype) -> Tensor:
        assert self._inbox is not None and self._previous is not None
        if self._is_reading:
            self._inbox.count(self._previous.free)
        self._is_reading = True
        return self._inbox.next()[: size * dtype.itemsize].view(dtype)


def slot_bytes(max_step_tokens: int, hidden_size: int, dtype: torch.dtype) -> int:
    """Room for the largest step, and for a number."""
    return max(max_step_tokens * hidden_size * dtype.itemsize, np.dtype(np.int64).itemsize)
