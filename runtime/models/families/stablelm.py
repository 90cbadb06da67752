"""StableLM: LayerNorm in place of RMSNorm, heads rotated in part; where the config says so a norm
for each head, and both blocks side by side."""

from __future__ import annotations

from dataclasses import replace

from ...checkpoint.config.fields import Fields
from ...checkpoint.config.model_config import DecoderConfig, LayerNames
from .decoder import read_decoder

_DEFAULTS = {
    "num_key_value_heads": 32,
    "max_position_embeddings": 4096,
    "partial_rotary_factor": 0.25,
    "eos_token_id": 0,
}
_NAMES = LayerNames(query_norm="q_layernorm.norms.{}", key_norm="k_layernorm.norms.{}")


def read_stablelm(config: Fields, architecture: str) -> DecoderConfig:
    config = config.with_defaults(_DEFAULTS)
    for field in ("attention_bias", "mlp_bias"):
        config.restrict(field, False)
    own = {"rms_norm_eps": config.number("layer_norm_eps", 1e-5)}
    config = Fields(config.file, {**config.values, **own})
    decoder = read_decoder(config, architecture, can_rotate_in_part=True)
    if decoder.head_dim * decoder.num_heads != decoder.hidden_size:
        raise config.fail("head_dim", f"hidden_size / {decoder.num_heads}, the number of heads")
    return replace(
        decoder,
        qkv_bias=config.flag("use_qkv_bias", False),
        norm="layer",
        has_norm_bias=True,
        norm_placement="parallel" if config.flag("use_parallel_residual", False) else "before",
        query_key_norm="layer" if config.flag("qk_layernorm", False) else None,
        names=_NAMES,
    )
