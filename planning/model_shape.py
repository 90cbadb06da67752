"""The matrix products and parameters of a model, counted from its config. Torch-free."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ..kernels.model_options import AttentionOptions
from ..runtime.checkpoint.config.model_config import (
    DecoderConfig,
    ExpertsConfig,
    GatedDeltaConfig,
    LatentConfig,
    Mamba2Config,
    RecurrentConfig,
    ShortConvConfig,
)
from ..runtime.models.layers.stage import ALL_LAYERS, Stage
from .product import Product
from .varied_shape import varied_parameters, varied_products


@dataclass(frozen=True, slots=True)
class AttentionLayers:
    """`count` layers with the same attention window and heads, or that select as many keys."""

    count: int
    num_visible: int | None  # keys that a query sees at most, including its own; None: all before
    num_kv_heads: int
    head_dim: int

    def num_keys(self, num_tokens: int, before: int) -> int:
        """Keys seen by `num_tokens` queries, each counted once, of a row with `before` earlier
        tokens."""
        keys = before + num_tokens
        return keys if self.num_visible is None else min(keys, self.num_visible + num_tokens - 1)

    def num_seen(self, befores: Sequence[int]) -> int:
        """The keys that lone queries see, added up; `befores`: tokens before each of them."""
        if self.num_visible is None:
            return sum(befores) + len(befores)
        return sum([min(before + 1, self.num_visible) for before in befores])

    def num_pairs(self, num_tokens: int, before: int) -> int:
        """The sum over the queries of the keys that each sees."""
        growing = num_tokens
        if self.num_visible is not None:
            growing = min(num_tokens, max(0, self.num_visible - before))
        pairs = growing * before + growing * (growing + 1) // 2
        return pairs + (num_tokens - growing) * (self.num_visible or 0)


@dataclass(frozen=True, slots=True)
class ModelShape:
    """All parts of a model that take memory or time, except for its KV and its states."""

    products: tuple[Product, ...]
    attention: tuple[AttentionLayers, ...]
    embedding_parameters: int  # also a tied head's, which has no parameters of its own
    is_head_tied: bool
    other_parameters: int  # norms, biases, sinks, convolutions, gates of shared experts, tables
    vision_parameters: int = 0  # of a vision tower, which no token passes

    @classmethod
    def of(cls, config: DecoderConfig, stage: Stage = ALL_LAYERS) -> ModelShape:
        """Count the parts of a model, or of a stage, whose config this then is: the first has the
        embedding, the last the output projection, which is its own where a model ties them."""
        hidden = config.hidden_size
        head = Product(
            "lm_head", hidden, config.vocab_size, 1, is_quantized=False, is_sampled_only=True
        )
        return cls(
            products=(*_layer_products(config), *([head] if stage.is_last else ())),
            attention=_attention_layers(config),
            embedding_parameters=hidden * config.vocab_size if stage.is_first else 0,
            is_head_tied=config.tie_word_embeddings and stage.is_whole,
            other_parameters=_other_parameters(config),
            vision_parameters=0 if config.vision is None else config.vision.num_parameters,
        )

    @property
    def num_parameters(self) -> int:
        """All parameters of the checkpoint."""
        products = sum(product.num_parameters for product in self.products)
        tied = self.embedding_parameters if self.is_head_tied else 0
        rest = self.embedding_parameters + self.other_parameters + self.vision_parameters
        return products - tied + rest

    @property
    def num_active_parameters(self) -> int:
        """All parameters except those of experts that a token does not use."""
        idle = sum(
            p.num_parameters * (p.num_experts - p.num_used) // p.num_experts for p in self.products
        )
        return self.num_parameters - idle - self.vision_parameters


def _layer_products(config: DecoderConfig) -> Iterator[Product]:
    if config.varied is not None:
        yield from varied_products(config, config.varied)
        return
    if config.latent is not None:
        yield from _latent_products(config, config.latent)
    else:
        yield from _attention_products(config)
    if config.recurrent is not None:
        yield from _recurrent_products(config)
    yield from _feed_forward_products(config)


def _other_parameters(config: DecoderConfig) -> int:
    if config.varied is not None:
        return varied_parameters(config, config.varied)
    others = (_norms, _biases, _sinks, _expert_vectors, _recurrent_vectors)
    return sum(count(config) for count in others)


def _attention_layers(config: DecoderConfig) -> tuple[AttentionLayers, ...]:
    """Also those that attend to another layer's KV."""
    all_layers = range(config.num_layers)
    layers = config.attention_layers if config.varied is None else all_layers
    counts = Counter(
        (_num_visible(config, config.layer_kinds[layer]), *config.kv_shape(layer))
        for layer in layers
    )
    return tuple(AttentionLayers(count, *alike) for alike, count in counts.items())


