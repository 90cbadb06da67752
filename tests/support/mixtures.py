"""Small random checkpoints of models with experts, as transformers writes them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from checkpoints import BYTE_VOCAB_SIZE, make_byte_tokenizer

_HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2}
_LATENT = {
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "kv_lora_rank": 32,
    "q_lora_rank": 24,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 16,
    "v_head_dim": 12,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "n_shared_experts": 2,
    "moe_intermediate_size": 24,
    "first_k_dense_replace": 1,
    "n_group": 4,
    "topk_group": 2,
}
_NEXT = {
    **_HEADS,
    "head_dim": 24,
    "num_hidden_layers": 4,
    "linear_key_head_dim": 12,
    "linear_value_head_dim": 20,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
    "num_experts": 6,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 40,
    "shared_expert_intermediate_size": 56,
}
_SLIDING, _FULL = "sliding_attention", "full_attention"
_UNIT_OFFSET = ("Qwen3Next", "Qwen3_5", "Qwen3_5Moe")  # norms multiply by 1 + weight
_CONFIGS = {
    "Gemma3n": "Gemma3nText",
    "Gemma4": "Gemma4Text",
    "Llama4": "Llama4Text",
    "Qwen3_5": "Qwen3_5Text",
    "Qwen3_5Moe": "Qwen3_5MoeText",
}
# Of buffers that follow from the config.
_CONSTANTS = ("embed_scale", "input_scale", "projection_scale")
FAMILIES: dict[str, dict[str, Any]] = {
    "Mixtral": {**_HEADS, "num_local_experts": 4, "num_experts_per_tok": 2},
    "Qwen2Moe": {
        **_HEADS,
        "num_experts": 6,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 40,
        "shared_expert_intermediate_size": 56,
    },
    "Qwen3Moe": {
        **_HEADS,
        "head_dim": 24,
        "num_experts": 6,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 40,
    },
    "DeepseekV2": {**_LATENT, "topk_method": "group_limited_greedy", "routed_scaling_factor": 4.0},
    "DeepseekV3": _LATENT,
    "DeepseekV32": {**_LATENT, "index_topk": 12, "index_head_dim": 24, "index_n_heads": 2},
    "GptOss": {
        **_HEADS,
        "head_dim": 24,
        "num_local_experts": 6,
        "num_experts_per_tok": 3,
        "sliding_window": 9,
    },
    "Ernie4_5_Moe": {
        **_HEADS,
        "moe_num_experts": 6,
        "moe_k": 3,
        "moe_intermediate_size": 40,
        "moe_num_shared_experts": 2,
    },
    "HunYuanMoEV1": {**_HEADS, "head_dim": 16, "num_experts": 6, "moe_topk": 3},
    "Glm4Moe": {
        **_HEADS,
        "head_dim": 24,
        "n_routed_experts": 8,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 40,
        "n_group": 4,
        "topk_group": 2,
        "routed_scaling_factor": 2.5,
    },
    "SolarOpen": {
        **_HEADS,
        "head_dim": 24,
        "n_routed_experts": 6,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 40,
        "attention_bias": True,
    },
    "Dots1": {
        **_HEADS,
        "head_dim": 24,
        "n_routed_experts": 8,
        "num_experts_per_tok": 3,
        "n_shared_experts": 2,
        "moe_intermediate_size": 40,
        "n_group": 4,
        "topk_group": 2,
        "first_k_dense_replace": 1,
        "sliding_window": 9,
        "max_window_layers": 1,
        "attention_bias": True,
    },
    "Youtu": {
        name: value
        for name, value in _LATENT.items()
        if name.startswith(("num_att", "num_key", "kv", "q", "v"))
    },
    "GraniteMoeShared": {
        **_HEADS,
        "num_local_experts": 6,
        "num_experts_per_tok": 3,
        "shared_intermediate_size": 40,
        "attention_multiplier": 0.3,
        "embedding_multiplier": 1.5,
        "residual_multiplier": 0.7,
        "logits_scaling": 1.3,
    },
    "GraniteMoe": {**_HEADS, "num_local_experts": 6, "num_experts_per_tok": 3},
    "Glm4MoeLite": {k: v for k, v in _LATENT.items() if k != "first_k_dense_replace"},
    "GlmMoeDsa": {**_LATENT, "index_topk": 12, "index_head_dim": 24, "index_n_heads": 2},
    "MiniMaxM2": {**_HEADS, "head_dim": 24, "num_local_experts": 6, "num_experts_per_tok": 3},
    "Llama4": {
        **_HEADS,
        "head_dim": 24,
        "num_hidden_layers": 4,
        "intermediate_size_mlp": 56,
        "num_local_experts": 6,
        "attention_chunk_size": 9,
        "floor_scale": 5,
        "attn_scale": 0.4,
    },
    "Gemma3n": {
        **_HEADS,
        "num_hidden_layers": 5,
        "head_dim": 16,
        "num_kv_shared_layers": 2,
        "layer_types": [_SLIDING, _FULL, _SLIDING, _SLIDING, _FULL],
        "sliding_window": 9,
        "vocab_size_per_layer_input": BYTE_VOCAB_SIZE,
        "hidden_size_per_layer_input": 12,
        "altup_num_inputs": 3,
        "laurel_rank": 10,
        "activation_sparsity_pattern": [0.7, 0.0, 0.4, 0.0, 0.0],
        "final_logit_softcapping": 9.0,
        "pad_token_id": 0,
    },
    "Gemma4": {
        **_HEADS,
        "num_hidden_layers": 5,
        "head_dim": 16,
        "global_head_dim": 24,
        "num_kv_shared_layers": 2,
        "layer_types": [_SLIDING, _FULL, _SLIDING, _SLIDING, _FULL],
        "sliding_window": 9,
        "vocab_size_per_layer_input": BYTE_VOCAB_SIZE,
        "hidden_size_per_layer_input": 12,
        "final_logit_softcapping": 9.0,
        "pad_token_id": 0,
    },
    "KimiLinear": {
        **{k: v for k, v in _LATENT.items() if k not in ("first_k_dense_replace", "q_lora_rank")},
        "num_hidden_layers": 3,
        "layer_types": ["linear_attention", "full_attention", "linear_attention"],
        "num_local_experts": 8,
        "linear_num_heads": 3,
        "linear_head_dim": 12,
    },
    "Nemotron": _HEADS,
    "NemotronH": {
        **_HEADS,
        "head_dim": 24,
        "layers_block_type": [
            "linear_attention",
            "mlp",
            "full_attention",
            "linear_attention",
            "moe",
        ],
        "mamba_num_heads": 6,
        "mamba_head_dim": 12,
        "n_groups": 2,
        "ssm_state_size": 10,
        "n_routed_experts": 6,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 40,
        "moe_shared_expert_intermediate_size": 24,
        "time_step_min": 0.4,
    },
    "Qwen3Next": _NEXT,
    "Qwen3_5": {k: v for k, v in _NEXT.items() if "expert" not in k and "moe" not in k},
    "GraniteMoeHybrid": {
        **_HEADS,
        "num_hidden_layers": 4,
        "layer_types": ["linear_attention", "full_attention", *["linear_attention"] * 2],
        "num_local_experts": 0,
        "shared_intermediate_size": 56,
        "mamba_n_heads": 8,
        "mamba_n_groups": 2,
        "mamba_d_state": 12,
        "attention_multiplier": 0.3,
        "embedding_multiplier": 1.5,
        "residual_multiplier": 0.7,
        "logits_scaling": 1.3,
    },
    "Qwen3_5Moe": _NEXT,
    "Lfm2Moe": {
        **_HEADS,
        "num_hidden_layers": 4,
        "layer_types": ["conv", "full_attention", "conv", "conv"],
        "num_dense_layers": 1,
        "num_experts": 6,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 40,
    },
    "Olmoe": {**_HEADS, "num_experts": 6, "num_experts_per_tok": 3},
}


def make_mixture(
    folder: Path,
    family: str,
    *,
    dtype: torch.dtype = torch.float32,
    is_sharded: bool = False,
    has_tokenizer: bool = False,
    seed: int = 0,
    init_std: float = 0.2,
    **fields: Any,
) -> torch.nn.Module:
    """Write a checkpoint of `family` to the folder; returns transformers' model of it."""
    import transformers

    shape = {
        "vocab_size": BYTE_VOCAB_SIZE,
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "intermediate_size": 48,
        "max_position_embeddings": 512,
        "bos_token_id": 256,
        "eos_token_id": 257,
        "pad_token_id": None,
    }
    if family == "SolarOpen":  # whose layers are all of experts
        del shape["intermediate_size"]
    config = getattr(transformers, f"{_CONFIGS.get(family, family)}Config")(
        **{**shape, **FAMILIES[family], **fields}
    )
    config._attn_implementation = config._experts_implementation = "eager"
    model: torch.nn.Module = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    _randomize(model, seed, init_std, has_unit_offset_norms=family in _UNIT_OFFSET)
    for parameter in model.parameters():  # not the buffers: frequencies and biases stay float32
        parameter.data = parameter.data.to(dtype)
    model.save_pretrained(folder, max_shard_size="100KB" if is_sharded else "10GB")  # type: ignore[operator]
    if has_tokenizer:
        make_byte_tokenizer(folder)
    return model


