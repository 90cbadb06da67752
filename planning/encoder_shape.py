"""What an encoder needs: its parameters, and the memory of a step. It keeps no KV. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass

from ..runtime.checkpoint.config.encoder_config import EncoderConfig
from .formats import DTYPE_BYTES
from .resident_memory import PROCESS_BYTES, ResidentMemory

# Rows of a step's widest tensors that are there at once: states, projections, activations.
_LIVE_WIDTHS = 3


@dataclass(frozen=True, slots=True)
class EncoderShape:
    """Parameters, counted from the config."""

    linear_parameters: int  # that each token is multiplied with
    other_parameters: int  # tables, norms, biases, the head

    @classmethod
    def of(cls, config: EncoderConfig) -> EncoderShape:
        """Raises nothing: the config was checked when it was read."""
        hidden, inner = config.hidden_size, config.intermediate_size
        width = 2 * inner if config.has_gates else inner
        linear = config.num_layers * (4 * hidden * hidden + hidden * (width + inner))
        norm = hidden * (2 if config.has_norm_bias else 1)
        rows = config.vocab_size + config.num_position_rows + config.num_token_types
        biases = 4 * hidden if config.has_attention_bias else 0
        biases += width + hidden if config.has_feed_forward_bias else 0
        num_norms = 2 * config.num_layers + 1
        other = config.num_relative_buckets * config.num_heads
        other += rows * hidden + num_norms * norm + config.num_layers * biases
        return cls(linear, other + _head_parameters(config))

    @property
    def num_parameters(self) -> int:
        """All of them."""
        return self.linear_parameters + self.other_parameters

    def weight_bytes(self, dtype: str, quantization: str = "none") -> int:
        """Of all weights; rounded ones have a scale for some of them, which is left out."""
        bits = {"int8": 8, "w8a8": 8, "int4": 4}.get(quantization, 8 * DTYPE_BYTES[dtype])
        return self.linear_parameters * bits // 8 + self.other_parameters * DTYPE_BYTES[dtype]


def encoder_step_bytes(config: EncoderConfig, dtype: str, num_tokens: int) -> int:
    """Of the tensors of a step, about."""
    inner = config.intermediate_size * (2 if config.has_gates else 1)
    width = max(inner, 3 * config.hidden_size)
    return _LIVE_WIDTHS * width * num_tokens * DTYPE_BYTES[dtype]


def encoder_resident_memory(
    config: EncoderConfig, dtype: str, quantization: str, num_tokens: int
) -> ResidentMemory:
    """Of an engine's process that computes a step of so many tokens on a CPU."""
    start = PROCESS_BYTES + EncoderShape.of(config).weight_bytes(dtype, quantization)
    return ResidentMemory(start, start + encoder_step_bytes(config, dtype, num_tokens))


def _head_parameters(config: EncoderConfig) -> int:
    head = config.head
    if head is None:
        return 0
    hidden = config.hidden_size
    dense = 0 if head.dense is None else hidden * hidden + hidden * head.has_dense_bias
    norm = 0 if head.norm is None else hidden * (2 if config.has_norm_bias else 1)
    return dense + norm + head.num_labels * (hidden + 1)
