"""Feed-forward blocks: down(activation(gate(x)) * up(x)), gate and up as one product, or without
gates down(activation(up(x)))."""

from __future__ import annotations

from torch import Tensor

from ...checkpoint.parts import WHOLE, Part
from ..forward_batch import ForwardBatch
from .activation import PLAIN_ACTIVATIONS
from .build import ModelBuild
from .linear import GatedLinearLayer, LinearLayer


def dense_block(
    build: ModelBuild, name: str, intermediate_size: int | None = None, *, is_summed: bool = True
) -> GatedMLP | PlainMLP:
    """The feed-forward block that the config names; name: its own in checkpoints;
    intermediate_size: None for the config's value; is_summed: False: the caller sums the ranks'
    results."""
    kind = GatedMLP if build.config.has_gates else PlainMLP
    return kind(build, name, intermediate_size, is_summed=is_summed)


class GatedMLP:
    """SwiGLU, or GeGLU if the config's activation says so."""

    def __init__(
        self,
        build: ModelBuild,
        name: str,
        intermediate_size: int | None = None,
        *,
        is_summed: bool = True,
    ) -> None:
        """See `dense_block`."""
        config = build.config
        names = config.names
        fused = "gate_up_proj" if config.has_fused_projections else names.gate_up
        parts = (names.gate, names.up) if fused is None else (fused,)
        size = config.intermediate_size if intermediate_size is None else intermediate_size
        share = build.ranks.share(size)
        self.gate_up = GatedLinearLayer(
            build,
            [f"{name}.{part}" for part in parts],
            in_features=config.hidden_size,
            size=size,
            activation=config.activation,
            bias=config.mlp_bias,
            share=share,
        )
        self.down = LinearLayer(
            build,
            [f"{name}.{names.down}"],
            in_features=size,
            out_features=[config.hidden_size],
            bias=config.mlp_bias,
            part=Part(inputs=share),
            is_summed=is_summed,
        )

    def __call__(self, x: Tensor, batch: ForwardBatch) -> Tensor:
        """[T, hidden_size] -> [T, hidden_size]."""
        return self.down(self.gate_up(x, batch), batch)


class PlainMLP:
    """Without gates (Phi-2, Nemotron)."""

    def __init__(
        self,
        build: ModelBuild,
        name: str,
        intermediate_size: int | None = None,
        *,
        is_summed: bool = True,
    ) -> None:
        """See `dense_block`."""
        config, names = build.config, build.config.names
        self._activate = PLAIN_ACTIVATIONS[config.plain_activation]
        size = config.intermediate_size if intermediate_size is None else intermediate_size
        share = build.ranks.share(size)
        up = WHOLE if share is None else Part([[share]])
        self._up, self._down = (
            LinearLayer(
                build,
                [f"{name}.{module}"],
                in_features=in_features,
                out_features=[out_features],
                bias=config.mlp_bias,
                part=part,
                is_summed=is_summed,
            )
            for module, in_features, out_features, part in (
                (names.up, config.hidden_size, size, up),
                (names.down, size, config.hidden_size, Part(inputs=share)),
            )
        )

    def __call__(self, x: Tensor, batch: ForwardBatch) -> Tensor:
        """[T, hidden_size] -> [T, hidden_size]."""
        return self._down(self._activate(self._up(x, batch)), batch)
