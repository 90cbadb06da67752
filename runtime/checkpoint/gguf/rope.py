"""Converts GGUF's rotary embedding to the fields of config.json. Torch-free.

A file stores Llama 3's scaling as one resulting factor for each frequency (`rope_freqs.weight`).
They are converted back to its four parameters where these give the same factors, and else used as
they are.
"""

from __future__ import annotations

import math
from typing import Any

from .hyperparameters import Hyperparameters

_FREQUENCIES = "rope_freqs.weight"
_LONG, _SHORT = "rope_factors_long.weight", "rope_factors_short.weight"
_DEFAULT_BASES = {"gemma3": 1_000_000.0}  # llama.cpp's constant
_TOLERANCE = 1e-4
# Of Llama 3.1 to 3.3: low and high frequency factor, original context length.
_USUAL_LLAMA3 = (1.0, 4.0, 8192)


def rope_fields(model: Hyperparameters, head_dim: int) -> dict[str, Any]:
    """`rope_theta`, `rope_scaling` and related fields.

    Raises:
        ModelLoadError: an unknown kind of scaling, or missing numbers.
    """
    theta = model.number("rope.freq_base", _DEFAULT_BASES.get(model.architecture, 10_000.0))
    rotary_dim = model.integer("rope.dimension_count", head_dim)
    fields: dict[str, Any] = {"rope_theta": theta, "rope_scaling": None}
    # If heads have parts of both kinds (deepseek2), the rotated part counts as a whole one.
    if rotary_dim != head_dim and model.architecture != "deepseek2":
        fields["partial_rotary_factor"] = rotary_dim / head_dim
    if model.has_tensor(_FREQUENCIES):
        factors = model.factors(_FREQUENCIES, rotary_dim // 2)
        return fields | {"rope_scaling": _llama3(model, factors, theta, rotary_dim)}
    if model.has_tensor(_LONG):
        return fields | _longrope(model, rotary_dim)
    kind = model.get("rope.scaling.type")
    if kind in (None, "none"):
        factor = model.optional_number("rope.scale_linear")
        if factor not in (None, 1.0):
            fields["rope_scaling"] = {"rope_type": "linear", "factor": factor}
        return fields
    factor = model.optional_number("rope.scaling.factor")
    if kind == "linear":
        scaling = {"rope_type": "linear", "factor": factor}
        return fields | {"rope_scaling": None if factor in (None, 1.0) else scaling}
    if kind == "yarn" and factor is not None:
        return fields | {"rope_scaling": _yarn(model, factor)}
    raise model.fail("rope.scaling.type", "none, linear, yarn or longrope, with its numbers")


def _yarn(model: Hyperparameters, factor: float) -> dict[str, Any]:
    scaling: dict[str, Any] = {
        "rope_type": "yarn",
        "factor": factor,
        "original_max_position_embeddings": model.integer("rope.scaling.original_context_length"),
    }
    optional = {
        "attention_factor": "rope.scaling.yarn_attn_factor",
        "beta_fast": "rope.scaling.yarn_beta_fast",
        "beta_slow": "rope.scaling.yarn_beta_slow",
    }
    for name, key in optional.items():
        value = model.optional_number(key)
        if value is not None:
            scaling[name] = value
    multiplier = model.optional_number("rope.scaling.yarn_log_multiplier")
    if multiplier is not None:
        # mscale_all_dim, which equals mscale in all these models; of DeepSeek's a tenth.
        if model.architecture == "deepseek2":
            multiplier *= 10
        scaling["mscale"] = scaling["mscale_all_dim"] = round(multiplier, 6)
    return scaling


def _longrope(model: Hyperparameters, rotary_dim: int) -> dict[str, Any]:
    original = model.integer("rope.scaling.original_context_length")
    scaling = {
        "rope_type": "longrope",
        "short_factor": model.factors(_SHORT, rotary_dim // 2),
        "long_factor": model.factors(_LONG, rotary_dim // 2),
        "original_max_position_embeddings": original,
    }
    attention_factor = model.optional_number("rope.scaling.attn_factor")
    if attention_factor is not None:
        scaling["attention_factor"] = attention_factor
    return {"rope_scaling": scaling, "original_max_position_embeddings": original}


def _llama3(
    model: Hyperparameters, factors: list[float], theta: float, rotary_dim: int
) -> dict[str, Any] | None:
    factor = max(factors)
    if factor == 1.0:
        return None
    waves = [2 * math.pi * theta ** (2 * i / rotary_dim) for i in range(len(factors))]
    candidates = [_USUAL_LLAMA3]
    original = model.count("rope.scaling.original_context_length") or _USUAL_LLAMA3[2]
    fitted = _fitted(waves, factors, factor, original)
    if fitted is not None:
        candidates.append(fitted)
    for low, high, length in candidates:
        made = [_llama3_factor(wave, factor, low, high, length) for wave in waves]
        if all(abs(a - b) <= _TOLERANCE * b for a, b in zip(made, factors, strict=True)):
            return {
                "rope_type": "llama3",
                "factor": factor,
                "low_freq_factor": low,
                "high_freq_factor": high,
                "original_max_position_embeddings": length,
            }
    return _as_stored(model, factors)


def _as_stored(model: Hyperparameters, factors: list[float]) -> dict[str, Any]:
    """Periods multiplied by these factors, whatever made them: LongRoPE's form, with the same ones
    for short and long contexts."""
    return {
        "rope_type": "longrope",
        "short_factor": factors,
        "long_factor": factors,
        "attention_factor": 1.0,
        "original_max_position_embeddings": model.integer("context_length"),
    }


def _llama3_factor(wave: float, factor: float, low: float, high: float, length: int) -> float:
    """The divisor of the frequency with this wavelength."""
    if wave < length / high:
        return 1.0
    if wave > length / low:
        return factor
    share = (length / wave - low) / (high - low)
    return 1 / ((1 - share) / factor + share)


def _fitted(
    waves: list[float], factors: list[float], factor: float, length: int
) -> tuple[float, float, int] | None:
    """Low and high frequency factor for this original length, from two blended frequencies: the
    share of the plain one is linear in 1 / wavelength. (All three parameters may be multiplied by
    one number, so the length can be chosen.) None where fewer are blended."""
    blended = [(1 / w, (1 / f - 1 / factor) / (1 - 1 / factor)) for w, f in zip(waves, factors)]
    blended = [(x, share) for x, share in blended if 1e-3 < share < 1 - 1e-3]
    if len(blended) < 2:
        return None
    (first_x, first_share), (last_x, last_share) = blended[0], blended[-1]
    slope = (last_share - first_share) / (last_x - first_x)
    if slope <= 0:
        return None
    width = length / slope  # high - low
    low = first_x * length - first_share * width
    return (round(low, 4), round(low + width, 4), length) if low > 1e-3 else None
