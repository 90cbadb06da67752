"""Copies between a block's bytes and its slots in the device's pool, bit for bit.

A block lies scattered in the pool (any 256 slots of each layer) and in one piece outside of it:
[num_layers, 2, num_kv_heads, 256, head_dim], as `KVLayout.block_shape` says.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from .block_file import Payload
from .block_key import BLOCK_TOKENS


def slots_of(pages: Sequence[int], page_size: int, device: torch.device | str = "cpu") -> Tensor:
    """[len(pages) * page_size] int64: the slots of pages, in their order."""
    first = torch.tensor(pages, dtype=torch.int64, device=device) * page_size
    return (first[:, None] + torch.arange(page_size, device=device)).flatten()


def gather_block(layers: Sequence[Tensor], slots: Tensor) -> Payload:
    """The bytes of a block, a copy; layers [2, num_kv_heads, num_slots, head_dim], slots [256]."""
    _, num_heads, _, head_dim = layers[0].shape
    shape = (len(layers), 2, num_heads, BLOCK_TOKENS, head_dim)
    block = torch.empty(shape, dtype=layers[0].dtype, device=layers[0].device)
    for layer, target in zip(layers, block, strict=True):
        torch.index_select(layer, 2, slots, out=target)
    payload: Payload = block.cpu().flatten().view(torch.uint8).numpy()
    return payload


def scatter_block(
    layers: Sequence[Tensor], slots: Tensor, payload: Payload, first_token: int = 0
) -> None:
    """Write the bytes of a block's tokens from `first_token` on to as many slots, all distinct."""
    _, num_heads, _, head_dim = layers[0].shape
    shape = (len(layers), 2, num_heads, BLOCK_TOKENS, head_dim)
    num_bytes = math.prod(shape) * layers[0].element_size()
    assert payload.nbytes == num_bytes, f"{payload.nbytes} bytes for a block of {num_bytes}"
    block = torch.from_numpy(payload).view(layers[0].dtype).view(shape)
    tokens = block[..., first_token : first_token + len(slots), :].to(layers[0].device)
    for layer, source in zip(layers, tokens, strict=True):
        layer.index_copy_(2, slots, source)
