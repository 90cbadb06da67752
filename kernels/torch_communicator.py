"""Ranks that sum and exchange through torch.distributed: NCCL between GPUs, gloo between processes
without a compiled library. Its sums are the reference of the compiled ones."""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
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

# A rank that has ended closes its sockets, which ends all waits at once; this is for one that
# hangs.
_TIMEOUT = timedelta(minutes=10)
_HOST = "127.0.0.1"


def new_store(num_ranks: int, port: int | None = None) -> TCPStore:
    """Where the ranks of a machine meet. port: of the store that rank 0 made; None: makes it."""
    if port is not None:
        return TCPStore(_HOST, port, num_ranks, False, _TIMEOUT, wait_for_workers=False)
    listener = socket.create_server((_HOST, 0))  # by itself it would listen to all networks
    port = listener.getsockname()[1]
    return TCPStore(
        _HOST,
        port,
        num_ranks,
        True,
        _TIMEOUT,
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
    )


class TorchCommunicator:
    """See `ops.Communicator`. Waits until all ranks have made theirs."""

    def __init__(
        self, store: TCPStore, rank: int, num_ranks: int, *, is_on_gpu: bool = False
    ) -> None:
        self.rank, self.num_ranks = rank, num_ranks
        self._store = store
        self._is_on_gpu = is_on_gpu
        self._is_aborted = False
        loopbacks = [name for _, name in socket.if_nameindex() if name.startswith("lo")]
        if loopbacks:  # rather than where this machine's name leads to
            os.environ.setdefault("GLOO_SOCKET_IFNAME", loopbacks[0])
        backend = "cpu:gloo,cuda:nccl" if is_on_gpu else "gloo"
        dist.init_process_group(
            backend, store=store, rank=rank, world_size=num_ranks, timeout=_TIMEOUT
        )

    def all_reduce(self, x: Tensor) -> None:
        """See `ops.Communicator`."""
        if self._is_on_gpu:
            dist.all_reduce(x)
            return
        parts = [torch.empty_like(x) for _ in range(self.num_ranks)]
        self._wait_for(lambda: dist.all_gather(parts, x))
        wide = torch.promote_types(x.dtype, torch.float32)
        total = parts[0].to(wide)
        for part in parts[1:]:
            total += part
        x.copy_(total)

    def all_gather(self, data: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """See `ops.Communicator`."""
        flat = torch.from_numpy(np.ascontiguousarray(data).reshape(-1).view(np.uint8))
        parts = [torch.empty_like(flat) for _ in range(self.num_ranks)]
        self._wait_for(lambda: dist.all_gather(parts, flat))
        gathered = torch.stack(parts).numpy()
        return gathered.view(data.dtype).reshape(self.num_ranks, *data.shape)

    def all_to_all(self, parts: Sequence[Tensor]) -> Sequence[Tensor]:
        """See `ops.Communicator`."""
        given = [len(part) for part in parts]
        sizes = self.all_gather(np.array(given, dtype=np.int64))[:, self.rank].tolist()
        data = torch.cat(list(parts))
        received = data.new_empty(sum(sizes))
        self._wait_for(lambda: dist.all_to_all_single(received, data, sizes, given))
        return received.split(sizes)

    def gather_columns(self, x: Tensor, sizes: Sequence[int]) -> Tensor:
        """See `ops.Communicator`."""
        padded = pad(x, (0, max(sizes) - x.shape[1]))
        gathered = [torch.empty_like(padded) for _ in sizes]
        dist.all_gather(gathered, padded)
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
        dist.destroy_process_group()

    def _wait_for(self, exchange: Any) -> None:
        self.check()
        try:
            exchange()
        except RuntimeError as error:  # a socket was closed at the other end
            self._is_aborted = True
            raise _lost() from error


def _lost() -> RankLost:
    return RankLost("a rank of the model has ended: the engine cannot go on without it")
