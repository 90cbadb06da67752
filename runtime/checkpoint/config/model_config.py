"""The shape of a decoder-only model of any family, as layers and memory sizing need it.

`models/families/` fills it from each family's config.json. Torch-free.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from ....kernels.model_options import (
    DEFAULT_OPTIONS,
    AttentionOptions,
    ClampedSwiGLU,
    LatentOptions,
    RoutingOptions,
)
from .rope_scaling import RopeScaling
from .score_fields import ScoreLabels
from .varied_layers import VariedLayers
from .vision_config import VisionConfig


@dataclass(frozen=True, slots=True)
class QueryScaling:
    """Queries at position p are multiplied by 1 + beta * ln(1 + floor((p + offset) / length)), so
    that scores stay as sharp over contexts longer than those of training (Llama 4; Ministral 3)."""

    beta: float
    length: int
    offset: int = 0
    is_without_rope: bool = False  # only in layers without rotary embedding


@dataclass(frozen=True, slots=True)
class LayerNames:
    """A checkpoint's names of a layer's modules, below the layer's name."""

    input_norm: str = "input_layernorm"
    attention: str = "self_attn"
    attention_output: str = "o_proj"  # below the attention's, as the next two
    query_norm: str = "q_norm"  # `{}`: a head's number, where each has a norm of its own
    key_norm: str = "k_norm"
    recurrence: str = "linear_attn"  # of a layer with a state in place of attention
    attended_norm: str = "post_attention_layernorm"  # of the attention's output
    middle_norm: str = "post_attention_layernorm"  # of the feed-forward block's input
    feed_forward: str = "mlp"
    gate_up: str | None = None  # one module with both, gates first, in place of the next two
    gate: str = "gate_proj"  # below the feed-forward block's, as the next two
    up: str = "up_proj"
    down: str = "down_proj"
    output_norm: str = "post_feedforward_layernorm"  # of the feed-forward block's output


@dataclass(frozen=True, slots=True)
class ExpertNames:
    """A checkpoint's names of a mixture's modules; `{}` is an expert's number."""

    block: str = "mlp"  # below the layer's name; the others are below the block's
    router: str = "gate"
    selection_bias: str = "gate.e_score_correction_bias"
    gate: str = "experts.{}.gate_proj"
    up: str = "experts.{}.up_proj"
    down: str = "experts.{}.down_proj"
    gate_up: str = "experts.gate_up_proj"  # of experts in one tensor; `down` then has no number
    shared: str = "shared_experts"
    is_shared_beside: bool = False  # the shared expert is below the layer's name, too
    shared_gate: str = "shared_expert_gate"


@dataclass(frozen=True, slots=True)
class ExpertsConfig:
    """The mixture of experts that replaces some layers' feed-forward block."""

    layers: tuple[int, ...]  # which have one; the others are dense
    num_experts: int
    intermediate_size: int  # of one expert
    routing: RoutingOptions
    shared_intermediate_size: int = 0  # of the expert that every token takes; 0: none
    has_shared_gate: bool = False  # a sigmoid gate weights the shared expert's output
    has_selection_bias: bool = False  # see `ops.RouteExperts`
    # The checkpoint has all experts of a layer in one tensor, gates and ups in turn.
    is_stacked: bool = False
    has_gates: bool = True  # else an expert is down(plain_activation(up(x)))
    latent_size: int = 0  # of what experts take and give, by projections; 0: the hidden size
    is_halved: bool = False  # the gates first, then the ups, in place of gates and ups in turn
    weighs_inputs: bool = False  # an expert's weight is multiplied with its input, not its output
    has_biases: bool = False  # of the router and of all experts' linears
    clamped: ClampedSwiGLU | None = None  # in place of the model's activation
    is_selection_bias_row: bool = False  # stored as [1, num_experts]
    names: ExpertNames = ExpertNames()


