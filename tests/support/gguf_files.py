"""GGUF files made from Hugging Face checkpoints as llama.cpp's converter makes them.

Written against the converter (llama.cpp, conversion/) and the gguf package's own table of names,
not against the code under test.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf_newer import (
    NAMES,
    converted_newer,
    feed_forward_length,
    with_packed_experts,
    with_stacked_norms,
    write_newer,
)
from numpy.typing import NDArray
from safetensors.torch import load_file

_NAMES = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "llama",
    "MixtralForCausalLM": "llama",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen2MoeForCausalLM": "qwen2moe",
    "Qwen3ForCausalLM": "qwen3",
    "Qwen3MoeForCausalLM": "qwen3moe",
    "GemmaForCausalLM": "gemma",
    "Gemma2ForCausalLM": "gemma2",
    "Gemma3ForCausalLM": "gemma3",
    "Phi3ForCausalLM": "phi3",
    "Olmo2ForCausalLM": "olmo2",
    "SmolLM3ForCausalLM": "smollm3",
    "GraniteForCausalLM": "granite",
    "DeepseekV2ForCausalLM": "deepseek2",
    "DeepseekV3ForCausalLM": "deepseek2",
    **NAMES,
}
_PAIRED = ("llama", "smollm3", "granite", "mistral3", "granitehybrid")
Kind = gguf.GGMLQuantizationType


def write_gguf(
    folder: Path,
    path: Path,
    kind: Kind = Kind.F32,
    *,
    kinds: dict[str, Kind] | None = None,
    **split: Any,
) -> Path:
    """`folder`: a checkpoint with a byte-level BPE tokenizer. Matrices of layers and the embeddings
    get `kind`, unless `kinds` has one for a part of their GGUF name; split: the writer's options
    for a model in parts."""
    config = json.loads((folder / "config.json").read_text())
    architecture = _NAMES[config["architectures"][0]]
    writer = gguf.GGUFWriter(path, architecture, **split)
    _write_config(writer, config, architecture)
    write_byte_level_tokenizer(writer, folder, config["vocab_size"])
    for name, tensor in _converted(folder, config, architecture):
        own = next((k for part, k in (kinds or {}).items() if part in name), kind)
        is_matrix = tensor.ndim > 1 and not any(each in name for each in ("ffn_gate_inp", "conv"))
        own = Kind.MXFP4 if tensor.dtype == np.uint8 else own if is_matrix else Kind.F32
        # The package's writer takes quantized data as bytes.
        data = tensor if own is Kind.MXFP4 else gguf.quantize(tensor, own)
        writer.add_tensor(name, data, raw_dtype=own)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def write_byte_level_tokenizer(writer: gguf.GGUFWriter, folder: Path, vocab_size: int) -> None:
    """As the converter's `_set_vocab_gpt2`."""
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    config = json.loads((folder / "tokenizer_config.json").read_text())
    tokens = {i: text for text, i in tokenizer["model"]["vocab"].items()}
    added = {token["id"]: token for token in tokenizer["added_tokens"]}
    tokens |= {i: token["content"] for i, token in added.items()}
    kinds = gguf.TokenType
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list([tokens.get(i, f"[PAD{i}]") for i in range(vocab_size)])
    writer.add_token_types(
        [
            kinds.UNUSED
            if i not in tokens
            else kinds.NORMAL
            if i not in added
            else kinds.CONTROL
            if added[i]["special"]
            else kinds.USER_DEFINED
            for i in range(vocab_size)
        ]
    )
    writer.add_token_merges([" ".join(merge) for merge in tokenizer["model"]["merges"]])
    ids = {text: i for i, text in tokens.items()}
    if "bos_token" in config:
        writer.add_bos_token_id(ids[config["bos_token"]])
    if "eos_token" in config:
        writer.add_eos_token_id(ids[config["eos_token"]])
    writer.add_add_bos_token(config.get("add_bos_token", False))
    if "chat_template" in config:
        writer.add_chat_template(config["chat_template"])


