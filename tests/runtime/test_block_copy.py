"""Blocks leave the pool and come back bit for bit, wherever their slots are."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from stemma.runtime.memory.block_copy import gather_block, scatter_block, slots_of

NUM_LAYERS, NUM_HEADS, HEAD_DIM, NUM_SLOTS = 3, 2, 4, 1024
DTYPES = [torch.bfloat16, torch.float16, torch.float32, torch.float64]


def random_layers(dtype: torch.dtype, seed: int) -> tuple[torch.Tensor, ...]:
    """All bit patterns, NaNs with payloads among them."""
    rng = np.random.default_rng(seed)
    shape = (2, NUM_HEADS, NUM_SLOTS, HEAD_DIM)
    size = int(np.prod(shape)) * dtype.itemsize
    return tuple(
        torch.from_numpy(rng.integers(0, 256, size, dtype=np.uint8)).view(dtype).view(shape)
        for _ in range(NUM_LAYERS)
    )


def bits(tensor: torch.Tensor) -> np.ndarray:
    return tensor.contiguous().flatten().view(torch.uint8).numpy()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("page_size", [1, 16, 256])
def test_a_block_keeps_its_bits_through_a_copy_out_and_in(
    dtype: torch.dtype, page_size: int
) -> None:
    source, target = random_layers(dtype, 1), random_layers(dtype, 2)
    before = [layer.clone() for layer in target]
    num_slots = source[0].shape[2]
    generator = torch.Generator().manual_seed(3)
    order = torch.randperm(num_slots // page_size, generator=generator)
    pages_from, pages_to = order[: 256 // page_size], order[-(256 // page_size) :]
    slots_from = slots_of(pages_from.tolist(), page_size)
    slots_to = slots_of(pages_to.tolist(), page_size)
    payload = gather_block(source, slots_from)
    assert payload.nbytes == NUM_LAYERS * 2 * NUM_HEADS * 256 * HEAD_DIM * dtype.itemsize
    scatter_block(target, slots_to, payload)
    others = torch.ones(num_slots, dtype=torch.bool)
    others[slots_to] = False
    for old, new, given in zip(before, target, source, strict=True):
        assert (bits(new[:, :, slots_to]) == bits(given[:, :, slots_from])).all()
        assert (bits(new[:, :, others]) == bits(old[:, :, others])).all()


def test_the_payload_lies_layer_by_layer_keys_first() -> None:
    layers = random_layers(torch.float32, 1)
    payload = gather_block(layers, torch.arange(256))
    block = payload.view(np.float32).reshape(NUM_LAYERS, 2, NUM_HEADS, 256, HEAD_DIM)
    for index, layer in enumerate(layers):
        assert (bits(torch.from_numpy(block[index].copy())) == bits(layer[:, :, :256])).all()


def test_slots_follow_the_pages_order() -> None:
    assert slots_of([3, 1], 4).tolist() == [12, 13, 14, 15, 4, 5, 6, 7]


def test_a_payload_of_another_size_is_refused() -> None:
    with pytest.raises(AssertionError, match="bytes for a block"):
        scatter_block(
            random_layers(torch.float32, 1), torch.arange(256), np.zeros(8, dtype=np.uint8)
        )


def test_only_some_tokens_of_a_block_are_written_on_request() -> None:
    source, target = random_layers(torch.float32, 1), random_layers(torch.float32, 2)
    before = [layer.clone() for layer in target]
    scatter_block(target, torch.arange(500, 530), gather_block(source, torch.arange(256)), 100)
    for old, new, given in zip(before, target, source, strict=True):
        assert (bits(new[:, :, 500:530]) == bits(given[:, :, 100:130])).all()
        assert (bits(new[:, :, :500]) == bits(old[:, :, :500])).all()
        assert (bits(new[:, :, 530:]) == bits(old[:, :, 530:])).all()
