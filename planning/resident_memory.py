"""What an engine's process holds in memory on a CPU, as `stemma doctor` tells it. Torch-free.

Held against engines by `stemma bench memory` (docs/serve/planning.md has the figures).
"""

from __future__ import annotations

from dataclasses import dataclass

from ..runtime.config import EngineConfig
from ..runtime.memory.kv_layout import KVLayout
from ..runtime.memory.sizing import cpu_step_bytes
from .formats import DTYPE_BYTES
from .served_model import ServedModel

# Of an engine's process without weights and KV, on a CPU: Python, torch and its threads, the
# tokenizer (Linux, torch 2.13 for CPUs, a vocabulary of 32,000, 2026-11). On a GPU a step's own
# tensors come on top.
PROCESS_BYTES = 340_000_000
_PAGE_BYTES = 1 << 12


@dataclass(frozen=True, slots=True)
class ResidentMemory:
    """Of an engine's process."""

    start_bytes: int  # once it is loaded
    peak_bytes: int  # while it computes one request


def resident_memory(model: ServedModel, num_tokens: int, pool_tokens: int) -> ResidentMemory:
    """`num_tokens`: of the request; `pool_tokens`: for which the KV pool has room."""
    fixed = PROCESS_BYTES + model.weight_bytes + model.rotary_bytes + model.adapter_bytes
    step = cpu_step_bytes(
        model.config,
        dtype_bytes=DTYPE_BYTES[model.format.dtype],
        num_tokens=min(num_tokens, EngineConfig().chunked_prefill_size),
    )
    at_start, at_end = (_kv_bytes(model, count, pool_tokens) for count in (1, num_tokens))
    return ResidentMemory(fixed + at_start, fixed + at_end + 2 * model.state_bytes + step)


def _kv_bytes(model: ServedModel, num_tokens: int, pool_tokens: int) -> int:
    """Every vector of a layer lies by itself in the pool, which takes no memory until it is
    written, and then whole pages."""
    own = KVLayout.of(model.config, model.format.dtype)
    of_draft = None if model.draft is None else model.draft.layout
    layouts = [own] if of_draft is None else [own, of_draft]
    total = 0
    for layout, part in ((each, part) for each in layouts for part in each.parts):
        written = -(-num_tokens * part.vector_bytes // _PAGE_BYTES) * _PAGE_BYTES
        num_vectors = len(layout.layers_of(part)) * part.num_vectors
        total += num_vectors * min(written, pool_tokens * part.vector_bytes)
    return total
