"""A mixture of experts in place of a feed-forward block: router, experts, shared expert.

Experts are read one by one into stacks, so that at most one expert is in memory twice.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from ....kernels.ops import Experts, Linear, Weight
from ....kernels.reference.dense import sigmoid
from ...checkpoint.config.model_config import ExpertsConfig
from ...checkpoint.parts import WHOLE, Part
from ...checkpoint.quantized.expert_stack import stacked_weights
from ...checkpoint.weight_parts import part_of
from ..forward_batch import ForwardBatch
from .build import ModelBuild
from .expert_dispatch import SentExperts
from .expert_share import ExpertShare, ExpertSlots, OwnExperts, expert_share, ranks_of
from .mlp import GatedMLP, PlainMLP, dense_block
from .plain_experts import PlainExperts
from .ranks import ALONE


def feed_forward_of(
    build: ModelBuild, layer: str, index: int
) -> GatedMLP | PlainMLP | MixtureOfExperts:
    """The layer's feed-forward block: experts where the config says so. layer: its name."""
    experts = build.config.experts
    if experts is not None and index in experts.layers:
        return MixtureOfExperts(build, layer, index)
    return dense_block(build, f"{layer}.{build.config.names.feed_forward}")


class MixtureOfExperts:
    """The weighted sum of the chosen experts, and of the shared expert if there is one.

    Between ranks each expert is divided as a dense block is, or groups of ranks have other experts
    (`expert_share`); all ranks route alike.
    """

    def __init__(self, build: ModelBuild, layer: str, index: int) -> None:
        """layer: its name in the checkpoint; index: its place among the model's."""
        config, experts = build.config, _config_of(build)
        self._note = None if build.expert_loads is None else build.expert_loads.of_layer(index)
        names = experts.names
        name = f"{layer}.{names.block}"
        self._ranks = ranks = ranks_of(experts, build.ranks)
        build = replace(build, ranks=ranks)
        share = expert_share(index, experts.num_experts, ranks)
        self._routing = experts.routing
        self._weighs_inputs = experts.weighs_inputs
        self._route = build.kernels.route_experts
        router = build.source.take(
            f"{name}.{names.router}.weight", (experts.num_experts, config.hidden_size)
        )
        self._router = build.kernels.make_output_linear(router)
        self._selection_bias: Tensor | None = None
        if experts.has_selection_bias:
            # Values near 15 that order scores by their fourth digit: never in 16 bits.
            self._selection_bias = build.source.take(
                f"{name}.{names.selection_bias}",
                (*(1,) * experts.is_selection_bias_row, experts.num_experts),
                torch.promote_types(build.dtype, torch.float32),
            ).flatten()
        self._router_bias: Tensor | None = None
        if experts.has_biases:
            self._router_bias = build.source.take(
                f"{name}.{names.router}.bias",
                (experts.num_experts,),
                torch.promote_types(build.dtype, torch.float32),
            )
        self._slots = None if share.experts is None else ExpertSlots(share, build.device)
        self._experts = _experts_of(build, name, experts, share)
        if ranks.context is not None and share.experts is not None:
            self._experts = SentExperts(self._experts, experts.num_experts, ranks.context)
        self._shared: GatedMLP | PlainMLP | None = None
        self._shared_gate: Linear | None = None
        if experts.shared_intermediate_size:
            size = experts.shared_intermediate_size
            above = layer if names.is_shared_beside else name
            self._shared = dense_block(build, f"{above}.{names.shared}", size, is_summed=False)
        if experts.has_shared_gate:
            gate = build.source.take(f"{name}.{names.shared_gate}.weight", (1, config.hidden_size))
            self._shared_gate = build.kernels.make_output_linear(gate)

    def __call__(self, x: Tensor, batch: ForwardBatch) -> Tensor:
        """[T, hidden_size] -> [T, hidden_size]."""
        logits = self._router(x)
        if self._router_bias is not None:
            logits = logits + self._router_bias
        expert_ids, weights = self._route(
            logits, self._selection_bias, self._routing, batch.num_tokens
        )
        if self._note is not None:
            self._note(expert_ids, batch)
        if self._slots is not None:
            expert_ids = self._slots(expert_ids, batch)
        if self._weighs_inputs:
            out = self._of_weighed_inputs(x, expert_ids, weights)
        else:
            out = self._experts(x, expert_ids, weights)
        if self._shared is None:
            return self._ranks.sum(out)
        shared = self._shared(x, batch)
        if self._shared_gate is not None:
            shared = shared * sigmoid(self._shared_gate(x)).to(x.dtype)
        return self._ranks.sum(out.add_(shared))

    def _of_weighed_inputs(self, x: Tensor, expert_ids: Tensor, weights: Tensor) -> Tensor:
        """As `ops.RunExperts`, one choice of all tokens after the other."""
        ones = torch.ones_like(weights[:, :1])
        out: Tensor | None = None
        for nth in range(self._routing.num_chosen):
            chosen = expert_ids[:, nth : nth + 1].contiguous()
            own = self._experts(x * weights[:, nth : nth + 1].to(x.dtype), chosen, ones)
            out = own if out is None else out.add_(own)
        assert out is not None, "a token takes at least one expert"
        return out


