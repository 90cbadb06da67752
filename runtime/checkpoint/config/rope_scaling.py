"""How a checkpoint scales its rotary embedding to longer contexts, read from config.json.

    transformers 4   rope_theta: 1e6, rope_scaling: {"type" | "rope_type": "yarn", "factor": 4, ...}
    transformers 5   rope_parameters: {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4, ...}

`layers/rotary.py` applies the numbers to the frequencies. Torch-free.
"""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass
from enum import Enum

from ....errors import ModelLoadError
from .fields import Fields, is_finite

_DEFAULT_THETA = 10000.0
MAX_POSITIONS = 1 << 24  # of a context, the limit of --max-model-len
# Fields allowed in an object that describes a rotary embedding; "finetuned" has no effect.
_KNOWN = frozenset(
    {"rope_type", "type", "rope_theta", "factor", "original_max_position_embeddings",
     "partial_rotary_factor", "low_freq_factor", "high_freq_factor", "beta_fast", "beta_slow",
     "truncate", "attention_factor", "mscale", "mscale_all_dim", "short_factor", "long_factor",
     "finetuned"}
)  # fmt: skip
# From early YaRN code; Hugging Face ignores both, and published checkpoints contain them.
_IGNORED = frozenset({"attn_factor", "extrapolation_factor"})

logger = logging.getLogger(__name__)


class RopeKind(Enum):
    """The implemented scalings."""

    LINEAR = "linear"
    DYNAMIC = "dynamic"
    LLAMA3 = "llama3"
    YARN = "yarn"
    LONGROPE = "longrope"
    PROPORTIONAL = "proportional"  # Gemma 4's, which its reader reads

    @property
    def is_chosen_by_length(self) -> bool:
        """Whether the frequencies depend on the longest sequence that an engine may hold."""
        return self in (RopeKind.DYNAMIC, RopeKind.LONGROPE)


@dataclass(frozen=True, slots=True)
class RopeScaling:
    """One scaling with its numbers; numbers of other kinds have no meaning."""

    kind: RopeKind
    factor: float  # > 0; how many times longer the context becomes
    original_max_positions: int  # the context of training, before scaling
    max_positions: int  # the longest sequence
    low_freq_factor: float = 1.0  # llama3: wavelengths above original / low are divided by factor
    high_freq_factor: float = 4.0  # llama3: wavelengths below original / high are not changed
    beta_fast: float = 32.0  # yarn: dimensions that turn more often within original are not changed
    beta_slow: float = 1.0  # yarn: dimensions that turn less often are divided by factor
    is_truncated: bool = True  # yarn: these bounds are rounded to whole dimensions
    attention_factor: float = 1.0  # yarn, longrope: cos and sin are multiplied by it
    # longrope: periods are multiplied by these, [rotary_dim / 2]: the long ones if sequences may
    # exceed the original length.
    short_factors: tuple[float, ...] = ()
    long_factors: tuple[float, ...] = ()
    rotated_share: float = 1.0  # proportional: of the pairs of a head; the rest stands still


@dataclass(frozen=True, slots=True)
class Rope:
    """A rotary embedding as config.json describes it."""

    theta: float  # base of the frequencies
    scaling: RopeScaling | None
    partial_dim: int | None  # how much of a head is rotated; None: all


def read_rope(
    config: Fields, max_positions: int, head_dim: int, *, can_be_partial: bool = False
) -> Rope:
    """Read `rope_scaling` or `rope_parameters`, whichever exists, and related fields beside it.

    can_be_partial: whether the family's heads may be partly rotated.

    Raises ModelLoadError for a scaling that is not implemented or lacks a number.
    """
    fields = config.nested("rope_scaling") or config.nested("rope_parameters")
    fields = fields or Fields(config.file, {})
    theta = fields.number("rope_theta", config.number("rope_theta", _DEFAULT_THETA))
    partial_dim = _partial_dim(config, fields, head_dim, can_be_partial)
    scaling = _named_scaling(config, fields, max_positions, partial_dim or head_dim)
    if scaling is not None and scaling.kind is RopeKind.YARN and theta <= 1.0:
        source = config if fields.get("rope_theta") is None else fields
        raise source.fail("rope_theta", "a number above 1, as YaRN needs")
    return Rope(theta, scaling, partial_dim)