def _num_visible(config: DecoderConfig, kind: int) -> int | None:
    options = config.attention_kinds[kind]
    if not isinstance(options, AttentionOptions):
        return options.num_selected
    if options.window is None:
        return options.chunk
    return options.window + options.num_sink_tokens


def _attention_products(config: DecoderConfig) -> Iterator[Product]:
    q_size = config.num_heads * config.head_dim
    kv_size = config.num_kv_heads * config.head_dim
    hidden, layers = config.hidden_size, len(config.attention_layers)
    num_modules = 1 if config.has_fused_projections else 3
    q_out = q_size * (2 if config.has_attention_gate else 1)
    yield Product("qkv", hidden, q_out + 2 * kv_size, layers, num_modules=num_modules)
    yield Product("attention output", q_size, hidden, layers, num_modules=1)


def _latent_products(config: DecoderConfig, latent: LatentConfig) -> Iterator[Product]:
    hidden, layers, heads = config.hidden_size, len(config.attention_layers), config.num_heads
    query_size = heads * (latent.nope_dim + latent.rope_dim)
    if latent.query_latent_dim is None:
        yield Product("query", hidden, query_size, layers, num_modules=1)
    else:
        yield Product("query down", hidden, latent.query_latent_dim, layers, num_modules=1)
        yield Product("query up", latent.query_latent_dim, query_size, layers, num_modules=1)
    row_size = latent.latent_dim + latent.rope_dim
    yield Product("latent", hidden, row_size, layers, num_modules=1)
    if latent.indexer is not None:
        indexer, count = latent.indexer, len(latent.indexer.layers)
        size = indexer.num_heads * indexer.head_dim
        yield Product("index query", latent.query_latent_dim or 0, size, count)
        yield Product("index key", hidden, indexer.head_dim, count)
        yield Product("index weights", hidden, indexer.num_heads, count, is_quantized=False)
    up_size = heads * (latent.nope_dim + latent.value_dim)
    yield Product("latent up", latent.latent_dim, up_size, layers, is_quantized=False)
    yield Product("attention output", heads * latent.value_dim, hidden, layers, num_modules=1)


def _recurrent_products(config: DecoderConfig) -> Iterator[Product]:
    hidden, recurrent = config.hidden_size, _recurrent_of(config)
    mixer, layers = recurrent.mixer, len(recurrent.layers)
    inner_size = _inner_size(config)
    if isinstance(mixer, ShortConvConfig):
        yield Product("recurrent input", hidden, 3 * hidden, layers, num_modules=1)
    elif isinstance(mixer, Mamba2Config):
        out_size = inner_size + mixer.num_channels + mixer.num_heads
        yield Product("recurrent input", hidden, out_size, layers, num_modules=1)
    elif mixer.has_channel_decays:
        size, head_dim = inner_size, mixer.key_dim
        yield Product("recurrent input", hidden, 3 * size, layers, num_modules=3)
        rates = 2 * head_dim + mixer.num_value_heads
        yield Product("recurrent rates", hidden, rates, layers, num_modules=3)
        yield Product("recurrent decays", head_dim, size, layers, num_modules=1)
        yield Product("recurrent gates", head_dim, size, layers, num_modules=1)
    else:
        num_modules = 1 if mixer.is_fused else 2
        out_size, rates = mixer.num_channels + inner_size, 2 * mixer.num_value_heads
        yield Product("recurrent input", hidden, out_size, layers, num_modules=num_modules)
        yield Product("recurrent rates", hidden, rates, layers, num_modules=num_modules)
    yield Product("recurrent output", inner_size, hidden, layers, num_modules=1)


def _inner_size(config: DecoderConfig) -> int:
    """Of a recurrent layer's heads together."""
    mixer = _recurrent_of(config).mixer
    if isinstance(mixer, ShortConvConfig):
        return config.hidden_size
    if isinstance(mixer, Mamba2Config):
        return mixer.inner_size
    return mixer.num_value_heads * mixer.value_dim


def _recurrent_of(config: DecoderConfig) -> RecurrentConfig:
    assert config.recurrent is not None, "it has recurrent layers"
    return config.recurrent


def _recurrent_vectors(config: DecoderConfig) -> int:
    """Convolutions, decays, norms and biases of all recurrent layers."""
    if config.recurrent is None:
        return 0
    mixer, hidden = config.recurrent.mixer, config.hidden_size
    if isinstance(mixer, ShortConvConfig):
        own = hidden * mixer.kernel_size + (5 * hidden if mixer.has_bias else 0)
    elif isinstance(mixer, GatedDeltaConfig):
        own = mixer.num_channels * mixer.kernel_size + 2 * mixer.num_value_heads + mixer.value_dim
        if mixer.has_channel_decays:  # a step's bias for each of them
            own += mixer.num_value_heads * (mixer.key_dim - 1)
    else:
        own = mixer.num_channels * (mixer.kernel_size + mixer.has_convolution_bias)
        own += 3 * mixer.num_heads + mixer.inner_size
        if mixer.has_bias:
            own += mixer.inner_size + mixer.num_channels + mixer.num_heads + hidden
    return len(config.recurrent.layers) * own


