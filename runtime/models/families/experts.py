"""The checks on expert counts that all mixtures of experts share."""

from __future__ import annotations

from dataclasses import replace

from ...checkpoint.config.decoder_config import DecoderConfig, ExpertsConfig
from ...checkpoint.config.fields import Fields


def with_experts(decoder: DecoderConfig, config: Fields, experts: ExpertsConfig) -> DecoderConfig:
    """The decoder with these experts, or without any where no layer has them.

    Raises:
        ModelLoadError: groups of unequal size, or a token can reach fewer experts than it takes.
    """
    routing, num_experts = experts.routing, experts.num_experts
    if num_experts % routing.num_groups:
        raise config.fail("n_group", f"a divisor of the number of experts, {num_experts}")
    if routing.group_rank == "best_two" and num_experts < 2 * routing.num_groups:
        raise config.fail(
            "n_group", f"at most {num_experts // 2}: groups are ranked by two experts"
        )
    if routing.num_chosen_groups > routing.num_groups:
        raise config.fail("topk_group", f"at most n_group={routing.num_groups}")
    in_reach = num_experts // routing.num_groups * routing.num_chosen_groups
    if routing.num_chosen > in_reach:
        raise config.fail("num_experts_per_tok", f"at most {in_reach}, the experts in reach")
    return replace(decoder, experts=experts if experts.layers else None)