@dataclass(frozen=True, slots=True)
class IndexerConfig:
    """What selects the keys that latent attention is to (DeepSeek-V3.2, section 2.1): the cache
    holds one more key a token. How many are selected is an option of the layers' attention."""

    num_heads: int  # of its queries
    head_dim: int  # of its queries and keys, of which the first rope_dim numbers are rotated
    layers: tuple[int, ...]  # which select, the first among them; others take what was selected
    is_interleaved: bool = False  # rotated pairs are adjacent


@dataclass(frozen=True, slots=True)
class LatentConfig:
    """Multi-head latent attention (DeepSeek-V2, section 2.1): the cache holds one latent and one
    rotated key a token for all heads."""

    latent_dim: int  # kv_lora_rank
    rope_dim: int  # of the rotated part of keys and queries
    nope_dim: int  # of their other part, a head
    value_dim: int  # of a head
    query_latent_dim: int | None  # q_lora_rank; None: queries are projected directly
    is_interleaved: bool = True  # rotated pairs are adjacent in the checkpoint's projections
    indexer: IndexerConfig | None = None  # set: queries attend to selected keys


@dataclass(frozen=True, slots=True)
class ShortConvConfig:
    """out(C * conv(B * x)), the three of one projection (LFM2)."""

    kernel_size: int  # tokens, >= 2
    has_bias: bool = False  # of the convolution and of both projections


@dataclass(frozen=True, slots=True)
class GatedDeltaConfig:
    """A gated delta net: a short convolution, the gated delta rule, a gated norm."""

    kernel_size: int  # tokens, >= 2
    num_key_heads: int
    num_value_heads: int  # a multiple
    key_dim: int  # of a head
    value_dim: int  # of a head
    # The checkpoint has one projection for queries, keys, values and gates and one for rates and
    # decays, by key heads; or one each, queries, keys and values together.
    is_fused: bool = False
    # Kimi's: a decay for each number of a key, gates by projections of low rank; as many heads of
    # keys as of values, of one size.
    has_channel_decays: bool = False

    @property
    def num_channels(self) -> int:
        """Of the convolution: queries, keys and values of all heads."""
        return 2 * self.num_key_heads * self.key_dim + self.num_value_heads * self.value_dim


@dataclass(frozen=True, slots=True)
class Mamba2Config:
    """Mamba-2: a short convolution, a state-space scan, a gate and a norm (Granite 4)."""

    kernel_size: int  # tokens, >= 2
    num_heads: int
    num_groups: int  # of heads with the same keys and queries; a divisor
    state_dim: int  # of keys and queries
    head_dim: int
    has_convolution_bias: bool = True
    has_bias: bool = False  # of both projections
    step_limit: tuple[float, float] = (0.0, math.inf)

    @property
    def inner_size(self) -> int:
        """All heads together."""
        return self.num_heads * self.head_dim

    @property
    def num_channels(self) -> int:
        """Of the convolution: values, keys, queries."""
        return self.inner_size + 2 * self.num_groups * self.state_dim


@dataclass(frozen=True, slots=True)
class RecurrentConfig:
    """The layers with a state in place of attention and its KV."""

    layers: tuple[int, ...]  # which have one; at least one layer has attention
    mixer: ShortConvConfig | GatedDeltaConfig | Mamba2Config


@dataclass(frozen=True, slots=True)
class PredictorConfig:
    """The layer for multi-token prediction (models/predictor.py), by a checkpoint's names: whole
    ones, of a layer like the model's last with attention and what is around it."""

    layer: str
    token_norm: str
    hidden_norm: str
    merge: str
    norm: str  # behind the layer; its own, or the model's
    weights: tuple[str, ...]  # prefixes of all its tensors
    copies: tuple[str, ...] = ()  # prefixes, among them, of what the model has, too
    # What it hands on behind its own guess is behind the norm.
    hands_on_normed: bool = False
    is_hidden_first: bool = False  # `merge` takes the hidden state, then the token
    is_dense: bool = False  # it has no experts, though the model's last layer has


