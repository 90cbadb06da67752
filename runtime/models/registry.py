"""Which class implements which architecture. A new family is one module and one line here, beside
its reader in `model_families/`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from torch import Tensor

from ...errors import ModelLoadError
from .deepseek import DeepseekForCausalLM
from .families.registry import unknown_architecture
from .forward_batch import ForwardBatch
from .gemma import Gemma2ForCausalLM, Gemma3ForCausalLM, Gemma3ForConditionalGeneration
from .granite import GraniteForCausalLM
from .layers.build import ModelBuild
from .llama import LlamaForCausalLM
from .mixtral import MixtralForCausalLM
from .olmo2 import Olmo2ForCausalLM
from .olmoe import OlmoeForCausalLM
from .phi3 import Phi3ForCausalLM
from .qwen3 import Qwen3ForCausalLM
from .qwen_moe import Qwen2MoeForCausalLM, Qwen3MoeForCausalLM


class CausalLM(Protocol):
    """What the model runner needs of a model."""

    def forward(self, input_ids: Tensor, positions: Tensor, batch: ForwardBatch) -> Tensor:
        """input_ids, positions [T] int64 -> hidden [T, hidden_size]."""
        ...

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """hidden [N, hidden_size] -> [N, vocab_size] float32 or float64."""
        ...


ModelClass = Callable[[ModelBuild], CausalLM]

ARCHITECTURES: dict[str, ModelClass] = {
    "LlamaForCausalLM": LlamaForCausalLM,
    "MistralForCausalLM": LlamaForCausalLM,
    "MinistralForCausalLM": LlamaForCausalLM,
    "Qwen2ForCausalLM": LlamaForCausalLM,
    "Qwen3ForCausalLM": Qwen3ForCausalLM,
    "SmolLM3ForCausalLM": LlamaForCausalLM,
    "GemmaForCausalLM": LlamaForCausalLM,
    "Gemma2ForCausalLM": Gemma2ForCausalLM,
    "Gemma3ForCausalLM": Gemma3ForCausalLM,
    "Gemma3ForConditionalGeneration": Gemma3ForConditionalGeneration,
    "Phi3ForCausalLM": Phi3ForCausalLM,
    "Olmo2ForCausalLM": Olmo2ForCausalLM,
    "Olmo3ForCausalLM": Olmo2ForCausalLM,
    "GraniteForCausalLM": GraniteForCausalLM,
    "MixtralForCausalLM": MixtralForCausalLM,
    "Qwen2MoeForCausalLM": Qwen2MoeForCausalLM,
    "Qwen3MoeForCausalLM": Qwen3MoeForCausalLM,
    "OlmoeForCausalLM": OlmoeForCausalLM,
    "DeepseekV2ForCausalLM": DeepseekForCausalLM,
    "DeepseekV3ForCausalLM": DeepseekForCausalLM,
}
"""By the name in config.json's `architectures`."""


def model_class(architecture: str) -> ModelClass:
    """Raises ModelLoadError for an architecture that nobody implements."""
    if architecture not in ARCHITECTURES:
        raise ModelLoadError(unknown_architecture(architecture))
    return ARCHITECTURES[architecture]
