"""What a model gets to know of a step."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from ...kernels.ops import KVLayer


@dataclass(frozen=True, slots=True)
class ForwardBatch:
    """All that a model's `forward` gets to know of a step. T tokens, R rows."""

    input_ids: Tensor  # [T] int64
    positions: Tensor  # [T] int64, of each token in its own sequence
    slot_mapping: Tensor  # [T] int64, where each token's KV goes; distinct but for padding
    kv_layers: tuple[KVLayer, ...]
    # What the kernels' plans made of the R rows, for each of the config's attention_kinds.
    attention: tuple[object, ...]
    # What `plan_lora` made of the tokens' adapters; None: no token has one.
    adapters: object | None = None
