"""What differs from layer to layer, and what layers take beside the residual stream (Gemma 3n,
Gemma 4). Torch-free."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class AltUpConfig:
    """Alternating updates (Baykal et al. 2023): several residual streams, of which a layer computes
    one and predicts the others; and beside attention a learned residual of low rank (LAuReL,
    Menghani et al. 2024)."""

    num_streams: int  # >= 2
    active_stream: int
    has_output_scale: bool
    laurel_rank: int


@dataclass(frozen=True, slots=True)
class VariedLayers:
    """Each tuple has an entry a layer. A model's own `num_kv_heads` and `head_dim` are the largest;
    layers of one kind of attention are alike in both."""

    head_dims: tuple[int, ...]
    num_kv_heads: tuple[int, ...]
    kv_sources: tuple[int, ...]  # the layer whose KV it attends to: itself, or one before it
    has_values: tuple[bool, ...]  # else its values are its keys, before their norm and rotation
    intermediate_sizes: tuple[int, ...]
    # Which share of a dense block's gates is cut to zero, by their mean and spread; 0: none is.
    sparsities: tuple[float, ...]
    token_input_size: int  # numbers of the token's own embedding for each layer; 0: there is none
    token_input_vocab: int  # ids from here on take that of id 0
    has_output_scalars: bool = False  # a layer's result is multiplied by one number
    altup: AltUpConfig | None = None
