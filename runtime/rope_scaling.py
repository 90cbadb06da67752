"""How a checkpoint stretches its rotary embedding to longer contexts, read from config.json.

    transformers 4   rope_theta: 1e6, rope_scaling: {"type" | "rope_type": "yarn", "factor": 4, ...}
    transformers 5   rope_parameters: {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4, ...}

What the numbers do to the frequencies: `layers/rotary.py`. Torch-free.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum

from ..errors import ModelLoadError
from .config_fields import Fields

_DEFAULT_THETA = 10000.0


class RopeKind(Enum):
    """The scalings that are implemented."""

    LINEAR = "linear"
    DYNAMIC = "dynamic"
    LLAMA3 = "llama3"
    YARN = "yarn"


@dataclass(frozen=True, slots=True)
class RopeScaling:
    """One scaling with its numbers; those of other kinds have no meaning."""

    kind: RopeKind
    factor: float  # > 0; how many times longer the context becomes
    original_max_positions: int  # what the model was trained for before it was stretched
    max_positions: int  # the longest sequence
    low_freq_factor: float = 1.0  # llama3: wavelengths above original / low are divided by factor
    high_freq_factor: float = 4.0  # llama3: those below original / high stay as they are
    beta_fast: float = 32.0  # yarn: dimensions that turn more often within original stay
    beta_slow: float = 1.0  # yarn: those that turn less often are divided by factor
    is_truncated: bool = True  # yarn: these bounds are rounded to whole dimensions
    attention_factor: float = 1.0  # yarn: cos and sin are multiplied by it


def rope_theta_and_scaling(config: Fields, max_positions: int) -> tuple[float, RopeScaling | None]:
    """The base of the rotary frequencies, and how they are scaled (None: not at all).

    Raises ModelLoadError for a scaling that is not implemented or lacks a number.
    """
    theta = config.number("rope_theta", _DEFAULT_THETA)
    _require_whole_heads(config)
    fields = config.nested("rope_scaling") or config.nested("rope_parameters")
    if fields is None:
        return theta, None
    theta = fields.number("rope_theta", theta)
    name = fields.get("rope_type") or fields.get("type") or "default"
    _require_whole_heads(fields)
    if name == "default":
        return theta, None
    kinds = [kind.value for kind in RopeKind]
    if name not in kinds:
        raise ModelLoadError(
            f"{config.file}: rope scaling of type {name!r} is not supported; supported are: "
            f"{', '.join(['default', *kinds])}"
        )
    return theta, _scaling(RopeKind(name), fields, config, max_positions)


def _require_whole_heads(fields: Fields) -> None:
    if fields.number("partial_rotary_factor", 1.0) != 1.0:
        raise fields.fail("partial_rotary_factor", "1, rotary embedding of whole heads")


def _scaling(kind: RopeKind, fields: Fields, config: Fields, max_positions: int) -> RopeScaling:
    if kind in (RopeKind.LINEAR, RopeKind.DYNAMIC):
        factor = _required(fields, "factor")
        return RopeScaling(kind, factor, max_positions, int(max_positions * factor))
    original = config.integer(
        "original_max_position_embeddings",
        fields.integer("original_max_position_embeddings", max_positions),
    )
    if kind is RopeKind.LLAMA3:
        return RopeScaling(
            kind,
            _required(fields, "factor"),
            original,
            max_positions,
            low_freq_factor=_required(fields, "low_freq_factor"),
            high_freq_factor=_required(fields, "high_freq_factor"),
        )
    factor = fields.number("factor", max_positions / original)
    return RopeScaling(
        kind,
        factor,
        original,
        max(max_positions, int(original * factor)),
        beta_fast=fields.number("beta_fast", 32.0),
        beta_slow=fields.number("beta_slow", 1.0),
        is_truncated=fields.flag("truncate", True),
        attention_factor=_yarn_attention_factor(fields, factor),
    )


def _required(fields: Fields, name: str) -> float:
    if fields.get(name) is None:
        raise fields.fail(name, "a positive number")
    return fields.number(name, 1.0)


def _yarn_attention_factor(fields: Fields, factor: float) -> float:
    """As given, or the paper's 0.1 ln(factor) + 1, for DeepSeek a ratio of two of these."""

    def recommended(scale: float) -> float:
        return 1.0 if factor <= 1.0 else 0.1 * scale * math.log(factor) + 1.0

    default = recommended(1.0)
    if fields.get("mscale") and fields.get("mscale_all_dim"):
        scales = fields.number("mscale", 1.0), fields.number("mscale_all_dim", 1.0)
        default = recommended(scales[0]) / recommended(scales[1])
    return fields.number("attention_factor", default)
