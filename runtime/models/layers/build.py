"""What a model and its layers are built from; needed only during construction."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ....kernels.registry import Kernels
from ...checkpoint.config.model_config import ModelConfig
from ...checkpoint.weight_source import WeightSource
from .adapter_tables import AdapterTables
from .expert_loads import ExpertLoads
from .ranks import ALONE, Ranks
from .stage import ALL_LAYERS, Stage


@dataclass(frozen=True, slots=True)
class ModelBuild:
    """Layers take their tensors from `source` by name, and prepare them with `kernels`."""

    config: ModelConfig
    source: WeightSource
    kernels: Kernels
    dtype: torch.dtype
    device: torch.device
    max_model_len: int
    adapters: AdapterTables | None = None  # None: linear layers take no adapters
    ranks: Ranks = ALONE
    stage: Stage = ALL_LAYERS
    expert_loads: ExpertLoads | None = None  # None: what tokens choose is not counted
