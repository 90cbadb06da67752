"""What a model may ask of attention beyond softmax over everything before."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class AttentionOptions:
    """Constant over a model's layers of one kind; part of a step's plan."""

    scale: float | None = None  # of the scores; None: head_dim ** -0.5
    # A query sees the keys at its own position and the `window` - 1 before it; None: all before.
    window: int | None = None
    # Tokens at the start of a sequence that stay visible beside the window (StreamingLLM: Xiao et
    # al. 2023, section 3.2); without a window they change nothing.
    num_sink_tokens: int = 0
    # Scores become soft_cap * tanh(score / soft_cap) (Gemma 2: Riviere et al. 2024, section 2).
    soft_cap: float | None = None


DEFAULT_OPTIONS = AttentionOptions()


@dataclass(frozen=True, slots=True)
class LatentOptions:
    """Multi-head latent attention in its absorbed form, see `ops.LatentAttention`."""

    scale: float  # of the scores
