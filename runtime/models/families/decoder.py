"""The config.json fields that all decoder-only families share.

A family's reader starts from `read_decoder` and replaces what differs in its family. Each family
defines the values that Hugging Face uses for absent fields (`Fields.with_defaults`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Literal

from ....kernels.model_options import DEFAULT_OPTIONS, AttentionOptions
from ...checkpoint.config.fields import Fields
from ...checkpoint.config.model_config import DecoderConfig, ExpertsConfig
from ...checkpoint.config.rope_scaling import MAX_POSITIONS, read_rope

# Larger values would cost memory before a missing tensor is found; guesses, far above any model's.
MAX_LAYERS = 10_000
MAX_HEAD_DIM = 1 << 16

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
        num_layers=config.integer("num_hidden_layers", most=MAX_LAYERS),
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
    head_dim = config.integer("head_dim", max(1, hidden_size // num_heads), most=MAX_HEAD_DIM)
    if head_dim % 2:
        raise config.fail("head_dim", "an even number, as rotary embeddings need")
    return head_dim


def _stored_dtype(config: Fields) -> str | None:
    value = config.get("dtype") or config.get("torch_dtype")
    return str(value) if value is not None else None


def with_experts(
    decoder: DecoderConfig,
    config: Fields,
    experts: ExpertsConfig,
    *,
    num_chosen: str = "num_experts_per_tok",
) -> DecoderConfig:
    """The decoder with these experts, or without any where no layer has them.

    num_chosen: the field of the number of experts a token.

    Raises:
        ModelLoadError: groups of unequal size, or a token can reach fewer experts than it takes.
    """
    routing, num_experts = experts.routing, experts.num_experts
    if num_experts % routing.num_groups:
        raise config.fail("n_group", f"a divisor of the number of experts, {num_experts}")
    if routing.group_rank == "best_two" and num_experts < 2 * routing.num_groups:
        raise config.fail(
            "n_group", f"at most {num_experts // 2}: groups are ranked by two experts"
        )
    if routing.num_chosen_groups > routing.num_groups:
        raise config.fail("topk_group", f"at most n_group={routing.num_groups}")
    in_reach = num_experts // routing.num_groups * routing.num_chosen_groups
    if routing.num_chosen > in_reach:
        raise config.fail(num_chosen, f"at most {in_reach}, the experts in reach")
    return replace(decoder, experts=experts if experts.layers else None)


def read_text_half(
    config: Fields, read: Callable[[Fields], DecoderConfig], *, is_tied: bool
) -> DecoderConfig:
    """The text model within one that also sees, whose other weights are not read.

    read: of its `text_config`; is_tied: whether the embedding is the output projection, if neither
    config says so.
    """
    text = config.nested("text_config")
    if text is None:
        raise config.fail("text_config", "an object")
    tied = config.flag("tie_word_embeddings", text.flag("tie_word_embeddings", is_tied))
    dtype = config.get("dtype") or config.get("torch_dtype")
    own = {"tie_word_embeddings": tied}
    decoder = read(Fields(config.file, {"dtype": dtype, **text.values, **own}))
    return replace(
        decoder,
        weight_prefix="language_model.",
        unread_weights=("vision_tower.", "multi_modal_projector."),
        eos_token_ids=config.token_ids("eos_token_id") or decoder.eos_token_ids,
    )


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


def layers_of_type(
    config: Fields, num_layers: int, name: str, default: Sequence[int]
) -> tuple[int, ...]:
    """The layers that `layer_types` gives this name; all others have full attention, at least one.
    default: which they are if config.json does not list them."""
    names = config.get("layer_types")
    layers = tuple(default)
    if names is not None:
        if not isinstance(names, list) or len(names) != num_layers:
            raise config.fail("layer_types", f"a list of {num_layers} names")
        if any(each not in (name, "full_attention") for each in names):
            raise config.fail("layer_types", f"names among {name}, full_attention")
        layers = tuple(index for index, each in enumerate(names) if each == name)
    if len(layers) == num_layers:
        raise config.fail("layer_types", "at least one layer of full_attention")
    return layers


def with_window_rope(
    config: Fields, read: Callable[[Fields], DecoderConfig], *, window_theta: str
) -> DecoderConfig:
    """The result of `read` for the layers without a window, plus the rotary base of the windowed
    layers, which are never scaled.

    window_theta: the field of this base in the layout of transformers 4. That layout does not give
    the length before scaling: `max_position_embeddings` is the length after it.
    """
    nested = config.nested("rope_parameters")
    full: dict[str, Any] = {}
    window = {"rope_theta": config.number(window_theta, 1e4), "rope_scaling": None}
    if nested is not None and "full_attention" in nested.values:
        full |= _of(nested, "full_attention")
        window |= _of(nested, "sliding_attention")
    decoder = read(_changed(config, full))
    windowed = read(_changed(config, window))
    if windowed.rope_scaling is not None:
        raise config.fail("rope_parameters", "no scaling of layers with sliding_attention")
    scaling = decoder.rope_scaling
    if scaling is not None:
        scaling = replace(scaling, max_positions=decoder.max_position_embeddings)
    return replace(decoder, rope_scaling=scaling, window_rope_theta=windowed.rope_theta)


def _of(nested: Fields, name: str) -> dict[str, Any]:
    part = nested.nested(name)
    return {"rope_scaling": None, "rope_parameters": {} if part is None else dict(part.values)}


def _changed(config: Fields, changes: dict[str, Any]) -> Fields:
    return Fields(config.file, {**config.values, **changes})