Block = Literal["attention", "recurrent", "dense", "experts"]


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderConfig:
    """`num_heads % num_kv_heads == 0`; `head_dim` and `rotary_dim` are even."""

    architecture: str  # a name of `models.families.registry.ARCHITECTURES`
    hidden_size: int
    num_layers: int
    num_heads: int  # query heads
    num_kv_heads: int  # key/value heads, each shared by num_heads / num_kv_heads query heads
    head_dim: int
    intermediate_size: int
    vocab_size: int
    max_position_embeddings: int
    rope_theta: float
    rope_scaling: RopeScaling | None  # None: plain rotary frequencies
    rms_norm_eps: float  # of all norms, of LayerNorm too
    tie_word_embeddings: bool  # the output projection is the embedding matrix
    qkv_bias: bool
    output_bias: bool  # bias of the attention's output projection
    mlp_bias: bool
    eos_token_ids: tuple[int, ...]  # that end an answer
    torch_dtype: str | None  # as stored, "bfloat16"; None where config.json does not say it
    activation: Literal["silu", "gelu", "gelu_tanh"] = "silu"  # of the feed-forward block's gates
    # The layers' kinds of attention; layer i has attention_kinds[layer_kinds[i]]. None: all have
    # the first.
    attention_kinds: tuple[AttentionOptions | LatentOptions, ...] = (DEFAULT_OPTIONS,)
    kind_of_layer: tuple[int, ...] | None = None
    has_sink_logits: bool = False  # a learned one for each query head, see `ops.PagedAttention`
    latent: LatentConfig | None = None  # set: all layers have latent attention
    experts: ExpertsConfig | None = None
    # Each layer is one block behind one norm; None: attention (or a recurrence) and a feed-forward
    # block each.
    single_blocks: tuple[Block, ...] | None = None
    varied: VariedLayers | None = None  # set: layers differ, and may share KV
    recurrent: RecurrentConfig | None = None  # set: some layers have a state and no KV
    has_attention_gate: bool = False  # sigmoid gates on attended heads, from the query projection
    # How much of a head is rotated; None: all. The rest has no position.
    partial_rotary_dim: int | None = None
    # Rotated pairs are adjacent in the checkpoint's queries and keys: (a0, b0, a1, b1, ...).
    has_interleaved_rope: bool = False
    # Set: layers with a window rotate by this base, unscaled; the others as above.
    window_rope_theta: float | None = None
    layers_without_rope: tuple[int, ...] = ()
    query_scaling: QueryScaling | None = None
    norm: Literal["rms", "layer"] = "rms"  # RMSNorm or LayerNorm
    has_norm_bias: bool = False  # of LayerNorm
    # Where a layer's norms are: before its attention and its feed-forward block, after them, or on
    # both sides; or one before both blocks, which then do not see each other's output.
    norm_placement: Literal["before", "after", "around", "parallel"] = "before"
    # Queries and keys are normed before rotation: each head by itself, or all of a token's; or by
    # LayerNorm without biases, with weights of each head's own; or each head without weights, in
    # layers with rotary embedding alone ("unit").
    query_key_norm: Literal["head", "whole", "layer", "unit"] | None = None
    is_normed_after_rotation: bool = False  # queries and keys, rather than before it
    has_unit_offset_norms: bool = False  # norms multiply by 1 + weight
    # Of feed-forward blocks, but not of experts; else down(plain_activation(up(x))).
    has_gates: bool = True
    plain_activation: Literal["gelu_tanh", "relu_squared"] = "gelu_tanh"
    logits_bias: bool = False  # of the output projection
    has_fused_projections: bool = False  # the checkpoint has one qkv_proj and one gate_up_proj
    vision: VisionConfig | None = None  # set: the checkpoint has a vision tower that can be loaded
    # Of positions in an image's grid: which axis (0 time, 1 height, 2 width) turns each rotated
    # pair. None: positions have one axis.
    rope_axes: tuple[int, ...] | None = None
    unread_weights: tuple[str, ...] = ()  # prefixes of tensors that are not part of the decoder
    predictor: PredictorConfig | None = None  # the layer that predicts one token more
    names: LayerNames = LayerNames()
    final_norm: str = "norm"  # the checkpoint's name
    weight_prefix: str = ""  # of all names in the checkpoint, if it has more than the decoder
    embedding_multiplier: float = 1.0
    residual_multiplier: float = 1.0  # of what each block adds to the residual stream
    logits_divisor: float = 1.0
    labels: ScoreLabels | None = None  # set: it classifies texts, by its last token's state
    is_bare: bool = False  # it has no output projection: it embeds or classifies, and no more
    logits_soft_cap: float | None = None  # logits become cap * tanh(logit / cap)

    @property
    def layer_kinds(self) -> tuple[int, ...]:
        """[num_layers] indices into `attention_kinds`."""
        return (0,) * self.num_layers if self.kind_of_layer is None else self.kind_of_layer

    @property
    def attention_layers(self) -> tuple[int, ...]:
        """The layers that keep KV, in order."""
        if self.varied is not None:
            return tuple(i for i, source in enumerate(self.varied.kv_sources) if i == source)
        if self.single_blocks is not None:
            return tuple(i for i, block in enumerate(self.single_blocks) if block == "attention")
        without = () if self.recurrent is None else self.recurrent.layers
        return tuple(index for index in range(self.num_layers) if index not in without)

    @property
    def kv_shapes(self) -> tuple[tuple[int, int], ...]:
        """(num_kv_heads, head_dim) of each of the attention_layers."""
        return tuple(self.kv_shape(layer) for layer in self.attention_layers)

    def kv_shape(self, layer_index: int) -> tuple[int, int]:
        """(num_kv_heads, head_dim) of a layer."""
        varied = self.varied
        if varied is None:
            return self.num_kv_heads, self.head_dim
        return varied.num_kv_heads[layer_index], varied.head_dims[layer_index]

    def has_window(self, layer_index: int) -> bool:
        """Whether the layer's attention has a window."""
        options = self.attention_kinds[self.layer_kinds[layer_index]]
        return isinstance(options, AttentionOptions) and options.window is not None

    @property
    def layer_ropes(self) -> tuple[tuple[float | None, RopeScaling | None], ...]:
        """[num_layers] (theta, scaling) of each layer's rotary embedding; theta None: no rotation
        at any position."""
        return tuple(self._rope_of(index) for index in range(self.num_layers))

    def _rope_of(self, layer_index: int) -> tuple[float | None, RopeScaling | None]:
        if layer_index in self.layers_without_rope:
            return None, None
        if self.window_rope_theta is not None and self.has_window(layer_index):
            return self.window_rope_theta, None
        return self.rope_theta, self.rope_scaling

    @property
    def rotary_dim(self) -> int:
        """How much of a head is rotated."""
        return self.head_dim if self.partial_rotary_dim is None else self.partial_rotary_dim

    @property
    def rotary_dims(self) -> tuple[int, ...]:
        """[num_layers]"""
        varied = self.varied
        return (self.rotary_dim,) * self.num_layers if varied is None else varied.head_dims

    @property
    def context_length(self) -> int:
        """The longest sequence."""
        scaling = self.rope_scaling
        return self.max_position_embeddings if scaling is None else scaling.max_positions


__all__ = ["ExpertsConfig", "LatentConfig", "ModelConfig", "RecurrentConfig"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig(DecoderConfig):
    """A decoder-only model and its default sampling."""

    default_temperature: float | None  # None: the checkpoint gives none
    default_top_p: float | None
    default_top_k: int | None
    default_min_p: float | None
    default_repetition_penalty: float | None
