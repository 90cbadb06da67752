"""The recurrent states on the compute device: a tensor for each layer and part, addressed by slot.

Slot 0 belongs to nobody: what is computed for no request is written there. The host half decides
who owns the others (schedule/cache/state_cache.py).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from ...kernels.ops import RecurrentState
from .copies import StateCopy, StateRestore, StateSave
from .device_pool import zeros
from .disk.block_file import Payload
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

    def copy(self, copies: Iterable[StateCopy]) -> tuple[Payload, ...]:
        """Make copies in order. Returns the payloads of the StateSaves."""
        payloads = []
        for copy in copies:
            if isinstance(copy, StateSave):
                payloads.append(self._payload(copy.slot))
            elif isinstance(copy, StateRestore):
                self._restore(copy.payload, copy.slot)
            else:
                source, target = copy
                for tensor in self._tensors():
                    tensor[target] = tensor[source]
        return tuple(payloads)

    def _payload(self, slot: int) -> Payload:
        """A copy of a slot's bytes, layer after layer."""
        parts = [tensor[slot].contiguous().view(-1).view(torch.uint8) for tensor in self._tensors()]
        return torch.cat(parts).numpy()

    def _restore(self, payload: Payload, slot: int) -> None:
        start = 0
        for tensor in self._tensors():
            flat = tensor[slot].view(-1).view(torch.uint8)
            flat.numpy()[:] = payload[start : start + len(flat)]
            start += len(flat)
        assert start == payload.size, f"{payload.size} bytes for a state of {start}"

    def _tensors(self) -> Iterator[Tensor]:
        """By layer, [num_slots, ...]."""
        for layer in self.layers:
            yield layer.tails
            if layer.matrices is not None:
                yield layer.matrices

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
