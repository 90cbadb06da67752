"""The kinds of KV layouts at test sizes, and pools of random bits in them."""

from __future__ import annotations

import torch

from stemma.runtime.memory.device_pool import DeviceKVPool
from stemma.runtime.memory.host_pool import HostKVPool
from stemma.runtime.memory.kv_layout import KVLayout, KVPart

LAYOUTS = {
    "bfloat16": KVLayout(2, (KVPart("kv", 4, 16, "bfloat16"),)),
    "float32": KVLayout(2, (KVPart("kv", 4, 6, "float32"),)),
    "int8": KVLayout(2, (KVPart("values", 4, 16, "int8"), KVPart("scales", 4, 1, "float32"))),
    "int4": KVLayout(2, (KVPart("values", 4, 16, "uint8"), KVPart("scales", 4, 4, "uint8"))),
    "fp8": KVLayout(
        3, (KVPart("values", 2, 6, "float8_e4m3fn"), KVPart("scales", 2, 1, "float32"))
    ),
    "unlike layers": KVLayout(
        3, (KVPart("kv", 4, 16, "bfloat16", (0, 2)), KVPart("kv", 2, 32, "bfloat16", (1,)))
    ),
    "latent": KVLayout(3, (KVPart("latent", 1, 40, "bfloat16"),)),
    "indexed": KVLayout(
        2, (KVPart("latent", 1, 40, "bfloat16"), KVPart("index", 1, 24, "bfloat16"))
    ),
}


def random_pool(layout: KVLayout, num_pages: int, page_size: int) -> DeviceKVPool:
    """Full of random bits, the same in every call, including NaNs of every kind."""
    pool = DeviceKVPool(layout, num_pages=num_pages, page_size=page_size)
    generator = torch.Generator().manual_seed(1)
    for tensor in memory_of(pool):
        tensor.random_(0, 256, generator=generator)
    return pool


def memory_of(pool: DeviceKVPool | HostKVPool) -> list[torch.Tensor]:
    """Every tensor of a pool, as bytes [num_vectors, num_slots, vector_bytes]."""
    return [tensor for part in pool.parts for tensor in part]