def _partial_dim(config: Fields, fields: Fields, head_dim: int, can_be_partial: bool) -> int | None:
    name = "partial_rotary_factor"
    source = config if fields.get(name) is None else fields
    share = source.number(name, 1.0)
    if share == 1.0:
        return None
    if not can_be_partial:
        raise source.fail(name, "1, rotary embedding of whole heads")
    rotary_dim = int(head_dim * share)
    if share > 1.0 or rotary_dim < 2 or rotary_dim % 2:
        raise source.fail(name, f"an even share, at most 1, of head_dim={head_dim}")
    return rotary_dim


def _named_scaling(
    config: Fields, fields: Fields, max_positions: int, rotary_dim: int
) -> RopeScaling | None:
    name = fields.get("rope_type") or fields.get("type") or "default"
    kinds = ["default", *(kind.value for kind in RopeKind if kind is not RopeKind.PROPORTIONAL)]
    if name not in kinds:
        raise ModelLoadError(
            f"{config.file}: rope scaling of type {name!r} is not supported; supported are: "
            f"{', '.join(kinds)}"
        )
    if ignored := sorted(fields.values.keys() & _IGNORED):
        logger.warning("%s: of the rotary embedding, %s: not used", fields.file, ", ".join(ignored))
    if unknown := sorted(fields.values.keys() - _KNOWN - _IGNORED):
        raise fields.fail(unknown[0], "no such field: its rotary embedding is not implemented")
    if name == "default":
        return None
    return _scaling(RopeKind(name), fields, config, max_positions, rotary_dim)


def _scaling(
    kind: RopeKind, fields: Fields, config: Fields, max_positions: int, rotary_dim: int
) -> RopeScaling:
    if kind in (RopeKind.LINEAR, RopeKind.DYNAMIC):
        factor = _required(fields, "factor")
        if kind is RopeKind.DYNAMIC and rotary_dim < 4:
            name = "type" if fields.get("rope_type") is None else "rope_type"
            raise fields.fail(
                name, f"another where heads rotate {rotary_dim} dimensions: 4 or more"
            )
        return RopeScaling(kind, factor, max_positions, _stretched(fields, max_positions, factor))
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
    if original < 2:
        raise fields.fail("original_max_position_embeddings", "an integer > 1")
    factor = fields.number("factor", max_positions / original)
    if kind is RopeKind.LONGROPE:
        default = 1.0 if factor <= 1.0 else math.sqrt(1 + math.log(factor) / math.log(original))
        return RopeScaling(
            kind,
            factor,
            original,
            max_positions,
            attention_factor=fields.number("attention_factor", default),
            short_factors=_factors(fields, "short_factor", rotary_dim),
            long_factors=_factors(fields, "long_factor", rotary_dim),
        )
    return RopeScaling(
        kind,
        factor,
        original,
        max(max_positions, _stretched(fields, original, factor)),
        beta_fast=fields.number("beta_fast", 32.0),
        beta_slow=fields.number("beta_slow", 1.0),
        is_truncated=fields.flag("truncate", True),
        attention_factor=_yarn_attention_factor(fields, factor),
    )


def _stretched(fields: Fields, num_positions: int, factor: float) -> int:
    """The number of positions times the factor."""
    if not 1 <= num_positions * factor <= MAX_POSITIONS:
        allowed = f"one that makes 1 to {MAX_POSITIONS:,} of {num_positions:,} positions"
        raise fields.fail("factor", allowed)
    return int(num_positions * factor)


def _factors(fields: Fields, name: str, rotary_dim: int) -> tuple[float, ...]:
    values = fields.get(name)
    expected = f"a list of {rotary_dim // 2} positive numbers"
    if not isinstance(values, list) or len(values) != rotary_dim // 2:
        raise fields.fail(name, expected)
    if not all(is_finite(value) and value > 0 for value in values):
        raise fields.fail(name, expected)
    return tuple(float(value) for value in values)


def _required(fields: Fields, name: str) -> float:
    if fields.get(name) is None:
        raise fields.fail(name, "a positive number")
    return fields.number(name, 1.0)


def _yarn_attention_factor(fields: Fields, factor: float) -> float:
    """As given, else the paper's 0.1 ln(factor) + 1, for DeepSeek a ratio of two of these."""

    def recommended(scale: float) -> float:
        return 1.0 if factor <= 1.0 else 0.1 * scale * math.log(factor) + 1.0

    default = recommended(1.0)
    if fields.get("mscale") and fields.get("mscale_all_dim"):
        scales = fields.number("mscale", 1.0), fields.number("mscale_all_dim", 1.0)
        default = recommended(scales[0]) / recommended(scales[1])
    return fields.number("attention_factor", default)
