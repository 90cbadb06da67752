"""What config.json leaves out is what Hugging Face fills in for its family."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import transformers

from stemma.errors import ModelLoadError
from stemma.runtime.checkpoint.config.fields import Fields
from stemma.runtime.models.families.registry import ARCHITECTURES, read_family

# Those of the others are named as the architecture is.
_CONFIGS = {
    "MiMoForCausalLM": None,  # Qwen2's
    "Ernie4_5_ForCausalLM": "Ernie4_5Config",  # an earlier name
    "Gemma3ForCausalLM": "Gemma3TextConfig",
    "Mistral3ForConditionalGeneration": None,  # the text model's, see test_families
    "Gemma3ForConditionalGeneration": None,  # the text model's, see test_model_config
    "Gemma3nForCausalLM": "Gemma3nTextConfig",
    "Gemma3nForConditionalGeneration": None,  # the text model's
    "Gemma4ForCausalLM": "Gemma4TextConfig",
    "Gemma4ForConditionalGeneration": None,
    "Llama4ForCausalLM": "Llama4TextConfig",
    "Llama4ForConditionalGeneration": None,
    "Qwen2_5_VLForConditionalGeneration": None,  # the text model's, see test_image_parity
    "Qwen3VLForConditionalGeneration": None,
    "Qwen3VLMoeForConditionalGeneration": None,
    "Qwen3_5ForCausalLM": "Qwen3_5TextConfig",
    "Qwen3_5ForConditionalGeneration": None,  # the text model's
    "Qwen3_5MoeForCausalLM": "Qwen3_5MoeTextConfig",
    "Qwen3_5MoeForConditionalGeneration": None,
}


def _defaults(architecture: str) -> dict[str, Any]:
    usual = architecture.replace("ForCausalLM", "Config")
    config = getattr(transformers, _CONFIGS.get(architecture) or usual)()
    fields: dict[str, Any] = json.loads(config.to_json_string(use_diff=False))
    if architecture == "DeepseekV2ForCausalLM":
        fields["num_experts_per_tok"] = 6  # which has no default
    if architecture == "Dots1ForCausalLM":  # nor have these
        fields |= {"num_experts_per_tok": 6, "n_routed_experts": 128}
    if architecture == "Glm4MoeForCausalLM":
        fields["num_attention_heads"] = 64  # the default divides no hidden_size
    if architecture == "GraniteMoeHybridForCausalLM":  # whose defaults are no model that is served
        kinds = ["linear_attention", "full_attention"] * (fields["num_hidden_layers"] // 2)
        fields["layer_types"] = kinds
    return {**fields, "architectures": [architecture]}


@pytest.mark.parametrize(
    "architecture", [name for name in ARCHITECTURES if _CONFIGS.get(name, name)]
)
def test_a_field_that_is_left_out_means_its_default(architecture: str) -> None:
    defaults = _defaults(architecture)
    whole = read_family(Fields(Path("config.json"), defaults))
    num_read = 0
    for name in defaults.keys() - {"architectures"}:
        rest = {key: value for key, value in defaults.items() if key != name}
        try:
            assert read_family(Fields(Path("config.json"), rest)) == whole, name
            num_read += 1
        except ModelLoadError as error:
            assert repr(name) in str(error), "what is needed is asked for by its name"
    assert num_read >= 10
