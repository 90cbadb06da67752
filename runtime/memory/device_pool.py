"""The KV pool on the compute device: a tensor for each part of the KV and layer that has it,
addressed by slot.

    layers[i]     [2, num_kv_heads, num_slots, head_dim]: [0] keys (after rotation), [1] values;
                  the same in 8 or 4 bits (QuantizedKV); or [num_slots, latent_dim + rope_dim]
    index_keys[i] [num_slots, head_dim of the indexer], if the layers select keys
    parts[p][i]   the same memory as bytes: [num_vectors, num_slots, vector_bytes], of the i-th
                  layer that has the part

with num_slots = (num_pages + num_spare_pages) * page_size and slot = page * page_size + offset.

Heads come before slots, so that attention gathers contiguous memory head by head, as a batched
matrix product needs it (measured on a CPU, 32 rows of 320 keys, 12 query and 4 KV heads of 64,
bfloat16, one thread: gather and attend 1.4 ms a layer against 5.8 ms with slots first), and a run
of pages is 2 * num_kv_heads contiguous pieces for tier copies. Callers pass page ids; the host half
decides who owns a page.
"""

from __future__ import annotations

import math
import mmap

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ...errors import InvalidRequest
from ...kernels.ops import KVLayer
from ...kernels.quantized_tensors import QuantizedKV
from .kv_layout import KVLayout

_KEYS = ("kv", "values", "latent")  # parts whose first vectors are of keys


class DeviceKVPool:
    """Owns the KV memory for the life of the runner. All `num_pages` pages, from 0 on, are usable.

    Spare pages follow, which no request gets: padding of captured steps is written there.
    """

    def __init__(
        self,
        layout: KVLayout,
        *,
        num_pages: int,
        page_size: int,
        device: torch.device | str = "cpu",
        num_spare_pages: int = 0,
    ) -> None:
        """num_spare_pages: extra pages after the usable ones, for writes that are discarded. Raises
        InvalidRequest, see `zeroed_parts`."""
        self.layout = layout
        self.num_pages = num_pages
        self.page_size = page_size
        num_slots = (num_pages + num_spare_pages) * page_size
        self.parts = zeroed_parts(layout, num_slots, torch.device(device), "max_total_tokens")
        of_layer: list[dict[str, Tensor]] = [{} for _ in range(layout.num_layers)]
        for part, tensors in zip(layout.parts, self.parts, strict=True):
            for layer, tensor in zip(layout.layers_of(part), tensors, strict=True):
                of_layer[layer][part.name] = tensor.view(getattr(torch, part.dtype))
        self.layers: tuple[KVLayer, ...] = tuple(map(_layer, of_layer))
        self.index_keys: tuple[Tensor, ...] = tuple(
            views["index"][0] for views in of_layer if "index" in views
        )

    def keys(self, layer: int) -> npt.NDArray[np.uint8]:
        """[num_slots, num_bytes]: the memory of a layer's first head's keys, or its latents; of a
        pool on a CPU. The layer may be counted from the last one, -1."""
        layer %= self.layout.num_layers
        for part, tensors in zip(self.layout.parts, self.parts, strict=True):
            layers = self.layout.layers_of(part)
            if part.name in _KEYS and layer in layers:
                keys: npt.NDArray[np.uint8] = tensors[layers.index(layer)][0].numpy()
                return keys
        raise AssertionError(f"layer {layer} has no KV")

    @property
    def num_bytes(self) -> int:
        """Size of all layers in bytes."""
        return sum(tensor.nbytes for part in self.parts for tensor in part)


def zeroed_parts(
    layout: KVLayout, num_slots: int, device: torch.device, field: str
) -> tuple[tuple[Tensor, ...], ...]:
    """For each part and layer that has it: [num_vectors, num_slots, vector_bytes] uint8.

    Raises InvalidRequest, which names `field`, where the system does not give a CPU so much memory.
    """
    try:
        return tuple(
            tuple(
                zeros((part.num_vectors, num_slots, part.vector_bytes), device)
                for _ in layout.layers_of(part)
            )
            for part in layout.parts
        )
    except OSError as error:
        size = num_slots * layout.bytes_per_token / 2**30
        raise InvalidRequest(
            f"{num_slots:,} tokens of KV take {size:,.1f} GiB here, which the system does not give "
            f"({error.strerror}): lower {field}",
            field,
        ) from None


def zeros(shape: tuple[int, ...], device: torch.device) -> Tensor:
    """Zero bytes, finite in any dtype. On a CPU they take no memory and no time until a page is
    written: a fresh mapping where torch.zeros writes them (770 MB took 0.05 s instead of 4 s), and
    not in pages of 2 MB as numpy's are, of which the first token would touch one in every head."""
    size = math.prod(shape)
    if device.type != "cpu" or size == 0:
        return torch.zeros(shape, dtype=torch.uint8, device=device)
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(memory, dtype=torch.uint8).view(shape)


def _layer(views: dict[str, Tensor]) -> KVLayer:
    """One layer's KV as the kernels take it; views: by the part's name, see kv_layout.py."""
    if "latent" in views:
        return views["latent"][0]
    heads = {name: view.view(2, -1, *view.shape[1:]) for name, view in views.items()}
    if "kv" in heads:
        return heads["kv"]
    scales = heads["scales"]
    return QuantizedKV(heads["values"], scales[..., 0] if scales.shape[-1] == 1 else scales)
