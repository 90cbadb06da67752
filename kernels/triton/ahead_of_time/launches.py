"""All ways in which the ops launch kernels, as calls for use inside `offline()`.

Tensors have the sizes of real models and of an H200's KV pool; they are never read or written.
Launches marked `is_rare` run only in `make soak`. The others have each
kernel, and of its types, formats and sizes each that many models have, with one another or alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

import numpy as np
import torch
from torch import Tensor, empty

from ...attention_rows import AttentionRows
from ...kv_cache_dtype import kv_cache_dtypes_of_gpu
from ...model_options import DEFAULT_OPTIONS, AttentionOptions, ClampedSwiGLU, RoutingOptions
from ...ops import Activation, KVLayer
from ...quantized_tensors import QuantizedKV, QuantizedWeight
from ...sampling_rows import AdjustedRows, SamplingRows
from ...state_rows import StateRows
from .. import (
    adjust,
    dense,
    experts,
    kv_store,
    latent_attention,
    logprobs,
    lora,
    normed_linear,
    page_copy,
    page_table,
    paged_attention,
    quantized_linear,
    recurrence_rows,
    routing,
    sampling,
    short_convolution,
    state_scan,
    token_mask,
)
from ..dependent_launch import dependent_launches

Bits = Literal[8, 4]

NUM_TOKENS = 64  # of a decode step
NUM_SLOTS = 840_016  # one layer's, where 110 GB hold the KV of Llama-3.1-8B
FLOATS = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
ROUTINGS = {  # experts, and how they are chosen
    "Qwen3-30B-A3B": (128, RoutingOptions(8, is_normalized=True)),
    "DeepSeek-V3": (256, RoutingOptions(8, "sigmoid", True, 2.5, 8, 4, "best_two")),
}
EIGHT_BITS = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}


@dataclass(frozen=True, slots=True)
class Launch:
    """One call of an op, which may launch several kernels."""

    name: str
    run: Callable[[], object]
    is_rare: bool = False

    def is_for(self, capability: int) -> bool:
        """Whether a GPU of that capability, 10 * major + minor, has the formats."""
        formats = kv_cache_dtypes_of_gpu(2, divmod(capability, 10))
        return "fp8" in formats or "fp8" not in self.name.split()


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


@dataclass(frozen=True, slots=True)
class ScanSizes:
    """One model's recurrent layers."""

    kind: Literal["delta", "channels", "mamba"]
    num_groups: int
    num_heads: int
    key_dim: int
    value_dim: int


SCANS = {
    "Qwen3-Next": ScanSizes("delta", 16, 32, 128, 128),
    "Kimi Linear": ScanSizes("channels", 32, 32, 128, 128),
    "Granite 4 H": ScanSizes("mamba", 1, 48, 128, 64),
}


