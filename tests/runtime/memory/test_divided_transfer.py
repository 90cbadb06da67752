"""Copies between tiers of which ranks have some pages each leave what they leave in one process."""

from __future__ import annotations

import random
from array import array

import pytest
import torch
from kv_layouts import LAYOUTS, memory_of, random_pool
from ranks import ThreadCommunicator, on_ranks

from stemma.kernels.context_share import PageShare
from stemma.runtime.memory.copies import PageFork, TierCopy, Transfer
from stemma.runtime.memory.device_pool import DeviceKVPool
from stemma.runtime.memory.divided_transfer import DividedKVTransfer
from stemma.runtime.memory.host_pool import HostKVPool
from stemma.runtime.memory.transfer import KVTransfer

NUM_PAGES, NUM_HOST_PAGES, NUM_RANKS = 12, 21, 3


def of_rank(pool: DeviceKVPool | HostKVPool, rank: int) -> list[torch.Tensor]:
    """A copy of the pages that a rank has of a pool of all, in its order."""
    by_page = [tensor.unflatten(1, (-1, pool.page_size)) for tensor in memory_of(pool)]
    return [tensor[:, rank::NUM_RANKS].flatten(1, 2).clone() for tensor in by_page]


@pytest.mark.parametrize("kind", LAYOUTS)
@pytest.mark.parametrize("page_size", [1, 4])
def test_pages_arrive_whichever_ranks_have_them(kind: str, page_size: int) -> None:
    rng, layout = random.Random(2), LAYOUTS[kind]
    moves: list[TierCopy] = []
    for count in (12, 7, 1, 0):  # one of them is of one rank alone, one of nothing
        device = array("i", rng.sample(range(NUM_PAGES), count))
        host = array("i", rng.sample(range(NUM_HOST_PAGES), count))
        back = array("i", rng.sample(range(NUM_PAGES), count))
        moves += [Transfer("store", device, host), Transfer("load", back, host)]
        ids = rng.sample(range(NUM_PAGES), count)
        num_sources = count // 2  # some of which are copied twice
        sources = array(
            "i", rng.choices(ids[:num_sources], k=count - num_sources) if ids[1:] else []
        )
        moves.append(PageFork(sources, array("i", ids[num_sources:] if ids[1:] else [])))
    whole = random_pool(layout, NUM_PAGES, page_size)
    before = [of_rank(whole, rank) for rank in range(NUM_RANKS)]
    host_of_all = HostKVPool(whole, NUM_HOST_PAGES)
    KVTransfer(whole, host_of_all).run(moves)

    def run(communicator: ThreadCommunicator) -> None:
        rank = communicator.rank
        device = DeviceKVPool(layout, num_pages=NUM_PAGES // NUM_RANKS, page_size=page_size)
        for own, given in zip(memory_of(device), before[rank], strict=True):
            own.copy_(given)
        host = HostKVPool(device, NUM_HOST_PAGES // NUM_RANKS)
        pages = PageShare(rank, NUM_RANKS)
        DividedKVTransfer(device, host, pages, communicator.all_gather).run(moves)
        for own_pool, pool in ((device, whole), (host, host_of_all)):
            for own, expected in zip(memory_of(own_pool), of_rank(pool, rank), strict=True):
                assert torch.equal(own, expected)

    on_ranks(NUM_RANKS, run)
