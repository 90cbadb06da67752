"""What an encoder is built from, and the parts that all of its layers take."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from ....kernels.ops import Linear
from ....kernels.reference.dense import sigmoid
from ....kernels.registry import Kernels
from ...checkpoint.config.encoder_config import EncoderActivation, EncoderConfig
from ...checkpoint.weight_source import WeightSource

Activate = Callable[[Tensor], Tensor]

# Numbers that torch's elementwise loops give to one thread, and that its registers divide: within
# such a piece each number is computed by the same instructions.
_ONE_THREAD = 32_768
_BLOCK_ROWS = 64  # of a float64 product


@dataclass(frozen=True, slots=True)
class EncoderBuild:
    """Layers take their tensors from `source` by name, and prepare them with `kernels`."""

    config: EncoderConfig
    source: WeightSource
    kernels: Kernels
    dtype: torch.dtype
    device: torch.device
    is_deterministic: bool = False

    @property
    def is_exact(self) -> bool:
        """Whether a text's bits may depend on nothing else in the batch: float64 is there to
        compare with."""
        return self.is_deterministic or self.dtype is torch.float64

    def linear(
        self,
        names: Sequence[str],
        in_features: int,
        out_features: Sequence[int],
        *,
        has_bias: bool,
    ) -> Linear:
        """One product for modules that share their input."""
        weight = self.source.take_weight(names, out_features, in_features)
        bias = None
        if has_bias:
            bias = self.source.take_stacked(
                [f"{name}.bias" for name in names], [(size,) for size in out_features]
            )
        run = self.kernels.make_linear(weight, bias)
        return _of_equal_blocks(run) if self.dtype is torch.float64 else run

    def norm(self, name: str) -> Activate:
        """LayerNorm; checkpoints of 2018 have its weights as gamma and beta."""
        source, shape = self.source, (self.config.hidden_size,)
        is_old = f"{name}.gamma" in source and f"{name}.weight" not in source
        weight = source.take(f"{name}.{'gamma' if is_old else 'weight'}", shape)
        bias: Tensor | None = None
        if self.config.has_norm_bias:
            bias = source.take(f"{name}.{'beta' if is_old else 'bias'}", shape)
        eps = self.config.norm_eps
        return lambda x: F.layer_norm(x, shape, weight, bias, eps)

    def activation(self, name: EncoderActivation) -> Activate:
        """By its name in a config."""
        activate = _ACTIVATIONS[name]
        return _by_pieces(activate) if self.is_exact else activate


def _of_equal_blocks(run: Linear) -> Linear:
    """A float64 product sums a row in one order, whatever the number of rows: BLAS chooses that by
    the shape, so each call has the same. For float64, which is there to compare with."""

    def linear(x: Tensor) -> Tensor:
        num_missing = -len(x) % _BLOCK_ROWS
        blocks = torch.split(F.pad(x, (0, 0, 0, num_missing)), _BLOCK_ROWS)
        return torch.cat([run(block) for block in blocks])[: len(x)]

    return linear


def _silu(x: Tensor) -> Tensor:
    return x * sigmoid(x)


_ACTIVATIONS: dict[EncoderActivation, Activate] = {
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "silu": _silu,
    "relu": torch.relu,
    "tanh": torch.tanh,
}


def _by_pieces(activate: Activate) -> Activate:
    """Row by row as if each were alone: torch divides a large tensor among threads wherever it
    likes, and computes the last numbers of each part by other instructions."""

    def activated(x: Tensor) -> Tensor:
        rows = max(1, _ONE_THREAD // x.shape[-1])
        return torch.cat([activate(piece) for piece in torch.split(x, rows)])

    return activated
