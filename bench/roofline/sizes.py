"""How large everything is: as on an H200, or so small that an interpreter carries it out."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal

# Meta's published config.json files, without the fields that a dummy model does not read.
_LLAMA_3 = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "attention_bias": False,
    "bos_token_id": 128000,
    "eos_token_id": 128001,
    "hidden_act": "silu",
    "initializer_range": 0.02,
    "max_position_embeddings": 131072,
    "mlp_bias": False,
    "rms_norm_eps": 1e-05,
    "rope_theta": 500000.0,
    "torch_dtype": "bfloat16",
    "vocab_size": 128256,
}
_ROPE_LLAMA_3 = {
    "high_freq_factor": 4.0,
    "low_freq_factor": 1.0,
    "original_max_position_embeddings": 8192,
    "rope_type": "llama3",
}
LLAMA_8B: dict[str, Any] = {  # Llama-3.1-8B
    **_LLAMA_3,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "rope_scaling": {**_ROPE_LLAMA_3, "factor": 8.0},
    "tie_word_embeddings": False,
}
LLAMA_1B: dict[str, Any] = {  # Llama-3.2-1B
    **_LLAMA_3,
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_attention_heads": 32,
    "num_hidden_layers": 16,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "rope_scaling": {**_ROPE_LLAMA_3, "factor": 32.0},
    "tie_word_embeddings": True,
}
TINY_LLAMA: dict[str, Any] = {
    **_LLAMA_3,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "vocab_size": 512,
    "tie_word_embeddings": False,
}


@dataclass(frozen=True, slots=True)
class Heads:
    """Head counts of an attention layer."""

    query: int
    kv: int
    dim: int


@dataclass(frozen=True, slots=True)
class ExpertSizes:
    """Sizes of a mixture of experts."""

    name: str
    experts: int
    chosen: int  # per token
    hidden: int
    intermediate: int


@dataclass(frozen=True, slots=True)
class LatentSizes:
    """Sizes of multi-head latent attention."""

    name: str
    heads: int
    latent: int
    rope: int


@dataclass(frozen=True, slots=True)
class ScanSizes:
    """Sizes of a recurrent layer."""

    name: str
    kind: Literal["delta", "channels", "mamba"]  # channels: a decay for each number of a key
    groups: int  # of queries and keys
    heads: int
    key_dim: int
    value_dim: int


@dataclass(frozen=True, slots=True)
class ServingSizes:
    """The end-to-end workloads, in tokens and requests, and the pool that holds them."""

    unshared: tuple[int, int, int]  # requests, tokens in, tokens out
    fanout: tuple[int, int, int, int]  # requests, common, own, out
    tree: tuple[int, int, int, int, int]  # root, levels, branches, in a node, out a node
    kv_tokens: int
    max_running_requests: int


@dataclass(frozen=True, slots=True)
class Sizes:
    """All sizes of one run."""

    name: str
    repeats: int
    copy_bytes: int
    gemm_side: int
    heads: Heads
    decode_batch: int
    decode_tokens: int  # of context per row
    tree_batch: int
    tree_shared: tuple[int, ...]  # tokens
    tree_own: int
    extend_tokens: int
    mixed_prefix: int  # tokens cached before the chunk of the mixed step
    prompt_tokens: tuple[int, ...]  # of prompts computed by torch's kernels, too
    chain_layers: int  # decode layers whose launches are recorded together
    small_tokens: tuple[int, ...]  # rows of the small ops
    small_bytes: int  # that their calls, each on its own data, should move in total
    small_calls: int  # at most
    hidden: int
    intermediate: int
    vocab: int
    experts: tuple[ExpertSizes, ...]
    expert_tokens: tuple[int, int]  # of a decode step, of a prompt
    latents: tuple[LatentSizes, ...]
    scans: tuple[ScanSizes, ...]
    page_size: int
    models: tuple[tuple[str, dict[str, Any]], ...]  # the first one is served end to end
    step_batches: tuple[int, ...]
    step_prompt: int
    steps: int  # timed
    stall_prompt: int  # tokens of the prompt that arrives among decodes
    serving: ServingSizes
    peer_limit_s: float  # of each workload


FULL = Sizes(
    name="full",
    repeats=15,
    copy_bytes=4 * 2**30,
    gemm_side=8192,
    heads=Heads(32, 8, 128),
    decode_batch=64,
    decode_tokens=4096,
    tree_batch=64,
    tree_shared=(4096, 32_768),
    tree_own=256,
    extend_tokens=8192,
    mixed_prefix=4096,
    prompt_tokens=(2048, 8192, 32_768),
    chain_layers=8,
    small_tokens=(1, 64),
    small_bytes=512 * 2**20,
    small_calls=256,
    hidden=4096,
    intermediate=14_336,
    vocab=128_256,
    experts=(
        ExpertSizes("Mixtral-8x7B", 8, 2, 4096, 14_336),
        ExpertSizes("Qwen3-30B-A3B", 128, 8, 2048, 768),
    ),
    expert_tokens=(64, 4096),
    latents=(
        LatentSizes("DeepSeek-V2-Lite", 16, 512, 64),
        LatentSizes("DeepSeek-V3", 128, 512, 64),
    ),
    scans=(
        ScanSizes("Qwen3-Next", "delta", 16, 32, 128, 128),
        ScanSizes("Kimi Linear", "channels", 32, 32, 128, 128),
        ScanSizes("Granite 4 H Tiny", "mamba", 1, 48, 128, 64),
    ),
    page_size=16,
    models=(("8B", LLAMA_8B), ("1B", LLAMA_1B)),
    step_batches=(1, 64),
    step_prompt=1024,
    steps=64,
    stall_prompt=8192,
    serving=ServingSizes(
        unshared=(256, 1024, 256),
        fanout=(128, 2048, 64, 128),
        tree=(2048, 3, 5, 32, 64),
        kv_tokens=400_000,
        max_running_requests=256,
    ),
    peer_limit_s=75.0,
)
TINY = Sizes(
    name="tiny",
    repeats=1,
    copy_bytes=4096,
    gemm_side=32,
    heads=Heads(4, 2, 64),
    decode_batch=2,
    decode_tokens=20,
    tree_batch=2,
    tree_shared=(16,),
    tree_own=3,
    extend_tokens=12,
    mixed_prefix=4,
    prompt_tokens=(12,),
    chain_layers=1,
    small_tokens=(1,),
    small_bytes=4096,
    small_calls=1,
    hidden=64,
    intermediate=96,
    vocab=300,
    experts=(ExpertSizes("tiny", 4, 2, 32, 32),),
    expert_tokens=(3, 20),
    latents=(LatentSizes("tiny", 4, 64, 16),),
    scans=(
        ScanSizes("tiny delta", "delta", 1, 2, 16, 16),
        ScanSizes("tiny channels", "channels", 2, 2, 16, 16),
        ScanSizes("tiny mamba", "mamba", 1, 2, 16, 16),
    ),
    page_size=16,
    models=(("tiny", TINY_LLAMA),),
    step_batches=(2,),
    step_prompt=12,
    steps=4,
    stall_prompt=24,
    serving=ServingSizes(
        unshared=(3, 12, 3),
        fanout=(3, 16, 4, 2),
        tree=(16, 1, 2, 4, 2),
        kv_tokens=512,
        max_running_requests=4,
    ),
    peer_limit_s=60.0,
)
CPU = replace(
    FULL,
    name="cpu",
    copy_bytes=2**28,
    gemm_side=1024,
    decode_batch=8,
    extend_tokens=1024,
    prompt_tokens=(1024,),
)
SIZES = {sizes.name: sizes for sizes in (FULL, TINY, CPU)}
