"""The config.json fields that all decoder-only families share.

A family's reader starts from `read_decoder` and replaces what differs in its family. Each family
defines the values that Hugging Face uses for absent fields (`Fields.with_defaults`).
"""

from __future__ import annotations

from typing import Literal

from ...checkpoint.config.decoder_config import DecoderConfig
from ...checkpoint.config.fields import Fields
from ...checkpoint.config.rope_scaling import MAX_POSITIONS, read_rope

# Larger values would cost memory before a missing tensor is found; guesses, far above any model's.
_MAX_LAYERS = 10_000
_MAX_HEAD_DIM = 1 << 16

_ACTIVATIONS: dict[str, Literal["silu", "gelu", "gelu_tanh"]] = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_pytorch_tanh": "gelu_tanh",
}


def read_decoder(
    config: Fields, architecture: str, *, can_rotate_in_part: bool = False
) -> DecoderConfig:
    """Assumes full attention and no biases; a family's reader sets what differs.

    Raises:
        ModelLoadError: a missing or malformed field, or a value that is not implemented.
    """
    config.restrict("is_causal", True)
    hidden_size = config.integer("hidden_size")
    num_heads = config.integer("num_attention_heads")
    num_kv_heads = config.integer("num_key_value_heads", default=num_heads)
    if num_heads % num_kv_heads:
        raise config.fail("num_key_value_heads", f"a divisor of num_attention_heads={num_heads}")
    head_dim = _head_dim(config, hidden_size, num_heads)
    max_positions = config.integer("max_position_embeddings", 2048, most=MAX_POSITIONS)
    rope = read_rope(config, max_positions, head_dim, can_be_partial=can_rotate_in_part)
    return DecoderConfig(
        architecture=architecture,
        hidden_size=hidden_size,
        num_layers=config.integer("num_hidden_layers", most=_MAX_LAYERS),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        intermediate_size=config.integer("intermediate_size"),
        vocab_size=config.integer("vocab_size"),
        max_position_embeddings=max_positions,
        rope_theta=rope.theta,
        rope_scaling=rope.scaling,
        partial_rotary_dim=rope.partial_dim,
        rms_norm_eps=config.number("rms_norm_eps", 1e-6),
        tie_word_embeddings=config.flag("tie_word_embeddings", False),
        qkv_bias=False,
        output_bias=False,
        mlp_bias=False,
        eos_token_ids=config.token_ids("eos_token_id"),
        torch_dtype=_stored_dtype(config),
        activation=read_activation(config),
    )


def read_activation(
    config: Fields, field: str = "hidden_act"
) -> Literal["silu", "gelu", "gelu_tanh"]:
    """Silu where the field is absent."""
    name = config.get(field)
    if name is None:
        return "silu"
    if not isinstance(name, str) or name not in _ACTIVATIONS:
        raise config.fail(field, f"one of {', '.join(_ACTIVATIONS)}")
    return _ACTIVATIONS[name]


def _head_dim(config: Fields, hidden_size: int, num_heads: int) -> int:
    if config.get("head_dim") is None and hidden_size % num_heads:
        raise config.fail("hidden_size", f"a multiple of num_attention_heads={num_heads}")
    head_dim = config.integer("head_dim", max(1, hidden_size // num_heads), most=_MAX_HEAD_DIM)
    if head_dim % 2:
        raise config.fail("head_dim", "an even number, as rotary embeddings need")
    return head_dim


def _stored_dtype(config: Fields) -> str | None:
    value = config.get("dtype") or config.get("torch_dtype")
    return str(value) if value is not None else None
