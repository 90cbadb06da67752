"""Qwen2.5-VL, Qwen3-VL and Qwen3-VL-MoE: the decoders of Qwen2, Qwen3 and Qwen3-MoE behind a vision
tower, with positions that have three axes within an image (mrope).

Sources: Qwen2.5-VL Technical Report (arXiv:2502.13923); Qwen3-VL's interleaved axes and features
for several layers (DeepStack, arXiv:2406.04334), as transformers computes both.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from ...checkpoint.config.fields import Fields
from ...checkpoint.config.model_config import DecoderConfig, ExpertNames
from ...checkpoint.config.vision_config import VisionConfig
from .qwen import read_qwen2, read_qwen3
from .qwen_moe import read_qwen3_moe

_MAX_BLOCKS = 1 << 10
_MAX_SIZE = 1 << 16
_MAX_SIDE = 1 << 10  # of patches and windows, in pixels; of a grid of positions
_GRID_FIELDS = ("mrope_section", "mrope_interleaved")
_TOKENS = {"image_token_id": 151655, "video_token_id": 151656}
_DEFAULTS_2_5 = {"rope_theta": 1e6, "rms_norm_eps": 1e-5}
_DEFAULTS_3 = {"rope_theta": 5e5, "rms_norm_eps": 1e-6, "max_position_embeddings": 128000}
_DEFAULTS_3_MOE = {
    **_DEFAULTS_3, "num_key_value_heads": 16, "num_local_experts": 60, "num_experts_per_tok": 4,
    "moe_intermediate_size": 1408, "norm_topk_prob": True,
}  # fmt: skip
_STACKS = ExpertNames(down="experts.down_proj")
_TOWER = {"patch_size": 14, "temporal_patch_size": 2, "spatial_merge_size": 2, "num_heads": 16}
_TOWER_2_5 = {
    **_TOWER, "depth": 32, "hidden_size": 3584, "intermediate_size": 3420, "window_size": 112,
    "out_hidden_size": 3584, "fullatt_block_indexes": [7, 15, 23, 31],
}  # fmt: skip
_TOWER_3 = {
    **_TOWER, "patch_size": 16, "depth": 27, "hidden_size": 1152, "intermediate_size": 4304,
    "out_hidden_size": 3584, "num_position_embeddings": 2304,
    "deepstack_visual_indexes": [8, 16, 24],
}  # fmt: skip


class _Tokens(NamedTuple):
    """The template's stand-ins."""

    image: int
    video: int


def read_qwen2_5_vl(config: Fields, architecture: str) -> DecoderConfig:
    """Axes in runs: the pairs of time, then those of height, then those of width."""
    text, sections = _text_of(config, _DEFAULTS_2_5, (16, 24, 24))
    text.restrict("mrope_interleaved", False)
    decoder = read_qwen2(text, architecture)
    axes = [axis % 3 for axis, length in enumerate(sections) for _ in range(length)]
    return _with_tower(config, decoder, axes, _tower_2_5)


def read_qwen3_vl(config: Fields, architecture: str) -> DecoderConfig:
    return _read_3(config, architecture, _DEFAULTS_3, read_qwen3)


def read_qwen3_vl_moe(config: Fields, architecture: str) -> DecoderConfig:
    """Experts in stacks of [E, H, 2 I] and [E, I, H]."""
    decoder = _read_3(config, architecture, _DEFAULTS_3_MOE, read_qwen3_moe)
    assert decoder.experts is not None
    experts = replace(decoder.experts, is_stacked=True, is_halved=True, names=_STACKS)
    return replace(decoder, experts=experts)


def _read_3(
    config: Fields,
    architecture: str,
    defaults: dict[str, Any],
    read_decoder: Callable[[Fields, str], DecoderConfig],
) -> DecoderConfig:
    """Axes in turn, as far as height and width have pairs; the others are time's."""
    text, sections = _text_of(config, defaults, (24, 20, 20))
    decoder = read_decoder(text, architecture)
    axes = [0] * sum(sections)
    for axis in (1, 2):
        for pair in range(axis, min(3 * sections[axis], len(axes)), 3):
            axes[pair] = axis
    return _with_tower(config, decoder, axes, _tower_3)


