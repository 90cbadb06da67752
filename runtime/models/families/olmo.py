"""OLMo 2: norms after the blocks instead of before; one norm over all query heads together, and one
over all key heads. OLMo 3 also has a window in three of four layers, which are rotated unscaled."""

from __future__ import annotations

from dataclasses import replace

from ...checkpoint.config.fields import Fields
from ...checkpoint.config.model_config import DecoderConfig
from .decoder import read_decoder, with_window_rope, with_windows

_DEFAULTS = {"rms_norm_eps": 1e-5, "eos_token_id": 50279}


def read_olmo2(config: Fields, architecture: str) -> DecoderConfig:
    config.restrict("clip_qkv")
    config.restrict("mlp_bias", False)
    attention_bias = config.flag("attention_bias", False)
    return replace(
        read_decoder(config.with_defaults(_DEFAULTS), architecture),
        qkv_bias=attention_bias,
        output_bias=attention_bias,
        norm_placement="after",
        query_key_norm="whole",
    )


def read_olmo3(config: Fields, architecture: str) -> DecoderConfig:
    config = config.with_defaults({"rope_theta": 5e5, "sliding_window": 4096})
    decoder = with_window_rope(
        config, lambda fields: read_olmo2(fields, architecture), window_theta="rope_theta"
    )
    default = [(index + 1) % 4 != 0 for index in range(decoder.num_layers)]
    window = config.optional_integer("sliding_window")
    return with_windows(decoder, config, default=default, window=window)