def _experts_of(
    build: ModelBuild, name: str, experts: ExpertsConfig, share: ExpertShare
) -> Experts:
    """name: the mixture's."""
    if not experts.has_gates:
        return PlainExperts(build, name, experts)
    take = _take_stacked if experts.is_stacked else take_experts
    made = build.kernels.make_experts(
        *take(build, name, experts, share),
        experts.clamped or build.config.activation,
        *(_take_biases(build, name, experts, share) if experts.has_biases else ()),
    )
    if share.experts is None or build.device.type == "cuda":
        return made
    return OwnExperts(made)


def take_experts(
    build: ModelBuild, name: str, experts: ExpertsConfig, share: ExpertShare | None = None
) -> tuple[Weight, Weight]:
    """gate_up [E, 2 * I, H] and down [E, H, I], as `ops.MakeExperts` takes them; share: this rank's
    of E and I; None: all."""
    hidden_size, size = build.config.hidden_size, experts.intermediate_size
    share = share or ExpertShare(None, ALONE)
    source, names = build.source, experts.names
    numbers = [expert for expert in range(experts.num_experts) if share.has(expert)]
    for expert in range(experts.num_experts):
        if not share.has(expert):  # another rank has it
            for module in (names.gate, names.up, names.down):
                source.skip(f"{name}.{module.format(expert)}.")
    inner = share.ranks.share(size)
    gates = WHOLE if inner is None else Part([[inner], [inner]])
    gate_up = stacked_weights(
        (
            source.take_part(
                [f"{name}.{part.format(expert)}" for part in (names.gate, names.up)],
                [size, size],
                hidden_size,
                gates,
            )
            for expert in numbers
        ),
        len(numbers),
    )
    own = Part(inputs=inner)
    down = stacked_weights(
        (
            source.take_part([f"{name}.{names.down.format(expert)}"], [hidden_size], size, own)
            for expert in numbers
        ),
        len(numbers),
    )
    return gate_up, down


def _take_stacked(
    build: ModelBuild, name: str, experts: ExpertsConfig, share: ExpertShare
) -> tuple[Weight, Weight]:
    """The same, of a checkpoint that has a tensor for all experts."""
    hidden_size, size, count = (
        build.config.hidden_size,
        experts.intermediate_size,
        experts.num_experts,
    )
    source, names = build.source, experts.names
    gate_up = source.take_experts(f"{name}.{names.gate_up}", count, 2 * size, hidden_size)
    down = source.take_experts(f"{name}.{names.down}", count, hidden_size, size)
    if not experts.is_halved:
        if isinstance(gate_up, Tensor):
            gate_up = _gates_first(gate_up)
        else:
            gate_up = gate_up.map(_gates_first)
    gate_up, down = (_experts_in(weight, share.experts) for weight in (gate_up, down))
    inner = share.ranks.share(experts.intermediate_size)
    if inner is None:
        return gate_up, down
    size = experts.intermediate_size
    gate_up = part_of([names.gate_up], gate_up, [size, size], Part([[inner], [inner]]))
    return gate_up, part_of([names.down], down, [hidden_size], Part(inputs=inner))


def _experts_in(weight: Weight, own: Sequence[int] | None) -> Weight:
    if own is None:
        return weight
    if isinstance(weight, Tensor):
        return weight[list(own)]
    return weight.map(lambda tensor: tensor[list(own)])


def _take_biases(
    build: ModelBuild, name: str, experts: ExpertsConfig, share: ExpertShare
) -> tuple[Tensor, Tensor]:
    """gate_up [E, 2 * I] and down [E, H]; of partial results one rank's have those of down."""
    names, count = experts.names, experts.num_experts
    gate_up = build.source.take(
        f"{name}.{names.gate_up}_bias", (count, 2 * experts.intermediate_size)
    )
    down = build.source.take(f"{name}.{names.down}_bias", (count, build.config.hidden_size))
    gate_up = _gates_first(gate_up)
    if share.experts is not None:
        own = list(share.experts)
        gate_up, down = gate_up[own], down[own]
    inner = share.ranks.share(experts.intermediate_size)
    if inner is None:
        return gate_up, down
    first, end = inner
    gates, ups = gate_up.chunk(2, dim=1)
    gate_up = torch.cat((gates[:, first:end], ups[:, first:end]), dim=1)
    return gate_up, down if share.ranks.rank == 0 else torch.zeros_like(down)


def _gates_first(rows: Tensor) -> Tensor:
    """[E, 2 * I, ...], gates and ups in turn -> gates, then ups."""
    return torch.cat((rows[:, ::2], rows[:, 1::2]), dim=1)


def _config_of(build: ModelBuild) -> ExpertsConfig:
    assert build.config.experts is not None, "the config says which layers have experts"
    return build.config.experts
