"""Tier moves leave KV bit-equal (docs/architecture.md, exactness, part b)."""

from __future__ import annotations

from array import array
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from stemma.runtime.memory.device_pool import DeviceKVPool
from stemma.runtime.memory.host_pool import HostKVPool
from stemma.runtime.memory.transfer import KVTransfer, contiguous_runs
from stemma.runtime.model_config import ModelConfig
from stemma.runtime.step import Transfer

NUM_PAGES, NUM_HOST_PAGES = 12, 20


@pytest.fixture(scope="module")
def model_config(checkpoint: Path) -> ModelConfig:
    return ModelConfig.from_folder(checkpoint)


def pools(
    config: ModelConfig, dtype: torch.dtype, page_size: int
) -> tuple[DeviceKVPool, HostKVPool]:
    """A device full of random bits, NaNs of every kind among them, and an empty host."""
    device = DeviceKVPool(config, num_pages=NUM_PAGES, page_size=page_size, dtype=dtype)
    for layer in device.layers:
        layer.view(torch.uint8).random_(0, 256)
    return device, HostKVPool(device, NUM_HOST_PAGES)


def bits(layers: tuple[torch.Tensor, ...], pages: list[int], page_size: int) -> list[torch.Tensor]:
    slots = [page * page_size + offset for page in pages for offset in range(page_size)]
    return [layer[:, :, slots].view(torch.uint8) for layer in layers]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("page_size", [1, 16])
@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_kv_is_bit_equal_after_a_round_trip(
    model_config: ModelConfig, dtype: torch.dtype, page_size: int, data: st.DataObject
) -> None:
    device, host = pools(model_config, dtype, page_size)
    transfer = KVTransfer(device, host)
    count = data.draw(st.integers(0, NUM_PAGES))

    def draw(num_pages: int) -> list[int]:
        first = data.draw(st.integers(0, num_pages - count))
        scattered = data.draw(st.permutations(range(num_pages)))[:count]
        return data.draw(st.sampled_from([list(range(first, first + count)), scattered]))

    source, between, target = draw(NUM_PAGES), draw(NUM_HOST_PAGES), draw(NUM_PAGES)
    before = bits(device.layers, source, page_size)
    others = [page for page in range(NUM_PAGES) if page not in target]
    untouched = bits(device.layers, others, page_size)
    transfer.run([Transfer("store", array("i", source), array("i", between))])
    assert all(map(torch.equal, bits(host.layers, between, page_size), before))
    transfer.run([Transfer("load", array("i", target), array("i", between))])
    assert all(map(torch.equal, bits(device.layers, target, page_size), before))
    assert all(map(torch.equal, bits(device.layers, others, page_size), untouched))


def test_runs_are_contiguous_on_both_sides() -> None:
    assert list(contiguous_runs([4, 5, 6, 9], [1, 2, 8, 9])) == [(0, 2), (2, 3), (3, 4)]
    assert list(contiguous_runs([3, 4, 5], [0, 1, 2])) == [(0, 3)]
    assert list(contiguous_runs([2, 1], [0, 1])) == [(0, 1), (1, 2)]
    assert list(contiguous_runs([], [])) == []
