"""Which layers have a sliding window: `layer_types` in config.json, or the family's default."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ....kernels.model_options import DEFAULT_OPTIONS, AttentionOptions
from ...checkpoint.config.decoder_config import DecoderConfig
from ...checkpoint.config.fields import Fields

_TYPES = {"full_attention": False, "sliding_attention": True}


def with_windows(
    decoder: DecoderConfig,
    config: Fields,
    *,
    default: Sequence[bool],
    window: int | None,
    options: AttentionOptions = DEFAULT_OPTIONS,
) -> DecoderConfig:
    """The decoder with its kinds of attention.

    default [num_layers]: which layers have the window, if config.json does not list them; window:
    in tokens, None: no layer has one; options: of all layers, except for the window.
    """
    has_window = _listed(config, decoder.num_layers) or list(default)
    if any(has_window) and window is None:
        raise config.fail("sliding_window", "a positive integer, as layer_types ask for it")
    kinds = sorted(set(has_window))
    return replace(
        decoder,
        attention_kinds=tuple(replace(options, window=window if k else None) for k in kinds),
        kind_of_layer=tuple(kinds.index(k) for k in has_window) if len(kinds) > 1 else None,
    )


def _listed(config: Fields, num_layers: int) -> list[bool] | None:
    names = config.get("layer_types")
    if names is None:
        return None
    if not isinstance(names, list) or len(names) != num_layers:
        raise config.fail("layer_types", f"a list of {num_layers} names")
    if any(not isinstance(name, str) or name not in _TYPES for name in names):
        raise config.fail("layer_types", f"names among {', '.join(_TYPES)}")
    return [_TYPES[name] for name in names]
