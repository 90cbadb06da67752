"""The shape of an encoder of any family, as its layers and the planner need it.

An encoder reads a whole text at once, every token seeing those on both sides, and gives a vector
for each of them; it keeps no KV and generates nothing. `models/encoders/` fills this record from
each family's config.json. Torch-free.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from .score_fields import ScoreLabels

EncoderActivation = Literal["gelu", "gelu_tanh", "silu", "relu", "tanh"]


@dataclass(frozen=True, slots=True)
class EncoderNames:
    """A checkpoint's names of an encoder's modules."""

    base: str  # before all but a head's, in checkpoints of more than the bare encoder
    tokens: str
    embedding_norm: str
    layer: str  # `{}`: its number; the next ones are below it
    queries_keys_values: tuple[str, ...]  # three modules, or one with all
    attention_output: str
    attention_norm: str
    up: str  # with gates: what is activated first, then what multiplies it
    down: str
    feed_forward_norm: str
    positions: str | None = None  # the table of learned ones
    token_types: str | None = None
    relative_bias: str | None = None  # the table of it, which all layers share
    final_norm: str | None = None
    unread: tuple[str, ...] = ()  # heads of other tasks


@dataclass(frozen=True, slots=True)
class ScoreHead:
    """From a pooled vector to a score for each label: norm(activation(dense(x))), then a linear
    layer."""

    labels: ScoreLabels
    pooling: Literal["cls", "mean"]
    output: str  # names in the checkpoint
    dense: str | None = None
    norm: str | None = None
    dense_activation: EncoderActivation = "tanh"
    has_dense_bias: bool = True

    @property
    def num_labels(self) -> int:
        """How many scores a text has."""
        return len(self.labels.names)


@dataclass(frozen=True, slots=True, kw_only=True)
class EncoderConfig:
    """`hidden_size` is a multiple of `num_heads`; of an encoder with rotary positions the quotient
    is even."""

    architecture: str  # a name of `models.encoders.registry.ENCODERS`
    hidden_size: int
    num_layers: int
    num_heads: int
    intermediate_size: int
    vocab_size: int
    max_positions: int  # tokens of the longest text
    num_token_types: int  # 0: tokens have none
    norm_eps: float
    activation: EncoderActivation
    names: EncoderNames
    torch_dtype: str | None  # as stored; None where config.json does not say it
    # Learned positions begin behind that of padding, where it has one (RoBERTa).
    padding_id: int | None = None
    is_normed_before: bool = False  # each block's input, not the sum behind it
    has_norm_bias: bool = True
    has_attention_bias: bool = True
    has_feed_forward_bias: bool = True
    has_gates: bool = False
    # [num_layers] How far a token sees to each side; None: everything.
    windows: tuple[int | None, ...] = ()
    # [num_layers] The base of rotary positions; none: learned ones.
    rope_thetas: tuple[float, ...] = ()
    num_relative_buckets: int = 0  # of distances by which scores are biased; 0: they are not
    head: ScoreHead | None = None  # set: the model gives scores, of texts or of pairs

    @property
    def head_dim(self) -> int:
        """The size of an attention head."""
        return self.hidden_size // self.num_heads

    @property
    def context_length(self) -> int:
        """The longest text, in tokens."""
        return self.max_positions

    @property
    def num_position_rows(self) -> int:
        """Of the table of learned positions; 0: there is none."""
        if self.rope_thetas:
            return 0
        return self.max_positions + (0 if self.padding_id is None else self.padding_id + 1)
