"""The adapters on the device: stacked matrices for every linear layer of a model, slot by slot."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from ....kernels.ops import Lora
from ....kernels.registry import Kernels
from ...checkpoint.lora.adapter import AdapterModule, ModuleShape, StoredTensor
from ...checkpoint.safetensors.safetensors_file import torch_dtype


@dataclass(frozen=True, slots=True)
class _Place:
    """A module's part of its layer's tables."""

    a: Tensor  # [num_slots, max_rank, in_features]
    b: Tensor  # [num_slots, out_features, max_rank]
    order: Tensor | None  # of the rows of b; see `LinearLayer`


@dataclass(frozen=True, slots=True)
class AdapterWeights:
    """An adapter's matrices in host memory, pinned for a GPU."""

    pairs: Mapping[str, tuple[Tensor, Tensor]]  # by module, of the shapes in the file


class AdapterTables:
    """Owns the matrices, padded to `max_rank`, an even number, for every adapter's rank; see
    `ops.MakeLora`.

    Layers request theirs while the model is built, which determines the modules that take adapters.
    """

    def __init__(
        self,
        num_slots: int,
        max_rank: int,
        *,
        kernels: Kernels,
        dtype: torch.dtype,
        device: torch.device,
        allocate: Callable[[int], Tensor],
    ) -> None:
        """`allocate`: [bytes] uint8 of host memory from which copies to the device are made."""
        self.num_slots = num_slots
        self.max_rank = max_rank + max_rank % 2  # the compiled kernels take ranks in pairs
        self._kernels = kernels
        self._dtype = dtype
        self._device = device
        self._allocate = allocate
        self._places: dict[str, _Place] = {}

    def beside(
        self,
        names: Sequence[str],
        in_features: int,
        out_features: Sequence[int],
        orders: Sequence[Tensor | None] | None = None,
    ) -> Lora:
        """The adapters' part of the linear layer of the modules `names`; their tables start as
        zeros. orders: see `LinearLayer`."""
        orders = [None] * len(names) if orders is None else orders
        rank = self.max_rank
        a, b = self._zeros(len(names) * rank, in_features), self._zeros(sum(out_features), rank)
        parts = zip(torch.split(a, rank, 1), torch.split(b, list(out_features), 1), strict=True)
        for name, (own_a, own_b), order in zip(names, parts, orders, strict=True):
            assert name not in self._places, f"{name} has adapters already"
            self._places[name] = _Place(own_a, own_b, order)
        return self._kernels.make_lora(a, b, out_features)

    @property
    def modules(self) -> dict[str, ModuleShape]:
        """The linear layers that take adapters."""
        return {
            name: ModuleShape(place.a.shape[2], place.b.shape[1])
            for name, place in self._places.items()
        }

    def prepare(self, modules: Sequence[AdapterModule]) -> AdapterWeights:
        """An adapter's matrices in the tables' dtype; see `PrepareWeights`."""
        sizes = [prod(part.shape) for module in modules for part in (module.a, module.b)]
        memory = self._allocate(sum(sizes) * self._dtype.itemsize).view(self._dtype)
        parts = iter(torch.split(memory, sizes))
        pairs = {}
        for module in modules:
            a, b = (next(parts).view(stored.shape) for stored in (module.a, module.b))
            a.copy_(_tensor(module.a))
            order, stored_b = self._places[module.name].order, _tensor(module.b)
            stored_b = stored_b if order is None else stored_b[order]
            b.copy_(stored_b.to(torch.float64) * module.scale)
            pairs[module.name] = (a, b)
        return AdapterWeights(pairs)

    def load(self, slot: int, weights: object) -> None:
        """Fill a slot, numbered from 1, with the result of `prepare`; on a GPU the copies are
        queued after the steps before."""
        assert isinstance(weights, AdapterWeights), "weights of these tables"
        for name, place in self._places.items():
            a, b = place.a[slot - 1], place.b[slot - 1]
            rank = 0
            if name in weights.pairs:
                own_a, own_b = weights.pairs[name]
                rank = len(own_a)
                a[:rank].copy_(own_a, non_blocking=True)
                b[:, :rank].copy_(own_b, non_blocking=True)
            a[rank:].zero_()
            b[:, rank:].zero_()

    def _zeros(self, *shape: int) -> Tensor:
        return torch.zeros((self.num_slots, *shape), dtype=self._dtype, device=self._device)


def _tensor(stored: StoredTensor) -> Tensor:
    data = torch.frombuffer(stored.data, dtype=torch.uint8).clone()  # aligned
    return data.view(torch_dtype(stored.dtype)).view(stored.shape)