@dataclass(frozen=True, slots=True)
class WeightFormat:
    """A quantized weight's format; group: None for one scale a row."""

    bits: Bits
    group: int | None
    has_offsets: bool = False
    activations: Literal["exact", "int8"] = "exact"

    def weight(self, *shape: int) -> QuantizedWeight:
        """[..., rows, width]."""
        *rows, width = shape
        num_bytes, dtype = (width, torch.int8) if self.bits == 8 else (width // 2, torch.uint8)
        group = self.group or width
        scales = empty(*rows, width // group)
        offsets = scales if self.has_offsets else None
        numbers = empty(*rows, num_bytes, dtype=dtype)
        return QuantizedWeight(self.bits, group, numbers, scales, offsets, self.activations)


GPT_OSS = AttentionOptions(window=128)
GEMMA_2 = AttentionOptions(scale=224**-0.5, window=4096, soft_cap=50.0)


def all_launches() -> list[Launch]:
    """Those that take longest to compile come first, so that none is left at the end."""
    return [
        *_attention(),
        *_latent(),
        *_experts(),
        *_quantized(),
        *_recurrence(),
        *_lora(),
        *_sampling(),
        *_kv_store(),
        *_dense(),
        *_dependent(),
        *_inputs(),
    ]


def _attention() -> Iterator[Launch]:
    """Both widths and the merge of each; the rare ones cover the table of tiles."""
    for name, kind in {**FLOATS, **EIGHT_BITS}.items():
        for head_dim, model in MODELS.items():
            is_rare = (name, head_dim) not in (("bf16", 128), ("fp8", 128))
            run = partial(_attend, kind, model)
            yield Launch(f"attention {name} {head_dim}", run, is_rare)
            if name in ("bf16", "fp8", "fp32"):
                for group in (32, 64):
                    run = partial(_attend, kind, Heads(group, 1, head_dim))
                    yield Launch(f"attention {name} {head_dim}, {group} to 1", run, is_rare=True)
    bf16, llama = torch.bfloat16, MODELS[128]
    yield Launch("attention bf16 256 of Gemma 2", partial(_attend, bf16, MODELS[256], GEMMA_2))
    run = partial(_attend, bf16, llama, page_size=1)
    yield Launch("attention bf16 128, pages of 1", run, is_rare=True)
    run = partial(_attend, bf16, Heads(32, 32, 96))
    yield Launch("attention bf16 96, 1 to 1", run, is_rare=True)
    sinks = AttentionOptions(window=4096, num_sink_tokens=4)
    run = partial(_attend, bf16, llama, sinks)
    yield Launch("attention bf16 128, window and sinks", run, is_rare=True)
    run = partial(_attend, bf16, Heads(64, 8, 64), GPT_OSS, has_sink_logits=True)
    yield Launch("attention bf16 64 of gpt-oss", run)


def _attend(
    kind: torch.dtype,
    model: Heads,
    options: AttentionOptions = DEFAULT_OPTIONS,
    page_size: int = 16,
    has_sink_logits: bool = False,
) -> None:
    """63 decoding rows and a prompt, padded as in a captured step. 8-bit KV is read by bfloat16
    queries."""
    is_quantized = kind in EIGHT_BITS.values()
    dtype = torch.bfloat16 if is_quantized else kind
    kv_layer = _kv_layer(model, dtype, kind if is_quantized else None)
    rows, table = _decodes_and_a_prompt(page_size)
    plan = paged_attention.plan_attention(rows, kv_layer, model.num_heads, options, 1024)
    bound = plan.bind({name: torch.from_numpy(x) for name, x in plan.arrays.items()}, table)
    q = empty(1024, model.num_heads, model.head_dim, dtype=dtype)
    sink_logits = empty(model.num_heads) if has_sink_logits else None
    paged_attention.paged_attention(q, kv_layer, bound, sink_logits)


def _decodes_and_a_prompt(page_size: int) -> tuple[AttentionRows, Tensor]:
    """The rows, and their page table."""
    num_queries = np.array([1] * (NUM_TOKENS - 1) + [512], dtype=np.int32)
    table = empty(NUM_TOKENS, 8192, dtype=torch.int32)
    rows = AttentionRows(
        query_start=np.concatenate([[0], np.cumsum(num_queries)]).astype(np.int32),
        seq_lens=np.full(NUM_TOKENS, 4096, dtype=np.int32),
        page_table=table.numpy(),
        table_rows=np.arange(NUM_TOKENS, dtype=np.int32),
        page_size=page_size,
    )
    return rows, table


def _latent() -> Iterator[Launch]:
    """DeepSeek-V2-Lite's heads, or V3's on eight devices; V3's; sizes of other models."""
    for name, dtype in FLOATS.items():
        for num_heads in (16, 128):
            run = partial(_attend_latent, dtype, num_heads, 512, 64)
            is_rare = (name, num_heads) != ("bf16", 128)
            yield Launch(f"latent {name} 512, {num_heads} heads", run, is_rare)
    bf16 = torch.bfloat16
    for num_heads, latent_dim, rope_dim in (
        (8, 512, 64),
        (32, 512, 64),
        (40, 256, 32),
        (16, 128, 32),
    ):
        run = partial(_attend_latent, bf16, num_heads, latent_dim, rope_dim)
        yield Launch(f"latent bf16 {latent_dim}, {num_heads} heads", run, is_rare=True)
    run = partial(_attend_latent, bf16, 16, 512, 64, page_size=1)
    yield Launch("latent bf16 512, 16 heads, pages of 1", run, is_rare=True)
    yield Launch("store_latent bf16", _store_latent)


def _attend_latent(
    dtype: torch.dtype, num_heads: int, latent_dim: int, rope_dim: int, page_size: int = 16
) -> None:
    """Queries have the layout of a batched product's output, heads first."""
    rows, table = _decodes_and_a_prompt(page_size)
    kv_layer = empty(NUM_SLOTS, latent_dim + rope_dim, dtype=dtype)
    plan = latent_attention.plan_latent_attention(rows, kv_layer, num_heads, 0.1, 1024)
    bound = plan.bind({name: torch.from_numpy(x) for name, x in plan.arrays.items()}, table)
    q_latent = empty(num_heads, 1024, latent_dim, dtype=dtype).transpose(0, 1)
    q_rope = empty(1024, num_heads, rope_dim, dtype=dtype)
    latent_attention.latent_attention(q_latent, q_rope, kv_layer, bound)


def _store_latent() -> None:
    kv_layer = empty(NUM_SLOTS, 576, dtype=torch.bfloat16)
    latent = empty(NUM_TOKENS, 576, dtype=torch.bfloat16)
    latent_attention.store_latent(latent, kv_layer, _ints(NUM_TOKENS))


def _experts() -> Iterator[Launch]:
    """Qwen3-30B-A3B: 8 of 128 experts of 768; few, some and many pairs an expert."""
    for name, dtype in FLOATS.items():
        for num_tokens in (64, 1024, 8192):
            is_rare = name != "bf16" or num_tokens == 1024
            run = partial(_run_experts, dtype, num_tokens, "silu")
            yield Launch(f"experts {name} {num_tokens} tokens", run, is_rare)
    for activation in ("gelu", "gelu_tanh"):
        run = partial(_run_experts, torch.bfloat16, 64, activation)
        yield Launch(f"experts bf16 64 tokens {activation}", run, is_rare=True)

    yield from _quantized_experts()
    for name, routing_of in ROUTINGS.items():
        yield Launch(f"route_experts {name}", partial(_route, *routing_of))


def _route(num_experts: int, options: RoutingOptions) -> None:
    bias = empty(num_experts) if options.scoring == "sigmoid" else None
    num_tokens = empty(1, dtype=torch.int32)
    routing.route_experts(empty(NUM_TOKENS, num_experts), bias, options, num_tokens)


def _quantized_experts() -> Iterator[Launch]:
    """16 experts of that size, in the formats of `--quantization`, in symmetric 4 bits, and with
    Q4_K beside Q6_K; few, some and many pairs an expert."""
    bf16, fp32 = torch.bfloat16, torch.float32
    by_row, by_128 = WeightFormat(8, None), WeightFormat(4, 128)
    rounding, zeros = WeightFormat(8, None, activations="int8"), WeightFormat(4, 128, True)
    formats = {  # gate_up's, down's, and with how many pairs they are not rare
        "8 bits by row": (by_row, by_row, 4),
        "4 bits by 128 with offsets": (zeros, zeros, 512),
        "W8A8": (rounding, rounding, 512),
        "4 bits by 128": (by_128, by_128, None),
        "4 and 8 bits of GGUF": (WeightFormat(4, 32, True), WeightFormat(8, 16), None),
    }
    for num_pairs in (4, 64, 512):
        for name, (up, down, usual) in formats.items():
            run = partial(_run_experts, bf16, 2 * num_pairs, "silu", up, down, num_experts=16)
            is_rare = num_pairs != usual
            yield Launch(f"experts {name}, {num_pairs} pairs each", run, is_rare)
    for num_pairs in (4, 64, 512):
        run = partial(_run_gpt_oss_experts, 4 * num_pairs)
        yield Launch(f"experts of gpt-oss, {num_pairs} pairs each", run, num_pairs != 4)
    for num_pairs in (4, 64):
        run = partial(_run_experts, fp32, 2 * num_pairs, "silu", by_row, by_128, num_experts=16)
        yield Launch(f"experts 8 and 4 bits, fp32, {num_pairs} pairs each", run, is_rare=True)


def _run_experts(
    dtype: torch.dtype,
    num_tokens: int,
    activation: Activation,
    up: WeightFormat | None = None,
    down: WeightFormat | None = None,
    num_experts: int = 128,
) -> None:
    top_k, hidden, size = 8, 2048, 768
    layer = experts.make_experts(
        _expert_weight(up, dtype, num_experts, 2 * size, hidden),
        _expert_weight(down, dtype, num_experts, hidden, size),
        activation,
    )
    x = empty(num_tokens, hidden, dtype=dtype)
    layer(x, _ints(num_tokens, top_k), empty(num_tokens, top_k))


def _run_gpt_oss_experts(num_tokens: int) -> None:
    """Of 16 experts 4, in the sizes of gpt-oss, MXFP4."""
    bf16, top_k, num_experts, hidden = torch.bfloat16, 4, 16, 2880
    gate_up, down = (
        replace(WeightFormat(4, 32).weight(num_experts, rows, hidden), codes="fp4")
        for rows in (2 * hidden, hidden)
    )
    biases = (empty(num_experts, rows, dtype=bf16) for rows in (2 * hidden, hidden))
    layer = experts.make_experts(gate_up, down, ClampedSwiGLU(), *biases)
    layer(empty(num_tokens, hidden, dtype=bf16), _ints(num_tokens, top_k), empty(num_tokens, top_k))


def _expert_weight(
    kind: WeightFormat | None, dtype: torch.dtype, *shape: int
) -> Tensor | QuantizedWeight:
    return empty(*shape, dtype=dtype) if kind is None else kind.weight(*shape)


def _quantized() -> Iterator[Launch]:
    """Llama-3.1-8B's attention output (split for few tokens) and gates and ups."""
    bf16 = torch.bfloat16
    for num_tokens in (1, 64, 512):
        formats: tuple[tuple[Bits, int], ...] = ((8, 4096), (4, 128), (4, 32))
        for bits, group in formats:
            is_rare = (num_tokens, group) not in ((1, 4096), (1, 128), (512, 128))
            run = partial(_weight_only, bf16, num_tokens, bits, group)
            yield Launch(f"linear {bits} bits by {group}, {num_tokens} tokens", run, is_rare)
        run, is_rare = partial(_w8a8, num_tokens), num_tokens == 64
        yield Launch(f"linear W8A8, {num_tokens} tokens", run, is_rare)
    for group in (128, 32, 16):
        run = partial(_weight_only, bf16, 1, 8, group)
        yield Launch(f"linear 8 bits by {group}, 1 tokens", run, is_rare=True)
    for name in ("fp16", "fp32"):
        for num_tokens in (1, 512):
            run = partial(_weight_only, FLOATS[name], num_tokens, 4, 128, has_offsets=True)
            text = f"linear 4 bits by 128 with offsets, {name}, {num_tokens} tokens"
            yield Launch(text, run, is_rare=True)


def _weight_only(
    dtype: torch.dtype, num_tokens: int, bits: Bits, group: int, has_offsets: bool = False
) -> None:
    for num_rows in (4096, 28672):
        weight = WeightFormat(bits, group, has_offsets).weight(num_rows, 4096)
        layer = quantized_linear.make_linear(weight, None)
        layer(empty(num_tokens, 4096, dtype=dtype))


def _w8a8(num_tokens: int) -> None:
    weight = WeightFormat(8, None, activations="int8").weight(4096, 4096)
    layer = quantized_linear.make_linear(weight, None)
    layer(empty(num_tokens, 4096, dtype=torch.bfloat16))


def _lora() -> Iterator[Launch]:
    """The stacked qkv of Llama-3.1-8B, of ranks up to 16 and 64; a decode step and a prompt's."""
    for name, dtype in FLOATS.items():
        for num_tokens in (64, 1024):
            for max_rank in (16, 64):
                is_rare = (name, num_tokens, max_rank) not in (("bf16", 64, 16), ("bf16", 1024, 64))
                run = partial(_add_lora, dtype, num_tokens, max_rank)
                yield Launch(f"lora {name} {num_tokens} tokens, rank {max_rank}", run, is_rare)


def _add_lora(dtype: torch.dtype, num_tokens: int, max_rank: int) -> None:
    num_slots, out_features = 8, (4096, 1024, 1024)
    plan = lora.plan_lora(np.arange(num_tokens, dtype=np.int32) % num_slots + 1, num_slots)
    bound = plan.bind({name: torch.from_numpy(x) for name, x in plan.arrays.items()}, empty(0))
    layer = lora.make_lora(
        empty(num_slots, 3 * max_rank, 4096, dtype=dtype),
        empty(num_slots, sum(out_features), max_rank, dtype=dtype),
        out_features,
    )
    x = empty(num_tokens, 4096, dtype=dtype)
    layer(x, empty(num_tokens, sum(out_features), dtype=dtype), bound)


def _recurrence() -> Iterator[Launch]:
    """Qwen3-Next's heads, Kimi Linear's and Granite 4 H Tiny's; the channels of Qwen3-Next, with
    four taps, and of LFM2 1.2B, with three and a bias."""
    for name, dtype in FLOATS.items():
        is_rare = name != "bf16"
        for model, sizes in SCANS.items():
            if not is_rare or model == "Qwen3-Next":
                yield Launch(f"scan {name} of {model}", partial(_scan, dtype, sizes), is_rare)
        yield Launch(f"drafts {name} of Qwen3-Next", partial(_accept_drafts, dtype), is_rare)
        for channels, kernel_size in ((8192, 4), (2048, 3)):
            run = partial(_convolve, dtype, channels, kernel_size)
            yield Launch(f"short_convolution {name} {channels}", run, is_rare)


def _recurrent_rows() -> recurrence_rows.RecurrencePlan:
    """63 decoding rows and a prompt, padded as in a captured step."""
    lengths = np.array([1] * (NUM_TOKENS - 1) + [512])
    none = np.zeros(NUM_TOKENS, dtype=np.int64)
    starts = np.concatenate([[0], np.cumsum(lengths)])
    rows = StateRows(starts, np.arange(NUM_TOKENS), none.astype(np.bool_), none)
    plan = recurrence_rows.plan_recurrence(rows, 1024)
    bound = plan.bind({name: torch.from_numpy(x) for name, x in plan.arrays.items()}, empty(0))
    assert isinstance(bound, recurrence_rows.RecurrencePlan)
    return bound


def _scan(dtype: torch.dtype, sizes: ScanSizes) -> None:
    num_tokens, heads = 1024, sizes.num_heads
    q = k = empty(num_tokens, sizes.num_groups, sizes.key_dim, dtype=dtype)
    v = empty(num_tokens, heads, sizes.value_dim, dtype=dtype)
    states = empty(129, heads, sizes.key_dim, sizes.value_dim)
    rates = empty(num_tokens, heads)
    if sizes.kind == "mamba":
        state_scan.state_space_scan(q, k, v, rates, empty(heads), states, _recurrent_rows())
        return
    decays = empty(num_tokens, heads, sizes.key_dim) if sizes.kind == "channels" else rates
    state_scan.gated_delta_rule(q, k, v, decays, rates, states, _recurrent_rows())


def _accept_drafts(dtype: torch.dtype) -> None:
    """A token and seven drafts, all right."""
    sizes, none = SCANS["Qwen3-Next"], np.zeros(1, dtype=np.bool_)
    rows = StateRows(np.array([0, 8]), np.array([1]), none, np.array([7]))
    plan = recurrence_rows.plan_recurrence(rows)
    bound = plan.bind({name: torch.from_numpy(x) for name, x in plan.arrays.items()}, empty(0))
    q = k = empty(8, sizes.num_groups, sizes.key_dim, dtype=dtype)
    v, rates = empty(8, sizes.num_heads, sizes.value_dim, dtype=dtype), empty(8, sizes.num_heads)
    states = empty(129, sizes.num_heads, sizes.key_dim, sizes.value_dim)
    state_scan.gated_delta_rule(q, k, v, rates, rates, states, bound)
    recurrence_rows.accept_drafts(bound, torch.tensor([7]))


def _convolve(dtype: torch.dtype, channels: int, kernel_size: int) -> None:
    x, taps = empty(1024, channels, dtype=dtype), empty(kernel_size, channels)
    bias = empty(channels, dtype=dtype) if kernel_size == 3 else None
    tails = empty(129, kernel_size - 1, channels, dtype=dtype)
    plan = _recurrent_rows()
    short_convolution.short_convolution(x, taps, bias, tails, plan, has_silu=kernel_size == 4)


def _sampling() -> Iterator[Launch]:
    """Llama 3's vocabulary, and one that is odd (GPT-2's): its rows begin anywhere. Draws also over
    Qwen's and Llama 2's, which have other numbers of spans."""
    for vocab_size in (128256, 151936, 50257, 32000):
        is_rare = vocab_size != 128256
        yield Launch(f"sample {vocab_size}", partial(_sample, vocab_size), is_rare)
    for vocab_size in (128256, 50257):
        is_rare = vocab_size != 128256
        yield Launch(f"adjust_logits {vocab_size}", partial(_adjust, vocab_size), is_rare)
        yield Launch(f"token_logprobs {vocab_size}", partial(_logprobs, vocab_size), is_rare)
        yield Launch(f"apply_token_mask {vocab_size}", partial(_mask, vocab_size), is_rare)


def _sample(vocab_size: int) -> None:
    temperature = top_p = min_p = _doubles(NUM_TOKENS)
    top_k = seed = position = _ints(NUM_TOKENS)
    rows = SamplingRows(temperature, top_k, top_p, min_p, seed, position)
    sampling.sample(empty(NUM_TOKENS, vocab_size), rows)


def _adjust(vocab_size: int) -> None:
    num_entries = 1000
    rows = AdjustedRows(
        place=_ints(NUM_TOKENS),
        repetition=_doubles(NUM_TOKENS),
        frequency=_doubles(NUM_TOKENS),
        presence=_doubles(NUM_TOKENS),
        latest=_ints(NUM_TOKENS),
        entry_start=_ints(NUM_TOKENS + 1),
        token_id=_ints(num_entries),
        count=_ints(num_entries),
        is_in_prompt=empty(num_entries, dtype=torch.bool),
        bias=_doubles(num_entries),
    )
    adjust.adjust_logits(empty(NUM_TOKENS, vocab_size), rows, _ints(NUM_TOKENS))


def _logprobs(vocab_size: int) -> None:
    logprobs.token_logprobs(empty(NUM_TOKENS, vocab_size), _ints(NUM_TOKENS))


def _mask(vocab_size: int) -> None:
    masks = empty(NUM_TOKENS, -(-vocab_size // 32), dtype=torch.int32)
    token_mask.apply_token_mask(empty(NUM_TOKENS, vocab_size), _ints(NUM_TOKENS), masks)


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
        run = partial(_query_key_norm, dtype)
        yield Launch(f"query_key_norm {name} 128", run, is_rare=name == "fp16")
        for activation in activations:
            is_rare = name == "fp16" or (name == "fp32" and activation != "silu")
            run = partial(_act_and_mul, dtype, activation)
            yield Launch(f"act_and_mul {name} {activation}", run, is_rare)
        yield Launch(f"gather_rows {name}", partial(_gather_rows, dtype), name != "bf16")
    for name in ("bf16", "fp32"):
        layers: tuple[tuple[int, Activation | None], ...] = ((6144, None), (28672, "silu"))
        for rows, behind in layers:
            run = partial(_normed_linear, FLOATS[name], rows, behind)
            yield Launch(f"normed_linear {name} {rows}", run, is_rare=name == "fp32")
    bf16 = torch.bfloat16
    yield Launch("query_key_norm bf16 whole", partial(_query_key_norm, bf16, is_whole=True))
    yield Launch("rms_norm bf16 3584 by fp32", partial(_rms_norm, bf16, 3584, torch.float32))


def _rms_norm(dtype: torch.dtype, size: int, weight_dtype: torch.dtype | None = None) -> None:
    norm = dense.make_rms_norm(empty(size, dtype=weight_dtype or dtype), 1e-5)
    x = empty(NUM_TOKENS, size, dtype=dtype)
    norm(x)
    norm(x, torch.empty_like(x))


def _normed_linear(dtype: torch.dtype, num_rows: int, activation: Activation | None) -> None:
    """Llama-3.1-8B's queries, keys and values, and its gates and ups."""
    weight, norm_weight = empty(num_rows, 4096, dtype=dtype), empty(4096, dtype=dtype)
    fused = normed_linear.make_normed_linear(weight, None, norm_weight, 1e-5, activation)
    assert fused is not None
    x, residual, total = (empty(fused.max_tokens, 4096, dtype=dtype) for _ in range(3))
    fused(x, residual, total)


def _query_key_norm(dtype: torch.dtype, *, is_whole: bool = False) -> None:
    """Of Qwen3's heads, or of all of a token's at once, as OLMo 2's."""
    model = MODELS[128]
    num_heads, num_kv_heads = model.num_heads, model.num_kv_heads
    heads = empty(NUM_TOKENS, num_heads + 2 * num_kv_heads, 128, dtype=dtype)
    sizes = (num_heads * 128, num_kv_heads * 128) if is_whole else (128, 128)
    query_weight, key_weight = (empty(size, dtype=dtype) for size in sizes)
    norm = dense.make_query_key_norm(query_weight, key_weight, num_heads, num_kv_heads, 1e-6)
    norm(heads)


def _act_and_mul(dtype: torch.dtype, activation: Activation) -> None:
    dense.act_and_mul(empty(NUM_TOKENS, 2 * 14336, dtype=dtype), activation)


def _gather_rows(dtype: torch.dtype) -> None:
    dense.gather_rows(empty(128256, 4096, dtype=dtype), _ints(NUM_TOKENS))


def _dependent() -> Iterator[Launch]:
    """What a decode layer launches, dependent on the launch before it."""
    bf16, llama = torch.bfloat16, MODELS[128]
    for name, run in {
        "attention bf16 128": partial(_attend, bf16, llama),
        "rotate_and_store bf16 128": partial(_rotate_and_store, bf16, 128, None),
        "store_kv bf16": partial(_store_kv, bf16, None),
        "rms_norm bf16 4096": partial(_rms_norm, bf16, 4096),
        "query_key_norm bf16 128": partial(_query_key_norm, bf16),
        "act_and_mul bf16 silu": partial(_act_and_mul, bf16, "silu"),
        "normed_linear bf16 28672": partial(_normed_linear, bf16, 28672, "silu"),
    }.items():
        yield Launch(f"dependent {name}", partial(_dependently, run))


def _dependently(run: Callable[[], object]) -> None:
    with dependent_launches():
        run()


def _inputs() -> Iterator[Launch]:
    yield Launch("take_inputs", _take_inputs)
    yield Launch("update_pages", _update_pages)
    for page_size in (1, 16):
        yield Launch(f"page_copy bf16 pages of {page_size}", partial(_page_copy, page_size))


def _take_inputs() -> None:
    page_table.take_inputs(_ints(NUM_TOKENS), _ints(NUM_TOKENS), _ints(NUM_TOKENS))


def _update_pages() -> None:
    page_table.update_pages(
        empty(NUM_TOKENS, 8192, dtype=torch.int32), empty(NUM_TOKENS, 3, dtype=torch.int32)
    )


def _page_copy(page_size: int) -> None:
    model = MODELS[128]
    num_vectors, vector_bytes = 2 * model.num_kv_heads, 2 * model.head_dim
    layers = [empty(num_vectors, NUM_SLOTS, vector_bytes, dtype=torch.uint8)] * 2
    shape = (NUM_TOKENS, len(layers), num_vectors, page_size, vector_bytes)
    packed = empty(shape, dtype=torch.uint8)
    copy = page_copy.PageCopy(layers, page_size)
    copy.pack(_ints(NUM_TOKENS), packed.permute(1, 2, 0, 3, 4))
    copy.unpack(_ints(NUM_TOKENS), packed.permute(1, 2, 0, 3, 4))


def _ints(*shape: int) -> Tensor:
    return empty(shape, dtype=torch.int64)


def _doubles(*shape: int) -> Tensor:
    return empty(shape, dtype=torch.float64)