def _text_of(
    config: Fields, defaults: dict[str, Any], sections: Sequence[int]
) -> tuple[Fields, Sequence[int]]:
    """The decoder's fields, which older files have beside `vision_config`; and the number of
    rotated pairs of each axis."""
    text = config.nested("text_config") or config
    tied = config.flag("tie_word_embeddings", text.flag("tie_word_embeddings", False))
    dtype = config.get("dtype") or config.get("torch_dtype")
    outer = {"eos_token_id": config.get("eos_token_id")} if text.get("eos_token_id") is None else {}
    changed: dict[str, Any] = {"tie_word_embeddings": tied, **outer}
    for field in ("rope_scaling", "rope_parameters"):
        rope = text.nested(field)
        if rope is not None:
            sections = _sections(rope, sections)
            kept = {k: v for k, v in rope.values.items() if k not in _GRID_FIELDS}
            for name in ("type", "rope_type"):
                if kept.get(name) == "mrope":
                    kept[name] = "default"
            changed[field] = kept
    return Fields(config.file, {**defaults, "dtype": dtype, **text.values, **changed}), sections


def _sections(rope: Fields, default: Sequence[int]) -> Sequence[int]:
    given = rope.get("mrope_section")
    if given is None:
        return default
    if not isinstance(given, list) or len(given) != 3 or not all(type(n) is int for n in given):
        raise rope.fail("mrope_section", "three numbers of rotated pairs")
    if min(given) < 0 or sum(given) > _MAX_SIZE:
        raise rope.fail("mrope_section", "three numbers of rotated pairs")
    return given


def _with_tower(
    config: Fields,
    decoder: DecoderConfig,
    axes: Sequence[int],
    read: Callable[[Fields, _Tokens], VisionConfig],
) -> DecoderConfig:
    if len(axes) != decoder.rotary_dim // 2:
        expected = f"{decoder.rotary_dim // 2} rotated pairs of mrope_section in all"
        raise config.fail("text_config", expected)
    vision = config.nested("vision_config")
    if vision is None:
        raise config.fail("vision_config", "an object")
    with_tokens = config.with_defaults(_TOKENS)
    tokens = _Tokens(*(with_tokens.count(name) for name in _TOKENS))
    tower = read(vision, tokens)
    if tower.out_size != decoder.hidden_size:
        raise vision.fail("out_hidden_size", f"{decoder.hidden_size}, the decoder's hidden size")
    if tower.hidden_size % (4 * tower.num_heads):
        raise vision.fail("hidden_size", f"a multiple of 4 * num_heads={tower.num_heads}")
    return replace(decoder, vision=tower, rope_axes=tuple(axes), weight_prefix="language_model.")


def _tower_2_5(vision: Fields, tokens: _Tokens) -> VisionConfig:
    vision = vision.with_defaults(_TOWER_2_5)
    vision.restrict("hidden_act", "silu", "swish")
    return VisionConfig(
        kind="qwen2_5_vl",
        window_size=vision.integer("window_size", most=_MAX_SIDE),
        full_attention_blocks=vision.token_ids("fullatt_block_indexes"),
        positions_per_side=None,
        deepstack_blocks=(),
        **_shape(vision),
        image_token_id=tokens.image,
        video_token_id=tokens.video,
    )


def _tower_3(vision: Fields, tokens: _Tokens) -> VisionConfig:
    vision = vision.with_defaults(_TOWER_3)
    vision.restrict("hidden_act", "gelu_pytorch_tanh")
    num_positions = vision.integer("num_position_embeddings", most=_MAX_SIDE**2)
    side = round(num_positions**0.5)
    if side**2 != num_positions:
        raise vision.fail("num_position_embeddings", "a square number")
    shape = _shape(vision)
    blocks = vision.token_ids("deepstack_visual_indexes")
    if list(blocks) != sorted(set(blocks)) or any(b >= shape["num_blocks"] for b in blocks):
        raise vision.fail("deepstack_visual_indexes", "ascending numbers of blocks")
    return VisionConfig(
        kind="qwen3_vl",
        window_size=None,
        full_attention_blocks=(),
        positions_per_side=side,
        deepstack_blocks=blocks,
        **shape,
        image_token_id=tokens.image,
        video_token_id=tokens.video,
    )


def _shape(vision: Fields) -> dict[str, Any]:
    vision.restrict("in_channels", 3)
    vision.restrict("in_chans", 3)
    rope = vision.nested("rope_parameters") or Fields(vision.file, {})
    return {
        "num_blocks": vision.integer("depth", most=_MAX_BLOCKS),
        "hidden_size": vision.integer("hidden_size", most=_MAX_SIZE),
        "num_heads": vision.integer("num_heads", most=_MAX_SIZE),
        "intermediate_size": vision.integer("intermediate_size", most=_MAX_SIZE),
        "out_size": vision.integer("out_hidden_size", most=_MAX_SIZE),
        "patch_size": vision.integer("patch_size", most=_MAX_SIDE),
        "temporal_patch_size": vision.integer("temporal_patch_size", most=16),
        "merge_size": vision.integer("spatial_merge_size", most=16),
        "rope_theta": rope.number("rope_theta", 1e4),
    }
