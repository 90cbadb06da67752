"""A model that is not supported is told its nearest family, and what that lacks."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from stemma.errors import ModelLoadError
from stemma.runtime.checkpoint.config.fields import Fields
from stemma.runtime.models.families.kin import nearest_kin
from stemma.runtime.models.families.registry import (
    ARCHITECTURES,
    read_family,
    unknown_architecture,
)

DENSE: dict[str, Any] = {"hidden_size": 64, "num_attention_heads": 4, "rms_norm_eps": 1e-5}
EXPERTS: dict[str, Any] = {**DENSE, "n_routed_experts": 128, "n_shared_experts": 1, "n_group": 1}
NOW = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM",
       "Gemma2ForCausalLM", "Gemma3ForCausalLM", "Phi3ForCausalLM", "OlmoeForCausalLM",
       "Qwen2MoeForCausalLM", "Qwen3MoeForCausalLM", "GptOssForCausalLM",
       "DeepseekV2ForCausalLM", "DeepseekV3ForCausalLM")  # fmt: skip


@pytest.mark.parametrize(
    ("name", "config", "kin", "missing"),
    [
        ("Glm4ForCausalLM", {**DENSE, "partial_rotary_factor": 0.5}, "Phi3ForCausalLM", ()),
        ("GlmForCausalLM", DENSE, "LlamaForCausalLM", ()),
        ("Glm4MoeForCausalLM", {**EXPERTS, "partial_rotary_factor": 0.5}, "Qwen2MoeForCausalLM",
         ("heads rotated in part",)),
        ("KimiK2ForCausalLM", {**EXPERTS, "n_group": 8, "kv_lora_rank": 512},
         "DeepseekV2ForCausalLM", ()),
        ("DeepseekV32ForCausalLM",
         {**EXPERTS, "n_group": 8, "kv_lora_rank": 512, "index_topk": 2048},
         "DeepseekV3ForCausalLM", ("attention to chosen tokens",)),
        ("Qwen3NextForCausalLM",
         {**DENSE, "num_experts": 512, "shared_expert_intermediate_size": 512,
          "linear_num_value_heads": 32, "layer_types": ["linear_attention", "full_attention"]},
         "Qwen2MoeForCausalLM", ("gated delta nets",)),
        ("Qwen2VLForConditionalGeneration", {"vision_config": {"depth": 2}, "text_config": DENSE},
         "Qwen2ForCausalLM", ("images or sound",)),
        ("JambaForCausalLM", {**DENSE, "num_experts": 16, "mamba_d_state": 16},
         "OlmoeForCausalLM", ("recurrent layers of another kind",)),
        ("GPT2LMHeadModel", {"n_positions": 1024, "layer_norm_epsilon": 1e-5}, "LlamaForCausalLM",
         ("norms with means", "positions other than rotary ones")),
        ("Gemma4ForCausalLM", {**DENSE, "final_logit_softcapping": 30.0, "sliding_window": 512},
         "Gemma2ForCausalLM", ()),
    ],
)  # fmt: skip
def test_the_nearest_family_is_found_by_name_and_by_what_the_config_tells(
    name: str, config: dict[str, Any], kin: str, missing: tuple[str, ...]
) -> None:
    found = nearest_kin(name, config, NOW)
    assert found is not None and (found.architecture, found.missing) == (kin, missing)


@pytest.mark.parametrize(
    ("name", "config", "kin", "missing"),
    [
        ("Glm5MoeForCausalLM", {**EXPERTS, "partial_rotary_factor": 0.5}, "Glm4MoeForCausalLM", ()),
        ("Cohere3ForCausalLM", {**DENSE, "layer_norm_eps": 1e-5, "sliding_window": 4096},
         "Cohere2ForCausalLM", ()),
        ("Ernie5_MoeForCausalLM", {**DENSE, "moe_num_experts": 64, "moe_num_shared_experts": 2},
         "Ernie4_5_MoeForCausalLM", ()),
        ("GptOssNextForCausalLM", {**DENSE, "num_local_experts": 32, "sliding_window": 128},
         "GptOssForCausalLM", ()),
        ("Qwen4NextForCausalLM",
         {**DENSE, "num_experts": 512, "shared_expert_intermediate_size": 512,
          "linear_num_value_heads": 32, "layer_types": ["linear_attention", "full_attention"]},
         "Qwen3NextForCausalLM", ()),
        ("Lfm3ForCausalLM", {**DENSE, "conv_L_cache": 3, "layer_types": ["conv"]},
         "Lfm2ForCausalLM", ()),
        ("Granite5ForCausalLM", {**DENSE, "mamba_n_heads": 128, "embedding_multiplier": 12},
         "GraniteMoeHybridForCausalLM", ()),
        ("MiniMaxForCausalLM",
         {**DENSE, "num_local_experts": 32, "layer_types": ["linear_attention"]},
         "MiniMaxM2ForCausalLM", ("recurrent layers of another kind",)),
        ("MiniMaxForCausalLM", {**DENSE, "num_local_experts": 32, "attn_type_list": [0, 0, 1]},
         "MiniMaxM2ForCausalLM", ("recurrent layers of another kind",)),
        ("DeepseekV9ForCausalLM", {**EXPERTS, "n_group": 8, "kv_lora_rank": 512,
         "linear_attn_config": {"num_heads": 4}}, "DeepseekV2ForCausalLM",
         ("delta rule with decays of channels",)),
        ("MambaForCausalLM", {"state_size": 16, "time_step_rank": 48, "layer_norm_epsilon": 1e-5},
         "Starcoder2ForCausalLM", ("recurrent layers of another kind",)),
        ("JambaForCausalLM", {**DENSE, "num_experts": 16, "mamba_d_state": 16},
         "Ernie4_5_MoeForCausalLM", ("recurrent layers of another kind",)),
        ("BambaForCausalLM", {**DENSE, "mamba_n_heads": 128, "partial_rotary_factor": 0.5},
         "GraniteMoeHybridForCausalLM", ("heads rotated in part",)),
        ("KimiK25ForConditionalGeneration", {"vision_config": {"depth": 2},
         "text_config": {**EXPERTS, "kv_lora_rank": 512}}, "DeepseekV2ForCausalLM",
         ("images or sound",)),
        ("ApertusForCausalLM", {**DENSE, "hidden_act": "xielu"}, "ArceeForCausalLM",
         ("such an activation",)),
        ("KimiLinear2ForCausalLM", {**EXPERTS, "kv_lora_rank": 512,
         "linear_attn_config": {"num_heads": 4}}, "KimiLinearForCausalLM", ()),
        ("Llama5ForCausalLM", {**DENSE, "num_local_experts": 16, "attention_chunk_size": 8192},
         "Llama4ForCausalLM", ()),
        ("Gemma5nForCausalLM", {**DENSE, "sliding_window": 512, "num_kv_shared_layers": 15,
         "hidden_size_per_layer_input": 256}, "Gemma3nForCausalLM", ()),
        ("MistralNextForCausalLM", {**DENSE, "attention_chunk_size": 8192}, "MistralForCausalLM",
         ("attention in chunks",)),
        ("Ernie4_5_VLMoeForCausalLM", {**DENSE, "moe_num_experts": [64, 64],
         "moe_num_shared_experts": 2}, "Ernie4_5_MoeForCausalLM", ()),
    ],
)  # fmt: skip
def test_the_families_that_are_served_are_found(
    name: str, config: dict[str, Any], kin: str, missing: tuple[str, ...]
) -> None:
    found = nearest_kin(name, config, ARCHITECTURES)
    assert found is not None and (found.architecture, found.missing) == (kin, missing)


def test_what_is_no_decoder_has_no_kin() -> None:
    assert nearest_kin("BertModel", DENSE, ARCHITECTURES) is None
    assert nearest_kin("XForCausalLM", DENSE, ()) is None
    odd = {"layer_types": 3, "rope_parameters": [], "text_config": 7, "n_group": "x"}
    assert nearest_kin("XForCausalLM", odd, NOW) is not None, "any config has one"


def test_a_long_name_is_not_shown_whole() -> None:
    assert len(unknown_architecture("X" * 100_000, {})) < 3000


def test_a_checkpoints_own_code_is_never_run(tmp_path: Path) -> None:
    (tmp_path / "modeling_own.py").write_text("raise SystemExit('was run')")
    own = {"AutoModelForCausalLM": "modeling_own.OwnForCausalLM"}
    config = {**DENSE, "architectures": ["OwnForCausalLM"], "auto_map": own}
    with pytest.raises(ModelLoadError, match=r"nearest: .*own code \(auto_map\) is never run"):
        read_family(Fields(tmp_path / "config.json", config))
    assert "modeling_own" not in sys.modules
