"""Processes that sum and exchange through torch.distributed: NCCL between GPUs, gloo between
processes without a compiled library. Its sums are the reference of the compiled ones."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import TCPStore
from torch.nn.functional import pad

from ..errors import RankLost

# A process that has ended closes its sockets, which ends all waits at once; this is for one that
# hangs.
_TIMEOUT = timedelta(minutes=10)
_HOST = "127.0.0.1"


def new_store(num_processes: int, port: int | None = None) -> TCPStore:
    """Where the processes of a machine meet. port: of the store that the first made; None: makes
    it."""
    if port is not None:
        return TCPStore(_HOST, port, num_processes, False, _TIMEOUT, wait_for_workers=False)
    listener = socket.create_server((_HOST, 0))  # by itself it would listen to all networks
    port = listener.getsockname()[1]
    return TCPStore(
        _HOST,
        port,
        num_processes,
        True,
        _TIMEOUT,
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
    )


class TorchWorld:
    """All processes of a model by their numbers: torch.distributed's default group, which it owns
    until `close`. Waits until all have made theirs.

    Between GPUs messages are queued on the current stream, as kernels are; the host waits for none.
    """

    def __init__(
        self, store: TCPStore, process: int, num_processes: int, *, is_on_gpu: bool = False
    ) -> None:
        self._process, self._num_processes = process, num_processes
        self._store = store
        self._is_on_gpu = is_on_gpu
        loopbacks = [name for _, name in socket.if_nameindex() if name.startswith("lo")]
        if loopbacks:  # rather than where this machine's name leads to
            os.environ.setdefault("GLOO_SOCKET_IFNAME", loopbacks[0])
        backend = "cpu:gloo,cuda:nccl" if is_on_gpu else "gloo"
        dist.init_process_group(
            backend, store=store, rank=process, world_size=num_processes, timeout=_TIMEOUT
        )

    def communicator(self, groups: Sequence[Sequence[int]]) -> TorchCommunicator:
        """With the others of this process's group, in their order. groups: of all processes, each
        in one. All make theirs together."""
        (own,) = (members for members in groups if self._process in members)
        group = None
        if len(groups) > 1:
            group, _ = dist.new_subgroups_by_enumeration(groups, timeout=_TIMEOUT)  # type: ignore[no-untyped-call]
        rank = own.index(self._process)
        return TorchCommunicator(group, rank, len(own), is_on_gpu=self._is_on_gpu)

    def send(self, x: Tensor, process: int) -> dist.Work:
        """Begin to; x stays as it is until `end`. Raises RankLost."""
        with _telling():
            return _work(dist.isend(x, process))

    def end(self, sent: dist.Work) -> None:
        """Wait until it has been received. Raises RankLost."""
        with _telling():
            sent.wait()

    def receive(self, x: Tensor, process: int) -> None:
        """Fill x, of the dtype and shape of what is sent next. Raises RankLost."""
        with _telling():
            _work(dist.irecv(x, process)).wait()

    def least(self, number: int) -> int:
        """The smallest of all processes' numbers. Raises RankLost."""
        found = torch.tensor(number)
        with _telling():
            dist.all_reduce(found, dist.ReduceOp.MIN)
        return int(found)

    def close(self) -> None:
        """Nobody exchanges anything any more."""
        dist.destroy_process_group()


class TorchCommunicator:
    """See `ops.Communicator`. The world has what it uses."""

    def __init__(
        self, group: dist.ProcessGroup | None, rank: int, num_ranks: int, *, is_on_gpu: bool
    ) -> None:
        """group: None: all processes."""
        self.rank, self.num_ranks = rank, num_ranks
        self._group = group
        self._is_on_gpu = is_on_gpu
        self._is_aborted = False

    def all_reduce(self, x: Tensor) -> None:
        """See `ops.Communicator`."""
        if self._is_on_gpu:
            dist.all_reduce(x, group=self._group)
            return
        parts = [torch.empty_like(x) for _ in range(self.num_ranks)]
        with self._told():
            dist.all_gather(parts, x, group=self._group)
        wide = torch.promote_types(x.dtype, torch.float32)
        total = parts[0].to(wide)
        for part in parts[1:]:
            total += part
        x.copy_(total)

    def all_gather(self, data: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """See `ops.Communicator`."""
        flat = torch.from_numpy(np.ascontiguousarray(data).reshape(-1).view(np.uint8))
        parts = [torch.empty_like(flat) for _ in range(self.num_ranks)]
        with self._told():
            dist.all_gather(parts, flat, group=self._group)
        gathered = torch.stack(parts).numpy()
        return gathered.view(data.dtype).reshape(self.num_ranks, *data.shape)

    def all_to_all(self, parts: Sequence[Tensor]) -> Sequence[Tensor]:
        """See `ops.Communicator`."""
        given = [len(part) for part in parts]
        sizes = self.all_gather(np.array(given, dtype=np.int64))[:, self.rank].tolist()
        data = torch.cat(list(parts))
        received = data.new_empty(sum(sizes))
        with self._told():
            dist.all_to_all_single(received, data, sizes, given, group=self._group)
        return torch.split(received, sizes)

    def gather_columns(self, x: Tensor, sizes: Sequence[int]) -> Tensor:
        """See `ops.Communicator`."""
        padded = pad(x, (0, max(sizes) - x.shape[1]))
        gathered = [torch.empty_like(padded) for _ in sizes]
        dist.all_gather(gathered, padded, group=self._group)
        return torch.cat([part[:, :size] for part, size in zip(gathered, sizes)], dim=1)

    def abort(self) -> None:
        """See `ops.Communicator`: here the end of this process tells the others."""
        self._is_aborted = True

    def check(self) -> None:
        """See `ops.Communicator`."""
        if self._is_aborted:
            raise _lost()

    def close(self) -> None:
        """See `ops.Communicator`."""
        self._is_aborted = True

    @contextmanager
    def _told(self) -> Iterator[None]:
        self.check()
        try:
            with _telling():
                yield
        except RankLost:
            self._is_aborted = True
            raise


@contextmanager
def _telling() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:  # a socket was closed at the other end
        raise _lost() from error


def _lost() -> RankLost:
    return RankLost("a process of the model has ended: the engine cannot go on without it")


def _work(begun: dist.Work | None) -> dist.Work:
    assert begun is not None, "this process is one of the world"
    return begun
