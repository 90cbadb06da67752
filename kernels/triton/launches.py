"""Every way in which the ops launch kernels, as calls to be made inside `offline()`.

Tensors have the sizes of real models and of an H200's KV pool; they are never touched. A launch
marked `is_rare` is left to `make soak`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, empty

from ..adjusted_rows import AdjustedRows
from ..ops import Activation, KVLayer
from ..quantized_kv import QuantizedKV
from ..sampling_rows import SamplingRows
from . import adjust, dense, experts, kv_store, logprobs, page_table, sampling, token_mask

NUM_TOKENS = 64  # of a decode step
NUM_SLOTS = 840_016  # one layer's, where 110 GB hold the KV of Llama-3.1-8B
FLOATS = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
EIGHT_BITS = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}


@dataclass(frozen=True, slots=True)
class Launch:
    """One call of an op, which may launch several kernels."""

    name: str
    run: Callable[[], object]
    is_rare: bool = False


@dataclass(frozen=True, slots=True)
class Heads:
    """One model's."""

    num_heads: int
    num_kv_heads: int
    head_dim: int


MODELS = {  # by head_dim
    64: Heads(32, 8, 64),  # Llama-3.2-1B
    128: Heads(32, 8, 128),  # Llama-3.1-8B
    256: Heads(16, 8, 256),  # Gemma-2-9B
}


def all_launches() -> list[Launch]:
    """The longest to compile first, so that none of them is left at the end."""
    return [*_experts(), *_kv_store(), *_dense(), *_logits(), *_inputs()]


def _experts() -> Iterator[Launch]:
    """Qwen3-30B-A3B: 8 of 128 experts of 768; few, some and many pairs an expert."""
    for name, dtype in FLOATS.items():
        for num_tokens in (64, 1024, 8192):
            is_rare = name == "fp16" or (name == "fp32" and num_tokens != 64)
            run = partial(_run_experts, dtype, num_tokens, "silu")
            yield Launch(f"experts {name} {num_tokens} tokens", run, is_rare)
    for activation in ("gelu", "gelu_tanh"):
        run = partial(_run_experts, torch.bfloat16, 64, activation)
        yield Launch(f"experts bf16 64 tokens {activation}", run, is_rare=True)


def _run_experts(dtype: torch.dtype, num_tokens: int, activation: Activation) -> None:
    num_experts, top_k, hidden, size = 128, 8, 2048, 768
    layer = experts.make_experts(
        empty(num_experts, 2 * size, hidden, dtype=dtype),
        empty(num_experts, hidden, size, dtype=dtype),
        activation,
    )
    x = empty(num_tokens, hidden, dtype=dtype)
    layer(x, _ints(num_tokens, top_k), empty(num_tokens, top_k))


def _kv_store() -> Iterator[Launch]:
    for name, dtype in FLOATS.items():
        for head_dim in MODELS:
            is_rare = name == "fp16" or head_dim != 128
            run = partial(_rotate_and_store, dtype, head_dim, None)
            yield Launch(f"rotate_and_store {name} {head_dim}", run, is_rare)
        yield Launch(f"store_kv {name}", partial(_store_kv, dtype, None), name != "bf16")
    for name, kind in EIGHT_BITS.items():
        run = partial(_rotate_and_store, torch.bfloat16, 128, kind)
        yield Launch(f"rotate_and_store bf16 128 as {name}", run)
        run = partial(_store_kv, torch.bfloat16, kind)
        yield Launch(f"store_kv bf16 as {name}", run, is_rare=True)
    run = partial(_rotate_and_store, torch.bfloat16, 128, None, rotary_dim=64)
    yield Launch("rotate_and_store bf16 128, 64 rotated", run)


def _rotate_and_store(
    dtype: torch.dtype, head_dim: int, kind: torch.dtype | None, rotary_dim: int | None = None
) -> None:
    model = MODELS[head_dim]
    heads = empty(NUM_TOKENS, model.num_heads + 2 * model.num_kv_heads, head_dim, dtype=dtype)
    cos = sin = empty(NUM_TOKENS, 1, rotary_dim or head_dim, dtype=dtype)
    kv_layer = _kv_layer(model, dtype, kind)
    kv_store.rotate_and_store(heads, cos, sin, kv_layer, _ints(NUM_TOKENS))


