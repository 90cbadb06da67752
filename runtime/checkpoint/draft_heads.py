"""Heads that guess from a model's hidden states: which kind a folder holds, and what its config and
its maps of token ids say. Torch-free.

The fields and names are those of the published checkpoints (SafeAILab/EAGLE, SpecForge,
vllm-project/speculators).
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import numpy as np
import numpy.typing as npt

from ...errors import ModelLoadError
from .config.fields import Fields
from .model_files import PICKLED_SUFFIXES
from .safetensors.safetensors_header import Place, open_header

HeadKind = Literal["eagle", "eagle3", "medusa"]

_NUM_STATES = 3  # that an EAGLE-3 head reads
_OFFSETS = "d2t"
_NUM_MEDUSA_HEADS = "medusa_num_heads"
_NUM_NAMED = 5  # tensors, in a message
_MAX_MEDUSA_HEADS = 64  # far above any that were published


@dataclass(frozen=True, slots=True)
class Eagle:
    """A head of the first EAGLE (models/eagle.py)."""


@dataclass(frozen=True, slots=True, eq=False)
class Eagle3:
    """A head of EAGLE-3 (models/eagle3.py)."""

    # Of the model: its hidden states behind so many layers are read, ascending in [1, num_layers].
    layers: tuple[int, ...]
    vocab_size: int  # of the tokens that it may guess
    # [vocab_size] the model's ids of them; None: the same
    token_ids: npt.NDArray[np.int64] | None = field(repr=False)
    has_output: bool  # an output projection of its own; else the model's
    has_embedding: bool  # an embedding of its own; else the model's
    is_residual_normed: bool = False  # the residual stream begins with the normed hidden state
    is_input_normed: bool = False  # the hidden states that it reads are normed together


@dataclass(frozen=True, slots=True)
class Medusa:
    """Medusa's heads (models/medusa.py)."""

    num_heads: int
    num_layers: int  # residual blocks of each
    has_bias: bool  # of the blocks


Head = Eagle | Eagle3 | Medusa


def head_kind(folder: Path) -> HeadKind | None:
    """None: it is a model. Raises ModelLoadError for files that cannot be read."""
    names = _places(folder).keys()
    file = folder / "config.json"
    if file.exists() and _NUM_MEDUSA_HEADS in Fields.read(file).values:
        return "medusa"
    if any(name.removeprefix("model.").startswith("midlayer.") for name in names):
        return "eagle3"
    if "layers.0.hidden_norm.weight" in {name.removeprefix("model.") for name in names}:
        return "eagle3"
    if "fc.weight" in names and not any(name.startswith("model.") for name in names):
        return "eagle"
    return None


def require_model(folder: Path) -> None:
    """Of a folder that is no head. Raises ModelLoadError where it is no model either."""
    if (folder / "tokenizer.json").exists():
        return
    names = sorted(_places(folder))
    found = "there are no tensors" if not names else f"there are {', '.join(names[:_NUM_NAMED])}"
    raise ModelLoadError(
        f"{folder}: neither a model, which has a tokenizer.json, nor a head: EAGLE's has fc.weight "
        "and layers.0.*, EAGLE-3's also midlayer.* or layers.0.hidden_norm.weight, and Medusa's "
        f"{_NUM_MEDUSA_HEADS} in its config.json; {found}"
    )


def read_eagle3(folder: Path, hidden_size: int, vocab_size: int, num_layers: int) -> Eagle3:
    """A head for a model of this shape. Raises ModelLoadError where it is for another one."""
    config = Fields.read(folder / "config.json")
    places = _places(folder)
    for flag in ("fc_norm", "use_aux_norm", "norm_output", "parallel_drafting"):
        config.restrict(flag, False)
    nested = config.nested("eagle_config") or Fields(config.file, {})
    nested.restrict("use_aux_hidden_state", True)
    if config.integer("target_hidden_size", hidden_size) != hidden_size:
        raise config.fail("target_hidden_size", f"the model's hidden_size, {hidden_size}")
    own = config.nested("transformer_layer_config") or config
    has_embedding = any(name.endswith("embed_tokens.weight") for name in places)
    has_output = "lm_head.weight" in places
    if own.integer("hidden_size") != hidden_size and not (has_embedding and has_output):
        expected = f"{hidden_size}, the model's, as it has no embed_tokens and lm_head of its own"
        raise own.fail("hidden_size", expected)
    if own.integer("vocab_size", vocab_size) != vocab_size:
        raise own.fail("vocab_size", f"the model's, {vocab_size}")
    size = config.integer("draft_vocab_size", vocab_size)
    token_ids = _token_ids(folder, places, size, vocab_size)
    if size != vocab_size and not has_output:
        raise ModelLoadError(
            f"{folder}: tensor 'lm_head.weight' is missing: draft_vocab_size={size}"
        )
    return Eagle3(
        _layers(config, nested, num_layers),
        size,
        token_ids,
        has_output,
        has_embedding,
        config.flag("norm_before_residual", False),
        config.flag("norm_before_fc", nested.flag("norm_before_fc", False)),
    )


