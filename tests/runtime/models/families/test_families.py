"""Each family against Hugging Face transformers, with all that its config.json can ask for."""

from __future__ import annotations

import json
import logging
import re
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import make_checkpoint, randomize
from mixtures import change_config
from model_scores import hf_scores, make_runner, scores
from safetensors.torch import load_file, save_file
from step_plans import PlanDriver

import stemma as st
from stemma.errors import ModelLoadError
from stemma.kernels.model_options import AttentionOptions
from stemma.kernels.native.bindings import why_not_native
from stemma.kernels.ops import Captured
from stemma.kernels.registry import select_kernels
from stemma.planning.served_model import ServedModel
from stemma.planning.stored_weights import stored_weights
from stemma.runtime.models.families.registry import ARCHITECTURES
from stemma.runtime.models.model_config import read_model_config

VOCAB_SIZE, WINDOW = 131, 9
LENGTH = 45
TOKENS = torch.randint(
    0, VOCAB_SIZE, (LENGTH,), generator=torch.Generator().manual_seed(7)
).tolist()
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


@pytest.fixture(scope="module", params=CASES)
def case(request: pytest.FixtureRequest) -> Case:
    return CASES[request.param]


@pytest.fixture(scope="module")
def checkpoint(case: Case, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(
        tmp_path_factory.mktemp(case.architecture),
        case.architecture,
        vocab_size=VOCAB_SIZE,
        has_tokenizer=False,
        **case.options,
    )


@pytest.fixture(scope="module")
def expected(checkpoint: Path) -> torch.Tensor:
    """transformers norms in float32 whatever the dtype, so its float64 is good to 1e-5."""
    return hf_scores(checkpoint, TOKENS)


@pytest.mark.parametrize(("dtype", "kernels"), [("float64", "reference"), ("float32", "auto")])
def test_logprobs_equal_transformers_in_any_chunking(
    checkpoint: Path, expected: torch.Tensor, dtype: str, kernels: str
) -> None:
    """The prompt at once, in chunks of 7 and token by token, in the same steps."""
    driver = PlanDriver(make_runner(checkpoint, dtype=dtype, kernels=kernels))
    for found in scores(driver, TOKENS, (LENGTH, 7, 1)):
        torch.testing.assert_close(found, expected, atol=5e-5, rtol=1e-5)


def test_bfloat16_is_no_further_off_than_that_of_transformers(
    checkpoint: Path, expected: torch.Tensor
) -> None:
    """Prefill, and token by token, where steps may be recorded."""
    theirs = (hf_scores(checkpoint, TOKENS, torch.bfloat16) - expected).abs()
    driver = PlanDriver(make_runner(checkpoint, dtype="bfloat16"))
    for chunk in (LENGTH, 1):
        (found,) = scores(driver, TOKENS, [chunk])
        assert (found - expected).abs().mean() <= 1.5 * theirs.mean()
        assert (found - expected).abs().max() <= 4 * theirs.max()


def test_parameters_are_counted_before_a_model_is_loaded(checkpoint: Path) -> None:
    """All of them: biases, norms and what experts have beside their matrices."""
    model = ServedModel.of(read_model_config(checkpoint), "float32")
    stored = stored_weights(checkpoint)
    assert stored is not None and stored.formats == ("F32",)
    assert 4 * model.shape.num_parameters == stored.num_bytes


def test_what_a_case_is_for_changes_what_the_model_says(
    case: Case, checkpoint: Path, expected: torch.Tensor
) -> None:
    for name in case.without:
        changes = {name: NEUTRAL[name]}
        if name == "attention_kinds":
            changes["kind_of_layer"] = None
        changed = make_runner(checkpoint, changes, kernels="reference")
        (found,) = scores(PlanDriver(changed), TOKENS, [LENGTH])
        assert (found - expected).abs().max() > 0.01, name


@pytest.mark.parametrize(
    ("architecture", "fields"),
    [
        ("phi", {"qk_layernorm": True}),
        ("phi", {"hidden_act": "silu"}),
        ("phi", {"partial_rotary_factor": 0.2}),
        ("stablelm", {"hidden_act": "relu2"}),
        ("stablelm", {"mlp_bias": True}),
        ("stablelm", {"head_dim": 32}),
        ("stablelm", {"attention_bias": True}),
        ("starcoder2", {"mlp_bias": True}),
        ("ernie4_5", {"attention_bias": True}),
        ("ernie4_5", {"compression_ratio": 2.0}),
        ("hunyuan", {"use_cla": True}),
        ("hunyuan", {"mlp_bias": True}),
        ("glm", {"mlp_bias": True}),
        ("cwm", {"attention_bias": True}),
        ("ministral3", {"attention_bias": True}),
        ("starcoder2", {"hidden_act": "silu"}),
        ("exaone4", {"attention_bias": True}),
        ("exaone4", {"layer_types": [FULL, "chunked_attention"]}),
        ("cohere", {"use_parallel_block": False}),
        ("cohere2", {"use_qk_norm": True}),
        ("cohere2", {"rotary_pct": 0.5}),
    ],
)
def test_what_is_not_implemented_is_refused_by_its_field(
    architecture: str, fields: dict[str, Any], tmp_path: Path
) -> None:
    folder = make_checkpoint(tmp_path, architecture, head_dim=16, has_tokenizer=False)
    read_model_config(folder)
    ((name, value),) = fields.items()
    change_config(folder, **fields)
    if name == "partial_rotary_factor":
        change_config(folder, rope_parameters={"rope_type": "default", "rope_theta": 1e4})
    shown = re.escape(repr(value))
    with pytest.raises(ModelLoadError, match=f"field '{name}': expected .* found {shown}"):
        read_model_config(folder)


@pytest.mark.parametrize("stored", ["same", "other", "alone"])
def test_a_head_that_is_stored_counts_though_the_config_ties_it(
    stored: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Of two matrices that differ both do; of a shared one either name will do."""
    folder = make_checkpoint(
        tmp_path, "qwen2", vocab_size=VOCAB_SIZE, has_tokenizer=False, tie_word_embeddings=True
    )
    file, name = folder / "model.safetensors", "model.embed_tokens.weight"
    tied = hf_scores(folder, TOKENS)
    tensors = load_file(file)
    tensors["lm_head.weight"] = tensors[name] * (0.5 if stored == "other" else 1.0)
    if stored == "alone":
        del tensors[name]
    save_file(tensors, file, metadata={"format": "pt"})
    expected = hf_scores(folder, TOKENS)
    (found,) = scores(PlanDriver(make_runner(folder, kernels="reference")), TOKENS, [LENGTH])
    torch.testing.assert_close(found, expected, atol=5e-5, rtol=1e-5)
    is_tied = stored != "other"
    assert torch.equal(expected, tied) == is_tied
    assert ("not tied" in caplog.text) != is_tied and "not used" not in caplog.text


@pytest.mark.parametrize(("quantization", "most"), [("int8", 0.1), ("int4", 1.0)])
@pytest.mark.parametrize("name", ["phi", "stablelm-parallel", "ernie4_5", "glm4"])
def test_a_quantized_family_says_nearly_the_same(
    name: str, quantization: str, most: float, tmp_path: Path
) -> None:
    """And exactly what the reference kernels say of the same weights."""
    case = CASES[name]
    folder = make_checkpoint(tmp_path, case.architecture, has_tokenizer=False, **case.options)
    plain, *found = (
        scores(PlanDriver(make_runner(folder, **options)), TOKENS, [LENGTH, 7])
        for options in (
            {},
            {"kernels": "reference", "quantization": quantization},
            {"quantization": quantization},
        )
    )
    for logprobs in (found[0][1], *found[1]):
        torch.testing.assert_close(logprobs, found[0][0], atol=1e-4, rtol=0)
    assert 1e-3 < (found[0][0] - plain[0]).abs().mean() < most


def test_a_mistral_that_lists_its_layers_is_a_ministral(tmp_path: Path) -> None:
    """As Ministral 8B is published; transformers takes it for one too."""
    folder = make_checkpoint(
        tmp_path, "ministral", vocab_size=VOCAB_SIZE, has_tokenizer=False, head_dim=16,
        sliding_window=WINDOW, layer_types=[FULL, SLIDING],
    )  # fmt: skip
    config = json.loads((folder / "config.json").read_text())
    config |= {"architectures": ["MistralForCausalLM"], "model_type": "mistral"}
    (folder / "config.json").write_text(json.dumps(config))
    (found,) = scores(PlanDriver(make_runner(folder)), TOKENS, [LENGTH])
    torch.testing.assert_close(found, hf_scores(folder, TOKENS), atol=5e-5, rtol=1e-5)


def test_an_iquest_coder_is_a_llama_by_another_name(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path, vocab_size=VOCAB_SIZE, has_tokenizer=False, head_dim=24)
    llama = read_model_config(folder)
    change_config(folder, architectures=["IQuestCoderForCausalLM"])
    assert read_model_config(folder) == replace(llama, architecture="IQuestCoderForCausalLM")
    change_config(folder, clip_qkv=8.0)
    with pytest.raises(ModelLoadError, match="field 'clip_qkv'"):
        read_model_config(folder)


def test_an_internlm3_is_a_llama_that_names_its_biases_otherwise(tmp_path: Path) -> None:
    """transformers has no more of it than a config, and runs it as a Llama."""
    folder = make_checkpoint(
        tmp_path, vocab_size=VOCAB_SIZE, has_tokenizer=False, head_dim=24,
        attention_bias=True, mlp_bias=True,
        rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 6.0},
    )  # fmt: skip
    expected = hf_scores(folder, TOKENS)
    for name in ("attention_bias", "mlp_bias"):
        change_config(folder, **{name: None})
    change_config(folder, architectures=["InternLM3ForCausalLM"], bias=True, qkv_bias=True)
    runner = make_runner(folder)
    for found in scores(PlanDriver(runner), TOKENS, (LENGTH, 7, 1)):
        torch.testing.assert_close(found, expected, atol=5e-5, rtol=1e-5)
    assert runner.config.rope_scaling is not None
    for fields in ({"qkv_bias": False}, {"bias": False}):
        change_config(folder, bias=True, qkv_bias=True)
        change_config(folder, **fields)
        config = read_model_config(folder)
        has = (config.qkv_bias, config.output_bias, config.mlp_bias)
        assert has == ((False, True, True) if "qkv_bias" in fields else (True, False, False))


@pytest.mark.skipif(
    why_not_native(torch.bfloat16) is not None, reason="nothing is compiled on this machine"
)
@pytest.mark.parametrize(
    "name",
    [
        "mistral", "qwen3", "smollm3", "gemma2", "gemma3", "olmo3", "granite", "ernie4_5", "glm",
        "seed_oss",
    ],
)  # fmt: skip
def test_small_steps_of_a_family_are_recorded(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    folder = make_checkpoint(tmp_path, case.architecture, has_tokenizer=False, **case.options)
    kernels = select_kernels(torch.bfloat16)
    recordings: list[Captured | None] = []

    def spy(*args: Any) -> Any:
        assert kernels.capture is not None
        result, captured = kernels.capture(*args)
        recordings.append(captured)
        return result, captured

    found, expected = (
        scores(
            PlanDriver(
                make_runner(folder, dtype="bfloat16", kernels=replace(kernels, capture=capture))
            ),
            TOKENS,
            [3],
        )[0]
        for capture in (spy, None)
    )
    assert len(recordings) == 1 and recordings[0] is not None
    assert torch.equal(found, expected)


@pytest.mark.parametrize(
    "name",
    [
        "gemma2",
        "phi3-long",
        "phi",
        *(
            pytest.param(name, marks=pytest.mark.slow)
            for name in ("gemma3", "olmo3", "granite", "hunyuan", "ministral3", "stablelm-parallel")
        ),
    ],
)
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of the interpreter's numpy
def test_kernels_for_a_gpu_say_the_same(name: str, tmp_path: Path) -> None:
    """In Triton's interpreter, captured: a prompt longer than the window, then two tokens."""
    case, tokens = CASES[name], TOKENS[: WINDOW + 6]
    folder = make_checkpoint(tmp_path, case.architecture, has_tokenizer=False, **case.options)
    driver = PlanDriver(make_runner(folder, device="cuda"))
    (found,) = scores(driver, tokens, [WINDOW + 4])
    (expected,) = scores(PlanDriver(make_runner(folder, kernels="reference")), tokens, [WINDOW + 4])
    torch.testing.assert_close(found, expected, atol=5e-5, rtol=1e-5)


def test_an_engine_generates_what_transformers_generates(tmp_path: Path) -> None:
    import transformers

    case, prompt = CASES["gemma2"], "windows alternate here, as they do"
    folder = make_checkpoint(tmp_path, case.architecture, **case.options)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    ids = torch.tensor([list(prompt.encode())])
    generated = model.generate(ids, max_new_tokens=16, do_sample=False, eos_token_id=300)
    expected = bytes(token for token in generated[0, ids.shape[1] :].tolist() if token < 256)

    @st.function
    def complete(s: st.ProgramState) -> None:
        s += prompt + st.gen("out", max_tokens=16, temperature=0, ignore_eos=True)

    with st.Engine(folder, dtype="float32", num_threads=1, max_total_tokens=512) as engine:
        assert complete.run(backend=engine)["out"] == expected.decode("utf-8", "replace")


TEXT = {
    "vocab_size": VOCAB_SIZE, "hidden_size": 64, "num_hidden_layers": 2, "head_dim": 16,
    "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 128,
    "sliding_window": WINDOW, "eos_token_id": 5,
}  # fmt: skip
VISION = {
    "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 1,
    "image_size": 28, "patch_size": 14,
}  # fmt: skip
SEEING: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "gemma3": ("Gemma3", {"sliding_window_pattern": 2}, {"mm_tokens_per_image": 4}),
    "mistral3": ("Mistral3", {"model_type": "mistral"}, {"tie_word_embeddings": False}),
    "ministral3": (
        "Mistral3",
        {"model_type": "ministral3", "rope_parameters": MINISTRAL_3},
        {"tie_word_embeddings": True},
    ),
}


@pytest.mark.parametrize("name", SEEING)
def test_the_text_half_of_a_model_that_sees_is_read_alone(
    name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    import transformers

    family, text, options = SEEING[name]
    vision = VISION if family == "Gemma3" else {**VISION, "model_type": "pixtral", "head_dim": 16}
    config = getattr(transformers, f"{family}Config")(
        text_config={**TEXT, **text}, vision_config=vision, **options
    )
    model = getattr(transformers, f"{family}ForConditionalGeneration")(config)
    randomize(model, seed=0, init_std=0.2)
    model.save_pretrained(tmp_path)
    (tmp_path / "generation_config.json").unlink()
    caplog.set_level(logging.INFO, logger="stemma.runtime.models.decoder")
    runner = make_runner(tmp_path)
    assert runner.config.eos_token_ids == (5,)
    records = [each for each in caplog.records if each.name.startswith("stemma")]
    (record,) = records  # no tensor was left over
    assert "not loaded: vision_tower.*, multi_modal_projector.*" in record.getMessage()
    expected = hf_scores(tmp_path, TOKENS, sees=True)
    for found in scores(PlanDriver(runner), TOKENS, (LENGTH, 7, 1)):
        torch.testing.assert_close(found, expected, atol=5e-5, rtol=1e-5)


def test_another_text_half_is_refused_by_its_name(tmp_path: Path) -> None:
    config = {
        "architectures": ["Mistral3ForConditionalGeneration"],
        "text_config": {**TEXT, "model_type": "mamba"},
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelLoadError, match=r"field 'model_type': .* found 'mamba'"):
        read_model_config(tmp_path)


def test_the_page_of_families_lists_them_all() -> None:
    page = (Path(st.__file__).parent / "docs" / "serve" / "models.md").read_text()
    rows = [line.split("|")[1] for line in page.splitlines() if line.startswith("| `")]
    listed = [name for row in rows[1:] for name in re.findall(r"`(\w+)`", row)]
    assert sorted(listed) == sorted(ARCHITECTURES)
