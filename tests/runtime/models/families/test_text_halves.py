"""Of models that see, the text half is read alone; its scores are those of transformers."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import randomize
from family_cases import MINISTRAL_3, VOCAB_SIZE, WINDOW
from mixtures import make_mixture
from model_scores import hf_scores, make_runner, scores
from safetensors.torch import load_file, save_file
from step_plans import PlanDriver

from stemma.errors import ModelLoadError
from stemma.runtime.models.model_config import read_model_config

LENGTH = 45
TOKENS = torch.randint(
    0, VOCAB_SIZE, (LENGTH,), generator=torch.Generator().manual_seed(7)
).tolist()
TEXT = {
    "vocab_size": VOCAB_SIZE, "hidden_size": 64, "num_hidden_layers": 2, "head_dim": 16,
    "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 128,
    "sliding_window": WINDOW, "eos_token_id": 5,
}  # fmt: skip
VISION = {
    "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 1,
    "image_size": 28, "patch_size": 14,
}  # fmt: skip
LLAMA_4_VISION = {
    "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 28,
    "patch_size": 14, "intermediate_size": 64, "vision_output_dim": 16,
    "projector_input_dim": 16, "projector_output_dim": 16,
}  # fmt: skip
VISIONS = {"Gemma3": VISION, "Llama4": LLAMA_4_VISION}
SEEING: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "gemma3": ("Gemma3", {"sliding_window_pattern": 2}, {"mm_tokens_per_image": 4}),
    "mistral3": ("Mistral3", {"model_type": "mistral"}, {"tie_word_embeddings": False}),
    "ministral3": (
        "Mistral3",
        {"model_type": "ministral3", "rope_parameters": MINISTRAL_3},
        {"tie_word_embeddings": True},
    ),
    "llama4": ("Llama4", {"attention_chunk_size": WINDOW, "num_local_experts": 4}, {}),
}


@pytest.mark.parametrize("name", SEEING)
def test_the_text_half_of_a_model_that_sees_is_read_alone(
    name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    import transformers

    family, text, options = SEEING[name]
    pixtral = {**VISION, "model_type": "pixtral", "head_dim": 16}
    vision = VISIONS.get(family, pixtral)
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
    tower = "vision_model" if family == "Llama4" else "vision_tower"
    assert f"not loaded: {tower}.*, multi_modal_projector.*" in record.getMessage()
    expected = hf_scores(tmp_path, TOKENS, sees=True)
    for found in scores(PlanDriver(runner), TOKENS, (LENGTH, 7, 1)):
        torch.testing.assert_close(found, expected, atol=5e-5, rtol=1e-5)


@pytest.mark.parametrize("family", ["Gemma3n", "Gemma4"])
def test_a_gemma_that_sees_and_hears_has_its_decoder_under_another_name(
    family: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """As published: a config within the config, and what layers that share KV never use."""
    make_mixture(tmp_path, family)
    (expected,) = scores(PlanDriver(make_runner(tmp_path)), TOKENS, [LENGTH])
    config = json.loads((tmp_path / "config.json").read_text())
    outer = {"architectures": [f"{family}ForConditionalGeneration"], "text_config": config}
    (tmp_path / "config.json").write_text(json.dumps(outer))
    file = tmp_path / "model.safetensors"
    tensors = {
        f"model.language_model.{name.removeprefix('model.')}": tensor
        for name, tensor in load_file(file).items()
    }
    last = "model.language_model.layers.4.self_attn"
    for name in ("model.vision_tower.a", "model.embed_audio.b.weight", f"{last}.k_proj.weight"):
        tensors[name] = torch.zeros(3)
    save_file(tensors, file, {"format": "pt"})
    (found,) = scores(PlanDriver(make_runner(tmp_path)), TOKENS, [LENGTH])
    assert torch.equal(found, expected) and "not used" not in caplog.text


def test_another_text_half_is_refused_by_its_name(tmp_path: Path) -> None:
    config = {
        "architectures": ["Mistral3ForConditionalGeneration"],
        "text_config": {**TEXT, "model_type": "mamba"},
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelLoadError, match=r"field 'model_type': .* found 'mamba'"):
        read_model_config(tmp_path)
