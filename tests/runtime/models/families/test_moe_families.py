"""Models with experts, with latent attention and with recurrent layers, against Hugging Face
transformers."""

from __future__ import annotations

import json
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from mixtures import change_config, make_mixture
from model_scores import scores
from safetensors.torch import load_file, save_file
from step_plans import PlanDriver

from stemma.errors import ModelLoadError
from stemma.kernels.quantized_tensors import QuantizedWeight, experts_of
from stemma.kernels.reference.quantized import dequantize
from stemma.planning.served_model import ServedModel
from stemma.planning.stored_weights import stored_weights
from stemma.runtime.checkpoint.quantized.expert_stack import stacked_weights
from stemma.runtime.execute.model_runner import ModelRunner
from stemma.runtime.models.model_config import read_model_config

YARN = {
    "rope_type": "yarn",
    "rope_theta": 1e4,
    "factor": 40.0,
    "original_max_position_embeddings": 32,
    "beta_fast": 32,
    "beta_slow": 1,
}
# By name: the family, what its config has beside the family's, and how the file is written.
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "mixtral": ("Mixtral", {"is_sharded": True}),
    "mixtral-window": ("Mixtral", {"sliding_window": 9, "tie_word_embeddings": True}),
    "qwen2_moe": ("Qwen2Moe", {"is_sharded": True}),
    "qwen2_moe-some-dense": (
        "Qwen2Moe",
        {
            "num_hidden_layers": 4,
            "mlp_only_layers": [3],
            "decoder_sparse_step": 2,
            "norm_topk_prob": True,
            "tie_word_embeddings": True,
        },
    ),
    "qwen3_moe": ("Qwen3Moe", {"is_sharded": True}),
    "qwen3_moe-some-dense": ("Qwen3Moe", {"mlp_only_layers": [1], "norm_topk_prob": True}),
    "olmoe": ("Olmoe", {}),
    "solar_open": ("SolarOpen", {"is_sharded": True}),
    "dots1": ("Dots1", {"num_hidden_layers": 3}),
    "youtu": ("Youtu", {}),
    "granite_moe": ("GraniteMoe", {"tie_word_embeddings": True}),
    "granite_moe-shared": ("GraniteMoeShared", {}),
    "gpt_oss": ("GptOss", {"is_sharded": True, "swiglu_limit": 0.5}),
    "gpt_oss-three-layers": (
        "GptOss",
        {
            "num_hidden_layers": 3,
            "num_attention_heads": 6,
            "num_key_value_heads": 1,
            "head_dim": 16,
            "num_local_experts": 5,
            "num_experts_per_tok": 2,
            "sliding_window": 5,
            "layer_types": ["full_attention", "sliding_attention", "sliding_attention"],
            "swiglu_alpha": 1.1,
            "swiglu_limit": 0.3,
            "attention_bias": False,
            "tie_word_embeddings": True,
            "rope_parameters": {**YARN, "truncate": False},
        },
    ),
    "ernie4_5_moe": ("Ernie4_5_Moe", {"tie_word_embeddings": True}),
    "ernie4_5_moe-some-dense": (
        "Ernie4_5_Moe",
        {
            "num_hidden_layers": 5,
            "num_key_value_heads": 1,
            "moe_num_shared_experts": 0,
            "moe_layer_interval": 2,
            "moe_layer_end_index": 3,
            "tie_word_embeddings": False,
            "is_sharded": True,
            "rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0},
        },
    ),
    "hunyuan_moe": ("HunYuanMoEV1", {"head_dim": 24, "is_sharded": True}),
    "hunyuan_moe-biases": (
        "HunYuanMoEV1",
        {
            "num_key_value_heads": 4,
            "attention_bias": True,
            "moe_topk": [2, 2],
            "tie_word_embeddings": True,
            "rope_parameters": {
                "rope_type": "dynamic", "rope_theta": 1e4, "factor": 1.0, "alpha": 50.0
            },
        },
    ),
    # Gates and decays of random weights amplify the rounding of transformers' float32.
    "qwen3_next": ("Qwen3Next", {"init_std": 0.1, "is_sharded": True}),
    "qwen3_next-some-dense": (
        "Qwen3Next",
        {
            "init_std": 0.1,
            "num_hidden_layers": 3,
            "layer_types": ["full_attention", "linear_attention", "full_attention"],
            "linear_conv_kernel_dim": 2,
            "linear_num_value_heads": 2,
            "mlp_only_layers": [1],
            "norm_topk_prob": False,
            "attention_bias": True,
            "tie_word_embeddings": True,
            "rope_parameters": {"rope_theta": 100.0, "partial_rotary_factor": 0.5},
        },
    ),
    "qwen3_5": ("Qwen3_5", {"init_std": 0.1}),
    "qwen3_5-few-heads": (
        "Qwen3_5",
        {
            "init_std": 0.1,
            "linear_num_key_heads": 3,
            "linear_num_value_heads": 3,
            "linear_conv_kernel_dim": 5,
            "linear_key_head_dim": 20,
            "linear_value_head_dim": 12,
            "tie_word_embeddings": True,
            "attention_bias": True,
        },
    ),
    "qwen3_5_moe": ("Qwen3_5Moe", {"init_std": 0.1, "is_sharded": True}),
    "qwen3_5_moe-narrow": (
        "Qwen3_5Moe",
        {
            "init_std": 0.1,
            "layer_types": ["linear_attention", "full_attention"] * 2,
            "num_experts_per_tok": 1,
            "linear_num_value_heads": 2,
            "tie_word_embeddings": True,
        },
    ),
    "lfm2_moe": ("Lfm2Moe", {"is_sharded": True}),
    "lfm2_moe-no-bias": (
        "Lfm2Moe",
        {
            "use_expert_bias": False,
            "norm_topk_prob": False,
            "routed_scaling_factor": 1.7,
            "num_dense_layers": 2,
            "conv_L_cache": 4,
            "conv_bias": True,
            "tie_word_embeddings": False,
        },
    ),
    "granite_hybrid": ("GraniteMoeHybrid", {"is_sharded": True}),
    "granite_hybrid-experts": (
        "GraniteMoeHybrid",
        {"num_local_experts": 6, "num_experts_per_tok": 3, "is_sharded": True},
    ),
    "granite_hybrid-few-experts": (
        "GraniteMoeHybrid",
        {"num_local_experts": 3, "num_experts_per_tok": 1, "intermediate_size": 24},
    ),
    "granite_hybrid-rope": (
        "GraniteMoeHybrid",
        {
            "position_embedding_type": "rope",
            "mamba_n_groups": 1,
            "mamba_d_conv": 2,
            "mamba_expand": 3,
            "mamba_d_state": 20,
            "mamba_conv_bias": False,
            "mamba_proj_bias": True,
            "attention_bias": True,
            "tie_word_embeddings": True,
        },
    ),
    "deepseek_v2": ("DeepseekV2", {"is_sharded": True}),
    "deepseek_v2-lite": (
        "DeepseekV2",
        {
            "q_lora_rank": None,
            "topk_method": "greedy",
            "mlp_bias": True,
            "n_group": 1,
            "topk_group": 1,
            "tie_word_embeddings": True,
            "rope_parameters": {**YARN, "mscale": 0.707, "mscale_all_dim": 0.707},
        },
    ),
    "deepseek_v3": (
        "DeepseekV3",
        {"rope_parameters": {**YARN, "mscale": 1.0, "mscale_all_dim": 0.8}},
    ),
    # Heads enough that no two scores are 0, of which transformers may select any.
    "deepseek_v32": ("DeepseekV32", {"index_n_heads": 16, "is_sharded": True}),
    "deepseek_v32-few-keys": (
        "DeepseekV32",
        {
            "num_hidden_layers": 3,
            "mlp_layer_types": ["sparse", "dense", "sparse"],
            "index_topk": 5,
            "index_n_heads": 21,
            "index_head_dim": 16,
            "attention_bias": True,
            "rope_parameters": {**YARN, "mscale": 1.0, "mscale_all_dim": 0.8},
        },
    ),
    "glm_moe_dsa": ("GlmMoeDsa", {"index_n_heads": 16}),
    "glm_moe_dsa-shared": (
        "GlmMoeDsa",
        {
            "num_hidden_layers": 4,
            "indexer_types": ["full", "shared", "full", "shared"],
            "index_topk": 7,
            "index_n_heads": 18,
            "n_group": 1,
            "topk_group": 1,
            "is_sharded": True,
        },
    ),
    "deepseek_v3-halves": (
        "DeepseekV3",
        {"rope_interleave": False, "norm_topk_prob": False, "attention_bias": True,
         "is_sharded": True},
    ),
    "glm4_moe": ("Glm4Moe", {"use_qk_norm": True, "is_sharded": True}),
    "glm4_moe-air": (
        "Glm4Moe",
        {
            "num_hidden_layers": 4, "head_dim": 32, "num_key_value_heads": 1,
            "attention_bias": True, "first_k_dense_replace": 2, "n_shared_experts": 2,
            "n_group": 1, "topk_group": 1, "norm_topk_prob": False, "tie_word_embeddings": True,
            "rope_parameters": {**YARN, "partial_rotary_factor": 0.25},
        },
    ),
    "glm4_moe_lite": ("Glm4MoeLite", {"is_sharded": True}),
    "glm4_moe_lite-listed": (
        "Glm4MoeLite",
        {
            "num_hidden_layers": 3, "mlp_layer_types": ["sparse", "dense", "sparse"],
            "q_lora_rank": None, "n_group": 1, "topk_group": 1, "tie_word_embeddings": True,
        },
    ),
    "minimax_m2": ("MiniMaxM2", {"rotary_dim": 12, "is_sharded": True}),
    "minimax_m2-whole-heads": (
        "MiniMaxM2",
        {
            "num_key_value_heads": 4, "tie_word_embeddings": True,
            "rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0},
        },
    ),
    "llama4": ("Llama4", {"is_sharded": True}),
    "llama4-some-dense": (
        "Llama4",
        {
            "num_attention_heads": 6, "num_key_value_heads": 1, "num_hidden_layers": 3,
            "interleave_moe_layer_step": 2, "num_experts_per_tok": 2, "use_qk_norm": False,
            "no_rope_layers": [1, 0, 1], "attention_chunk_size": 16, "attention_bias": True,
            "tie_word_embeddings": True,
            "rope_parameters": {
                "rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0, "low_freq_factor": 1.0,
                "high_freq_factor": 4.0, "original_max_position_embeddings": 64,
            },
        },
    ),
    "gemma3n": ("Gemma3n", {"is_sharded": True}),
    "gemma3n-second-stream": (
        "Gemma3n",
        {
            "num_hidden_layers": 4, "num_key_value_heads": 1, "head_dim": 24,
            "intermediate_size": [48, 56, 40, 48], "layer_types": None, "num_kv_shared_layers": 1,
            "altup_num_inputs": 2, "altup_active_idx": 1, "altup_correct_scale": False,
            "vocab_size_per_layer_input": 200, "activation_sparsity_pattern": [0.0, 0.9, 0.9, 0.0],
            "attention_bias": True, "tie_word_embeddings": False,
        },
    ),
    "gemma4": ("Gemma4", {"is_sharded": True, "use_double_wide_mlp": True}),
    "gemma4-experts": (
        "Gemma4",
        {
            "num_hidden_layers": 4, "layer_types": None, "num_kv_shared_layers": 0,
            "num_key_value_heads": 4, "num_global_key_value_heads": 1, "attention_k_eq_v": True,
            "hidden_size_per_layer_input": 0, "enable_moe_block": True, "num_experts": 6,
            "top_k_experts": 2, "moe_intermediate_size": 40,
            "rope_parameters": {
                "sliding_attention": {"rope_type": "default", "rope_theta": 300.0},
                "full_attention": {
                    "rope_type": "proportional", "rope_theta": 1e3, "partial_rotary_factor": 0.5,
                },
            },
        },
    ),
    "kimi_linear": ("KimiLinear", {"init_std": 0.15, "is_sharded": True}),
    "kimi_linear-listed": (
        "KimiLinear",
        {
            "init_std": 0.15, "num_hidden_layers": 4, "layer_types": None,
            "linear_attn_config": {
                "full_attn_layers": [1, 3], "kda_layers": [2, 4], "num_heads": 2, "head_dim": 20,
                "short_conv_kernel_size": 2,
            },
            "mlp_layer_types": ["sparse", "dense", "dense", "sparse"], "q_lora_rank": 24,
            "n_group": 1, "topk_group": 1, "norm_topk_prob": False, "attention_bias": True,
        },
    ),
    "nemotron": ("Nemotron", {"is_sharded": True}),
    "nemotron-biases": (
        "Nemotron",
        {
            "num_key_value_heads": 1, "attention_bias": True, "mlp_bias": True,
            "tie_word_embeddings": True,
            "rope_parameters": {"rope_theta": 300.0, "partial_rotary_factor": 0.25},
        },
    ),
    "nemotron_h": ("NemotronH", {"init_std": 0.15, "is_sharded": True}),
    "nemotron_h-latent-experts": (
        "NemotronH",
        {
            "init_std": 0.15,
            "layers_block_type": ["moe", "full_attention", "linear_attention", "moe"],
            "moe_latent_size": 20, "n_group": 3, "topk_group": 2, "norm_topk_prob": False,
            "routed_scaling_factor": 1.5, "mlp_bias": True, "use_bias": True,
            "use_conv_bias": False, "conv_kernel": 2, "n_groups": 3,
        },
    ),
}  # fmt: skip
BFLOAT16_CASES = (
    "gpt_oss",
    "mixtral", "qwen2_moe", "qwen3_moe", "olmoe", "ernie4_5_moe", "hunyuan_moe",
    "deepseek_v2", "deepseek_v3", "deepseek_v32", "glm4_moe", "glm4_moe_lite", "minimax_m2",
    "qwen3_next", "qwen3_5", "lfm2_moe", "granite_hybrid", "llama4",
    "gemma3n", "gemma4", "nemotron", "nemotron_h", "kimi_linear",
)  # fmt: skip
PROMPT = torch.randint(0, 256, (40,), generator=torch.Generator().manual_seed(3)).tolist()
TOKENS = [*PROMPT, 0]
TARGETS = TOKENS[1:]


