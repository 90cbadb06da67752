"""Tier moves leave KV bit-equal (docs/how-it-works/architecture.md, exactness, part b)."""

from __future__ import annotations

from array import array

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kv_layouts import LAYOUTS, memory_of, random_pool

from stemma.runtime.memory.copies import Transfer
from stemma.runtime.memory.device_pool import DeviceKVPool
from stemma.runtime.memory.host_pool import HostKVPool
from stemma.runtime.memory.transfer import KVTransfer, contiguous_runs

NUM_PAGES, NUM_HOST_PAGES = 12, 20


def bits(pool: DeviceKVPool | HostKVPool, pages: list[int]) -> list[torch.Tensor]:
    size = pool.page_size
    slots = [page * size + offset for page in pages for offset in range(size)]
    return [tensor[:, slots] for tensor in memory_of(pool)]


@pytest.mark.parametrize("kind", LAYOUTS)
@pytest.mark.parametrize("page_size", [1, 16])
@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_kv_is_bit_equal_after_a_round_trip(kind: str, page_size: int, data: st.DataObject) -> None:
    device = random_pool(LAYOUTS[kind], NUM_PAGES, page_size)
    host = HostKVPool(device, NUM_HOST_PAGES)
    transfer = KVTransfer(device, host)
    count = data.draw(st.integers(0, NUM_PAGES))

    def draw(num_pages: int) -> list[int]:
        first = data.draw(st.integers(0, num_pages - count))
        scattered = data.draw(st.permutations(range(num_pages)))[:count]
        return data.draw(st.sampled_from([list(range(first, first + count)), scattered]))

    source, between, target = draw(NUM_PAGES), draw(NUM_HOST_PAGES), draw(NUM_PAGES)
    before = bits(device, source)
    others = [page for page in range(NUM_PAGES) if page not in target]
    untouched = bits(device, others)
    transfer.run([Transfer("store", array("i", source), array("i", between))])
    assert all(map(torch.equal, bits(host, between), before))
    transfer.run([Transfer("load", array("i", target), array("i", between))])
    assert all(map(torch.equal, bits(device, target), before))
    assert all(map(torch.equal, bits(device, others), untouched))


def test_runs_are_contiguous_on_both_sides() -> None:
    assert list(contiguous_runs([4, 5, 6, 9], [1, 2, 8, 9])) == [(0, 2), (2, 3), (3, 4)]
    assert list(contiguous_runs([3, 4, 5], [0, 1, 2])) == [(0, 3)]
    assert list(contiguous_runs([2, 1], [0, 1])) == [(0, 1), (1, 2)]
    assert list(contiguous_runs([], [])) == []