def _store_kv(dtype: torch.dtype, kind: torch.dtype | None) -> None:
    model = MODELS[128]
    k = v = empty(NUM_TOKENS, model.num_kv_heads, model.head_dim, dtype=dtype)
    kv_store.store_kv(k, v, _kv_layer(model, dtype, kind), _ints(NUM_TOKENS))


def _kv_layer(model: Heads, dtype: torch.dtype, kind: torch.dtype | None = None) -> KVLayer:
    """In `dtype`, or quantized to `kind`."""
    shape = (2, model.num_kv_heads, NUM_SLOTS)
    values = empty(*shape, model.head_dim, dtype=kind or dtype)
    return values if kind is None else QuantizedKV(values, empty(shape))


def _dense() -> Iterator[Launch]:
    activations: tuple[Activation, ...] = ("silu", "gelu", "gelu_tanh")
    for name, dtype in FLOATS.items():
        for size in (4096, 2048, 896):
            is_rare = name == "fp16" or size == 2048
            yield Launch(f"rms_norm {name} {size}", partial(_rms_norm, dtype, size), is_rare)
        for activation in activations:
            is_rare = name == "fp16" or (name == "fp32" and activation != "silu")
            run = partial(_act_and_mul, dtype, activation)
            yield Launch(f"act_and_mul {name} {activation}", run, is_rare)
        yield Launch(f"gather_rows {name}", partial(_gather_rows, dtype), name != "bf16")


def _rms_norm(dtype: torch.dtype, size: int) -> None:
    norm = dense.make_rms_norm(empty(size, dtype=dtype), 1e-5)
    x = empty(NUM_TOKENS, size, dtype=dtype)
    norm(x)
    norm(x, torch.empty_like(x))


def _act_and_mul(dtype: torch.dtype, activation: Activation) -> None:
    dense.act_and_mul(empty(NUM_TOKENS, 2 * 14336, dtype=dtype), activation)


def _gather_rows(dtype: torch.dtype) -> None:
    dense.gather_rows(empty(128256, 4096, dtype=dtype), _ints(NUM_TOKENS))


def _logits() -> Iterator[Launch]:
    """Vocabularies of Llama 3, Qwen 2 and Llama 2."""
    for vocab_size in (128256, 151936, 32000):
        run, is_rare = partial(_sample, vocab_size), vocab_size != 128256
        yield Launch(f"sample {vocab_size}", run, is_rare)
    yield Launch("adjust_logits", _adjust_logits)
    yield Launch("apply_token_mask", _apply_token_mask)
    yield Launch("token_logprobs", _token_logprobs)


def _sample(vocab_size: int) -> None:
    ints, floats = _ints(NUM_TOKENS), empty(NUM_TOKENS, dtype=torch.float64)
    rows = SamplingRows(floats, ints, floats, floats, ints, ints)
    sampling.sample(empty(NUM_TOKENS, vocab_size), rows)


def _adjust_logits() -> None:
    ints, floats = _ints(NUM_TOKENS), empty(NUM_TOKENS, dtype=torch.float64)
    are_in_prompt = empty(NUM_TOKENS, dtype=torch.bool)
    rows = AdjustedRows(
        place=ints,
        repetition=floats,
        frequency=floats,
        presence=floats,
        latest=ints,
        entry_start=ints,
        token_id=ints,
        count=ints,
        is_in_prompt=are_in_prompt,
        bias=floats,
    )
    adjust.adjust_logits(empty(NUM_TOKENS, 128256), rows, ints)


def _apply_token_mask() -> None:
    masks = empty(NUM_TOKENS, 128256 // 32, dtype=torch.int32)
    token_mask.apply_token_mask(empty(NUM_TOKENS, 128256), _ints(NUM_TOKENS), masks)


def _token_logprobs() -> None:
    logprobs.token_logprobs(empty(NUM_TOKENS, 128256), _ints(NUM_TOKENS))


def _inputs() -> Iterator[Launch]:
    yield Launch("take_inputs", _take_inputs)
    yield Launch("update_pages", _update_pages)


def _take_inputs() -> None:
    page_table.take_inputs(_ints(NUM_TOKENS), _ints(NUM_TOKENS), _ints(NUM_TOKENS))


def _update_pages() -> None:
    page_table.update_pages(
        empty(NUM_TOKENS, 8192, dtype=torch.int32), empty(NUM_TOKENS, 3, dtype=torch.int32)
    )


def _ints(*shape: int) -> Tensor:
    return empty(shape, dtype=torch.int64)
