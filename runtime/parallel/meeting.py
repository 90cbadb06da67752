"""How the processes of a model find each other: the ranks of a stage through memory that the first
process shares with its children, or all through torch.distributed, where there is no compiled
library, or where tensors are on GPUs."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ...errors import RankLost
from ...kernels.native.communicator import SharedMemory, SharedMemoryCommunicator
from ...kernels.ops import Communicator
from ...kernels.triton.availability import is_interpreted
from ...native_library import BuildError

if TYPE_CHECKING:
    from torch._C._distributed_c10d import TCPStore

    from ...kernels.torch_communicator import TorchWorld

_LOOK_S = 0.02


def _here(process: int) -> str:
    """The store's key that says so."""
    return f"stemma-process-{process}"


@dataclass(frozen=True, slots=True)
class Joined:
    """What a process has of the others."""

    communicator: Communicator | None  # with the ranks of its stage; None: there are none
    world: TorchWorld | None  # None: nobody needs torch.distributed


@dataclass(frozen=True, slots=True)
class Meeting:
    """What one of the processes needs to join; made by `OpenedMeeting`."""

    process: int  # its number; those of a stage follow each other, in the order of their ranks
    num_ranks: int  # of each stage
    num_processes: int
    descriptor: int | None  # of memory that the ranks of its stage share, which children inherit
    port: int | None  # of torch.distributed's store, on this machine
    is_on_gpu: bool

    @property
    def descriptors(self) -> tuple[int, ...]:
        """What the process must be given."""
        return () if self.descriptor is None else (self.descriptor,)

    def join(self) -> Joined:
        """As another process than the first."""
        store, memory = None, None
        if self.port is not None:
            from ...kernels.torch_communicator import new_store

            store = new_store(self.num_processes, self.port)
            store.set(_here(self.process), "")
        if self.descriptor is not None:
            memory = SharedMemory(self.num_ranks, self.descriptor)
        return self.joined(store, memory)

    def joined(self, store: TCPStore | None, memory: SharedMemory | None) -> Joined:
        """With what this process has opened."""
        world: TorchWorld | None = None
        communicator: Communicator | None = None
        if store is not None:
            from ...kernels.torch_communicator import TorchWorld

            world = TorchWorld(store, self.process, self.num_processes, is_on_gpu=self.is_on_gpu)
        if memory is not None:
            rank = self.process % self.num_ranks
            communicator = SharedMemoryCommunicator(memory, rank, self.num_ranks)
        elif self.num_ranks > 1:
            assert world is not None, "the ranks meet in one place"
            communicator = world.communicator(self.num_ranks)
        return Joined(communicator, world)


class OpenedMeeting:
    """The side of who starts the processes, and is the first of them."""

    def __init__(self, num_ranks: int, num_stages: int, device: str) -> None:
        """Raises InvalidRequest for more ranks than there is room for."""
        self._num_ranks, self._num_processes = num_ranks, num_ranks * num_stages
        self._is_on_gpu = device != "cpu" and not is_interpreted()
        self._memories: list[SharedMemory] = []  # of each stage, that of the first process first
        if num_ranks > 1 and not self._is_on_gpu:
            self._memories = _shared_memories(num_ranks, num_stages)
        self._store: TCPStore | None = None
        has_neighbours = num_stages > 1 and device != "cpu"  # see `places`
        if has_neighbours or (num_ranks > 1 and not self._memories):
            from ...kernels.torch_communicator import new_store

            self._store = new_store(self._num_processes)

    def of(self, process: int) -> Meeting:
        """As this process joins it."""
        memories = self._memories
        return Meeting(
            process,
            self._num_ranks,
            self._num_processes,
            memories[process // self._num_ranks].descriptor if memories else None,
            None if self._store is None else self._store.port,
            self._is_on_gpu,
        )

    def join(self, are_alive: Callable[[], bool]) -> Joined:
        """As the first, once the others are there where they are waited for. Raises RankLost where
        one of them ends before."""
        if self._store is not None:
            while not self._store.check([_here(n) for n in range(1, self._num_processes)]):
                if not are_alive():
                    raise RankLost("a process of the model has ended before it was ready")
                time.sleep(_LOOK_S)
        return self.of(0).joined(self._store, self._memories[0] if self._memories else None)

    def hand_over(self) -> None:
        """The others' processes have been started: close what is only theirs."""
        for memory in self._memories[1:]:
            memory.close()


def _shared_memories(num_ranks: int, num_stages: int) -> list[SharedMemory]:
    """One a stage; none without a compiled library."""
    try:
        return [SharedMemory(num_ranks) for _ in range(num_stages)]
    except BuildError:
        return []
