"""The config.json fields that encoder families share."""

from __future__ import annotations

from typing import Any

from ...checkpoint.config.encoder_config import EncoderActivation
from ...checkpoint.config.fields import Fields

# Larger values would cost memory before a missing tensor is found; guesses.
MAX_POSITIONS = 1 << 24
_MAX_LAYERS = 10_000
_ACTIVATIONS: dict[str, EncoderActivation] = {
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "silu": "silu",
    "swish": "silu",
    "relu": "relu",
    "tanh": "tanh",
}


def read_activation(config: Fields, field: str) -> EncoderActivation:
    """GELU where the field is absent."""
    name = config.get(field)
    if name is None:
        return "gelu"
    if not isinstance(name, str) or name not in _ACTIVATIONS:
        raise config.fail(field, f"one of {', '.join(_ACTIVATIONS)}")
    return _ACTIVATIONS[name]


def shape_of(config: Fields, architecture: str) -> dict[str, Any]:
    """The sizes that all families name alike. Raises ModelLoadError."""
    config.restrict("is_decoder", False)
    config.restrict("add_cross_attention", False)
    hidden_size, num_heads = config.integer("hidden_size"), config.integer("num_attention_heads")
    if hidden_size % num_heads:
        raise config.fail("hidden_size", f"a multiple of num_attention_heads={num_heads}")
    stored = config.get("dtype") or config.get("torch_dtype")
    return {
        "architecture": architecture,
        "hidden_size": hidden_size,
        "num_layers": config.integer("num_hidden_layers", most=_MAX_LAYERS),
        "num_heads": num_heads,
        "intermediate_size": config.integer("intermediate_size"),
        "vocab_size": config.integer("vocab_size"),
        "torch_dtype": None if stored is None else str(stored),
    }


def require_even_heads(config: Fields) -> None:
    """Raises ModelLoadError where a head cannot be rotated."""
    if config.integer("hidden_size") // config.integer("num_attention_heads") % 2:
        raise config.fail("hidden_size", "heads of an even size, as rotary embeddings need")


def rope_theta(config: Fields, layer_type: str | None, *older: str, default: float) -> float:
    """The base of plain rotary positions: transformers 5's, of all layers or of a type of them, or
    one of the `older` fields. Raises ModelLoadError for any scaling."""
    config.restrict("rope_scaling")
    given = config.nested("rope_parameters")
    if given is not None and layer_type is not None:
        given = given.nested(layer_type)
    if given is not None:
        given.restrict("rope_type", "default")
        if given.get("rope_theta") is not None:
            return given.number("rope_theta", default)
    for name in older:
        if config.get(name) is not None:
            return config.number(name, default)
    return default
