"""GGUF files against the checkpoints that they were made from, family by family."""

from __future__ import annotations

import json
from contextlib import closing
from pathlib import Path
from typing import Any

import mixtures
import pytest
import torch
from checkpoints import BYTE_VOCAB_SIZE, make_byte_tokenizer
from gguf_files import Kind, write_gguf
from safetensors.torch import load_file
from step_plans import Feed, PlanDriver

from stemma.errors import ModelLoadError
from stemma.kernels.quantized_tensors import QuantizedWeight
from stemma.kernels.reference.quantized import dequantize
from stemma.runtime.checkpoint.gguf.config import FAMILIES
from stemma.runtime.checkpoint.gguf.convert import convert_gguf
from stemma.runtime.checkpoint.gguf.names import CONVENTIONS
from stemma.runtime.checkpoint.gguf.source import GgufWeights
from stemma.runtime.checkpoint.loader import open_weights
from stemma.runtime.execute.model_runner import ModelRunner
from stemma.runtime.models.families.registry import ARCHITECTURES
from stemma.runtime.models.model_config import read_model_config

_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 40}
_DEEPSEEK = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 32,
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
    "routed_scaling_factor": 2.5,
}
_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 5e5,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
_LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "short_factor": [1.0 + i / 8 for i in range(8)],
    "long_factor": [2.0 + i for i in range(8)],
    "original_max_position_embeddings": 256,
}
# By name: transformers' family, and what its config has beside the family's.
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "llama-biased": ("Llama", {"attention_bias": True, "mlp_bias": True, "head_dim": 24}),
    "llama3": ("Llama", {"rope_parameters": _LLAMA3, "tie_word_embeddings": True}),
    "llama3-other-length": (
        "Llama",
        {"rope_parameters": {**_LLAMA3, "original_max_position_embeddings": 32, "factor": 5.3}},
    ),
    "llama3-no-blend": (  # of too few frequencies to tell the parameters from
        "Llama",
        {
            "rope_parameters": {
                **_LLAMA3,
                "original_max_position_embeddings": 77,
                "factor": 3.7,
                "low_freq_factor": 1.7,
                "high_freq_factor": 1.9,
            }
        },
    ),
    "qwen2": ("Qwen2", {"rope_parameters": {"rope_type": "linear", "factor": 4.0}}),
    "qwen3": ("Qwen3", {"head_dim": 32, "tie_word_embeddings": True}),
    "gemma": ("Gemma", {"head_dim": 32}),
    "gemma2": ("Gemma2", {"head_dim": 32, "query_pre_attn_scalar": 32, "sliding_window": 8}),
    "gemma3": (
        "Gemma3",
        {"head_dim": 32, "query_pre_attn_scalar": 32, "sliding_window": 8, "num_hidden_layers": 7},
    ),
    "phi3": ("Phi3", {"sliding_window": 12}),
    "phi3-longrope": (
        "Phi3",
        {"rope_parameters": _LONGROPE, "original_max_position_embeddings": 256},
    ),
    "olmo2": ("Olmo2", {}),
    "smollm3": ("SmolLM3", {"num_hidden_layers": 4}),
    "granite": (
        "Granite",
        {
            "attention_multiplier": 0.3,
            "embedding_multiplier": 3.0,
            "residual_multiplier": 0.5,
            "logits_scaling": 2.0,
        },
    ),
    "mixtral": ("Mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "qwen2moe": ("Qwen2Moe", {**_EXPERTS, "shared_expert_intermediate_size": 56}),
    "qwen3moe": ("Qwen3Moe", {**_EXPERTS, "head_dim": 24, "norm_topk_prob": True}),
    "deepseek2": ("DeepseekV2", {**_DEEPSEEK, "topk_method": "group_limited_greedy"}),
    "deepseek2-lite": (
        "DeepseekV2",
        {**_DEEPSEEK, "q_lora_rank": None, "topk_method": "greedy", "n_group": 1, "topk_group": 1},
    ),
    "deepseek3": ("DeepseekV3", {**_DEEPSEEK, "q_lora_rank": 24}),
}
_HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 24}
# By name: a family of `mixtures`, and what its config has beside.
NEWER_CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt-oss": ("GptOss", {}),
    "qwen3next": ("Qwen3Next", {"init_std": 0.1}),
    "qwen35": ("Qwen3_5", {"init_std": 0.1}),
    "qwen35moe": ("Qwen3_5Moe", {"init_std": 0.1}),
    "lfm2": (
        "Lfm2",
        {
            **_HEADS,
            "num_hidden_layers": 3,
            "layer_types": ["conv", "full_attention", "conv"],
            "block_multiple_of": 16,
        },
    ),
    "lfm2moe": ("Lfm2Moe", {}),
    "glm4": ("Glm4", _HEADS),
    "glm4moe": ("Glm4Moe", {"use_qk_norm": True}),
    "granitehybrid": ("GraniteMoeHybrid", {}),
    "granitehybrid-moe": ("GraniteMoeHybrid", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "minimax-m2": ("MiniMaxM2", {}),
    "seed_oss": ("SeedOss", _HEADS),
    "exaone4": (
        "Exaone4",
        {
            **_HEADS,
            "num_hidden_layers": 3,
            "sliding_window": 8,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
    ),
    "phi2": ("Phi", {"num_attention_heads": 4}),
    "stablelm": (
        "StableLm",
        {
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "use_parallel_residual": True,
            "use_qkv_bias": True,
        },
    ),
    "stablelm-12b": (
        "StableLm",
        {
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "use_parallel_residual": True,
            "qk_layernorm": True,
        },
    ),
    "nemotron": ("Nemotron", {"attention_bias": True, "mlp_bias": True}),
    "mistral3": ("Ministral3", _HEADS),
    "ernie4_5": ("Ernie4_5", _HEADS),
    "ernie4_5-moe": ("Ernie4_5_Moe", {}),
    "hunyuan-dense": ("HunYuanDenseV1", _HEADS),
    "hunyuan-moe": ("HunYuanMoEV1", {}),
    "olmoe": ("Olmoe", {}),
}
PROMPT = torch.randint(0, 256, (24,), generator=torch.Generator().manual_seed(3)).tolist()


def make_checkpoint(folder: Path, family: str, **fields: Any) -> Path:
    """As transformers writes it, with random weights, norms about 1."""
    import transformers

    shape = {
        "vocab_size": BYTE_VOCAB_SIZE,
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 96,
        "max_position_embeddings": 512,
        "bos_token_id": 256,
        "eos_token_id": 257,
        "pad_token_id": None,
    }
    name = "Gemma3Text" if family == "Gemma3" else family
    config = getattr(transformers, f"{name}Config")(**{**shape, **fields})
    model = getattr(transformers, f"{family}ForCausalLM")(config)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator) * 0.2
            parameter.copy_(noise + 1.0 if name.endswith("norm.weight") else noise)
    model.save_pretrained(folder)
    make_byte_tokenizer(folder)
    return folder


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.mark.parametrize("name", CASES)
def test_scores_of_a_float_file_are_those_of_its_checkpoint(
    name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Every tensor comes back as it was, and every field of the config; nothing is left over."""
    family, fields = CASES[name]
    folder = make_checkpoint(tmp_path / "checkpoint", family, **fields)
    unfolded = convert_gguf(write_gguf(folder, tmp_path / "model.gguf"))
    with closing(GgufWeights(unfolded / "model.gguf", torch.float32)) as source:
        for key, tensor in load_file(folder / "model.safetensors").items():
            if key.endswith("kv_b_proj.weight"):
                rows, size = tensor.shape
                found = source.take_weight([key.removesuffix(".weight")], [rows], size)
            else:
                found = source.take(key, tensor.shape)
            torch.testing.assert_close(found, tensor, atol=2e-7, rtol=0)
    if json.loads((folder / "config.json").read_text())["architectures"][0] not in ARCHITECTURES:
        pytest.skip("not implemented")
    torch.testing.assert_close(_scores(unfolded), _scores(folder), atol=1e-5, rtol=0)
    assert "are not used" not in caplog.text


@pytest.mark.parametrize("name", NEWER_CASES)
def test_a_newer_family_says_what_its_checkpoint_does(
    name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    family, fields = NEWER_CASES[name]
    monkeypatch.setitem(mixtures.FAMILIES, family, mixtures.FAMILIES.get(family, {}))
    folder = tmp_path / "checkpoint"
    mixtures.make_mixture(folder, family, has_tokenizer=True, **fields)
    unfolded = convert_gguf(write_gguf(folder, tmp_path / "model.gguf"))
    torch.testing.assert_close(_scores(unfolded), _scores(folder), atol=1e-5, rtol=0)
    assert "are not used" not in caplog.text


def test_experts_in_mxfp4_stay_as_they_are(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoint"
    mixtures.make_mixture(folder, "GptOss", has_tokenizer=True, intermediate_size=96)
    mixtures.pack_experts(folder)
    unfolded = convert_gguf(write_gguf(folder, tmp_path / "model.gguf"))
    torch.testing.assert_close(_scores(unfolded), _scores(folder), atol=1e-5, rtol=0)
    name = "model.layers.1.mlp.experts.gate_up_proj"
    with (
        closing(GgufWeights(unfolded / "model.gguf", torch.float32)) as source,
        open_weights(folder, "auto", "none", torch.float32, torch.device("cpu")) as original,
    ):
        found, expected = (each.take_experts(name, 6, 192, 64) for each in (source, original))
        assert isinstance(found, QuantizedWeight) and isinstance(expected, QuantizedWeight)
        assert found.codes == expected.codes == "fp4"
        assert torch.equal(found.values, expected.values)
        assert torch.equal(found.scales, expected.scales)
        floats = source.take("model.layers.1.mlp.experts.down_proj", (6, 64, 96))
        down = original.take_experts("model.layers.1.mlp.experts.down_proj", 6, 64, 96)
        assert isinstance(down, QuantizedWeight)
        assert torch.equal(floats, dequantize(down, torch.float32))


def test_inputs_in_another_order_stay_packed(tmp_path: Path) -> None:
    """Qwen3.5's value heads."""
    folder = tmp_path / "checkpoint"
    sizes = {"intermediate_size": 96, "linear_value_head_dim": 16}
    mixtures.make_mixture(folder, "Qwen3_5", has_tokenizer=True, **sizes)
    name, shape = "model.layers.0.linear_attn.out_proj", (64, 96)
    original = load_file(folder / "model.safetensors")[f"{name}.weight"]
    path = write_gguf(folder, tmp_path / "model.gguf", Kind.Q8_0)
    with closing(GgufWeights(path, torch.float32)) as source:
        weight = source.take_weight([name], [64], 96)
        floats = source.take(f"{name}.weight", shape)
    assert isinstance(weight, QuantizedWeight) and weight.input_order is not None
    assert torch.equal(dequantize(weight, torch.float32), floats)
    torch.testing.assert_close(floats, original, atol=5e-3, rtol=0)


def test_each_architecture_has_names_and_a_config() -> None:
    assert FAMILIES.keys() == CONVENTIONS.keys()


@pytest.mark.parametrize("kind", [Kind.F16, Kind.BF16, Kind.Q8_0, Kind.Q4_0, Kind.Q5_1])
def test_quantized_linears_stay_packed_and_weigh_what_the_file_says(
    kind: Kind, tmp_path: Path
) -> None:
    folder = make_checkpoint(tmp_path / "checkpoint", "Llama")
    exact = write_gguf(folder, tmp_path / "exact.gguf")
    rounded = write_gguf(folder, tmp_path / "rounded.gguf", kind)
    names = ["model.layers.1.self_attn.q_proj", "model.layers.1.self_attn.k_proj"]
    with closing(GgufWeights(exact, torch.float32)) as source:
        truth = source.take_weight(names, [64, 32], 64)
    with closing(GgufWeights(rounded, torch.float32)) as source:
        weight = source.take_weight(names, [64, 32], 64)
        floats = source.take_stacked([f"{name}.weight" for name in names], [(64, 64), (32, 64)])
    assert isinstance(truth, torch.Tensor)
    if isinstance(weight, QuantizedWeight):
        assert weight.bits == (4 if kind is Kind.Q4_0 else 8)
        weight = dequantize(weight, torch.float32)
    else:
        assert kind in (Kind.F16, Kind.BF16)
    assert torch.equal(weight, floats)
    step = {Kind.F16: 1e-3, Kind.BF16: 5e-3, Kind.Q8_0: 5e-3, Kind.Q5_1: 0.03, Kind.Q4_0: 0.1}
    error = (floats - truth).abs().max()
    assert 0 < error <= step[kind] * truth.abs().max()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_floating_file_is_rounded_from_what_it_stores(tmp_path: Path, dtype: torch.dtype) -> None:
    checkpoint = make_checkpoint(tmp_path / "checkpoint", "Llama")
    unfolded = convert_gguf(
        write_gguf(checkpoint, tmp_path / "model.gguf", kinds={"ffn_up": Kind.F16})
    )
    for names in (["mlp.down_proj"], ["mlp.gate_proj", "mlp.up_proj"]):
        full_names = [f"model.layers.0.{name}" for name in names]
        sizes, num_inputs = ([64], 96) if len(names) == 1 else ([96, 96], 64)
        weights = []
        for folder in (checkpoint, unfolded):
            with open_weights(folder, "auto", "int8", dtype, torch.device("cpu")) as source:
                weights.append(source.take_weight(full_names, sizes, num_inputs))
        expected, found = weights
        assert isinstance(expected, QuantizedWeight) and isinstance(found, QuantizedWeight)
        rows = slice(0, sizes[0])  # the others are float16 in the file
        assert torch.equal(found.values[rows], expected.values[rows])
        assert torch.equal(found.scales[rows], expected.scales[rows])


def test_parts_in_differing_formats_become_one_weight(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path / "checkpoint", "Llama")
    kinds = {"attn_v": Kind.Q8_0, "attn_k": Kind.Q5_1, "ffn_up": Kind.F16}
    path = write_gguf(folder, tmp_path / "model.gguf", Kind.Q4_0, kinds=kinds)
    names = [f"model.layers.0.self_attn.{part}_proj" for part in "qkv"]
    with closing(GgufWeights(path, torch.float64)) as source:
        weight = source.take_weight(names, [64, 32, 32], 64)
        parts = [
            source.take(f"{name}.weight", (size, 64)) for name, size in zip(names, (64, 32, 32))
        ]
        mlp = [f"model.layers.0.mlp.{part}_proj" for part in ("gate", "up")]
        assert isinstance(source.take_weight(mlp, [96, 96], 64), torch.Tensor)
    assert isinstance(weight, QuantizedWeight)
    assert (weight.bits, weight.group_size, weight.offsets is not None) == (8, 32, True)
    assert torch.equal(dequantize(weight, torch.float64), torch.cat(parts))


@pytest.mark.parametrize(("dtype", "scales"), [("bfloat16", "float16"), ("float32", "float32")])
def test_scales_are_halves_where_the_model_computes_in_16_bits(
    dtype: str, scales: str, tmp_path: Path
) -> None:
    folder = make_checkpoint(tmp_path / "checkpoint", "Llama")
    path = write_gguf(folder, tmp_path / "model.gguf", Kind.Q5_1)
    with closing(GgufWeights(path, getattr(torch, dtype))) as source:
        weight = source.take_weight(["model.layers.0.self_attn.o_proj"], [64], 64)
    assert isinstance(weight, QuantizedWeight) and weight.offsets is not None
    assert weight.scales.dtype == weight.offsets.dtype == getattr(torch, scales)


def test_a_tied_output_projection_stays_packed(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path / "checkpoint", "Llama", tie_word_embeddings=True)
    path = write_gguf(folder, tmp_path / "model.gguf", Kind.Q8_0)
    assert read_model_config(convert_gguf(path)).tie_word_embeddings
    with closing(GgufWeights(path, torch.float32)) as source:
        table = source.take("model.embed_tokens.weight", (BYTE_VOCAB_SIZE, 64))
        output = source.tie_weight(table)
    assert isinstance(output, QuantizedWeight)
    assert torch.equal(dequantize(output, torch.float32), table)
    with closing(GgufWeights(write_gguf(folder, path), torch.float32)) as source:
        assert source.tie_weight(table) is table


def test_a_file_that_names_no_end_has_none(tmp_path: Path) -> None:
    """The family's default is Hugging Face's, not GGUF's."""
    folder = make_checkpoint(tmp_path / "checkpoint", "Llama")
    config_file = folder / "tokenizer_config.json"
    tokenizer = json.loads(config_file.read_text())
    del tokenizer["eos_token"]
    config_file.write_text(json.dumps(tokenizer))
    path = write_gguf(folder, tmp_path / "model.gguf", Kind.F32)
    assert read_model_config(convert_gguf(path)).eos_token_ids == ()


def test_progress_ends_with_the_whole_file(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path / "checkpoint", "Llama")
    path = write_gguf(folder, tmp_path / "model.gguf", Kind.Q8_0)
    heard: list[tuple[int, int]] = []
    _runner(convert_gguf(path), on_progress=lambda done, total: heard.append((done, total)))
    assert heard == sorted(heard) and heard[-1][0] == heard[-1][1] > 0


def test_a_missing_or_misshapen_tensor_is_named(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path / "checkpoint", "Llama")
    with closing(GgufWeights(write_gguf(folder, tmp_path / "model.gguf"), torch.float32)) as source:
        with pytest.raises(ModelLoadError, match=r"'blk\.5\.attn_q\.weight' in GGUF\) is missing"):
            source.take("model.layers.5.self_attn.q_proj.weight", (64, 64))
        with pytest.raises(ModelLoadError, match=r"attn_q\.weight': expected shape \[64, 65\]"):
            source.take_weight(["model.layers.0.self_attn.q_proj"], [64], 65)
        with pytest.raises(ModelLoadError, match=r"'lm_head\.bias' is missing"):
            source.take("lm_head.bias", (64,))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"general.architecture": "qwen9"}, "'qwen9' is not supported .nearest: qwen"),
        ({"llama.block_count": 0}, "field 'llama.block_count': expected a positive integer"),
        ({"llama.attention.head_count": [4, 2]}, "'llama.attention.head_count': expected"),
        ({"llama.rope.scaling.type": "magic"}, "'llama.rope.scaling.type': expected none, linear"),
        ({"tokenizer.ggml.model": "rwkv"}, "'tokenizer.ggml.model': expected 'gpt2'"),
        ({"tokenizer.ggml.pre": "new-one"}, "'tokenizer.ggml.pre': expected one of .*llama-bpe"),
        ({"tokenizer.ggml.token_type": [1]}, "'tokenizer.ggml.token_type': expected 260 numbers"),
        ({"tokenizer.ggml.merges": ["a zz"]}, "'tokenizer.ggml.merges': expected pairs"),
        ({"tokenizer.ggml.tokens": ["a", "a"]}, "'tokenizer.ggml.tokens': expected no token twice"),
    ],
)
def test_metadata_that_makes_no_sense_is_named(
    fields: dict[str, Any], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import stemma.runtime.checkpoint.gguf.reader as reader

    folder = make_checkpoint(tmp_path / "checkpoint", "Llama")
    path = write_gguf(folder, tmp_path / "model.gguf")
    read = reader.GgufHeader._entries
    monkeypatch.setattr(reader.GgufHeader, "_entries", lambda self, n: {**read(self, n), **fields})
    with pytest.raises(ModelLoadError, match=message) as caught:
        convert_gguf(path)
    assert str(path) in str(caught.value)


def test_a_folder_is_made_once_and_follows_its_file(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path / "checkpoint", "Llama")
    path = write_gguf(folder, tmp_path / "model.gguf")
    first = convert_gguf(path)
    config = first / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "mark": 1}))
    assert convert_gguf(path) == first and "mark" in config.read_text()
    (tmp_path / "other").mkdir()
    moved = path.rename(tmp_path / "other" / path.name)
    assert convert_gguf(moved) == first and (first / "model.gguf").resolve() == moved
    changed = write_gguf(folder, moved, Kind.Q8_0)
    assert convert_gguf(changed) != first
    assert not [entry for entry in first.parent.iterdir() if entry.name.startswith(".")]


def _scores(folder: Path) -> torch.Tensor:
    """Log-probabilities of PROMPT after its first token."""
    driver = PlanDriver(_runner(folder))
    targets = [*PROMPT[1:], 0]
    result = driver.step([Feed(driver.sequence(), PROMPT, targets=targets)])[0]
    return torch.tensor(result.target_logprobs)


def _runner(folder: Path, **options: Any) -> ModelRunner:
    config = read_model_config(folder)
    settings = {"dtype": "float32", "kernels": "reference", "num_pages": 60, "max_model_len": 50}
    return ModelRunner(folder, config, max_running_requests=4, **{**settings, **options})
