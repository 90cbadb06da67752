"""A mixture of experts in place of a feed-forward block: router, experts, shared expert.

A checkpoint stores its experts one by one. They are read one by one into stacks, so that at most
one expert is in memory twice.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from ....errors import ModelLoadError
from ....kernels.ops import Linear, Weight
from ....kernels.reference.dense import sigmoid
from ...checkpoint.config.model_config import ExpertsConfig
from ..forward_batch import ForwardBatch
from .build import ModelBuild
from .mlp import GatedMLP


def feed_forward_of(build: ModelBuild, layer: str, index: int) -> GatedMLP | MixtureOfExperts:
    """The layer's feed-forward block: experts where the config says so. layer: its name."""
    experts = build.config.experts
    if experts is not None and index in experts.layers:
        return MixtureOfExperts(build, layer)
    return GatedMLP(build, f"{layer}.mlp")


class MixtureOfExperts:
    """The weighted sum of the chosen experts, and of the shared expert if there is one."""

    def __init__(self, build: ModelBuild, layer: str) -> None:
        """layer: its name in the checkpoint."""
        config, experts = build.config, _config_of(build)
        names = experts.names
        name = f"{layer}.{names.block}"
        self._routing = experts.routing
        self._route = build.kernels.route_experts
        router = build.source.take(
            f"{name}.{names.router}.weight", (experts.num_experts, config.hidden_size)
        )
        self._router = build.kernels.make_output_linear(router)
        self._selection_bias: Tensor | None = None
        if experts.has_selection_bias:
            # Values near 15 that order scores by their fourth digit: never in 16 bits.
            self._selection_bias = build.source.take(
                f"{name}.{names.router}.e_score_correction_bias",
                (experts.num_experts,),
                torch.promote_types(build.dtype, torch.float32),
            )
        self._experts = build.kernels.make_experts(
            *_take_experts(build, name, experts), config.activation
        )
        self._shared: GatedMLP | None = None
        self._shared_gate: Linear | None = None
        if experts.shared_intermediate_size:
            size = experts.shared_intermediate_size
            self._shared = GatedMLP(build, f"{name}.{names.shared}", size)
        if experts.has_shared_gate:
            gate = build.source.take(f"{name}.{names.shared_gate}.weight", (1, config.hidden_size))
            self._shared_gate = build.kernels.make_output_linear(gate)

    def __call__(self, x: Tensor, batch: ForwardBatch) -> Tensor:
        """[T, hidden_size] -> [T, hidden_size]."""
        expert_ids, weights = self._route(self._router(x), self._selection_bias, self._routing)
        out = self._experts(x, expert_ids, weights)
        if self._shared is None:
            return out
        shared = self._shared(x, batch)
        if self._shared_gate is not None:
            shared = shared * sigmoid(self._shared_gate(x)).to(x.dtype)
        return out.add_(shared)


def _take_experts(build: ModelBuild, name: str, experts: ExpertsConfig) -> tuple[Weight, Weight]:
    """gate_up [E, 2 * I, H] and down [E, H, I], as `ops.MakeExperts` takes them."""
    hidden_size, size = build.config.hidden_size, experts.intermediate_size
    source, numbers, names = build.source, range(experts.num_experts), experts.names
    gate_up = stacked_weights(
        (
            source.take_weight(
                [f"{name}.{part.format(expert)}" for part in (names.gate, names.up)],
                [size, size],
                hidden_size,
            )
            for expert in numbers
        ),
        experts.num_experts,
    )
    down = stacked_weights(
        (
            source.take_weight([f"{name}.{names.down.format(expert)}"], [hidden_size], size)
            for expert in numbers
        ),
        experts.num_experts,
    )
    return gate_up, down


def stacked_weights(parts: Iterable[Weight], count: int) -> Weight:
    """`count` weights of one shape, stacked on a new first axis; a part is freed once copied.

    Raises:
        ModelLoadError: they are quantized in different formats.
    """
    stack: Weight | None = None
    for index, part in enumerate(parts):
        if stack is None:
            stack = _empty_stack(part, count)
        stack, part = _both_ordered(stack, part)
        _put(stack, index, part)
    assert stack is not None, "there is at least one expert"
    return stack


def _empty_stack(part: Weight, count: int) -> Weight:
    def empty(tensor: Tensor) -> Tensor:
        return tensor.new_empty((count, *tensor.shape))

    if isinstance(part, Tensor):
        return empty(part)
    return part.map(empty)


def _both_ordered(stack: Weight, part: Weight) -> tuple[Weight, Weight]:
    """Gives both an order of inputs where one has it. An expert's inputs may be in order by chance,
    for example where no calibration data reached the expert."""
    if isinstance(stack, Tensor) or isinstance(part, Tensor):
        return stack, part
    if (stack.input_order is None) is (part.input_order is None):
        return stack, part
    order = torch.arange(part.in_features, dtype=torch.int32, device=part.values.device)
    if part.input_order is None:
        return stack, replace(part, input_order=order)
    return replace(stack, input_order=order.repeat(len(stack.values), 1)), part


def _put(stack: Weight, index: int, part: Weight) -> None:
    if _format(stack) != _format(part):
        raise ModelLoadError(
            f"experts of one layer are quantized in differing formats: {_format(stack)} and, of "
            f"expert {index}, {_format(part)}"
        )
    for whole, own in zip(_tensors(stack), _tensors(part), strict=True):
        whole[index] = own


def _format(weight: Weight) -> tuple[object, ...]:
    """What must be equal within a stack, besides shapes."""
    if isinstance(weight, Tensor):
        return ("plain",)
    return (weight.bits, weight.group_size, weight.offsets is not None, weight.activations)


def _tensors(weight: Weight) -> Sequence[Tensor]:
    return (weight,) if isinstance(weight, Tensor) else weight.tensors()


def _config_of(build: ModelBuild) -> ExpertsConfig:
    assert build.config.experts is not None, "the config says which layers have experts"
    return build.config.experts
