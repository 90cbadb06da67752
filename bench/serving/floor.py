"""The least time in which a machine's limits allow the steps that an engine made.

Each product of a step takes as long as reading its weights once, or its arithmetic, whichever is
more; so does attention, by the keys that rows see and the pairs of a token and a key. Keys that
several rows share count once where the engine read them so. Nothing else is counted: no norm, no
sampling, no plan, no message, no branch of a draft tree and no draft model. The limits are the
machine's own (bench/harness/limits.py).
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ...planning.devices import DeviceModel, Rates
from ...planning.roofline import CostModel
from ...planning.served_model import ServedModel
from ...runtime.models.model_config import read_model_config
from ..harness.limits import Limits


def limits_of(model: Path, limits: Limits) -> CostModel | None:
    """The model in bfloat16 on a machine that does nothing but reach its limits. None: experts,
    latents, windows, recurrent states and weights of fewer bits cannot be counted so."""
    config = read_model_config(model)
    served = ServedModel.of(config, "bfloat16")
    is_dense = config.experts is None and config.latent is None and not served.state_bytes
    has_windows = any(layers.num_visible is not None for layers in served.shape.attention)
    is_quantized = "quantization_config" in json.loads((model / "config.json").read_text())
    if not is_dense or has_windows or is_quantized:
        return None
    read, flop = limits.read_gb_s * 1e9, limits.matmul_gflop_s * 1e9
    device = DeviceModel(
        name="this machine's limits", memory_bytes=0, rates={"none": Rates(read, flop)},
        kv_bytes_s=read, attention_flop_s=flop, step_s=0.0, layer_s=0.0, row_s=0.0, adapter_s=0.0,
    )  # fmt: skip
    return CostModel(served, device)


def floor_s(steps: Sequence[dict[str, Any]], costs: CostModel) -> float:
    """Seconds for steps as their log tells of them."""
    total_s = 0.0
    for step in steps:
        work = step["work"]
        num_keys = work["keys"] - step["num_shared"]
        total_s += costs.counted_s(work["tokens"], work["logits"], num_keys, work["pairs"])
    return total_s
