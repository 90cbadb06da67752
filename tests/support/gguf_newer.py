"""What llama.cpp's converter makes of newer families: recurrent layers, experts in one tensor.

Written against the converter (llama.cpp, conversion/), not against the code under test.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import gguf
import torch

NAMES = {
    "GptOssForCausalLM": "gpt-oss",
    "Qwen3NextForCausalLM": "qwen3next",
    "Qwen3_5ForCausalLM": "qwen35",
    "Qwen3_5MoeForCausalLM": "qwen35moe",
    "Lfm2ForCausalLM": "lfm2",
    "Lfm2MoeForCausalLM": "lfm2moe",
    "Glm4ForCausalLM": "glm4",
    "Glm4MoeForCausalLM": "glm4moe",
    "GraniteMoeHybridForCausalLM": "granitehybrid",
    "MiniMaxM2ForCausalLM": "minimax-m2",
    "SeedOssForCausalLM": "seed_oss",
    "Exaone4ForCausalLM": "exaone4",
    "PhiForCausalLM": "phi2",
    "StableLmForCausalLM": "stablelm",
    "NemotronForCausalLM": "nemotron",
    "Ministral3ForCausalLM": "mistral3",
    "Ernie4_5ForCausalLM": "ernie4_5",
    "Ernie4_5_MoeForCausalLM": "ernie4_5-moe",
    "HunYuanDenseV1ForCausalLM": "hunyuan-dense",
    "HunYuanMoEV1ForCausalLM": "hunyuan-moe",
    "OlmoeForCausalLM": "olmoe",
}


def write_newer(writer: gguf.GGUFWriter, config: dict[str, Any], architecture: str) -> None:
    """The metadata of these families, beside what all have."""
    types = config.get("layer_types") or []
    if architecture in ("lfm2", "lfm2moe", "granitehybrid"):
        heads = config["num_key_value_heads"]
        writer.add_head_count_kv([heads if each == "full_attention" else 0 for each in types])
    if architecture in ("lfm2", "lfm2moe"):
        writer.add_shortconv_l_cache(config["conv_L_cache"])
    if architecture == "lfm2moe":
        writer.add_leading_dense_block_count(config["num_dense_layers"])
    if architecture in ("qwen3next", "qwen35", "qwen35moe"):
        value_heads = config["linear_num_value_heads"]
        writer.add_ssm_conv_kernel(config["linear_conv_kernel_dim"])
        writer.add_ssm_state_size(config["linear_key_head_dim"])
        writer.add_ssm_group_count(config["linear_num_key_heads"])
        writer.add_ssm_time_step_rank(value_heads)
        writer.add_ssm_inner_size(config["linear_value_head_dim"] * value_heads)
        _write_rotated(writer, config, 0.25)
    if architecture in ("glm4", "glm4moe"):
        _write_rotated(writer, config, 0.5)
    if architecture in ("phi2", "stablelm"):
        writer.add_layer_norm_eps(config["layer_norm_eps"])
        _write_rotated(writer, config, 1.0)
    if architecture == "nemotron":
        writer.add_layer_norm_eps(config["norm_eps"])
        _write_rotated(writer, config, 0.5)
    if architecture == "stablelm":
        writer.add_parallel_residual(config["use_parallel_residual"])
    if architecture == "exaone4":
        writer.add_sliding_window(config["sliding_window"])
        writer.add_sliding_window_pattern([each == "sliding_attention" for each in types])
    if architecture == "minimax-m2":
        _write_rotated(writer, config, 1.0)
    if architecture == "glm4moe":
        writer.add_leading_dense_block_count(config["first_k_dense_replace"])
        writer.add_expert_shared_count(config["n_shared_experts"])
        writer.add_expert_weights_scale(config["routed_scaling_factor"])
        writer.add_expert_weights_norm(config["norm_topk_prob"])
        writer.add_expert_group_count(config["n_group"])
        writer.add_expert_group_used_count(config["topk_group"])
    if architecture == "gpt-oss":
        writer.add_sliding_window(config["sliding_window"])
    if architecture == "granitehybrid":
        writer.add_ssm_conv_kernel(config["mamba_d_conv"])
        writer.add_ssm_state_size(config["mamba_d_state"])
        writer.add_ssm_group_count(config["mamba_n_groups"])
        writer.add_ssm_inner_size(config["mamba_expand"] * config["hidden_size"])
        writer.add_ssm_time_step_rank(config["mamba_n_heads"])
        writer.add_rope_scaling_finetuned(False)
    if architecture == "ernie4_5-moe":
        writer.add_leading_dense_block_count(config["moe_layer_start_index"])
        writer.add_interleave_moe_layer_step(config["moe_layer_interval"])
        writer.add_expert_shared_count(config["moe_num_shared_experts"])
    if architecture == "mistral3":
        rope = config["rope_parameters"]
        writer.add_rope_scaling_yarn_log_mul(rope["mscale_all_dim"])
        writer.add_attn_temperature_scale(rope["llama_4_scaling_beta"])


def _write_rotated(writer: gguf.GGUFWriter, config: dict[str, Any], default: float) -> None:
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    share = (config.get("rope_parameters") or {}).get("partial_rotary_factor", default)
    writer.add_rope_dimension_count(int(head_dim * share))


def converted_newer(
    name: str, tensor: torch.Tensor, config: dict[str, Any], architecture: str
) -> Iterator[tuple[str, torch.Tensor]]:
    """A tensor by its Hugging Face name -> by such names as the package's table knows, or by
    GGUF's own, changed."""
    layer = name.split(".")[2] if name.startswith("model.layers.") else ""
    if architecture in ("qwen35", "qwen35moe") and ".linear_attn." in name:
        tensor = _with_value_heads_in_turn(name, tensor, config)
    if architecture in ("qwen3next", "qwen35", "qwen35moe"):
        if name.endswith("norm.weight") and not name.endswith("linear_attn.norm.weight"):
            tensor = tensor + 1
        if name.endswith("in_proj_qkvz.weight"):
            for own, part in zip(("attn_qkv", "attn_gate"), _sorted(tensor, config), strict=True):
                yield f"blk.{layer}.{own}.weight", part
            return
    if architecture == "nemotron" and name.endswith("norm.weight"):
        tensor = tensor + 1
    if name.endswith("A_log"):
        tensor = -torch.exp(tensor)
    if architecture == "granitehybrid":
        if name.endswith(("A_log", "mamba.D")):
            tensor = tensor.reshape(-1, 1)
        if name.endswith("mamba.norm.weight"):
            tensor = tensor.reshape(config["mamba_n_groups"], -1)
        has_experts = config["num_local_experts"] > 0
        if name.endswith("input_linear.weight"):
            kind = "_exps" if "block_sparse_moe" in name else "_shexp" if has_experts else ""
            for part, rows in zip(("gate", "up"), tensor.chunk(2, -2), strict=True):
                yield f"blk.{layer}.ffn_{part}{kind}.weight", rows
            return
        if name.endswith("shared_mlp.output_linear.weight") and not has_experts:
            yield f"blk.{layer}.ffn_down.weight", tensor
            return
    if architecture == "gpt-oss" and ".experts." in name:
        yield from _experts_of_gpt_oss(name, tensor, layer)
        return
    if name.startswith("blk."):
        yield name, tensor
        return
    name = name.replace(".dt_bias", ".dt_proj.bias").replace(".expert_bias", ".expert_bias.bias")
    name = f"{name}.weight" if name.endswith("sinks") else name
    yield name, tensor.squeeze() if "conv" in name else tensor


