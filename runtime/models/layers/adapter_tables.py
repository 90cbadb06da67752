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
from ...checkpoint.parts import WHOLE, Part, num_rows
from ...checkpoint.safetensors.safetensors_file import torch_dtype
from ...checkpoint.weight_parts import rows_of


@dataclass(frozen=True, slots=True)
class _Place:
    """A module's part of its layer's tables."""

    a: Tensor  # [num_slots, max_rank, in_features]
    b: Tensor  # [num_slots, out_features, max_rank]
    order: Tensor | None  # of the rows of b; see `LinearLayer`
    shape: ModuleShape  # in the file
    part: Part  # of this module alone


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
        part: Part = WHOLE,
    ) -> Lora:
        """The adapters' part of the linear layer of the modules `names`; their tables start as
        zeros. orders, part: see `LinearLayer`."""
        orders = [None] * len(names) if orders is None else orders
        rank, sizes, num_inputs = self.max_rank, list(out_features), in_features
        outputs = [None] * len(names) if part.outputs is None else part.outputs
        if part.outputs is not None:
            sizes = [num_rows(rows) for rows in part.outputs]
        if part.inputs is not None:
            num_inputs = part.inputs[1] - part.inputs[0]
        a, b = self._zeros(len(names) * rank, num_inputs), self._zeros(sum(sizes), rank)
        for nth, (own_a, own_b) in enumerate(
            zip(torch.split(a, rank, 1), torch.split(b, sizes, 1))
        ):
            name, rows = names[nth], outputs[nth]
            assert name not in self._places, f"{name} has adapters already"
            own = Part(None if rows is None else [rows], part.inputs)
            shape = ModuleShape(in_features, out_features[nth])
            self._places[name] = _Place(own_a, own_b, orders[nth], shape, own)
        return self._kernels.make_lora(a, b, sizes)

    @property
    def modules(self) -> dict[str, ModuleShape]:
        """The linear layers that take adapters."""
        return {name: place.shape for name, place in self._places.items()}

    def prepare(self, modules: Sequence[AdapterModule]) -> AdapterWeights:
        """An adapter's matrices in the tables' dtype; see `PrepareWeights`."""
        places = [self._places[module.name] for module in modules]
        ranks = [module.a.shape[0] for module in modules]
        shapes = [
            shape
            for rank, place in zip(ranks, places, strict=True)
            for shape in ((rank, place.a.shape[2]), (place.b.shape[1], rank))
        ]
        sizes = [prod(shape) for shape in shapes]
        memory = self._allocate(sum(sizes) * self._dtype.itemsize).view(self._dtype)
        parts = iter(zip(torch.split(memory, sizes), shapes, strict=True))
        pairs = {}
        for module, place in zip(modules, places, strict=True):
            a, b = (part.view(shape) for part, shape in (next(parts), next(parts)))
            stored_a, outputs = _tensor(module.a), place.part.outputs
            inputs = slice(None) if place.part.inputs is None else slice(*place.part.inputs)
            a.copy_(stored_a[:, inputs])
            stored_b = rows_of(_tensor(module.b), None if outputs is None else outputs[0])
            stored_b = stored_b if place.order is None else stored_b[place.order]
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
