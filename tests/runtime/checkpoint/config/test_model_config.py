"""Reading config.json: both spellings of rope, biases, windows, and errors that name the field."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from stemma.errors import ModelLoadError
from stemma.kernels.model_options import AttentionOptions
from stemma.runtime.checkpoint.config.model_config import ModelConfig
from stemma.runtime.models.model_config import read_model_config

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 128,
    "vocab_size": 100,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "eos_token_id": 2,
    "torch_dtype": "bfloat16",
}


def test_a_plain_llama_is_read(tmp_path: Path) -> None:
    config = _read(tmp_path, LLAMA)
    assert (config.hidden_size, config.num_layers, config.num_heads) == (64, 2, 4)
    assert (config.num_kv_heads, config.head_dim, config.context_length) == (2, 16, 256)
    assert (config.rope_theta, config.rms_norm_eps) == (10000.0, 1e-5)
    assert config.eos_token_ids == (2,)
    assert config.torch_dtype == "bfloat16" and not config.tie_word_embeddings
    assert not (config.qkv_bias or config.output_bias or config.mlp_bias)
    assert config.default_temperature is config.default_top_p is config.default_top_k is None


def test_head_dim_and_kv_heads_may_be_explicit_or_implied(tmp_path: Path) -> None:
    assert _read(tmp_path, {**LLAMA, "head_dim": 32}).head_dim == 32
    assert _read(tmp_path, {**LLAMA, "num_key_value_heads": None}).num_kv_heads == 4


@pytest.mark.parametrize(
    "fields",
    [
        {"rope_theta": 5e5},
        {"rope_theta": 5e5, "rope_scaling": None},
        {"rope_theta": 5e5, "rope_scaling": {"type": "default"}},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}},
    ],
)
def test_both_spellings_of_rope_theta_are_read(tmp_path: Path, fields: dict[str, Any]) -> None:
    assert _read(tmp_path, {**LLAMA, **fields}).rope_theta == 5e5


@pytest.mark.parametrize("field", ["rope_scaling", "rope_parameters"])
def test_rope_scaling_is_refused_by_name(tmp_path: Path, field: str) -> None:
    message = "'axial' is not supported; supported are: default, linear, .* yarn, longrope"
    with pytest.raises(ModelLoadError, match=message):
        _read(tmp_path, {**LLAMA, field: {"rope_type": "axial", "factor": 8.0}})


@pytest.mark.parametrize(
    ("rope", "expected"),
    [
        ({"type": "linear", "factor": 4}, 1024),
        ({"rope_type": "dynamic", "factor": 2.5}, 640),
        ({"type": "yarn", "factor": 4.0}, 1024),
        ({"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}, 256),
        ({"type": "yarn", "factor": 8.0, "original_max_position_embeddings": 64}, 512),
        (
            {
                "rope_type": "llama3",
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 64,
            },
            256,
        ),
    ],
    ids=str,
)
def test_a_scaled_rope_stretches_the_context(
    tmp_path: Path, rope: dict[str, Any], expected: int
) -> None:
    old = _read(tmp_path, {**LLAMA, "rope_theta": 5e5, "rope_scaling": rope})
    new = _read(tmp_path, {**LLAMA, "rope_parameters": {"rope_theta": 5e5, **rope}})
    assert old == new and old.context_length == expected and old.rope_theta == 5e5


@pytest.mark.parametrize(
    ("rope", "message"),
    [
        ({"type": "linear"}, "'factor': expected a positive number, found nothing"),
        ({"type": "dynamic", "factor": -1}, "'factor': expected a positive number, found -1"),
        ({"rope_type": "llama3", "factor": 8}, "'low_freq_factor': expected .* found nothing"),
        ({"type": "yarn", "factor": 4, "beta_fast": "x"}, "'beta_fast': expected .* found 'x'"),
        ({"type": "yarn", "factor": 4, "truncate": 1}, "'truncate': expected true or false"),
        ({"type": "linear", "factor": 2, "partial_rotary_factor": 0.35}, "partial_rotary_factor"),
        ({"full_attention": {"rope_type": "default"}}, "'full_attention': expected no such field"),
        ({"type": "longrope", "short_factor": [1] * 8}, "'long_factor': expected a list of 8"),
        ({"type": "yarn", "factor": 4, "llama_4_scaling_beta": 0.1}, "'llama_4_scaling_beta'"),
        ({"type": ["yarn"]}, "is not supported"),
        ({"type": "yarn", "factor": 4, "rope_theta": 1}, "'rope_theta': .* above 1.* found 1"),
        ({"type": "linear", "factor": 1e-9}, "'factor': .* 1 to 16,777,216 of 256 .* found 1e-09"),
        ({"type": "yarn", "factor": 1e38}, r"'factor': .* 1 to 16,777,216 .* found 1e\+38"),
        ({"type": "yarn", "factor": 4, "beta_slow": 1e-308}, "'beta_slow': expected a number in"),
    ],
    ids=str,
)
def test_a_bad_number_of_a_rope_scaling_is_named(
    tmp_path: Path, rope: dict[str, Any], message: str
) -> None:
    with pytest.raises(ModelLoadError, match=message):
        _read(tmp_path, {**LLAMA, "rope_scaling": rope})


def test_dynamic_scaling_of_heads_that_rotate_two_dimensions_is_refused(tmp_path: Path) -> None:
    rope = {"rope_type": "dynamic", "factor": 2.0}
    _read(tmp_path, {**LLAMA, "head_dim": 4, "rope_scaling": rope})
    with pytest.raises(ModelLoadError, match=r"'rope_type': .* 2 dimensions: .* found 'dynamic'"):
        _read(tmp_path, {**LLAMA, "head_dim": 2, "rope_scaling": rope})


def test_what_transformers_ignores_of_yarn_is_ignored_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """As a distilled Qwen3 of DeepSeek is published."""
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
    plain = _read(tmp_path, {**LLAMA, "rope_scaling": yarn})
    assert not caplog.records
    ignored = {"attn_factor": 0.8782488562869419, "extrapolation_factor": 1.0}
    assert _read(tmp_path, {**LLAMA, "rope_scaling": {**yarn, **ignored}}) == plain
    assert "attn_factor, extrapolation_factor: not used" in caplog.text


def test_biases_follow_the_architecture(tmp_path: Path) -> None:
    qwen = _read(tmp_path, {**LLAMA, "architectures": ["Qwen2ForCausalLM"]})
    assert qwen.qkv_bias and not qwen.output_bias and not qwen.mlp_bias
    llama = _read(tmp_path, {**LLAMA, "attention_bias": True, "mlp_bias": True})
    assert llama.qkv_bias and llama.output_bias and llama.mlp_bias


def test_a_sliding_window_is_an_option_of_attention(tmp_path: Path) -> None:
    def window(config: dict[str, Any]) -> int | None:
        found = _read(tmp_path, config)
        assert found.context_length == 256
        (options,) = found.attention_kinds
        assert isinstance(options, AttentionOptions)
        return options.window

    mistral = {**LLAMA, "architectures": ["MistralForCausalLM"]}
    assert window({**mistral, "sliding_window": 64}) == 64
    assert window({**mistral, "sliding_window": None}) is None
    qwen = {**LLAMA, "architectures": ["Qwen2ForCausalLM"], "sliding_window": 64}
    assert window({**qwen, "use_sliding_window": False}) is None
    assert window({**qwen, "use_sliding_window": True, "max_window_layers": 0}) == 64


def test_windows_of_some_layers_are_a_second_kind_of_attention(tmp_path: Path) -> None:
    full, windowed = AttentionOptions(), AttentionOptions(window=64)
    qwen = {**LLAMA, "architectures": ["Qwen2ForCausalLM"], "num_hidden_layers": 3}
    fields = {"use_sliding_window": True, "sliding_window": 64, "max_window_layers": 1}
    config = _read(tmp_path, {**qwen, **fields})
    assert config.attention_kinds == (full, windowed) and config.kind_of_layer == (0, 1, 1)
    types = ["sliding_attention", "full_attention", "full_attention"]
    config = _read(tmp_path, {**qwen, **fields, "layer_types": types})
    assert config.kind_of_layer == (1, 0, 0)
    assert [config.has_window(index) for index in range(3)] == [True, False, False]


def test_rotary_embeddings_by_layer_type_are_read_in_both_spellings(tmp_path: Path) -> None:
    gemma = {**LLAMA, "architectures": ["Gemma3ForCausalLM"], "num_hidden_layers": 7}
    gemma = {name: gemma[name] for name in gemma if name != "hidden_act"}
    scaling = {"rope_type": "linear", "factor": 8.0}
    old = {"rope_theta": 5e5, "rope_local_base_freq": 2e4, "rope_scaling": scaling}
    new = {
        "full_attention": {**scaling, "rope_theta": 5e5},
        "sliding_attention": {"rope_type": "default", "rope_theta": 2e4},
    }
    config = _read(tmp_path, {**gemma, **old})
    assert config == _read(tmp_path, {**gemma, "rope_parameters": new})
    assert (config.rope_theta, config.window_rope_theta) == (5e5, 2e4)
    # Its max_position_embeddings is the length after scaling.
    assert config.context_length == config.max_position_embeddings == 256
    assert config.kind_of_layer == (1, 1, 1, 1, 1, 0, 1)
    with pytest.raises(ModelLoadError, match="no scaling of layers with sliding_attention"):
        _read(tmp_path, {**gemma, "rope_parameters": {**new, "sliding_attention": scaling}})


def test_what_a_sparse_config_leaves_out_is_the_familys(tmp_path: Path) -> None:
    """As the smaller Gemma 3 checkpoints are published."""
    text = {
        "hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 34,
        "sliding_window": 1024, "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
    }  # fmt: skip
    config = _read(
        tmp_path,
        {"architectures": ["Gemma3ForConditionalGeneration"], "text_config": text,
         "eos_token_id": [1, 106], "torch_dtype": "bfloat16"},
    )  # fmt: skip
    assert (config.num_heads, config.num_kv_heads, config.head_dim) == (8, 4, 256)
    assert config.vocab_size == 262208 and config.tie_word_embeddings
    assert (config.rope_theta, config.window_rope_theta) == (1e6, 1e4)
    assert config.attention_kinds == (AttentionOptions(), AttentionOptions(window=1024))
    assert config.eos_token_ids == (1, 106) and config.torch_dtype == "bfloat16"


@pytest.mark.parametrize(
    ("architecture", "change", "message"),
    [
        ("Mistral", {"attention_bias": True}, "'attention_bias': expected False, nothing else"),
        ("Llama", {"is_causal": False}, "'is_causal': expected True, nothing else"),
        ("Ministral", {"layer_types": ["full_attention"]}, "'layer_types': expected a list of 2"),
        ("Ministral", {"layer_types": ["linear_attention"] * 2}, "'layer_types': expected names"),
        ("Qwen2", {"use_mrope": True}, "'use_mrope': expected False"),
        ("Qwen2", {"layer_types": ["sliding_attention"] * 2}, "'sliding_window': expected a pos"),
        ("Gemma", {"use_bidirectional_attention": True}, "'use_bidirectional_attention'"),
        ("Gemma2", {"hidden_activation": "relu"}, "'hidden_activation': expected one of"),
        ("Gemma3", {"attn_logit_softcapping": 50.0}, "'attn_logit_softcapping': expected null"),
        ("Gemma3", {"sliding_window": None}, "'sliding_window': expected a positive integer"),
        ("Phi3", {"partial_rotary_factor": 0.2}, "'partial_rotary_factor': expected an even"),
        ("Phi3", {"lm_head_bias": True}, "'lm_head_bias': expected False"),
        ("Olmo2", {"clip_qkv": 8.0}, "'clip_qkv': expected null"),
        ("SmolLM3", {"no_rope_layers": [1]}, "'no_rope_layers': expected a list of 2 zeros and"),
        ("Granite", {"logits_scaling": 0}, "'logits_scaling': expected a positive number"),
    ],
)
def test_what_a_family_has_and_is_not_implemented_is_refused_by_name(
    tmp_path: Path, architecture: str, change: dict[str, Any], message: str
) -> None:
    config = {**LLAMA, "architectures": [f"{architecture}ForCausalLM"]}
    _read(tmp_path, config)
    with pytest.raises(ModelLoadError, match=message):
        _read(tmp_path, {**config, **change})


def test_generation_config_wins_for_token_ids_and_sets_sampling(tmp_path: Path) -> None:
    generation = {"eos_token_id": [7, 8], "temperature": 0.6, "top_p": 0.9, "top_k": 20}
    config = _read(tmp_path, LLAMA, generation)
    assert config.eos_token_ids == (7, 8)
    defaults = (config.default_temperature, config.default_top_p, config.default_top_k)
    assert defaults == (0.6, 0.9, 20)
    generation = {"min_p": 0, "repetition_penalty": 1.05}
    config = _read(tmp_path, LLAMA, generation)
    assert (config.default_min_p, config.default_repetition_penalty) == (0.0, 1.05)
    greedy = _read(tmp_path, LLAMA, {"do_sample": False, "temperature": 0.6, "top_k": 0})
    assert greedy.default_temperature == 0.0 and greedy.default_top_k is None


def test_an_end_that_is_not_named_is_the_familys(tmp_path: Path) -> None:
    unnamed = {name: LLAMA[name] for name in LLAMA if name != "eos_token_id"}
    assert _read(tmp_path, unnamed).eos_token_ids == (2,)
    gemma = {**unnamed, "architectures": ["GemmaForCausalLM"]}
    assert _read(tmp_path, gemma).eos_token_ids == (1,)
    assert _read(tmp_path, {**gemma, "eos_token_id": None}).eos_token_ids == ()
    assert _read(tmp_path, gemma, {"eos_token_id": 7}).eos_token_ids == (7,)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, "'GPT2LMHeadModel' is not supported .*Qwen2"),
        (
            {"architectures": ["Qwen2VLForCausalLM"]},
            r"\(nearest: Qwen2_5_VLForConditionalGeneration",
        ),
        ({"architectures": ["BertModel"]}, "'BertModel' is not supported; supported are: .*Gemma"),
        ({"architectures": None}, "'architectures': expected a list.*found None"),
        ({"hidden_size": "64"}, "'hidden_size': expected a positive integer, found '64'"),
        ({"num_hidden_layers": 0}, "'num_hidden_layers': expected a positive integer, found 0"),
        ({"vocab_size": True}, "'vocab_size': expected a positive integer, found True"),
        ({"hidden_size": 66}, "'hidden_size': expected a multiple of num_attention_heads=4"),
        ({"num_key_value_heads": 3}, "'num_key_value_heads': expected a divisor"),
        ({"head_dim": 15}, "'head_dim': expected an even number"),
        ({"hidden_act": "relu"}, "'hidden_act': expected one of silu, .* found 'relu'"),
        ({"rms_norm_eps": -1}, "'rms_norm_eps': expected a positive number, found -1"),
        ({"tie_word_embeddings": 1}, "'tie_word_embeddings': expected true or false"),
        ({"eos_token_id": ["a"]}, "'eos_token_id': expected a token id"),
        ({"partial_rotary_factor": 1.5}, "'partial_rotary_factor': expected 1, rotary"),
        ({"rope_scaling": 3}, "'rope_scaling': expected an object or null"),
        ({"hidden_act": ["silu"]}, "'hidden_act': expected one of"),
        ({"hidden_size": 10**12}, r"'hidden_size': expected an integer in \[1, 2,147,483,647\]"),
        ({"vocab_size": 10**400}, "'vocab_size': expected an integer in"),
        ({"num_hidden_layers": 10**9}, r"'num_hidden_layers': expected .* 10,000\]"),
        ({"max_position_embeddings": 10**9}, r"'max_position_embeddings': expected .* 16,777,216"),
        ({"rms_norm_eps": 10**400}, "'rms_norm_eps': expected a positive number"),
        ({"rope_theta": float("inf")}, "'rope_theta': expected a positive number, found inf"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 1e9}}, "'factor': expected one that"),
        ({"rope_theta": 1e-60}, r"'rope_theta': expected a number in \[1.2e-38, 1.7e\+38\]"),
        ({"eos_token_id": 10**30}, "'eos_token_id': expected a token id"),
    ],
)
def test_a_bad_field_is_named(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelLoadError, match=message):
        _read(tmp_path, {**LLAMA, **change})


def test_a_config_without_end_is_named(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"a":' * 100_000)
    with pytest.raises(ModelLoadError, match=r"config\.json cannot be read as JSON"):
        read_model_config(tmp_path)
    (tmp_path / "config.json").unlink()
    os.mkfifo(tmp_path / "config.json")
    with pytest.raises(ModelLoadError, match=r"config\.json is a device or a pipe"):
        read_model_config(tmp_path)


def test_a_missing_field_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match=r"'intermediate_size': .* found nothing"):
        _read(tmp_path, {k: v for k, v in LLAMA.items() if k != "intermediate_size"})


def test_bad_generation_fields_are_named(tmp_path: Path) -> None:
    for fields in (
        {"temperature": -1}, {"top_p": 1.5}, {"top_k": "x"}, {"min_p": -0.1},
        {"repetition_penalty": 0},
    ):  # fmt: skip
        with pytest.raises(ModelLoadError, match=next(iter(fields))):
            _read(tmp_path, LLAMA, fields)


def test_missing_folder_missing_file_and_bad_json_are_told_apart(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match="does not exist"):
        read_model_config(tmp_path / "nowhere")
    with pytest.raises(ModelLoadError, match=r"config\.json is missing"):
        read_model_config(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ModelLoadError, match="cannot be read as JSON"):
        read_model_config(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(ModelLoadError, match="expected a JSON object"):
        read_model_config(tmp_path)


def _read(
    folder: Path, config: dict[str, Any], generation: dict[str, Any] | None = None
) -> ModelConfig:
    (folder / "config.json").write_text(json.dumps(config))
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    return read_model_config(folder)
