"""The recurrent states on the compute device: a tensor for each layer and part, addressed by slot.

Slot 0 belongs to nobody: what is computed for no request is written there. The host half decides
who owns the others (schedule/cache/state_cache.py).
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor

from ...kernels.ops import RecurrentState
from .device_pool import zeros
from .state_layout import StateLayout, StatePart


class StatePool:
    """Owns the states' memory for the life of the runner: slots 0 to `num_slots` of the device, and
    behind them `num_host_slots` of the host, which on a CPU are the same memory."""

    def __init__(
        self,
        layout: StateLayout,
        num_slots: int,
        device: torch.device | str = "cpu",
        *,
        num_host_slots: int = 0,
    ) -> None:
        """num_slots: without slot 0."""
        self.layout = layout
        self.num_slots = num_slots
        self.num_host_slots = num_host_slots
        self._num_entries = 1 + num_slots + num_host_slots
        self._device = torch.device(device)
        self.layers = tuple(self._layer() for _ in range(layout.num_layers))

    @property
    def num_bytes(self) -> int:
        """Size of all slots in bytes."""
        return self._num_entries * self.layout.num_bytes

    def copy(self, copies: Iterable[tuple[int, int]]) -> None:
        """Make copies between slots, (from, to), in order."""
        for source, target in copies:
            for layer in self.layers:
                layer.tails[target] = layer.tails[source]
                if layer.matrices is not None:
                    layer.matrices[target] = layer.matrices[source]

    def _layer(self) -> RecurrentState:
        matrix = self.layout.matrix
        return RecurrentState(
            self._tensor(self.layout.tail), None if matrix is None else self._tensor(matrix)
        )

    def _tensor(self, part: StatePart) -> Tensor:
        num_bytes = self._num_entries * part.num_bytes
        flat = zeros((num_bytes,), self._device).view(getattr(torch, part.dtype))
        assert math.prod(part.shape) * self._num_entries == len(flat)
        return flat.view(self._num_entries, *part.shape)
