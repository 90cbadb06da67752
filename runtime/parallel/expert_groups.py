"""How an engine's flags divide experts between groups of ranks, by the loads that an engine before
has counted."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ...errors import InvalidRequest
from ..checkpoint.config.model_config import ExpertsConfig, ModelConfig
from ..config import EngineConfig
from ..models.layers.expert_placement import ExpertGroups
from ..models.layers.expert_share import require_groups
from ..models.layers.ranks import Ranks


def expert_groups_of(config: EngineConfig, model: ModelConfig) -> ExpertGroups:
    """Raises InvalidRequest where the model's experts cannot be divided so, or for loads that are
    not of its experts."""
    groups = ExpertGroups(config.ep_size, config.ep_extra_experts)
    ranks = Ranks(num_ranks=config.tp_size, expert_groups=groups)
    require_groups(model, ranks, are_of_context=config.cp_size > 1)
    if config.ep_loads is None or model.experts is None:
        return groups
    loads = _read_loads(config.ep_loads, model.experts, model.architecture)
    return ExpertGroups(groups.count, groups.num_extra, loads)


def _read_loads(file: Path, experts: ExpertsConfig, name: str) -> Mapping[int, Sequence[int]]:
    """By layer, of the JSON that `/server_info` gives."""
    try:
        found: Any = json.loads(file.read_bytes())
        loads = {int(layer): counts for layer, counts in found["experts"]["loads"].items()}
        fits = set(loads) == set(experts.layers) and all(
            len(counts) == experts.num_experts
            and all(type(count) is int and count >= 0 for count in counts)
            for counts in loads.values()
        )
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        fits = False
    if not fits:
        shape = f"{len(experts.layers)} layers of {experts.num_experts} experts"
        allowed = f"a file with what /server_info says of {name}: experts.loads, {shape}"
        raise InvalidRequest.of("ep_loads", str(file), allowed)
    return loads