def _write_config(writer: gguf.GGUFWriter, config: dict[str, Any], architecture: str) -> None:
    rope = config.get("rope_parameters") or {}
    rope = rope.get("full_attention", rope)
    num_heads = config["num_attention_heads"]
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    if (size := feed_forward_length(config)) is not None:
        writer.add_feed_forward_length(size)
    writer.add_head_count(num_heads)
    is_latent = architecture == "deepseek2"
    writer.add_head_count_kv(1 if is_latent else config.get("num_key_value_heads", num_heads))
    if epsilon := config.get("rms_norm_eps") or config.get("norm_eps"):
        writer.add_layer_norm_rms_eps(epsilon)
    writer.add_rope_freq_base(rope.get("rope_theta", 10000.0))
    if config.get("head_dim") and not is_latent:
        writer.add_key_length(config["head_dim"])
        writer.add_value_length(config["head_dim"])
    if rope.get("rope_type") in ("linear", "yarn"):
        writer.add_rope_scaling_type(gguf.RopeScalingType(rope["rope_type"]))
        writer.add_rope_scaling_factor(rope["factor"])
    if rope.get("rope_type") == "yarn":
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
    _write_family(writer, config, architecture)


def _write_family(writer: gguf.GGUFWriter, config: dict[str, Any], architecture: str) -> None:
    if architecture in ("gemma2", "gemma3", "phi3"):
        writer.add_sliding_window(config.get("sliding_window") or 0)
    if architecture == "gemma2":
        writer.add_attn_logit_softcapping(config["attn_logit_softcapping"])
        writer.add_final_logit_softcapping(config["final_logit_softcapping"])
    if architecture == "phi3":
        head_dim = config["hidden_size"] // config["num_attention_heads"]
        share = config["rope_parameters"].get("partial_rotary_factor", 1.0)
        writer.add_rope_dimension_count(int(head_dim * share))
        original = config["rope_parameters"].get(
            "original_max_position_embeddings", config["max_position_embeddings"]
        )
        writer.add_rope_scaling_orig_ctx_len(original)
        if "long_factor" in config["rope_parameters"]:
            scale = config["max_position_embeddings"] / original
            writer.add_rope_scaling_attn_factors(
                math.sqrt(1 + math.log(scale) / math.log(original)) if scale > 1 else 1.0
            )
    if architecture in ("granite", "granitehybrid"):
        writer.add_attention_scale(config["attention_multiplier"])
        writer.add_embedding_scale(config["embedding_multiplier"])
        writer.add_residual_scale(config["residual_multiplier"])
        writer.add_logit_scale(config["logits_scaling"])
    experts = config.get("num_local_experts", config.get("num_experts"))
    if experts is None:
        experts = config.get("n_routed_experts", config.get("moe_num_experts"))
    if experts:
        writer.add_expert_count(experts)
        chosen = [config.get(name) for name in ("num_experts_per_tok", "moe_topk", "moe_k")]
        writer.add_expert_used_count(next(each for each in chosen if each))
    if "moe_intermediate_size" in config:
        writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
    if architecture == "deepseek2":
        rank, rope_dim = config["kv_lora_rank"], config["qk_rope_head_dim"]
        writer.add_kv_lora_rank(rank)
        if config.get("q_lora_rank"):
            writer.add_q_lora_rank(config["q_lora_rank"])
        writer.add_key_length(rank + rope_dim)
        writer.add_value_length(rank)
        writer.add_key_length_mla(config["qk_nope_head_dim"] + rope_dim)
        writer.add_value_length_mla(config["v_head_dim"])
        writer.add_leading_dense_block_count(config["first_k_dense_replace"])
        writer.add_expert_shared_count(config["n_shared_experts"])
        writer.add_expert_weights_scale(config["routed_scaling_factor"])
        if config.get("norm_topk_prob"):
            writer.add_expert_weights_norm(True)
        writer.add_rope_dimension_count(rope_dim)
        writer.add_expert_group_count(config["n_group"] or 1)
        writer.add_expert_group_used_count(config["topk_group"] or 1)
        is_v3 = config["architectures"] == ["DeepseekV3ForCausalLM"]
        kinds = gguf.ExpertGatingFuncType
        writer.add_expert_gating_func(kinds.SIGMOID if is_v3 else kinds.SOFTMAX)
    write_newer(writer, config, architecture)


