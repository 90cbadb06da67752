"""A model's options for attention and for expert routing. No torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class AttentionOptions:
    """Constant over a model's layers of one kind; part of a step's plan."""

    scale: float | None = None  # of the scores; None: head_dim ** -0.5
    # A query sees the keys at its own position and the `window` - 1 before it; None: all before.
    window: int | None = None
    # A query sees the keys of its own chunk alone, of those before it: chunk i is the tokens from
    # i * chunk to (i + 1) * chunk. Not beside a window.
    chunk: int | None = None
    # Tokens at the start of a sequence that stay visible besides the window (StreamingLLM: Xiao et
    # al. 2023, section 3.2); without a window they have no effect.
    num_sink_tokens: int = 0
    # Scores become soft_cap * tanh(score / soft_cap) (Gemma 2: Riviere et al. 2024, section 2).
    soft_cap: float | None = None


DEFAULT_OPTIONS = AttentionOptions()


@dataclass(frozen=True, slots=True)
class ClampedSwiGLU:
    """gate * sigmoid(alpha * gate) * (up + 1), with gates of at most `limit` and ups within
    [-limit, limit] (gpt-oss); instead of an activation that is multiplied with the ups."""

    alpha: float = 1.702
    limit: float = 7.0


@dataclass(frozen=True, slots=True)
class LatentOptions:
    """Multi-head latent attention in its absorbed form, see `ops.LatentAttention`."""

    scale: float  # of the scores
    # Queries that see more keys attend to so many of them, see `ops.SelectKeys`. None: to all.
    num_selected: int | None = None


@dataclass(frozen=True, slots=True)
class RoutingOptions:
    """Constant over a model's layers; see `ops.RouteExperts`.

    Experts form `num_groups` groups of equal size, and a token's come from only
    `num_chosen_groups` groups (DeepSeek-V2, section 2.2.2); these contain >= num_chosen experts.
    """

    num_chosen: int  # experts a token
    scoring: Literal["softmax", "sigmoid"] = "softmax"  # of the router's logits
    is_normalized: bool = False  # the chosen experts' weights sum to 1 (before the factor)
    weight_factor: float = 1.0  # the chosen experts' weights are multiplied by it
    num_groups: int = 1
    num_chosen_groups: int = 1
    # A group's rank: that of its best expert, or the sum of its best two (DeepSeek-V3, 2.1.2).
    group_rank: Literal["best", "best_two"] = "best"
