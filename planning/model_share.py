"""What one of several models that share a memory takes of it: its weights, and KV within its equal
share. Torch-free.

A model whose weights leave little of its share takes what it needs beyond it, for a few sequences;
fewer others are loaded beside it then.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..runtime.memory.sizing import DEFAULT_CPU_MEM_FRACTION, DEFAULT_GPU_MEM_FRACTION
from .resident_memory import PROCESS_BYTES
from .served_model import ServedModel

LEAST_SEQUENCES = 4  # at full length, of a model that is too large for its share (guess)


@dataclass(frozen=True, slots=True)
class SharedMemory:
    """The memory, and how it is to be divided."""

    num_bytes: int
    num_models: int  # that are to be loaded at a time
    is_gpu: bool
    is_given: bool = False  # the number of bytes is a limit that somebody set
    kv_fraction: float | None = None  # of what weights leave of a share; None: the device's


@dataclass(frozen=True, slots=True)
class Lengths:
    """What bounds a pool from above and below."""

    max_model_len: int
    max_running_requests: int
    page_size: int
    num_checkpoints: int | None = None  # of recurrent states; None: as the engine chooses


@dataclass(frozen=True, slots=True)
class ModelShare:
    """Of one model."""

    num_bytes: int
    kv_tokens: int  # of them for KV


def share_of(
    model: ServedModel, memory: SharedMemory, lengths: Lengths, step_bytes: int = 0
) -> ModelShare:
    """`step_bytes`: of a step's own tensors. More than the memory has where the model does not fit
    at all."""
    default = DEFAULT_GPU_MEM_FRACTION if memory.is_gpu else DEFAULT_CPU_MEM_FRACTION
    fraction = default if memory.kv_fraction is None else memory.kv_fraction
    fixed = _fixed_bytes(model, step_bytes)
    sequence = _whole_pages(lengths.max_model_len, lengths) * model.kv_bytes_per_token
    within_share = _for_kv(model, fraction, memory.num_bytes // memory.num_models - fixed, lengths)
    alone = _for_kv(model, fraction, memory.num_bytes - fixed, lengths)
    kv_bytes = max(within_share, min(LEAST_SEQUENCES * sequence, alone), sequence)
    kv_bytes = min(kv_bytes, lengths.max_running_requests * sequence)
    return share_with(model, kv_bytes // model.kv_bytes_per_token, lengths, step_bytes)


def share_with(
    model: ServedModel, kv_tokens: int, lengths: Lengths, step_bytes: int = 0
) -> ModelShare:
    """The same where the pool's size is given."""
    kv_bytes = kv_tokens * model.kv_bytes_per_token
    states = model.state_pool_bytes(
        kv_bytes,
        max_running_requests=lengths.max_running_requests,
        num_checkpoints=lengths.num_checkpoints,
    )
    return ModelShare(_fixed_bytes(model, step_bytes) + kv_bytes + states, kv_tokens)


def _fixed_bytes(model: ServedModel, step_bytes: int) -> int:
    """What it takes beside KV and states."""
    tables = model.weight_bytes + model.rotary_bytes + model.adapter_bytes
    return PROCESS_BYTES + step_bytes + tables


def _for_kv(model: ServedModel, fraction: float, left: int, lengths: Lengths) -> int:
    """Of what the weights leave, as an engine of its own divides it: recurrent states of all
    running requests come first, and their checkpoints have as much as the KV."""
    states = lengths.max_running_requests * model.state_bytes
    return (int(fraction * left) - states) // (2 if states else 1)


def _whole_pages(num_tokens: int, lengths: Lengths) -> int:
    return -(-num_tokens // lengths.page_size) * lengths.page_size
