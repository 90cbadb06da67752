"""The products and parameters of models whose layers differ (Gemma 3n, Gemma 4). Torch-free."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from ..runtime.checkpoint.config.model_config import DecoderConfig, ExpertsConfig
from ..runtime.checkpoint.config.varied_layers import AltUpConfig, VariedLayers
from .product import Product


def varied_products(config: DecoderConfig, varied: VariedLayers) -> Iterator[Product]:
    """Of all layers, those of one shape together."""
    hidden, layers = config.hidden_size, range(config.num_layers)
    for (size, num_modules), count in Counter(
        _projected(config, varied, i) for i in layers
    ).items():
        yield Product("qkv", hidden, size, count, num_modules=num_modules)
    for head_dim, count in Counter(varied.head_dims).items():
        size = config.num_heads * head_dim
        yield Product("attention output", size, hidden, count, num_modules=1)
    for size, count in Counter(varied.intermediate_sizes).items():
        yield Product("mlp gate and up", hidden, 2 * size, count, num_modules=2)
        yield Product("mlp down", size, hidden, count, num_modules=1)
    if config.experts is not None:
        yield from _experts(config, config.experts)
    if varied.token_input_size:
        yield from _token_inputs(config, varied.token_input_size)
    if varied.altup is not None:
        yield from _altup(config, varied.altup)


def varied_parameters(config: DecoderConfig, varied: VariedLayers) -> int:
    """All that are in no product, but for the embedding: norms, scalars, tables of layers."""
    hidden, layers, size = config.hidden_size, config.num_layers, varied.token_input_size
    count = hidden + layers * (4 * hidden + varied.has_output_scalars)
    for layer in range(layers):
        is_own = varied.kv_sources[layer] == layer
        count += varied.head_dims[layer] * (2 if is_own else 1)
        if config.qkv_bias:
            count += _projected(config, varied, layer)[0]
        count += hidden * config.output_bias
    if size:
        count += varied.token_input_vocab * layers * size + size + layers * hidden
    if varied.altup is not None:  # the router's norm, the output's scale, LAuReL's norm
        streams = varied.altup.num_streams
        count += layers * (3 * hidden + streams * hidden + streams**2 + streams**3)
    if config.experts is not None:
        count += layers * (4 * hidden + config.experts.num_experts)
    return count


def _projected(config: DecoderConfig, varied: VariedLayers, layer: int) -> tuple[int, int]:
    """Outputs and modules of the projection to queries, keys and values."""
    queries = config.num_heads * varied.head_dims[layer]
    if varied.kv_sources[layer] != layer:
        return queries, 1
    parts = 2 if varied.has_values[layer] else 1
    keys = varied.num_kv_heads[layer] * varied.head_dims[layer]
    return queries + parts * keys, 1 + parts


def _experts(config: DecoderConfig, experts: ExpertsConfig) -> Iterator[Product]:
    hidden, count, size = config.hidden_size, config.num_layers, experts.intermediate_size
    number = (experts.num_experts, experts.routing.num_chosen)
    yield Product("router", hidden, experts.num_experts, count, is_quantized=False)
    yield Product("experts gate and up", hidden, 2 * size, count, *number)
    yield Product("experts down", size, hidden, count, *number)


def _token_inputs(config: DecoderConfig, size: int) -> Iterator[Product]:
    hidden, layers = config.hidden_size, config.num_layers
    yield Product("token inputs", hidden, layers * size, 1, num_modules=1)
    yield Product("token input gate", hidden, size, layers, num_modules=1)
    yield Product("token input output", size, hidden, layers, num_modules=1)


def _altup(config: DecoderConfig, altup: AltUpConfig) -> Iterator[Product]:
    hidden, layers = config.hidden_size, config.num_layers
    yield Product("streams", hidden, hidden, 2 * (altup.num_streams - 1), num_modules=1)
    yield Product("laurel left", hidden, altup.laurel_rank, layers, num_modules=1)
    yield Product("laurel right", altup.laurel_rank, hidden, layers, num_modules=1)
