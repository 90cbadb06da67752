"""What the recurrent state of a sequence consists of: the one definition for the pool and for
estimates of memory. Torch-free."""

from __future__ import annotations

import math
from dataclasses import dataclass

from ..checkpoint.config.model_config import (
    GatedDeltaConfig,
    Mamba2Config,
    ModelConfig,
    ShortConvConfig,
)
from .kv_layout import DTYPE_BYTES, KVLayout

MIN_INTERVAL_TOKENS = 256  # between checkpoints: a prompt's chunk, and so a step, each (guess)
MAX_INTERVAL_TOKENS = 4096


@dataclass(frozen=True, slots=True)
class StatePart:
    """A tensor of each recurrent layer's state."""

    shape: tuple[int, ...]
    dtype: str  # as torch names it

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * DTYPE_BYTES[self.dtype]


@dataclass(frozen=True, slots=True)
class StateLayout:
    """The state of a sequence: the same parts in each layer that has one."""

    num_layers: int
    tail: StatePart  # the convolution's last inputs [kernel - 1, channels]
    matrix: StatePart | None  # [num_heads, key_dim, value_dim]

    @property
    def num_bytes(self) -> int:
        """Over all layers."""
        matrix = 0 if self.matrix is None else self.matrix.num_bytes
        return self.num_layers * (self.tail.num_bytes + matrix)

    @classmethod
    def of(cls, config: ModelConfig, dtype: str) -> StateLayout | None:
        """For a model computed in `dtype`; None: it has no recurrent layers. Matrices, which sum
        over all tokens, are float32 at least."""
        recurrent = config.recurrent
        if recurrent is None:
            return None
        mixer, num_layers = recurrent.mixer, len(recurrent.layers)
        if isinstance(mixer, ShortConvConfig):
            shape = (mixer.kernel_size - 1, config.hidden_size)
            return cls(num_layers, StatePart(shape, dtype), None)
        wide = "float64" if dtype == "float64" else "float32"
        matrix = _matrix_shape(mixer)
        tail = StatePart((mixer.kernel_size - 1, mixer.num_channels), dtype)
        return cls(num_layers, tail, StatePart(matrix, wide))


def _matrix_shape(mixer: GatedDeltaConfig | Mamba2Config) -> tuple[int, int, int]:
    if isinstance(mixer, Mamba2Config):
        return mixer.num_heads, mixer.state_dim, mixer.head_dim
    return mixer.num_value_heads, mixer.key_dim, mixer.value_dim


def checkpoint_interval(state: StateLayout, kv: KVLayout) -> int:
    """Tokens of a prompt between two checkpoints: so many that their KV is no smaller than the
    state that is kept of them, as a power of two within the bounds above."""
    tokens = state.num_bytes // max(1, kv.bytes_per_token)
    return min(MAX_INTERVAL_TOKENS, max(MIN_INTERVAL_TOKENS, 1 << max(0, tokens - 1).bit_length()))