@dataclass(frozen=True)
class Checkpoint:
    folder: Path
    logprobs: torch.Tensor  # [len(PROMPT), vocab_size] of PROMPT, by transformers


@pytest.fixture(scope="module", params=CASES)
def checkpoint(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Checkpoint:
    family, options = CASES[request.param]
    folder = tmp_path_factory.mktemp(request.param)
    return Checkpoint(folder, _logprobs(make_mixture(folder, family, **options)))


@pytest.mark.parametrize(
    ("dtype", "kernels"), [("float64", "reference"), ("float32", "auto")], ids=str
)
def test_logprobs_equal_transformers_in_any_chunking(
    checkpoint: Checkpoint, dtype: str, kernels: str
) -> None:
    """The prompt whole by itself, and whole, in chunks and token by token over the paged KV in the
    same steps, the last 35 of which are of one token alone."""
    driver = PlanDriver(_runner(checkpoint.folder, dtype=dtype, kernels=kernels))
    expected = checkpoint.logprobs[range(len(PROMPT)), TARGETS]
    for chunks in ([len(TOKENS)], [len(TOKENS), 7, 1, 16]):
        for logprobs in scores(driver, TOKENS, chunks):
            torch.testing.assert_close(logprobs, expected, atol=5e-5, rtol=0)


def test_parameters_are_counted_before_a_model_is_loaded(checkpoint: Checkpoint) -> None:
    """All of them: biases, norms and what experts have beside their matrices."""
    model = ServedModel.of(read_model_config(checkpoint.folder), "float32")
    stored = stored_weights(checkpoint.folder)
    assert stored is not None and stored.formats == ("F32",)
    assert 4 * model.shape.num_parameters == stored.num_bytes


@pytest.mark.parametrize("name", BFLOAT16_CASES)
def test_bfloat16_errs_no_more_than_transformers_does(name: str, tmp_path: Path) -> None:
    """Against the same weights in float32. Medians: where two experts are almost equal, one of them
    may be chosen here and the other there."""
    family, options = CASES[name]
    model = make_mixture(tmp_path, family, dtype=torch.bfloat16, **options)
    theirs, truth = _logprobs(model), _logprobs(model.float())
    at = (range(len(PROMPT)), TARGETS)
    (exact,) = scores(PlanDriver(_runner(tmp_path, dtype="float32")), TOKENS, [len(TOKENS)])
    torch.testing.assert_close(exact, truth[at], atol=5e-5, rtol=0)
    (ours,) = scores(PlanDriver(_runner(tmp_path, dtype="bfloat16")), TOKENS, [7])
    their_error = (theirs - truth)[at].abs().median()
    assert (ours - truth[at]).abs().median() <= 2 * their_error


@pytest.mark.parametrize("name", ["qwen2_moe", "deepseek_v3"])
def test_a_token_does_not_depend_on_its_neighbours(name: str, tmp_path: Path) -> None:
    family, options = CASES[name]
    make_mixture(tmp_path, family, **options)
    prompts = [PROMPT[:1], PROMPT[3:20], PROMPT[:30], PROMPT[10:12]]
    runner = _runner(tmp_path, dtype="float64", kernels="reference", page_size=16)
    together = PlanDriver(runner).generate(prompts, 8, chunk=5)
    for prompt, output in zip(prompts, together, strict=True):
        assert PlanDriver(runner, seed=1).generate([prompt], 8) == [output]
    assert len({tuple(output) for output in together}) == len(prompts)


@pytest.mark.parametrize(
    ("family", "quantization"),
    [
        *(("DeepseekV3", quantization) for quantization in ("int8", "w8a8", "int4")),
        *(
            (family, quantization)
            for family in (
                "Glm4Moe",
                "Llama4",
                "Gemma3n",
                "Gemma4",
                "KimiLinear",
                "Nemotron",
                "NemotronH",
            )
            for quantization in ("int8", "int4")
        ),
    ],
)
def test_quantized_experts_say_what_the_reference_says_of_them(
    family: str, quantization: str, tmp_path: Path
) -> None:
    """Rounded one by one while they are loaded; the router chooses as it did."""
    make_mixture(tmp_path, family, moe_intermediate_size=32)
    plain, *found = [
        scores(PlanDriver(_runner(tmp_path, dtype="float32", **options)), TOKENS, [7, len(TOKENS)])
        for options in (
            {},
            {"kernels": "reference", "quantization": quantization},
            {"quantization": quantization},
        )
    ]
    for logprobs in (found[0][1], *found[1]):
        torch.testing.assert_close(logprobs, found[0][0], atol=1e-4, rtol=0)
    assert (found[0][0] - plain[0]).abs().max() > 1e-3, "nothing was rounded"


@pytest.mark.parametrize("quantization", ["none", "int8"])
def test_experts_may_be_stored_as_one_tensor(quantization: str, tmp_path: Path) -> None:
    """As Qwen3.5-MoE is published; each expert is rounded by itself."""
    make_mixture(tmp_path, "Qwen3_5Moe", init_std=0.1, moe_intermediate_size=32, hidden_size=64)
    options = {"dtype": "float32", "quantization": quantization}
    (apart,) = scores(PlanDriver(_runner(tmp_path, **options)), TOKENS, [9])
    file = tmp_path / "model.safetensors"
    save_file(_stacked(load_file(file)), file, metadata={"format": "pt"})
    (found,) = scores(PlanDriver(_runner(tmp_path, **options)), TOKENS, [9])
    assert torch.equal(found, apart)


def _stacked(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    kept = {name: tensor for name, tensor in tensors.items() if ".experts." not in name}
    layers = {name.partition(".experts.")[0] for name in tensors.keys() - kept.keys()}
    for layer in layers:
        gate, up, down = (
            [tensors[f"{layer}.experts.{expert}.{part}_proj.weight"] for expert in range(6)]
            for part in ("gate", "up", "down")
        )
        both = [torch.cat(pair) for pair in zip(gate, up, strict=True)]
        kept[f"{layer}.experts.gate_up_proj"] = torch.stack(both)
        kept[f"{layer}.experts.down_proj"] = torch.stack(down)
    return kept


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_token_of_latent_attention_is_one_small_row(dtype: str, tmp_path: Path) -> None:
    make_mixture(tmp_path, "DeepseekV3", num_hidden_layers=3)
    runner = _runner(tmp_path, dtype=dtype, num_pages=10, page_size=4)
    itemsize = getattr(torch, dtype).itemsize
    assert runner.pool.num_bytes == 10 * 4 * 3 * (32 + 16) * itemsize
    assert all(layer.shape == (40, 48) for layer in runner.pool.layers)  # type: ignore[union-attr]


def test_kimi_k2_is_a_deepseek_v3(tmp_path: Path) -> None:
    """Its config as published, of 1 trillion parameters, 32 billion of which a token takes."""
    yarn = {
        "type": "yarn", "factor": 32.0, "original_max_position_embeddings": 4096,
        "beta_fast": 1.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0,
    }  # fmt: skip
    config = {
        "architectures": ["DeepseekV3ForCausalLM"], "model_type": "kimi_k2", "hidden_act": "silu",
        "hidden_size": 7168, "intermediate_size": 18432, "moe_intermediate_size": 2048,
        "num_hidden_layers": 61, "num_attention_heads": 64, "num_key_value_heads": 64,
        "n_routed_experts": 384, "n_shared_experts": 1, "num_experts_per_tok": 8, "n_group": 1,
        "topk_group": 1, "first_k_dense_replace": 1, "moe_layer_freq": 1, "kv_lora_rank": 512,
        "q_lora_rank": 1536, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
        "routed_scaling_factor": 2.827, "scoring_func": "sigmoid", "topk_method": "noaux_tc",
        "norm_topk_prob": True, "rope_theta": 50000.0, "rope_scaling": yarn, "vocab_size": 163840,
        "max_position_embeddings": 131072, "rms_norm_eps": 1e-6, "eos_token_id": 163585,
        "num_nextn_predict_layers": 0, "attention_bias": False, "tie_word_embeddings": False,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    read = read_model_config(tmp_path)
    assert read.experts is not None and read.experts.routing.weight_factor == 2.827
    shape = ServedModel.of(read, "bfloat16").shape
    assert shape.num_parameters == pytest.approx(1.026e12, rel=1e-3)
    assert shape.num_active_parameters == pytest.approx(32.9e9, rel=1e-2)


def test_layers_that_select_are_listed_or_follow_from_their_frequency(tmp_path: Path) -> None:
    make_mixture(tmp_path, "GlmMoeDsa", num_hidden_layers=6)
    for fields, expected in (
        ({"index_topk_pattern": "FSSFSS"}, (0, 3)),
        ({"index_topk_pattern": None, "index_topk_freq": 2}, (0, 1, 3, 5)),
        ({"index_topk_freq": None}, (0, 1, 2, 3, 4, 5)),
    ):
        change_config(tmp_path, indexer_types=None, **fields)
        latent = read_model_config(tmp_path).latent
        assert latent is not None and latent.indexer is not None
        assert latent.indexer.layers == expected


def test_llama_4_is_published_with_a_number_as_a_switch(tmp_path: Path) -> None:
    make_mixture(tmp_path, "Llama4")
    found = []
    for tuning in (True, 4, 0):
        change_config(tmp_path, attn_temperature_tuning=tuning)
        found.append(read_model_config(tmp_path).query_scaling)
    assert found[0] is not None and found == [found[0], found[0], None]


def test_there_may_be_no_shared_expert(tmp_path: Path) -> None:
    make_mixture(tmp_path, "DeepseekV3")
    for number in (0, None):
        change_config(tmp_path, n_shared_experts=number)
        experts = read_model_config(tmp_path).experts
        assert experts is not None and experts.shared_intermediate_size == 0


def test_a_layer_that_only_drafts_is_left_unread(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    make_mixture(tmp_path, "DeepseekV3", num_hidden_layers=3)
    for num_layers, is_told in ((2, False), (1, True)):
        change_config(tmp_path, num_hidden_layers=num_layers)
        _runner(tmp_path, dtype="float32")
        assert ("are not used" in caplog.text) == is_told


@pytest.mark.parametrize(
    ("family", "fields", "named"),
    [
        ("DeepseekV3", {"n_group": 3}, "n_group"),
        ("DeepseekV3", {"n_group": 8, "topk_group": 4}, "n_group"),
        ("DeepseekV3", {"topk_group": 5}, "topk_group"),
        ("DeepseekV3", {"num_experts_per_tok": 5}, "num_experts_per_tok"),
        ("DeepseekV3", {"scoring_func": "softmax"}, "scoring_func"),
        ("DeepseekV3", {"qk_rope_head_dim": 15}, "qk_rope_head_dim"),
        ("DeepseekV3", {"attention_bias": True, "q_lora_rank": None}, "attention_bias"),
        ("DeepseekV2", {"topk_method": "noaux_tc"}, "topk_method"),
        ("DeepseekV2", {"norm_topk_prob": True}, "norm_topk_prob"),
        ("DeepseekV2", {"moe_layer_freq": 2}, "moe_layer_freq"),
        ("Qwen2Moe", {"use_sliding_window": True}, "use_sliding_window"),
        ("Mixtral", {"num_experts_per_tok": 5}, "num_experts_per_tok"),
        ("MiniMaxM2", {"attention_bias": True}, "attention_bias"),
        ("Glm4Moe", {"mlp_bias": True}, "mlp_bias"),
        ("Glm4Moe", {"n_group": 3}, "n_group"),
        ("Glm4Moe", {"scoring_func": "softmax"}, "scoring_func"),
        ("Glm4MoeLite", {"mlp_layer_types": ["dense"]}, "mlp_layer_types"),
        ("Glm4MoeLite", {"mlp_layer_types": None, "first_k_dense_replace": 2},
         "first_k_dense_replace"),
        ("MiniMaxM2", {"attn_type_list": [1, 0]}, "attn_type_list"),
        ("MiniMaxM2", {"shared_intermediate_size": 8}, "shared_intermediate_size"),
        ("MiniMaxM2", {"qk_norm_type": "per_head"}, "qk_norm_type"),
        ("MiniMaxM2", {"use_routing_bias": False}, "use_routing_bias"),
        ("MiniMaxM2", {"rotary_dim": 7}, "partial_rotary_factor"),
        ("HunYuanMoEV1", {"moe_topk": [2, 3]}, "moe_topk"),
        ("HunYuanMoEV1", {"moe_topk": 7}, "moe_topk"),
        ("HunYuanMoEV1", {"moe_intermediate_size": [48, 40]}, "moe_intermediate_size"),
        ("HunYuanMoEV1", {"num_shared_expert": 2}, "num_shared_expert"),
        ("HunYuanMoEV1", {"use_cla": True}, "use_cla"),
        ("DeepseekV32", {"index_head_dim": 8}, "index_head_dim"),
        ("GlmMoeDsa", {"indexer_types": ["shared", "full"]}, "indexer_types"),
        ("GlmMoeDsa", {"indexer_types": None, "index_topk_pattern": "FX"}, "index_topk_pattern"),
        ("HunYuanMoEV1", {"use_qk_norm": False}, "use_qk_norm"),
        ("HunYuanMoEV1", {"norm_topk_prob": False}, "norm_topk_prob"),
        ("Ernie4_5_Moe", {"use_bias": True}, "use_bias"),
        ("Ernie4_5_Moe", {"moe_use_aux_free": False}, "moe_use_aux_free"),
        ("Ernie4_5_Moe", {"moe_norm_min": 0.5}, "moe_norm_min"),
        ("Ernie4_5_Moe", {"moe_k": 7}, "moe_k"),
        ("Qwen3Next", {"linear_num_value_heads": 5}, "linear_num_value_heads"),
        ("Qwen3Next", {"linear_conv_kernel_dim": 1}, "linear_conv_kernel_dim"),
        ("Qwen3Next", {"layer_types": ["linear_attention"] * 4}, "layer_types"),
        ("Qwen3_5", {"layer_types": ["linear_attention", "full_attention", "x", 1]}, "layer_types"),
        ("Qwen3_5", {"hidden_act": "gelu"}, "hidden_act"),
        ("SolarOpen", {"use_qk_norm": True}, "use_qk_norm"),
        ("Dots1", {"scoring_func": "softmax"}, "scoring_func"),
        ("Youtu", {"mlp_bias": True}, "mlp_bias"),
        ("KimiLinear", {"hidden_act": "gelu"}, "hidden_act"),
        ("GraniteMoeHybrid", {"hidden_act": "gelu"}, "hidden_act"),
        ("GraniteMoeHybrid", {"num_local_experts": -1}, "num_local_experts"),
        ("GraniteMoeHybrid", {"mamba_d_head": 5}, "mamba_d_head"),
        ("GraniteMoeHybrid", {"mamba_n_groups": 3}, "mamba_n_groups"),
        ("GraniteMoeHybrid", {"time_step_limit": [1.0, "x"]}, "time_step_limit"),
        ("GraniteMoeHybrid", {"position_embedding_type": "alibi"}, "position_embedding_type"),
    ],
)  # fmt: skip
def test_what_is_not_implemented_is_refused_by_its_field(
    family: str, fields: dict[str, Any], named: str, tmp_path: Path
) -> None:
    make_mixture(tmp_path, family)
    read_model_config(tmp_path)
    change_config(tmp_path, **fields)
    with pytest.raises(ModelLoadError, match=f"field '{named}'"):
        read_model_config(tmp_path)


def test_at_most_one_expert_is_held_twice() -> None:
    alive: list[weakref.ref[torch.Tensor]] = []

    def parts() -> Iterator[torch.Tensor]:
        for index in range(5):
            assert sum(ref() is not None for ref in alive) <= 1
            part = torch.full((2, 3), float(index))
            alive.append(weakref.ref(part))
            yield part
            del part

    stack = stacked_weights(parts(), 5)
    assert isinstance(stack, torch.Tensor) and stack.shape == (5, 2, 3)
    assert stack[:, 1, 2].tolist() == [0.0, 1.0, 2.0, 3.0, 4.0]


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("has_offsets", [False, True])
def test_quantized_experts_are_stacked_as_they_are(bits: int, has_offsets: bool) -> None:
    parts = [_quantized(bits, has_offsets, seed) for seed in range(3)]
    stack = stacked_weights(iter(parts), 3)
    assert isinstance(stack, QuantizedWeight) and stack.values.shape[0] == 3
    for part, found in zip(parts, experts_of(stack), strict=True):
        assert isinstance(found, QuantizedWeight)
        assert torch.equal(dequantize(found, torch.float32), dequantize(part, torch.float32))


def test_experts_of_differing_formats_are_refused() -> None:
    parts = [_quantized(8, False, 0), _quantized(4, False, 1)]
    with pytest.raises(ModelLoadError, match="differing formats"):
        stacked_weights(iter(parts), 2)


def _quantized(bits: int, has_offsets: bool, seed: int) -> QuantizedWeight:
    generator = torch.Generator().manual_seed(seed)
    shape, dtype = ((6, 32), torch.int8) if bits == 8 else ((6, 16), torch.uint8)
    info = torch.iinfo(dtype)
    values = torch.randint(info.min, info.max + 1, shape, generator=generator, dtype=dtype)
    scales = torch.rand(6, 2, generator=generator)
    offsets = torch.rand(6, 2, generator=generator) if has_offsets else None
    return QuantizedWeight(8 if bits == 8 else 4, 16, values, scales, offsets)


def _logprobs(model: torch.nn.Module) -> torch.Tensor:
    with torch.inference_mode():
        logits = model(torch.tensor([PROMPT])).logits[0]
    return logits.double().log_softmax(-1)


def _runner(folder: Path, **options: Any) -> ModelRunner:
    settings = {"num_pages": 60, "max_running_requests": 8, "page_size": 4}
    settings |= {"max_model_len": 100, **options}
    return ModelRunner(folder, read_model_config(folder), **settings)
