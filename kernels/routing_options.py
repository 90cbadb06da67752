"""How a mixture of experts' router chooses experts, and what they weigh."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class RoutingOptions:
    """Constant over a model's layers; see `ops.RouteExperts`.

    Experts come in `num_groups` groups of equal size, and a token's are of `num_chosen_groups`
    groups only (DeepSeek-V2, section 2.2.2); num_chosen <= experts in so many groups.
    """

    num_chosen: int  # experts a token
    scoring: Literal["softmax", "sigmoid"] = "softmax"  # of the router's logits
    is_normalized: bool = False  # the chosen experts' weights sum to 1 (before the factor)
    weight_factor: float = 1.0  # the chosen experts' weights are multiplied by it
    num_groups: int = 1
    num_chosen_groups: int = 1
    # A group's rank: that of its best expert, or the sum of its best two (DeepSeek-V3, 2.1.2).
    group_rank: Literal["best", "best_two"] = "best"