def _converted(
    folder: Path, config: dict[str, Any], architecture: str
) -> Iterator[tuple[str, NDArray[np.float32]]]:
    num_heads = config["num_attention_heads"]
    num_kv_heads = config.get("num_key_value_heads", num_heads)
    number = next(k for k, v in gguf.MODEL_ARCH_NAMES.items() if v == architecture)
    names = gguf.get_tensor_name_map(number, config["num_hidden_layers"])
    rope = config.get("rope_parameters") or {}
    if rope.get("rope_type") == "llama3":
        yield "rope_freqs.weight", _llama3_factors(config, rope)
    for length in ("long", "short"):
        if f"{length}_factor" in rope:
            values = np.array(rope[f"{length}_factor"], dtype=np.float32)
            yield f"rope_factors_{length}.weight", values
    tensors = load_file(folder / "model.safetensors")
    tensors = with_stacked_norms(with_packed_experts(tensors))
    for name, tensor in _with_stacked_experts(tensors).items():
        tensor = tensor if tensor.dtype == torch.uint8 else tensor.float()
        if architecture in _PAIRED and ".q_proj." in name:
            tensor = _paired(tensor, num_heads)
        if architecture in _PAIRED and ".k_proj." in name:
            tensor = _paired(tensor, num_kv_heads)
        if architecture.startswith("gemma") and name.endswith("norm.weight"):
            tensor = tensor + 1
        if name.endswith("kv_b_proj.weight"):
            yield from _split_latent(name, tensor, config, names)
            continue
        if name.endswith("e_score_correction_bias"):
            name = name.replace("e_score_correction_bias", "e_score_correction.bias")
        if name == "lm_head.weight" and config["tie_word_embeddings"]:
            continue
        for own, part in converted_newer(name, tensor, config, architecture):
            new = own if own.startswith("blk.") else _name_of(names, own)
            yield (
                new,
                (part if architecture == "granitehybrid" else part.squeeze()).contiguous().numpy(),
            )


def _name_of(names: gguf.TensorNameMap, name: str) -> str:
    found = names.get_name(name, try_suffixes=(".weight", ".bias"))
    assert found is not None, name
    return found


def _split_latent(
    name: str, tensor: torch.Tensor, config: dict[str, Any], names: gguf.TensorNameMap
) -> Iterator[tuple[str, NDArray[np.float32]]]:
    nope, value = config["qk_nope_head_dim"], config["v_head_dim"]
    heads = tensor.view(config["num_attention_heads"], nope + value, -1)
    parts = {"k_b_proj": heads[:, :nope].transpose(1, 2), "v_b_proj": heads[:, nope:]}
    for part, values in parts.items():
        new = names.get_name(name.replace("kv_b_proj", part), try_suffixes=(".weight",))
        assert new is not None
        yield new, values.contiguous().numpy()


def _paired(tensor: torch.Tensor, num_heads: int) -> torch.Tensor:
    """`LlamaModel.permute`: interleaves, per head, rows of the first and second half."""
    halves = tensor.reshape(num_heads, 2, tensor.shape[0] // num_heads // 2, *tensor.shape[1:])
    return halves.swapaxes(1, 2).reshape(tensor.shape)


def _with_stacked_experts(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    stacked: dict[str, list[torch.Tensor]] = {}
    others: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        before, _, behind = name.partition(".experts.")
        if not behind:
            others[name] = tensor
            continue
        number, _, part = behind.partition(".")
        if not number.isdigit():  # all of a layer in one tensor
            others[name] = tensor
            continue
        own = f"{before}.experts.{part}"
        # The package's table has Mixtral's stacks under a separate name.
        own = own.replace("model.layers", "layers").replace("block_sparse_moe", "feed_forward")
        own = own if "feed_forward" in own else f"{before}.experts.{part}"
        parts = stacked.setdefault(own, [])
        parts.extend([tensor] * (int(number) + 1 - len(parts)))
        parts[int(number)] = tensor
    return others | {name: torch.stack(parts) for name, parts in stacked.items()}


def _llama3_factors(config: dict[str, Any], rope: dict[str, Any]) -> NDArray[np.float32]:
    dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    factors = []
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    original, factor = rope["original_max_position_embeddings"], rope["factor"]
    for frequency in 1.0 / (rope["rope_theta"] ** (np.arange(0, dim, 2) / dim)):
        wave = 2 * math.pi / frequency
        if wave < original / high:
            factors.append(1.0)
        elif wave > original / low:
            factors.append(factor)
        else:
            smooth = (original / wave - low) / (high - low)
            factors.append(1 / ((1 - smooth) / factor + smooth))
    return np.array(factors, dtype=np.float32)
