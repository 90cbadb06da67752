"""Sums and exchanges between ranks: over shared memory, and through torch.distributed."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import numpy as np
import pytest
import torch
from torch import Tensor

from stemma.errors import InvalidRequest, RankLost
from stemma.kernels.native.communicator import (
    MAX_RANKS,
    SLOT_BYTES,
    SharedMemory,
    SharedMemoryCommunicator,
)

T = TypeVar("T")


def on_ranks(num_ranks: int, run: Callable[[SharedMemoryCommunicator], T]) -> list[T]:
    """In threads, which share the memory as processes do."""
    first = SharedMemory(num_ranks)
    memories = [first, *(SharedMemory(num_ranks, first.descriptor) for _ in range(1, num_ranks))]
    ranks = [
        SharedMemoryCommunicator(memory, rank, num_ranks) for rank, memory in enumerate(memories)
    ]
    with ThreadPoolExecutor(num_ranks) as pool:
        try:
            return list(pool.map(run, ranks))
        finally:
            for rank in ranks:
                rank.close()


def values(rank: int, size: int, dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(rank)
    return torch.randn(size, generator=generator, dtype=torch.float64).to(dtype)


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
@pytest.mark.parametrize("size", [1, 17, 4096, SLOT_BYTES + 3])  # the last takes several slots
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_a_sum_is_in_the_order_of_the_ranks_and_rounded_once(
    num_ranks: int, size: int, dtype: torch.dtype
) -> None:
    expected = values(0, size, dtype).to(torch.promote_types(dtype, torch.float32))
    for rank in range(1, num_ranks):
        expected += values(rank, size, dtype)

    def run(ranks: SharedMemoryCommunicator) -> Tensor:
        x = values(ranks.rank, size, dtype)
        ranks.all_reduce(x)
        return x

    for found in on_ranks(num_ranks, run):
        assert torch.equal(found, expected.to(dtype))


def test_many_sums_and_exchanges_follow_each_other_in_any_timing() -> None:
    """A rank may be a whole exchange ahead of another."""

    def run(ranks: SharedMemoryCommunicator) -> None:
        for turn in range(3000):
            x = torch.full((8,), float(turn * (ranks.rank + 1)))
            ranks.all_reduce(x)
            assert x.tolist() == [turn * 6.0] * 8
            if turn % 7 == 0:
                gathered = ranks.all_gather(np.array([turn, ranks.rank]))
                assert gathered.tolist() == [[turn, rank] for rank in range(3)]

    on_ranks(3, run)


def test_what_is_gathered_keeps_shape_and_dtype_whatever_its_size() -> None:
    def run(ranks: SharedMemoryCommunicator) -> tuple[int, ...]:
        data = np.full((2, SLOT_BYTES // 4), ranks.rank, dtype=np.int32)
        gathered = ranks.all_gather(data)
        assert gathered.dtype == np.int32
        assert (gathered == np.arange(2)[:, None, None]).all()
        return gathered.shape

    assert on_ranks(2, run) == [(2, 2, SLOT_BYTES // 4)] * 2


@pytest.mark.parametrize("unit", [1, 1000, SLOT_BYTES // 3])  # the last takes several slots
def test_each_rank_is_given_what_the_others_have_for_it_however_much(unit: int) -> None:
    """From rank 1 to rank 2 it is nothing."""

    def size(giver: int, taker: int) -> int:
        return unit * ((giver + 2 * taker) % 5)

    def run(ranks: SharedMemoryCommunicator) -> None:
        for turn in range(3):
            parts = [
                torch.full((size(ranks.rank, taker),), 16 * turn + 4 * ranks.rank + taker).byte()
                for taker in range(3)
            ]
            for giver, part in enumerate(ranks.all_to_all(parts)):
                assert len(part) == size(giver, ranks.rank)
                assert (part == 16 * turn + 4 * giver + ranks.rank).all()
        nothing = [torch.zeros(0, dtype=torch.uint8)] * 3
        assert [len(part) for part in ranks.all_to_all(nothing)] == [0, 0, 0]

    on_ranks(3, run)


def test_who_waits_for_a_rank_that_has_gone_is_told() -> None:
    is_waiting = threading.Event()

    def run(ranks: SharedMemoryCommunicator) -> str:
        if ranks.rank == 1:
            is_waiting.wait()
            ranks.abort()
            return "gone"
        is_waiting.set()
        ranks.all_reduce(torch.ones(4))  # comes to nothing
        with pytest.raises(RankLost, match="a rank of the model has ended"):
            ranks.check()
        with pytest.raises(RankLost):
            ranks.all_gather(np.zeros(1))
        return "told"

    assert on_ranks(2, run) == ["told", "gone"]


def test_a_closed_one_says_that_the_ranks_are_gone() -> None:
    ranks = SharedMemoryCommunicator(SharedMemory(1), 0, 1)
    ranks.close()
    ranks.abort()
    with pytest.raises(RankLost):
        ranks.check()


def test_more_ranks_than_there_is_room_for_are_refused() -> None:
    with pytest.raises(InvalidRequest, match=rf"tp_size={MAX_RANKS + 1} is not allowed"):
        SharedMemory(MAX_RANKS + 1)


_TORCH_RANK = """
import os, socket, sys, numpy as np, torch
from stemma.errors import RankLost
from stemma.kernels.torch_communicator import TorchWorld, new_store
rank, port = int(sys.argv[1]), int(sys.argv[2])
store = new_store(2, port or None)
if rank == 0:
    try:
        socket.create_connection(("127.0.0.2", store.port), 5)
    except OSError:  # it listens to one address, not to those of all networks
        print(store.port, flush=True)
world = TorchWorld(store, rank, 2)
assert world.least(5 - rank) == 4
rows = torch.arange(6.0).view(3, 2)
if rank == 0:
    for sent in [world.send(rows * turn, 1) for turn in range(3)]:
        world.end(sent)
else:
    for turn in range(3):
        received = torch.empty(3, 2)
        world.receive(received, 0)
        assert torch.equal(received, rows * turn), received
ranks = world.communicator([[0, 1]])
x = torch.tensor([1.0, 2.0**-9], dtype=torch.bfloat16) * (rank + 1)
ranks.all_reduce(x)
assert x.tolist() == [3.0, 3 * 2.0**-9], x
assert ranks.all_gather(np.array([rank, 7])).tolist() == [[0, 7], [1, 7]]
for size in (3, 0):
    parts = [torch.full((size,), rank).byte(), torch.full((2 * rank * size,), 7).byte()]
    received = ranks.all_to_all(parts)
    assert [part.tolist() for part in received] == (
        [[0] * size, [1] * size] if rank == 0 else [[], [7] * 2 * size]
    ), received
if rank == 1:
    store.wait(["gathered"])
    os._exit(0)
store.set("gathered", "")
for exchange in (lambda: ranks.all_reduce(x), lambda: world.receive(rows, 1)):
    try:
        exchange()
    except RankLost:
        print("told", flush=True)
os._exit(0)  # what gloo does about its lost sockets at an exit is its own
"""


def test_ranks_of_torch_sum_and_are_told_of_one_that_has_gone() -> None:
    def start(rank: int, port: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-c", _TORCH_RANK, str(rank), port]
        return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)

    with start(0, "0") as first:
        assert first.stdout is not None
        port = first.stdout.readline().strip()
        with start(1, port) as second:
            assert second.wait() == 0
        assert first.stdout.read() == "told\n" * 2
    assert first.returncode == 0
