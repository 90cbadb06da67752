"""GLM-4: half of each head rotated, its pairs side by side, and gates and ups as one matrix. The
models from 0414 on norm before and after each block."""

from __future__ import annotations

from dataclasses import replace

from ...checkpoint.config.fields import Fields
from ...checkpoint.config.model_config import DecoderConfig, LayerNames
from .decoder import read_decoder

_DEFAULTS = {
    "num_key_value_heads": 2,
    "head_dim": 128,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1.5625e-07,
    "partial_rotary_factor": 0.5,
}
_EOS = (151329, 151336, 151338)
_NAMES_4 = LayerNames(
    attended_norm="post_self_attn_layernorm",
    gate_up="gate_up_proj",
    output_norm="post_mlp_layernorm",
)


def read_glm(config: Fields, architecture: str) -> DecoderConfig:
    config = config.with_defaults(_DEFAULTS)
    config.restrict("mlp_bias", False)
    decoder = read_decoder(config, architecture, can_rotate_in_part=True)
    return replace(
        decoder,
        qkv_bias=config.flag("attention_bias", True),
        has_interleaved_rope=True,
        names=LayerNames(gate_up="gate_up_proj"),
        eos_token_ids=decoder.eos_token_ids or _EOS,
    )


def read_glm4(config: Fields, architecture: str) -> DecoderConfig:
    return replace(read_glm(config, architecture), norm_placement="around", names=_NAMES_4)