def _experts_of_gpt_oss(
    name: str, tensor: torch.Tensor, layer: str
) -> Iterator[tuple[str, torch.Tensor]]:
    """Gates and ups take turns; matrices lie the other way round."""
    kind = "bias" if name.endswith("_bias") else "weight"
    rows = tensor if kind == "bias" else tensor.transpose(1, 2)
    if "down_proj" in name:
        yield f"blk.{layer}.ffn_down_exps.{kind}", rows
        return
    yield f"blk.{layer}.ffn_gate_exps.{kind}", rows[:, ::2]
    yield f"blk.{layer}.ffn_up_exps.{kind}", rows[:, 1::2]


def with_packed_experts(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Experts in MXFP4 as ggml has them: in place of `_blocks` and `_scales` one tensor of bytes by
    GGUF's name, 17 for 32 numbers: the scale, then the numbers, the first half in the low bits."""
    packed = {}
    for name in [name for name in tensors if name.endswith("_blocks")]:
        blocks = tensors.pop(name)
        numbers = torch.stack((blocks & 15, blocks >> 4), -1).flatten(-2)
        scales = tensors.pop(name.replace("_blocks", "_scales")).unsqueeze(-1)
        halves = numbers[..., :16] | numbers[..., 16:] << 4
        rows = torch.cat((scales, halves), -1).flatten(-2)
        before = f"blk.{name.split('.')[2]}.ffn"
        if "down_proj" in name:
            packed[f"{before}_down_exps.weight"] = rows
        else:
            packed[f"{before}_gate_exps.weight"] = rows[:, ::2]
            packed[f"{before}_up_exps.weight"] = rows[:, 1::2]
    return tensors | packed


def with_stacked_norms(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """StableLM 12B's norms of heads (`_stack_qk_norm`): a layer's are one tensor, a head a row."""
    stacked: dict[str, dict[int, torch.Tensor]] = {}
    for name in [name for name in tensors if ".norms." in name]:
        _, _, layer, _, norm, _, head, _ = name.split(".")
        own = f"blk.{layer}.attn_{norm[0]}_norm.weight"
        stacked.setdefault(own, {})[int(head)] = tensors.pop(name)
    return tensors | {
        own: torch.stack([heads[head] for head in range(len(heads))])
        for own, heads in stacked.items()
    }


def feed_forward_length(config: dict[str, Any]) -> int | None:
    """LFM2's is adjusted."""
    size: int | None = config.get("intermediate_size")
    if size is None or not config.get("block_auto_adjust_ff_dim"):
        return size
    multiple = config["block_multiple_of"]
    return -(-int(config["block_ffn_dim_multiplier"] * int(2 * size / 3)) // multiple) * multiple


def _in_turn(tensor: torch.Tensor, axis: int, config: dict[str, Any], size: int) -> torch.Tensor:
    """`_reorder_v_heads`: heads of `size`, those of a key head side by side, to one of each."""
    keys = config["linear_num_key_heads"]
    heads = tensor.unflatten(axis, (keys, config["linear_num_value_heads"] // keys, size))
    return heads.transpose(axis, axis + 1).flatten(axis, axis + 2)


def _with_value_heads_in_turn(
    name: str, tensor: torch.Tensor, config: dict[str, Any]
) -> torch.Tensor:
    size = config["linear_value_head_dim"]
    before = 2 * config["linear_num_key_heads"] * config["linear_key_head_dim"]
    if ".in_proj_qkv." in name or ".conv1d." in name:
        values = _in_turn(tensor[before:], 0, config, size)
        return torch.cat((tensor[:before], values))
    if ".in_proj_z." in name:
        return _in_turn(tensor, 0, config, size)
    if name.endswith(("in_proj_a.weight", "in_proj_b.weight", "A_log", "dt_bias")):
        return _in_turn(tensor, 0, config, 1)
    return _in_turn(tensor, 1, config, size) if ".out_proj." in name else tensor


def _sorted(tensor: torch.Tensor, config: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows of (queries, keys, values, gates) of each key head by their kind."""
    keys, key_dim = config["linear_num_key_heads"], config["linear_key_head_dim"]
    share = config["linear_num_value_heads"] // keys * config["linear_value_head_dim"]
    parts = tensor.unflatten(0, (keys, -1)).split([key_dim, key_dim, share, share], 1)
    *qkv, gates = (part.flatten(0, 1) for part in parts)
    return torch.cat(qkv), gates
