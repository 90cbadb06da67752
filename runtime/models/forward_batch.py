"""A model's input for one step."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from ...kernels.context_share import ALL_TOKENS, TokenShare
from ...kernels.ops import KVLayer, RecurrentState


@dataclass(frozen=True, slots=True)
class ImageRows:
    """The tokens of a step that are an image's, M of T, and what they are in place of ids."""

    places: Tensor  # [M] int64, on the token axis
    # [1 + layers, M, hidden_size]: their embeddings, then what is added behind each of the first
    # layers
    features: Tensor


class LayerStates:
    """The residual stream behind some layers, which a pass leaves for a head that reads it. With
    the pass's result they are valid until the next one."""

    def __init__(self, layers: Iterable[int], num_tokens: int) -> None:
        """layers: behind so many layers, from 1 on."""
        self.layers = frozenset(layers)
        self.rows = torch.arange(num_tokens)
        self.of: dict[int, Tensor] = {}  # [T, hidden_size] each


class Observer(Protocol):
    """Looks at queries as a pass computes them, for whoever chooses among keys."""

    def note(self, layer: int, queries: Tensor) -> None:
        """layer: its index in the pool, which has its keys of these tokens; queries [T, heads,
        head_dim], rotated, not to be kept."""


OnLayer = Callable[[int], None]
"""Called behind each of a model's layers, with its index, before the next one begins."""


@dataclass(frozen=True, slots=True)
class ForwardBatch:
    """All of a model's input to `forward`. T tokens, R rows.

    Where ranks divide a step's tokens, input_ids, adapters and images are of this rank's own, which
    its layers compute; the rest is of all T.
    """

    input_ids: Tensor  # [T] int64
    # [T] int64, of each token in its own sequence; [3, T] if some are in an image's grid: time,
    # height and width
    positions: Tensor
    slot_mapping: Tensor  # [T] int64, where each token's KV goes; distinct except for padding
    kv_layers: tuple[KVLayer, ...]
    # The kernels' plans for the R rows, one for each of the config's attention_kinds.
    attention: tuple[object, ...]
    # The plan of `plan_lora` for the tokens' adapters; None: no token has one.
    adapters: object | None = None
    states: tuple[RecurrentState, ...] = ()  # of all slots, a layer each
    recurrence: object | None = None  # the plan of the rows' states, where the model has any
    index_keys: tuple[Tensor, ...] = ()  # [num_slots, head_dim] of each layer that selects keys
    images: ImageRows | None = None  # None: all tokens are of the vocabulary
    # [1] int32: tokens from there on only fill a graph; None: there are none
    num_tokens: Tensor | None = None
    tokens: TokenShare = ALL_TOKENS
    # [T, hidden_size], which the pass changes: the residual stream behind the layers of other
    # stages; None: this is the first.
    residual: Tensor | None = None
    # [T, hidden_size], in which the pass leaves its result; None: in a new tensor
    out: Tensor | None = None
    on_layer: OnLayer | None = None
    kept: LayerStates | None = None  # which the pass fills; None: nobody reads them
    observed: Observer | None = None  # the same
