"""How the processes of a model find each other: those of a group through memory that the first
process shares with its children, or all through torch.distributed, where there is no compiled
library, or where tensors are on GPUs."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
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
class Groups:
    """Processes in groups of equal size: in each their numbers are `step` apart."""

    size: int
    step: int

    def place(self, process: int) -> tuple[int, int]:
        """(the group's number, the process's rank in it)."""
        block, within = divmod(process, self.size * self.step)
        return block * self.step + within % self.step, within // self.step

    def members(self, num_processes: int) -> list[list[int]]:
        """The processes of each group, in the order of their ranks."""
        found: list[list[int]] = [[] for _ in range(num_processes // self.size)]
        for process in range(num_processes):
            found[self.place(process)[0]].append(process)
        return found


@dataclass(frozen=True, slots=True)
class Joined:
    """What a process has of the others."""

    communicators: Sequence[Communicator | None]  # of each kind of groups; None: it is alone there
    world: TorchWorld | None  # None: nobody needs torch.distributed


@dataclass(frozen=True, slots=True)
class Meeting:
    """What one of the processes needs to join; made by `OpenedMeeting`."""

    process: int  # its number
    kinds: Sequence[Groups]  # of each kind it is in one group
    num_processes: int
    # Of memory that its group of each kind shares, which children inherit; None: there is none.
    memories: Sequence[int | None]
    port: int | None  # of torch.distributed's store, on this machine
    is_on_gpu: bool

    @property
    def descriptors(self) -> tuple[int, ...]:
        """What the process must be given."""
        return tuple(memory for memory in self.memories if memory is not None)

    def join(self) -> Joined:
        """As another process than the first."""
        store = None
        if self.port is not None:
            from ...kernels.torch_communicator import new_store

            store = new_store(self.num_processes, self.port)
            store.set(_here(self.process), "")
        memories = [
            None if memory is None else SharedMemory(groups.size, memory)
            for groups, memory in zip(self.kinds, self.memories, strict=True)
        ]
        return self.joined(store, memories)

    def joined(self, store: TCPStore | None, memories: Sequence[SharedMemory | None]) -> Joined:
        """With what this process has opened."""
        world: TorchWorld | None = None
        if store is not None:
            from ...kernels.torch_communicator import TorchWorld

            world = TorchWorld(store, self.process, self.num_processes, is_on_gpu=self.is_on_gpu)
        found: list[Communicator | None] = []
        for groups, memory in zip(self.kinds, memories, strict=True):
            communicator: Communicator | None = None
            if memory is not None:
                _, rank = groups.place(self.process)
                communicator = SharedMemoryCommunicator(memory, rank, groups.size)
            elif groups.size > 1:
                assert world is not None, "the ranks meet in one place"
                communicator = world.communicator(groups.members(self.num_processes))
            found.append(communicator)
        return Joined(found, world)


class OpenedMeeting:
    """The side of who starts the processes, and is the first of them."""

    def __init__(
        self, kinds: Sequence[Groups], num_processes: int, device: str, *, needs_world: bool
    ) -> None:
        """needs_world: whether somebody exchanges beyond groups. Raises InvalidRequest for more
        ranks than there is room for."""
        self._kinds, self._num_processes = kinds, num_processes
        self._is_on_gpu = device != "cpu" and not is_interpreted()
        # Of each kind that of each group; none where its processes are alone, or have no such.
        self._memories: list[list[SharedMemory]] = [[] for _ in kinds]
        if not self._is_on_gpu:
            self._memories = [_shared_memories(groups, num_processes) for groups in kinds]
        self._store: TCPStore | None = None
        has_memories = all(
            groups.size == 1 or memories
            for groups, memories in zip(kinds, self._memories, strict=True)
        )
        if needs_world or not has_memories:
            from ...kernels.torch_communicator import new_store

            self._store = new_store(self._num_processes)

    def of(self, process: int) -> Meeting:
        """As this process joins it."""
        memories = self._memories_of(process)
        return Meeting(
            process,
            self._kinds,
            self._num_processes,
            [None if memory is None else memory.descriptor for memory in memories],
            None if self._store is None else self._store.port,
            self._is_on_gpu,
        )

    def _memories_of(self, process: int) -> list[SharedMemory | None]:
        """Of its group of each kind."""
        return [
            memories[groups.place(process)[0]] if memories else None
            for groups, memories in zip(self._kinds, self._memories, strict=True)
        ]

    def join(self, are_alive: Callable[[], bool]) -> Joined:
        """As the first, once the others are there where they are waited for. Raises RankLost where
        one of them ends before."""
        if self._store is not None:
            while not self._store.check([_here(n) for n in range(1, self._num_processes)]):
                if not are_alive():
                    raise RankLost("a process of the model has ended before it was ready")
                time.sleep(_LOOK_S)
        return self.of(0).joined(self._store, self._memories_of(0))

    def hand_over(self) -> None:
        """The others' processes have been started: close what is only theirs."""
        for memories in self._memories:
            for memory in memories[1:]:  # the first process is in the first group of each kind
                memory.close()


def _shared_memories(groups: Groups, num_processes: int) -> list[SharedMemory]:
    """One a group; none for processes that are alone, and without a compiled library."""
    if groups.size == 1:
        return []
    try:
        return [SharedMemory(groups.size) for _ in range(num_processes // groups.size)]
    except BuildError:
        return []