def read_medusa(folder: Path, hidden_size: int, vocab_size: int) -> Medusa:
    """Heads for a model of this shape. Raises ModelLoadError where they are for another one."""
    config = Fields.read(folder / "config.json")
    for name, size in (("hidden_size", hidden_size), ("vocab_size", vocab_size)):
        if config.integer(name, size) != size:
            raise config.fail(name, f"the model's, {size}")
    places = _places(folder)
    medusa = Medusa(
        config.integer(_NUM_MEDUSA_HEADS, most=_MAX_MEDUSA_HEADS),
        config.integer("medusa_num_layers", 1, most=_MAX_MEDUSA_HEADS),
        "0.0.linear.bias" in places,
    )
    for head in range(medusa.num_heads):
        wanted = {f"{head}.{medusa.num_layers}.weight": (vocab_size, hidden_size)}
        for layer in range(medusa.num_layers):
            wanted[f"{head}.{layer}.linear.weight"] = (hidden_size, hidden_size)
        for name, shape in wanted.items():
            _require(folder, places, name, shape)
    return medusa


def _require(
    folder: Path, places: dict[str, tuple[Path, Place]], name: str, shape: tuple[int, ...]
) -> None:
    if name not in places:
        raise ModelLoadError(f"{folder}: tensor {name!r} is missing from the checkpoint")
    file, place = places[name]
    if place.shape != shape:
        expected = f"expected shape {list(shape)}, as the model has, found {list(place.shape)}"
        raise ModelLoadError(f"{file}: tensor {name!r}: {expected}")


def _layers(config: Fields, nested: Fields, num_layers: int) -> tuple[int, ...]:
    """Speculators count the layers before a state; `eagle_config` has the indices of the layers
    that give it. As in SGLang and vLLM by default one low, one in the middle, one high."""
    name = "eagle_aux_hidden_state_layer_ids"
    fields, shift = (config, 0) if config.get(name) is not None else (nested, 1)
    layers = tuple(i + shift for i in fields.token_ids(name))
    if fields.get(name) is None:
        layers = (2, num_layers // 2, num_layers - 3)
    if len(layers) != _NUM_STATES or not all(1 <= each <= num_layers for each in layers):
        first, last = 1 - shift, num_layers - shift
        expected = (
            f"{_NUM_STATES} integers in [{first}, {last}], as the model has {num_layers} layers"
        )
        raise fields.fail(name, expected)
    return layers


def _token_ids(
    folder: Path, places: dict[str, tuple[Path, Place]], size: int, vocab_size: int
) -> npt.NDArray[np.int64] | None:
    """The model's id of each of a head's tokens, stored as the differences."""
    name = next((name for name in places if name.removeprefix("model.") == _OFFSETS), None)
    if name is None:
        if size == vocab_size:
            return None
        missing = f"draft_vocab_size={size} tokens have no ids among the model's {vocab_size}"
        raise ModelLoadError(f"{folder}: tensor {_OFFSETS!r} is missing: {missing}")
    file, place = places[name]
    if place.dtype not in ("I64", "I32") or place.shape != (size,):
        found = f"{place.dtype} {list(place.shape)}"
        raise ModelLoadError(f"{file}: tensor {name!r}: expected I64 [{size}], found {found}")
    ids = _read(file, place).astype(np.int64) + np.arange(size)
    if ids.min() < 0 or ids.max() >= vocab_size:
        at = int(np.argmax((ids < 0) | (ids >= vocab_size)))
        raise ModelLoadError(
            f"{file}: tensor {name!r}: token {at} of the head is {ids[at]} of the model: expected "
            f"an id in [0, {vocab_size})"
        )
    if len(np.unique(ids)) != size:
        raise ModelLoadError(
            f"{file}: tensor {name!r}: two tokens of the head are one of the model"
        )
    return ids


def _read(file: Path, place: Place) -> npt.NDArray[np.int64 | np.int32]:
    descriptor, _ = open_header(file)
    try:
        data = os.pread(descriptor, place.num_bytes, place.start)
    finally:
        os.close(descriptor)
    return np.frombuffer(data, dtype="<i8" if place.dtype == "I64" else "<i4")


def _places(folder: Path) -> dict[str, tuple[Path, Place]]:
    """The file and the place of each tensor of a folder."""
    found: dict[str, tuple[Path, Place]] = {}
    for file in sorted(folder.glob("*.safetensors")):
        descriptor, places = open_header(file)
        os.close(descriptor)
        found |= {name: (file, place) for name, place in places.items()}
    pickled = sorted(f.name for f in folder.glob("*") if f.suffix in PICKLED_SUFFIXES)
    if pickled and not found and not any(folder.glob("*.gguf")):
        raise ModelLoadError(_why_no_pickled_head(folder, pickled[0]))
    return found


def _why_no_pickled_head(folder: Path, name: str) -> str:
    return (
        f"{folder} has its weights as a PyTorch pickle only ({name}), which can run code of its "
        'own when it is read; convert it once: python -c "import torch, safetensors.torch as s; '
        f"s.save_file({{k: v.contiguous() for k, v in torch.load('{name}', weights_only=True, "
        "map_location='cpu').items()}, 'model.safetensors')\""
    )