def pack_experts(folder: Path, seed: int = 0) -> dict[str, torch.Tensor]:
    """Put random experts in MXFP4 in place of those of a gpt-oss checkpoint in one file; returns
    them, `_blocks` and `_scales`."""
    from safetensors.torch import load_file, save_file

    generator = torch.Generator().manual_seed(seed)
    tensors, packed = load_file(folder / "model.safetensors"), {}
    for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
        num_experts, inputs, outputs = tensors.pop(name).shape
        groups = (num_experts, outputs, inputs // 32)
        packed[f"{name}_blocks"] = torch.randint(
            0, 256, (*groups, 16), generator=generator, dtype=torch.uint8
        )
        packed[f"{name}_scales"] = torch.randint(
            122, 126, groups, generator=generator, dtype=torch.uint8
        )
    save_file({**tensors, **packed}, folder / "model.safetensors", {"format": "pt"})
    kept = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "lm_head"]
    section = {"quant_method": "mxfp4", "modules_to_not_convert": kept}
    change_config(folder, quantization_config=section)
    return packed


def change_config(folder: Path, **fields: Any) -> None:
    """Overwrite fields of the folder's config.json."""
    file = folder / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **fields}))


def _randomize(
    model: torch.nn.Module, seed: int, init_std: float, *, has_unit_offset_norms: bool
) -> None:
    """Norms about 1; the bias that chooses experts is large compared with its own spread."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            noise = torch.randn(tensor.shape, generator=generator) * init_std
            if name.endswith("norm.weight"):
                is_offset = has_unit_offset_norms and not name.endswith("linear_attn.norm.weight")
                noise += 0.0 if is_offset else 1.0
            elif name.endswith("e_score_correction_bias"):
                noise = 14.0 + noise / 2
            elif name.endswith(("layer_scalar", "per_expert_scale", "router.scale")):
                noise += 1.0
            elif "rotary" in name or "inv_freq" in name or name.endswith(_CONSTANTS):
                continue
            tensor.copy_(noise)
