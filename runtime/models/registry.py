"""Which class implements which architecture. A new family is one module and one line here."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from ...errors import ModelLoadError
from ...kernels.registry import Kernels
from ..execute.inputs import ForwardBatch
from ..model_config import ModelConfig
from ..weights.source import WeightSource
from .llama import LlamaForCausalLM


class CausalLM(Protocol):
    """What the model runner needs of a model."""

    def forward(self, input_ids: Tensor, positions: Tensor, batch: ForwardBatch) -> Tensor:
        """input_ids, positions [T] int64 -> hidden [T, hidden_size]."""
        ...

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """hidden [N, hidden_size] -> [N, vocab_size] float32 or float64."""
        ...


class CausalLMClass(Protocol):
    """How a model is built: it pulls its tensors from `source`."""

    def __call__(
        self,
        config: ModelConfig,
        source: WeightSource,
        kernels: Kernels,
        *,
        dtype: torch.dtype,
        device: torch.device,
        max_model_len: int,
    ) -> CausalLM: ...


MODELS: dict[str, CausalLMClass] = {
    "LlamaForCausalLM": LlamaForCausalLM,
    "MistralForCausalLM": LlamaForCausalLM,
    "Qwen2ForCausalLM": LlamaForCausalLM,
}


def model_class(architecture: str) -> CausalLMClass:
    """Raises ModelLoadError for an architecture that nobody implements."""
    if architecture not in MODELS:
        supported = ", ".join(sorted(MODELS))
        raise ModelLoadError(
            f"architecture {architecture!r} is not supported; supported are: {supported}"
        )
    return MODELS[architecture]