def _feed_forward_products(config: DecoderConfig) -> Iterator[Product]:
    experts = config.experts
    num_dense = config.num_layers - (0 if experts is None else len(experts.layers))
    if config.single_blocks is not None:
        num_dense = config.single_blocks.count("dense")
    if num_dense:
        yield from _dense(config, "mlp", config.intermediate_size, num_dense)
    if experts is not None:
        yield from _expert_products(config, experts)


def _expert_products(config: DecoderConfig, experts: ExpertsConfig) -> Iterator[Product]:
    hidden, count = config.hidden_size, len(experts.layers)
    yield Product("router", hidden, experts.num_experts, count, is_quantized=False)
    number = (experts.num_experts, experts.routing.num_chosen)
    size, width = experts.intermediate_size, experts.latent_size or hidden
    ups = ("gate and up", 2 * size) if experts.has_gates else ("up", size)
    yield Product(f"experts {ups[0]}", width, ups[1], count, *number)
    yield Product("experts down", size, width, count, *number)
    if experts.latent_size:
        yield Product("experts in", hidden, width, count)
        yield Product("experts out", width, hidden, count)
    if experts.shared_intermediate_size:
        yield from _dense(config, "shared expert", experts.shared_intermediate_size, count)


def _dense(config: DecoderConfig, name: str, size: int, count: int) -> Iterator[Product]:
    is_fused = config.has_fused_projections or config.names.gate_up is not None
    hidden, num_modules = config.hidden_size, 1 if is_fused else 2
    if config.has_gates:
        yield Product(f"{name} gate and up", hidden, 2 * size, count, num_modules=num_modules)
    else:
        yield Product(f"{name} up", hidden, size, count, num_modules=1)
    yield Product(f"{name} down", size, hidden, count, num_modules=1)


def _norms(config: DecoderConfig) -> int:
    """Parameters of all layers' norms, and of the last."""
    own = 0
    if config.latent is not None:
        latent = config.latent
        own = latent.latent_dim + (latent.query_latent_dim or 0)
    elif config.query_key_norm == "head":
        own = 2 * config.head_dim
    elif config.query_key_norm in ("whole", "layer"):
        own = (config.num_heads + config.num_kv_heads) * config.head_dim
    number = {"around": 4, "parallel": 1}.get(config.norm_placement, 2)
    number = number if config.single_blocks is None else 1
    own *= len(config.attention_layers)
    if config.latent is not None and config.latent.indexer is not None:
        own += 2 * config.latent.indexer.head_dim * len(config.latent.indexer.layers)
    return (config.num_layers * number + 1) * _norm_size(config) + own


def _norm_size(config: DecoderConfig) -> int:
    """Parameters of a norm of hidden states."""
    return config.hidden_size * (2 if config.has_norm_bias else 1)


def _biases(config: DecoderConfig) -> int:
    """Biases of all layers' attention and feed-forward blocks, including shared experts, and of
    the output projection."""
    attention = config.hidden_size if config.output_bias else 0
    if config.qkv_bias:
        latent = config.latent
        attention += (
            (config.num_heads * (1 + config.has_attention_gate) + 2 * config.num_kv_heads)
            * config.head_dim
            if latent is None
            else (latent.query_latent_dim or 0) + latent.latent_dim + latent.rope_dim
        )
    gated = 0
    if config.mlp_bias:
        blocks = (p for p in _feed_forward_products(config) if p.num_experts == 1)
        gated = sum(p.out_features * p.count for p in blocks if p.is_quantized)
    head = config.vocab_size if config.logits_bias else 0
    return len(config.attention_layers) * attention + gated + head


def _sinks(config: DecoderConfig) -> int:
    return len(config.attention_layers) * config.num_heads * config.has_sink_logits


def _expert_vectors(config: DecoderConfig) -> int:
    """The routers' biases, the gates of shared experts, and the experts' biases."""
    experts = config.experts
    if experts is None:
        return 0
    gate = config.hidden_size if experts.has_shared_gate else 0
    bias = experts.num_experts if experts.has_selection_bias else 0
    own = 2 * experts.intermediate_size + config.hidden_size + 1  # and one of the router
    biases = experts.num_experts * own if experts.has_biases else 0
    return len(experts.layers) * (gate + bias + biases)
