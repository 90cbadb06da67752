"""How the ranks of a model find each other: through memory that rank 0 shares with its children, or
through torch.distributed where there is no compiled library, or where tensors are on GPUs."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from ...errors import RankLost
from ...kernels.native.communicator import SharedMemory, SharedMemoryCommunicator
from ...kernels.ops import Communicator
from ...kernels.triton.availability import is_interpreted
from ...native_library import BuildError

_LOOK_S = 0.02


def _here(rank: int) -> str:
    """The store's key that says so."""
    return f"stemma-rank-{rank}"


@dataclass(frozen=True, slots=True)
class Meeting:
    """What a rank needs to join; made by `open_meeting`."""

    num_ranks: int
    descriptor: int | None = None  # of shared memory, which children inherit
    port: int | None = None  # of torch.distributed's store, on this machine
    is_on_gpu: bool = False

    @property
    def descriptors(self) -> tuple[int, ...]:
        """What a rank's process must be given."""
        return () if self.descriptor is None else (self.descriptor,)

    def join(self, rank: int) -> Communicator:
        """As another rank than 0."""
        if self.descriptor is not None:
            memory = SharedMemory(self.num_ranks, self.descriptor)
            return SharedMemoryCommunicator(memory, rank, self.num_ranks)
        from ...kernels.torch_communicator import TorchCommunicator, new_store

        assert self.port is not None, "the ranks meet in one place"
        store = new_store(self.num_ranks, self.port)
        store.set(_here(rank), "")
        return TorchCommunicator(store, rank, self.num_ranks, is_on_gpu=self.is_on_gpu)


class OpenedMeeting:
    """The side of who starts the ranks. As rank 0 it joins by `communicator`, which may wait for
    the others."""

    def __init__(self, num_ranks: int, device: str) -> None:
        """Raises InvalidRequest for more ranks than there is room for."""
        self._memory: SharedMemory | None = None
        is_on_gpu = device != "cpu" and not is_interpreted()
        self.meeting = Meeting(num_ranks, is_on_gpu=is_on_gpu)
        if not is_on_gpu:
            try:
                self._memory = SharedMemory(num_ranks)
                self.meeting = Meeting(num_ranks, descriptor=self._memory.descriptor)
                return
            except BuildError:
                pass
        from ...kernels.torch_communicator import new_store

        self._store = new_store(num_ranks)
        self.meeting = Meeting(num_ranks, port=self._store.port, is_on_gpu=is_on_gpu)

    def communicator(self, are_alive: Callable[[], bool]) -> Communicator:
        """Raises RankLost where another rank ends before it is here: it would be waited for."""
        meeting = self.meeting
        if self._memory is not None:
            return SharedMemoryCommunicator(self._memory, 0, meeting.num_ranks)
        from ...kernels.torch_communicator import TorchCommunicator

        while not self._store.check([_here(rank) for rank in range(1, meeting.num_ranks)]):
            if not are_alive():
                raise RankLost("a rank of the model has ended before it was ready")
            time.sleep(_LOOK_S)
        return TorchCommunicator(self._store, 0, meeting.num_ranks, is_on_gpu=meeting.is_on_gpu)

    def hand_over(self) -> None:
        """Those who meet have been started, and this process is none of them."""
        if self._memory is not None:
            self._memory.close()
