"""Checkpoints of each family, with all that its config.json can ask for."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from stemma.kernels.model_options import AttentionOptions

VOCAB_SIZE, WINDOW = 131, 9
FULL, SLIDING = "full_attention", "sliding_attention"


@dataclass(frozen=True)
class Case:
    """A checkpoint to be, and the fields of its ModelConfig that say what is tested of it."""

    architecture: str
    options: dict[str, Any] = field(default_factory=dict)
    without: tuple[str, ...] = ()  # another value in each of these changes what the model says


def _longrope(original: int) -> dict[str, Any]:
    """Heads of 16, 12 of which are rotated."""
    rope = {
        "rope_type": "longrope",
        "rope_theta": 1e4,
        "partial_rotary_factor": 0.75,
        "short_factor": [1.0, 1.1, 1.3, 1.5, 1.7, 2.0],
        "long_factor": [1.0, 2.0, 4.0, 8.0, 12.0, 16.0],
        "original_max_position_embeddings": original,
    }
    return {
        "rope_parameters": rope,
        "max_position_embeddings": 256,
        "original_max_position_embeddings": original,
    }


LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 1e4,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 24,
}
MINISTRAL_3 = {
    "rope_type": "yarn",
    "rope_theta": 1e4,
    "factor": 16.0,
    "original_max_position_embeddings": 12,
    "max_position_embeddings": 512,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.4,
}
CASES = {
    "llama": Case("llama", {"attention_bias": True, "mlp_bias": True}, ("qkv_bias", "mlp_bias")),
    "cwm": Case(
        "cwm",
        {
            "num_layers": 3,
            "head_dim": 16,
            "mlp_bias": True,
            "sliding_window": WINDOW,
            "rope_parameters": LLAMA3,
        },
        ("mlp_bias", "rope_scaling", "attention_kinds"),
    ),
    "cwm-listed": Case(
        "cwm",
        {
            "head_dim": 24,
            "num_heads": 6,
            "num_kv_heads": 3,
            "hidden_size": 96,
            "tie_word_embeddings": True,
            "sliding_window": WINDOW,
            "layer_types": [SLIDING, FULL],
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e3},
        },
        ("attention_kinds",),
    ),
    "arcee": Case(
        "arcee",
        {"head_dim": 24, "mlp_bias": True, "rope_parameters": LLAMA3},
        ("mlp_bias", "rope_scaling"),
    ),
    "helium": Case(
        "helium", {"head_dim": 16, "attention_bias": True}, ("qkv_bias", "has_interleaved_rope")
    ),
    "seed_oss": Case(
        "seed_oss",
        {"num_heads": 6, "head_dim": 32, "tie_word_embeddings": True},
        ("qkv_bias",),
    ),
    "seed_oss-other-biases": Case(
        "seed_oss",
        {
            "num_kv_heads": 1,
            "head_dim": 24,
            "is_sharded": True,
            "attention_bias": False,
            "attention_out_bias": True,
            "mlp_bias": True,
            "rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 3.0},
        },
        ("output_bias", "mlp_bias", "rope_scaling"),
    ),
    "mistral": Case(
        "mistral", {"sliding_window": WINDOW, "is_sharded": True}, ("attention_kinds",)
    ),
    "ministral": Case(
        "ministral",
        {
            "head_dim": 16,
            "num_layers": 3,
            "sliding_window": WINDOW,
            "layer_types": [SLIDING, FULL, SLIDING],
        },
        ("attention_kinds",),
    ),
    "ministral3": Case(
        "ministral3", {"head_dim": 32, "rope_parameters": MINISTRAL_3}, ("query_scaling",)
    ),
    "ministral3-window": Case(
        "ministral3",
        {
            "head_dim": 24,
            "num_kv_heads": 1,
            "is_sharded": True,
            "sliding_window": WINDOW,
            "tie_word_embeddings": True,
            "rope_parameters": {**MINISTRAL_3, "llama_4_scaling_beta": 0.7, "factor": 2.0},
        },
        ("query_scaling", "rope_scaling", "attention_kinds"),
    ),
    "qwen2": Case(
        "qwen2",
        {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1},
        ("attention_kinds",),
    ),
    "qwen3": Case("qwen3", {"head_dim": 32, "tie_word_embeddings": True, "is_sharded": True}),
    "smollm3": Case(
        "smollm3",
        {
            "num_layers": 4,
            "no_rope_layer_interval": 2,
            "use_sliding_window": True,
            "sliding_window": WINDOW,
            "tie_word_embeddings": True,
        },
        ("layers_without_rope", "attention_kinds"),
    ),
    "gemma": Case(
        "gemma",
        {"head_dim": 32, "tie_word_embeddings": True},
        ("activation", "embedding_multiplier", "has_unit_offset_norms"),
    ),
    "gemma2": Case(
        "gemma2",
        {
            "head_dim": 16,
            "tie_word_embeddings": True,
            "sliding_window": WINDOW,
            "query_pre_attn_scalar": 24,
            "attn_logit_softcapping": 2.0,
            "final_logit_softcapping": 5.0,
        },
        ("logits_soft_cap", "attention_kinds"),
    ),
    "gemma2-untied": Case(
        "gemma2", {"head_dim": 16, "sliding_window": WINDOW, "attention_bias": True}, ("qkv_bias",)
    ),
    "gemma3": Case(
        "gemma3",
        {
            "head_dim": 16,
            "num_layers": 4,
            "tie_word_embeddings": True,
            "sliding_window": WINDOW,
            "sliding_window_pattern": 3,
            "rope_parameters": {
                FULL: {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
                SLIDING: {"rope_type": "default", "rope_theta": 1e2},
            },
        },
        ("window_rope_theta", "rope_scaling", "attention_kinds"),
    ),
    "stablelm": Case("stablelm", {"num_kv_heads": 1, "is_sharded": True}, ("partial_rotary_dim",)),
    "stablelm-parallel": Case(
        "stablelm",
        {
            "hidden_size": 96,
            "num_kv_heads": 2,
            "use_parallel_residual": True,
            "qk_layernorm": True,
            "use_qkv_bias": True,
            "hidden_act": "gelu",
            "tie_word_embeddings": True,
            "rope_parameters": {**LLAMA3, "partial_rotary_factor": 0.5},
        },
        ("query_key_norm", "qkv_bias", "activation", "partial_rotary_dim", "rope_scaling"),
    ),
    "starcoder2": Case(
        "starcoder2", {"num_kv_heads": 1, "is_sharded": True}, ("qkv_bias", "output_bias")
    ),
    "starcoder2-window": Case(
        "starcoder2",
        {
            "head_dim": 24,
            "num_heads": 6,
            "use_bias": False,
            "tie_word_embeddings": True,
            "sliding_window": WINDOW,
            "rope_parameters": LLAMA3,
        },
        ("attention_kinds", "rope_scaling"),
    ),
    "exaone4": Case(
        "exaone4",
        {
            "head_dim": 24,
            "num_layers": 3,
            "num_kv_heads": 1,
            "sliding_window": WINDOW,
            "layer_types": [SLIDING, FULL, SLIDING],
            "rope_parameters": LLAMA3,
        },
        ("attention_kinds", "layers_without_rope", "rope_scaling"),
    ),
    "exaone4-small": Case(
        "exaone4",
        {
            "is_sharded": True,
            "tie_word_embeddings": True,
            "sliding_window": None,
            "layer_types": [FULL, FULL],
        },
    ),
    "cohere": Case(
        "cohere",
        {"head_dim": 32, "num_kv_heads": 1, "is_sharded": True},
        ("has_interleaved_rope", "logits_divisor"),
    ),
    "cohere-norms": Case(
        "cohere",
        {
            "head_dim": 24,
            "use_qk_norm": True,
            "attention_bias": True,
            "logit_scale": 0.3,
            "tie_word_embeddings": True,
            "rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0},
        },
        ("query_key_norm", "qkv_bias", "output_bias", "rope_scaling"),
    ),
    "cohere2": Case(
        "cohere2",
        {"num_layers": 4, "sliding_window": WINDOW, "is_sharded": True},
        ("attention_kinds", "layers_without_rope", "logits_divisor"),
    ),
    "cohere2-listed": Case(
        "cohere2",
        {
            "num_heads": 6,
            "num_kv_heads": 3,
            "hidden_size": 96,
            "attention_bias": True,
            "tie_word_embeddings": True,
            "sliding_window": WINDOW,
            "layer_types": [FULL, SLIDING],
            "rope_parameters": LLAMA3,
        },
        ("has_interleaved_rope", "layers_without_rope", "rope_scaling", "qkv_bias"),
    ),
    "phi": Case("phi", {"is_sharded": True}, ("partial_rotary_dim", "qkv_bias", "logits_bias")),
    "phi-few-keys": Case(
        "phi",
        {
            "hidden_size": 80,
            "num_heads": 2,
            "num_kv_heads": 1,
            "tie_word_embeddings": True,
            "rope_parameters": {
                "rope_type": "linear",
                "rope_theta": 1e4,
                "factor": 2.0,
                "partial_rotary_factor": 0.4,
            },
        },
        ("output_bias", "mlp_bias", "logits_bias", "rope_scaling"),
    ),
    "phi3": Case("phi3", {"sliding_window": WINDOW}, ("attention_kinds",)),
    "phi3-short": Case("phi3", _longrope(128), ("rope_scaling",)),
    "phi3-long": Case("phi3", _longrope(32), ("rope_scaling",)),
    "olmo2": Case("olmo2", {"num_kv_heads": 4}),
    "olmo3": Case(
        "olmo3",
        {
            "num_layers": 4,
            "sliding_window": WINDOW,
            "rope_parameters": {
                FULL: {
                    "rope_type": "yarn",
                    "factor": 4.0,
                    "rope_theta": 5e5,
                    "original_max_position_embeddings": 32,
                    "attention_factor": 1.5,
                },
                SLIDING: {"rope_type": "default", "rope_theta": 5e5},
            },
        },
        ("rope_scaling", "attention_kinds"),
    ),
    "lfm2": Case(
        "lfm2",
        {
            "num_layers": 4,
            "layer_types": ["conv", FULL, "conv", "conv"],
            "block_auto_adjust_ff_dim": False,
            "is_sharded": True,
        },
    ),
    "lfm2-biases": Case(
        "lfm2",
        {
            "num_layers": 3,
            "full_attn_idxs": [2],
            "conv_L_cache": 5,
            "conv_bias": True,
            "block_multiple_of": 24,
            "block_ffn_dim_multiplier": 1.3,
            "tie_word_embeddings": True,
            "rope_parameters": {"rope_type": "default", "rope_theta": 100.0},
        },
    ),
    "granite": Case(
        "granite",
        {
            "embedding_multiplier": 12.0,
            "residual_multiplier": 0.7,
            "attention_multiplier": 0.1,
            "logits_scaling": 0.5,
        },
        ("embedding_multiplier", "residual_multiplier", "logits_divisor", "attention_kinds"),
    ),
    "ernie4_5": Case(
        "ernie4_5", {"head_dim": 32, "num_heads": 6, "num_kv_heads": 1}, ("has_interleaved_rope",)
    ),
    "ernie4_5-biases": Case(
        "ernie4_5",
        {
            "head_dim": 24,
            "is_sharded": True,
            "use_bias": True,
            "tie_word_embeddings": True,
            "rope_parameters": LLAMA3,
        },
        ("has_interleaved_rope", "qkv_bias", "output_bias", "mlp_bias", "rope_scaling"),
    ),
    "glm": Case(
        "glm",
        {"head_dim": 32, "num_kv_heads": 1, "is_sharded": True},
        ("has_interleaved_rope", "qkv_bias", "partial_rotary_dim"),
    ),
    "glm-whole-heads": Case(
        "glm",
        {
            "head_dim": 24,
            "attention_bias": False,
            "tie_word_embeddings": True,
            "rope_parameters": {**LLAMA3, "partial_rotary_factor": 1.0},
        },
        ("has_interleaved_rope", "rope_scaling"),
    ),
    "glm4": Case(
        "glm4",
        {"head_dim": 24, "num_heads": 6, "num_kv_heads": 3, "tie_word_embeddings": True},
        ("has_interleaved_rope", "qkv_bias", "partial_rotary_dim"),
    ),
    "glm4-scaled": Case(
        "glm4",
        {
            "head_dim": 16,
            "num_kv_heads": 1,
            "is_sharded": True,
            "attention_bias": False,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 1e4,
                "factor": 4.0,
                "original_max_position_embeddings": 16,
                "partial_rotary_factor": 0.75,
            },
        },
        ("has_interleaved_rope", "rope_scaling", "partial_rotary_dim"),
    ),
    "hunyuan": Case(
        "hunyuan",
        {
            "head_dim": 32,
            "num_kv_heads": 1,
            "is_sharded": True,
            "rope_parameters": {
                "rope_type": "dynamic",
                "rope_theta": 1e4,
                "factor": 1.0,
                "alpha": 1000.0,
            },
        },
        ("is_normed_after_rotation", "rope_theta"),
    ),
    "hunyuan-biases": Case(
        "hunyuan",
        {
            "head_dim": 24,
            "num_heads": 6,
            "attention_bias": True,
            "tie_word_embeddings": True,
            "rope_parameters": LLAMA3,
        },
        ("is_normed_after_rotation", "rope_scaling", "qkv_bias", "output_bias"),
    ),
}
# A value that asks for nothing, for the fields above.
NEUTRAL = {
    "attention_kinds": (AttentionOptions(),),
    "activation": "silu",
    "embedding_multiplier": 1.0,
    "has_interleaved_rope": False,
    "has_unit_offset_norms": False,
    "is_normed_after_rotation": False,
    "layers_without_rope": (),
    "logits_bias": False,
    "logits_divisor": 1.0,
    "logits_soft_cap": None,
    "mlp_bias": False,
    "output_bias": False,
    "partial_rotary_dim": None,
    "qkv_bias": False,
    "query_key_norm": None,
    "query_scaling": None,
    "residual_multiplier": 1.0,
    "rope_scaling": None,
    "rope_theta": 1e4,
    "window_rope_theta": None,
}
