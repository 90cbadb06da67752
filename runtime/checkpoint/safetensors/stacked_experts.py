"""Experts that a checkpoint stores as one tensor a layer, as tensors of their own. Torch-free.

    experts.gate_up_proj [E, 2 I, H]    experts.{}.gate_proj.weight, experts.{}.up_proj.weight
    experts.down_proj [E, H, I]         experts.{}.down_proj.weight

A stack's rows lie one after the other, so a part of it is a place in the file like any other: what
reads one expert after the other (rounding, a stack's copy) needs no case for them. Stacks whose
experts have biases lie the other way round (gpt-oss, [E, H, 2 I]) and are left as they are; so are
Llama 4's, which a `feed_forward.router` goes with, and Qwen3-VL's.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from .safetensors_header import Place

_MAX_EXPERTS = 1 << 14  # more are no experts
_GATE_UP = ("experts.{}.gate_proj.weight", "experts.{}.up_proj.weight")
_DOWN = ("experts.{}.down_proj.weight",)
# By the last parts of a stack's name: the names of an expert's parts in their place.
_STACKS = {
    "experts.gate_up_proj": _GATE_UP,  # Qwen3.5-MoE
    "experts.down_proj": _DOWN,
    "input_linear.weight": _GATE_UP,  # Granite, within block_sparse_moe
    "output_linear.weight": _DOWN,
}
# Tensors of which a checkpoint has one only if its stacks lie the other way round.
_OTHERWISE = (
    "experts.gate_up_proj_bias",
    "feed_forward.router.weight",
    "visual.deepstack_merger_list.0.norm.weight",
)


def is_stack(name: str) -> bool:
    """Whether a tensor of this name may be a stack."""
    return name.endswith(tuple(_STACKS))


def can_unstack(names: Iterable[str]) -> bool:
    """Whether the stacks of a checkpoint with these tensors are laid out as above."""
    return not any(name.endswith(_OTHERWISE) for name in names)


def unstacked(places: Mapping[str, Place]) -> dict[str, dict[str, Place]]:
    """By the name of each stack, the places of its experts' parts."""
    return {
        name: dict(zip(*_parts(name, place), strict=True))
        for name, place in places.items()
        if is_stack(name) and _can_be_cut(place, len(_endings_of(name)))
    }


def _can_be_cut(place: Place, num_parts: int) -> bool:
    """Into experts, and each of these into so many parts."""
    if len(place.shape) != 3 or not place.num_bytes:
        return False
    return place.shape[0] <= _MAX_EXPERTS and place.shape[1] % num_parts == 0


def _endings_of(name: str) -> tuple[str, ...]:
    return next(parts for ending, parts in _STACKS.items() if name.endswith(ending))


def _parts(name: str, place: Place) -> tuple[list[str], list[Place]]:
    ending = next(ending for ending in _STACKS if name.endswith(ending))
    endings, prefix = _endings_of(name), name.removesuffix(ending)
    num_experts, num_rows, num_columns = place.shape
    shape = (num_rows // len(endings), num_columns)
    num_bytes = place.num_bytes // (num_experts * len(endings))
    names = [prefix + part.format(expert) for expert in range(num_experts) for part in endings]
    return names, [
        Place(place.dtype, shape, place.start + index * num_bytes, num_bytes)
        for index in range(len(names))
    ]
