"""Each family against Hugging Face transformers, with all that its config.json can ask for."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import make_checkpoint
from engine_thread import engine_in_thread
from family_cases import CASES, FULL, NEUTRAL, SLIDING, VOCAB_SIZE, WINDOW, Case
from mixtures import change_config
from model_scores import hf_scores, make_runner, scores
from safetensors.torch import load_file, save_file
from step_plans import PlanDriver

import stemma as st
from stemma.errors import ModelLoadError
from stemma.kernels.native.bindings import why_not_native
from stemma.kernels.ops import Captured
from stemma.kernels.registry import select_kernels
from stemma.planning.served_model import ServedModel
from stemma.planning.stored_weights import stored_weights
from stemma.runtime.models.families.registry import ARCHITECTURES
from stemma.runtime.models.model_config import read_model_config

LENGTH = 45
TOKENS = torch.randint(
    0, VOCAB_SIZE, (LENGTH,), generator=torch.Generator().manual_seed(7)
).tolist()


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


def test_a_mimo_is_a_qwen2_that_drafts(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The layer that drafts is not read."""
    folder = make_checkpoint(tmp_path, "qwen2", vocab_size=VOCAB_SIZE, has_tokenizer=False)
    expected, qwen = hf_scores(folder, TOKENS), read_model_config(folder)
    tensors = load_file(folder / "model.safetensors")
    drafting = {"model.mtp_layers.0.input_proj.weight": torch.zeros(4)}
    save_file({**tensors, **drafting}, folder / "model.safetensors", {"format": "pt"})
    change_config(folder, architectures=["MiMoForCausalLM"], model_type="mimo")
    changed = replace(qwen, architecture="MiMoForCausalLM", unread_weights=("model.mtp_layers.",))
    assert read_model_config(folder) == changed
    (found,) = scores(PlanDriver(make_runner(folder)), TOKENS, [LENGTH])
    torch.testing.assert_close(found, expected, atol=5e-5, rtol=1e-5)
    assert "are not used" not in caplog.text


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

    def spy(*args: Any, **options: Any) -> Any:
        assert kernels.capture is not None
        result, captured = kernels.capture(*args, **options)
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
    assert recordings and None not in recordings
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

    with engine_in_thread(folder, dtype="float32", max_total_tokens=512) as engine:
        assert complete.run(backend=engine)["out"] == expected.decode("utf-8", "replace")


def test_the_page_of_families_lists_them_all() -> None:
    page = (Path(st.__file__).parent / "docs" / "serve" / "models.md").read_text()
    decoders, _, _ = page.partition("## Encoders")
    rows = [line.split("|")[1] for line in decoders.splitlines() if line.startswith("| `")]
    listed = [name for row in rows[1:] for name in re.findall(r"`(\w+)`", row)]
    assert sorted(listed) == sorted(ARCHITECTURES)
