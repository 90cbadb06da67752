"""Scales of a linear's inputs, folded into what computes these: norms, and the linears before.

    input                       is divided in
    of queries, keys, values    the norm's weight (and bias)
    of the attention's output   the rows of the projection to values
    of gates and ups            the norm's weight (and bias)
    of down                     the rows of up

Products stay what they were: a norm's weight is rounded to the checkpoint's dtype, and the linears
behind it are multiplied by exactly what it was divided by.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from ..errors import InvalidRequest
from ..runtime.checkpoint.config.model_config import ModelConfig
from ..runtime.checkpoint.safetensors.checkpoint import CheckpointWeights


@dataclass(frozen=True, slots=True)
class Fold:
    """Where the scales of the inputs of the modules `names` go: into a norm, or into the rows of
    the linear whose outputs the inputs are."""

    names: tuple[str, ...]
    norm: str | None = None
    rows: str | None = None
    # (num_kv_heads, query heads to each, head_dim) of the attention's output: heads that share
    # values share their scales. None: each input has a scale of its own.
    heads: tuple[int, int, int] | None = None

    def tied(self, values: Tensor) -> Tensor:
        """values [in_features] -> the same, the largest of those that have one scale."""
        if self.heads is None:
            return values
        parts = values.view(self.heads)
        return parts.amax(1, keepdim=True).expand_as(parts).reshape(-1)

    def of_rows(self, scales: Tensor) -> Tensor:
        """scales [in_features], tied -> those of the outputs of `rows`."""
        return scales if self.heads is None else scales.view(self.heads)[:, 0].reshape(-1)


def folds_of(config: ModelConfig, layer: str, groups: Iterable[tuple[str, ...]]) -> list[Fold]:
    """groups: the modules of the layer that share an input each."""
    names = config.names
    attention, block = f"{layer}.{names.attention}", f"{layer}.{names.feed_forward}"
    heads = (config.num_kv_heads, config.num_heads // config.num_kv_heads, config.head_dim)
    folds = []
    for group in groups:
        first = group[0]
        if first in (f"{attention}.q_proj", f"{attention}.qkv_proj"):
            folds.append(Fold(group, norm=f"{layer}.{names.input_norm}"))
        elif first == f"{block}.{names.down}":
            if config.has_gates and not config.has_fused_projections and names.gate_up is None:
                folds.append(Fold(group, rows=f"{block}.{names.up}"))
        elif first == f"{attention}.{names.attention_output}":
            if not config.has_fused_projections and not config.has_attention_gate:
                folds.append(Fold(group, rows=f"{attention}.v_proj", heads=heads))
        elif first.startswith(f"{block}."):
            folds.append(Fold(group, norm=f"{layer}.{names.middle_norm}"))
    return folds


def fold_in(
    fold: Fold,
    scales: Tensor,
    linear: Callable[[str], Tensor],
    source: CheckpointWeights,
    changed: dict[str, Tensor],
) -> Tensor:
    """The scales [in_features] by which the inputs are divided from now on, which are those that
    were given but for a norm's rounding.

    linear: the weight of a module [out_features, in_features] float32, which is multiplied or
    divided IN PLACE; changed: gets norms and biases by tensor name, as the checkpoint stores them.
    """
    if fold.norm is not None:
        weight = f"{fold.norm}.weight"
        changed[weight], scales = _divided_norm(source.read(weight), scales)
        divisors, bias = scales, f"{fold.norm}.bias"
    else:
        assert fold.rows is not None, "scales go into a norm or into rows"
        divisors, bias = fold.of_rows(scales), f"{fold.rows}.bias"
        linear(fold.rows).div_(divisors[:, None])
    if bias in source:
        divided = source.read(bias).double() / divisors
        changed[bias] = divided.to(source.dtype_of(bias))
    for name in fold.names:
        linear(name).mul_(scales)
    return scales


def require_foldable(config: ModelConfig, method: str) -> None:
    """Raises InvalidRequest for a model whose norms cannot take over scales."""
    why = None
    if config.norm_placement != "before":
        why = f"each norm of {config.architecture} is not before one linear input alone"
    elif config.has_unit_offset_norms:
        why = f"the norms of {config.architecture} multiply by 1 + weight"
    if why is not None:
        raise InvalidRequest.of("method", method, f"for this model gptq or rtn: {why}")


def _divided_norm(weight: Tensor, scales: Tensor) -> tuple[Tensor, Tensor]:
    """weight [size] as stored -> the same divided by the scales, and by what exactly it was,
    float32; numbers that the division would lose stay."""
    divided = (weight.double() / scales.double()).to(weight.dtype)
    is_kept = (divided == 0) | ~divided.isfinite()
    divided = torch.where(is_kept, weight, divided)
    exact = (weight.double() / divided.double()).float()
    return divided, torch.where(is_kept | (weight == 0), torch.ones_like(exact), exact)
