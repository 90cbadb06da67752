"""Blocks leave the pool and come back bit for bit, wherever their slots are."""

from __future__ import annotations

import numpy as np
import pytest

from stemma.runtime.memory.block_copy import Bytes, gather_block, scatter_block, slots_of

NUM_LAYERS, NUM_VECTORS, NUM_SLOTS, WIDTH, SCALE_WIDTH = 3, 4, 1024, 6, 4


def random_layers(seed: int) -> tuple[Bytes, ...]:
    rng = np.random.default_rng(seed)
    return tuple(
        rng.integers(0, 256, (NUM_VECTORS, NUM_SLOTS, width), dtype=np.uint8)
        for width in (WIDTH, SCALE_WIDTH)
        for _ in range(NUM_LAYERS)
    )


@pytest.mark.parametrize("is_sorted", [False, True])
@pytest.mark.parametrize("page_size", [1, 2, 16, 256])
def test_a_block_keeps_its_bits_through_a_copy_out_and_in(page_size: int, is_sorted: bool) -> None:
    source, target = random_layers(1), random_layers(2)
    before = [layer.copy() for layer in target]
    order = np.random.default_rng(3).permutation(NUM_SLOTS // page_size)
    pages_from, pages_to = order[: 256 // page_size], order[-(256 // page_size) :]
    if is_sorted:
        pages_from, pages_to = np.sort(pages_from), np.arange(256 // page_size) + 1
    slots_from = slots_of(pages_from.tolist(), page_size)
    slots_to = slots_of(pages_to.tolist(), page_size)
    payload = gather_block(source, slots_from)
    assert payload.shape == (NUM_LAYERS * NUM_VECTORS * 256 * (WIDTH + SCALE_WIDTH),)
    scatter_block(target, slots_to, payload)
    others = np.setdiff1d(np.arange(NUM_SLOTS), slots_to)
    for old, new, given in zip(before, target, source, strict=True):
        assert (new[:, slots_to] == given[:, slots_from]).all()
        assert (new[:, others] == old[:, others]).all()


def test_the_payload_is_a_copy_that_lies_part_by_part_and_layer_by_layer() -> None:
    layers = random_layers(1)
    payload = gather_block(layers, np.arange(256))
    expected = np.concatenate([layer[:, :256].ravel() for layer in layers])
    assert (payload == expected).all()
    assert not any(np.shares_memory(payload, layer) for layer in layers)


def test_slots_follow_the_pages_order() -> None:
    assert slots_of([3, 1], 4).tolist() == [12, 13, 14, 15, 4, 5, 6, 7]


def test_a_payload_of_another_size_is_refused() -> None:
    with pytest.raises(AssertionError, match="bytes for a block"):
        scatter_block(random_layers(1), np.arange(256), np.zeros(8, dtype=np.uint8))


@pytest.mark.parametrize("step", [1, 2])
def test_only_some_tokens_of_a_block_are_written_on_request(step: int) -> None:
    source, target = random_layers(1), random_layers(2)
    before = [layer.copy() for layer in target]
    slots = np.arange(500, 600, step)
    scatter_block(target, slots, gather_block(source, np.arange(256)), 100)
    others = np.setdiff1d(np.arange(NUM_SLOTS), slots)
    for old, new, given in zip(before, target, source, strict=True):
        assert (new[:, slots] == given[:, 100 : 100 + len(slots)]).all()
        assert (new[:, others] == old[:, others]).all()
