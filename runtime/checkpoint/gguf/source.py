"""The tensors of GGUF files for a model being built; quantized ones stay packed.

Linear layers get their numbers, scales and offsets as a `QuantizedWeight`; parts of one layer in
different formats (a Q4_K beside a Q6_K) are converted to the wider one, which is exact except for
one rounding of offsets. Everything else (embedding, norms, biases) becomes floats. Rows are read
and unpacked some megabytes at a time into their final place, so the peak is little above the
result.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ....errors import ModelLoadError
from ....frontend.client.progress import ByteProgress
from ....kernels.ops import Weight
from ....kernels.quantized_tensors import QuantizedWeight
from ..parts import WHOLE, Part, Range, Rows, num_rows
from ..weight_source import WeightSource, empty_stack
from .blocks import LAYOUTS, GroupLayout, fits_half, to_floats, to_groups
from .hyperparameters import Hyperparameters
from .names import CONVENTIONS, EMBEDDING, Origin, Places, TensorNames
from .reader import TensorPlace
from .shards import GgufModel

_CHUNK_VALUES = 1 << 22  # unpacked at a time; 16 MB as float32
# Part of the config, see `rope`.
_IN_CONFIG = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")

_STORED_DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Part:
    """A matrix of the file, or one expert's: what a model requests by one name, or a part of it."""

    place: TensorPlace
    origin: Origin
    base: int = 0  # the row of what is requested from which its own, or their places, count
    # Of what is requested a rank wants these rows and columns alone; None: all.
    rows: Rows | None = None
    wanted_columns: Range | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        return self.place.shape if self.origin.expert is None else self.place.shape[1:]

    @property
    def num_rows(self) -> int:
        return math.prod(self.shape[:-1])

    @property
    def first_row(self) -> int:
        return self.num_rows * (self.origin.expert or 0)

    @property
    def is_quantized(self) -> bool:
        return self.place.format.is_quantized

    @property
    def is_vector(self) -> bool:
        return len(self.shape) == 1

    def targets(self) -> npt.NDArray[np.int64]:
        """[num_rows] the target places of its rows; -1: not wanted."""
        own = np.arange(self.num_rows)
        if self.origin.places is not None and not self.is_vector:
            own = self.origin.places(self.num_rows)
        own = own + self.base
        if self.rows is None:
            return own
        places, done = np.full(len(own), -1), 0
        for first, end in self.rows:
            is_here = (own >= first) & (own < end)
            places[is_here] = own[is_here] - first + done
            done += end - first
        return places

    @property
    def num_wanted(self) -> int:
        """How many of its rows."""
        return self.num_rows if self.rows is None else int((self.targets() >= 0).sum())

    @property
    def columns(self) -> Tensor | None:
        """The target places of the numbers of its rows; None: in order."""
        places: Places | None = self.origin.places if self.is_vector else self.origin.columns
        return None if places is None else torch.from_numpy(places(self.place.row_values))


class GgufWeights(WeightSource):
    """A `WeightSource` over a GGUF file, or the parts of one.

    Owns the open files until `close`; tensors handed out are copies and outlive them.
    """

    def __init__(
        self,
        path: Path,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
        on_progress: ByteProgress | None = None,
        *,
        has_stored_weights: bool = False,
    ) -> None:
        """`has_stored_weights`: `take_weight` returns floating weights as stored, not in `dtype`,
        for callers that round them further."""
        self.path = path
        self.dtype = dtype
        self.device = torch.device(device)
        self._on_progress = on_progress
        self._has_stored_weights = has_stored_weights
        with ExitStack() as opened:
            self._file = opened.enter_context(closing(GgufModel(path)))
            self._names = _names_of(self._file)
            opened.pop_all()
        layers = tuple(f"blk.{layer}." for layer in range(Hyperparameters(self._file).num_layers))
        self._not_taken = {
            name
            for name in self._file.tensors
            if name not in _IN_CONFIG and (not name.startswith("blk.") or name.startswith(layers))
        }
        self._bytes_total = sum(place.num_bytes for place in self._file.tensors.values())
        self._bytes_done = 0

    @property
    def is_quantized(self) -> bool:
        """Whether any tensor has fewer than 16 bits."""
        return self._file.is_quantized

    def __contains__(self, name: str) -> bool:
        origins = self._names.origins(name)
        return bool(origins) and all(origin.name in self._file.tensors for origin in origins)

    def take(self, name: str, shape: Sequence[int], dtype: torch.dtype | None = None) -> Tensor:
        parts = self._parts(name, shape)
        target = torch.empty(tuple(shape), dtype=dtype or self.dtype, device=self.device)
        self._floats_into(parts, target)
        if _are_in_turn(name):  # biases, [num_experts, 2 * N]
            return target.view(2, len(target), -1).permute(1, 2, 0).reshape(target.shape)
        return target

    def take_stacked(self, names: Sequence[str], shapes: Sequence[Sequence[int]]) -> Tensor:
        parts = [self._parts(name, shape) for name, shape in zip(names, shapes, strict=True)]
        return self._stacked(parts, shapes, self.dtype)

    def _stacked(
        self, parts: Sequence[Sequence[_Part]], shapes: Sequence[Sequence[int]], dtype: torch.dtype
    ) -> Tensor:
        stack, targets = empty_stack(shapes, dtype, self.device)
        for own, target in zip(parts, targets, strict=True):
            self._floats_into(own, target)
        return stack

    def take_weight(
        self, names: Sequence[str], out_features: Sequence[int], in_features: int
    ) -> Weight:
        full_names = [f"{name}.weight" for name in names]
        shapes = [(size, in_features) for size in out_features]
        if self._is_split_latent(full_names):
            return self._joined_latent(full_names[0], shapes[0])
        parts = [self._parts(name, shape) for name, shape in zip(full_names, shapes, strict=True)]
        flat = [part for own in parts for part in own]
        if all(part.is_quantized for part in flat):
            return self._packed(parts, in_features)
        return self._stacked(parts, shapes, self._floating_dtype(flat))

    def take_rows(
        self, name: str, shape: Sequence[int], rows: Rows | None, dtype: torch.dtype | None = None
    ) -> Tensor:
        if rows is None or len(shape) == 1:  # vectors are one row of a file
            return super().take_rows(name, shape, rows, dtype)
        parts = [replace(part, rows=rows) for part in self._parts(name, shape)]
        size = (num_rows(rows), *shape[1:])
        target = torch.empty(size, dtype=dtype or self.dtype, device=self.device)
        self._floats_into(parts, target)
        return target

    def take_part(
        self, names: Sequence[str], out_features: Sequence[int], in_features: int, part: Part
    ) -> Weight:
        full_names = [f"{name}.weight" for name in names]
        if part == WHOLE or self._is_split_latent(full_names):
            return super().take_part(names, out_features, in_features, part)
        shapes = [(size, in_features) for size in out_features]
        wanted = [None] * len(names) if part.outputs is None else part.outputs
        parts = [
            [
                replace(own, rows=rows, wanted_columns=part.inputs)
                for own in self._parts(name, shape)
            ]
            for name, shape, rows in zip(full_names, shapes, wanted, strict=True)
        ]
        flat = [own for each in parts for own in each]
        first, end = part.inputs or (0, in_features)
        if part.inputs is not None and not all(map(_can_take_columns, flat)):
            return super().take_part(names, out_features, in_features, part)
        if all(own.is_quantized for own in flat):
            return self._packed(parts, end - first)
        own_shapes = [(sum(own.num_wanted for own in each), end - first) for each in parts]
        return self._stacked(parts, own_shapes, self._floating_dtype(flat))

    def take_experts(
        self, name: str, num_experts: int, out_features: int, in_features: int
    ) -> Weight:
        shape = (num_experts, out_features, in_features)
        parts = self._parts(name, shape)
        weight: Weight
        if all(part.is_quantized for part in parts):
            weight = self._packed([parts], in_features)
        else:
            weight = self._stacked([parts], [shape], self._floating_dtype(parts))
        of_experts = partial(_of_experts, num_experts=num_experts, are_in_turn=_are_in_turn(name))
        return of_experts(weight) if isinstance(weight, Tensor) else weight.map(of_experts)

    def tie_weight(self, table: Tensor) -> Weight:
        """Packed as in the file, if it is quantized."""
        part = _Part(self._file.tensors[EMBEDDING], Origin(EMBEDDING))
        return self._packed([[part]], table.shape[1]) if part.is_quantized else table

    def skip(self, name: str) -> None:
        self._not_taken.difference_update(origin.name for origin in self._names.origins(name))

    def finish(self) -> None:
        if self._not_taken:
            names = sorted(self._not_taken)
            shown = ", ".join(names[:5]) + (", ..." if len(names) > 5 else "")
            logger.warning("%s: %d tensors are not used: %s", self.path, len(names), shown)

    def close(self) -> None:
        self._file.close()

    def _parts(self, name: str, shape: Sequence[int]) -> list[_Part]:
        """The tensors that make up this one, whose rows are theirs."""
        origins = self._names.origins(name)
        missing = [origin.name for origin in origins if origin.name not in self._file.tensors]
        if missing or not origins:
            known = f" ({missing[0]!r} in GGUF)" if missing else ""
            raise ModelLoadError(f"{self.path}: tensor {name!r}{known} is missing")
        parts: list[_Part] = []
        base = 0
        for origin in origins:
            part = _Part(self._file.tensors[origin.name], origin)
            parts.append(replace(part, base=0 if origin.places is not None else base))
            base += part.num_rows
        if not all(map(_has_its_expert, parts)) or not _fit([p.shape for p in parts], shape):
            names = " and ".join(repr(part.origin.name) for part in parts)
            found = " and ".join(str(list(part.place.shape)) for part in parts)
            raise ModelLoadError(
                f"{self.path}: tensor {names}: expected shape {list(shape)} for {name!r}, "
                f"found {found}"
            )
        return parts

    def _floats_into(self, parts: Sequence[_Part], target: Tensor) -> None:
        rows = target.view(sum(part.num_wanted for part in parts), -1)
        for part in parts:
            columns = part.columns
            for place, raw in self._chunks(part):
                values = to_floats(part.place.format, raw)
                if part.origin.shift:
                    values = values - part.origin.shift
                if part.origin.is_negated_exp:
                    values = (-values).log()
                if columns is not None:
                    own = columns.to(values.device)
                    values = torch.empty_like(values).index_copy_(1, own, values)
                rows[place] = values.to(target.dtype)

    def _packed(self, names: Sequence[Sequence[_Part]], in_features: int) -> QuantizedWeight:
        """One after the other; `names`: the parts of each name."""
        parts = [part for own in names for part in own]
        layout = _widest([LAYOUTS[part.place.format.name] for part in parts])
        num_all = sum(part.num_wanted for part in parts)
        packed = torch.int8 if layout.bits == 8 else torch.uint8
        num_groups = in_features // layout.group_size
        values = self._empty(num_all, in_features * layout.bits // 8, packed)
        scales = self._empty(num_all, num_groups, torch.float32)
        offsets = self._empty(num_all, num_groups, torch.float32) if layout.has_offsets else None
        first = 0
        for own in names:
            for part in own:
                for place, raw in self._chunks(part):
                    new = to_groups(part.place.format, raw, layout)
                    for whole, rows in zip((values, scales, offsets), new, strict=True):
                        if whole is not None and rows is not None:
                            whole[first:][place] = rows
            first += sum(part.num_wanted for part in own)
        if layout.codes == "fp4":
            scales = scales.to(torch.bfloat16)  # powers of two
        elif self._has_half_scales(parts) and fits_half(scales, offsets):
            scales = scales.half()
            offsets = None if offsets is None else offsets.half()
        columns = parts[0].columns
        order = None if columns is None else columns.to(torch.int32).to(self.device)
        return QuantizedWeight(
            layout.bits, layout.group_size, values, scales, offsets,
            input_order=order, codes=layout.codes,
        )  # fmt: skip

    def _has_half_scales(self, parts: Sequence[_Part]) -> bool:
        """Scales in float16, as most formats store them, unless the model computes in a wider
        dtype: the K formats' scales are products with 6 bits, rounded so to 11 of 17 bits."""
        names = {part.place.format.name for part in parts}
        is_stored_so = names <= {"Q4_0", "Q5_0", "Q8_0"}
        return is_stored_so or (self.dtype.itemsize == 2 and "MXFP4" not in names)

    def _floating_dtype(self, parts: Sequence[_Part]) -> torch.dtype:
        """The dtype of a weight with these parts, not all of which are quantized."""
        if not self._has_stored_weights:
            return self.dtype
        stored = {_STORED_DTYPES.get(part.place.format.name, torch.float32) for part in parts}
        return stored.pop() if len(stored) == 1 else torch.float32

    def _empty(self, num_rows: int, row_size: int, dtype: torch.dtype) -> Tensor:
        return torch.empty((num_rows, row_size), dtype=dtype, device=self.device)

    def _chunks(self, part: _Part) -> Iterator[tuple[slice | Tensor, Tensor]]:
        """Some rows' bytes at a time, on the device, with the places of the rows."""
        size = max(1, _CHUNK_VALUES // part.place.row_values)
        targets = part.targets()
        for first, end in _runs(targets >= 0):
            for begin in range(first, end, size):
                count = min(size, end - begin)
                read = self._file.read(
                    part.place, part.first_row + begin, count, part.wanted_columns
                )
                yield _as_slice(targets[begin : begin + count]), self._on_device(read)
        self._not_taken.discard(part.place.name)

    def _on_device(self, read: npt.NDArray[np.uint8]) -> Tensor:
        self._bytes_done += read.nbytes
        if self._on_progress is not None:
            self._on_progress(min(self._bytes_done, self._bytes_total), self._bytes_total)
        return torch.from_numpy(read).to(self.device)

    def _is_split_latent(self, names: Sequence[str]) -> bool:
        """Whether this is DeepSeek's kv_b_proj, and the file has it in two parts."""
        tensors = self._file.tensors
        return any(
            origin.name not in tensors
            and origin.name.endswith(".attn_kv_b.weight")
            and origin.name.replace("attn_kv_b", "attn_k_b") in tensors
            for origin in self._names.origins(names[0])
        )

    def _joined_latent(self, name: str, shape: tuple[int, int]) -> Tensor:
        """[num_heads * (nope_dim + value_dim), latent_dim] from keys' part, which is transposed in
        the file, and values' part, each with an axis of heads."""
        (origin,) = self._names.origins(name)
        keys, values = (
            self._whole(origin.name.replace("attn_kv_b", part)) for part in ("attn_k_b", "attn_v_b")
        )
        fits = keys.dim() == values.dim() == 3 and len(keys) == len(values)
        if fits and keys.shape[1] == values.shape[2] == shape[1]:
            joined = torch.cat((keys.transpose(1, 2), values), dim=1).flatten(0, 1)
            if tuple(joined.shape) == shape:
                return joined
        raise ModelLoadError(
            f"{self.path}: tensors {origin.name.replace('attn_kv_b', 'attn_k_b and attn_v_b')!r}: "
            f"expected parts of {list(shape)}, found {list(keys.shape)} and {list(values.shape)}"
        )

    def _whole(self, name: str) -> Tensor:
        """A tensor as it is in the file, in the model's dtype."""
        if name not in self._file.tensors:
            raise ModelLoadError(f"{self.path}: tensor {name!r} is missing")
        part = _Part(self._file.tensors[name], Origin(name))
        target = torch.empty(part.shape, dtype=self.dtype, device=self.device)
        self._floats_into([part], target)
        return target


def _names_of(file: GgufModel) -> TensorNames:
    model = Hyperparameters(file)
    if model.architecture not in CONVENTIONS:
        known = ", ".join(sorted(CONVENTIONS))
        raise model.fields.fail("general.architecture", f"one of {known}")
    return TensorNames(model, file.tensors)


def _can_take_columns(part: _Part) -> bool:
    """Whether the wanted ones lie together, in whole blocks."""
    assert part.wanted_columns is not None
    size = part.place.format.block_values
    return part.columns is None and not any(bound % size for bound in part.wanted_columns)


def _as_slice(places: npt.NDArray[np.int64]) -> slice | Tensor:
    """Places in order are copied to at once."""
    if (np.diff(places) == 1).all():
        return slice(int(places[0]), int(places[-1]) + 1)
    return torch.from_numpy(places)


def _runs(is_wanted: npt.NDArray[np.bool_]) -> Iterator[Range]:
    """Where it is true."""
    edges = np.flatnonzero(np.diff(is_wanted, prepend=False, append=False))
    yield from zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True)


def _has_its_expert(part: _Part) -> bool:
    expert, shape = part.origin.expert, part.place.shape
    return expert is None or (len(shape) > 1 and expert < shape[0])


def _fit(parts: Sequence[Sequence[int]], shape: Sequence[int]) -> bool:
    """Whether parts of these shapes make up this one: the same axes, or their rows together.
    Axes of size 1 may have been dropped, and a vector have been cut into rows."""
    if len(parts) == 1:
        is_whole_vector = len(shape) == 1 and math.prod(parts[0]) == shape[0]
        return is_whole_vector or _long_axes(parts[0]) == _long_axes(shape)
    is_as_long = sum(map(math.prod, parts)) == math.prod(shape)
    return is_as_long and len({(len(part), part[-1]) for part in parts}) == 1


def _long_axes(shape: Sequence[int]) -> list[int]:
    return [size for size in shape if size > 1]


def _are_in_turn(name: str) -> bool:
    """Whether the rows of its two parts take turns: gpt-oss's gates and ups."""
    return name.endswith(("experts.gate_up_proj", "experts.gate_up_proj_bias"))


def _of_experts(rows: Tensor, *, num_experts: int, are_in_turn: bool) -> Tensor:
    """[num_experts * N, M], perhaps all gates and then all ups, -> [num_experts, N, M]."""
    if not are_in_turn:
        return rows.view(num_experts, -1, rows.shape[-1])
    parts = rows.view(2, num_experts, -1, rows.shape[-1])
    return parts.permute(1, 2, 0, 3).reshape(num_experts, -1, rows.shape[-1])


def _widest(layouts: Sequence[GroupLayout]) -> GroupLayout:
    """The layout to which all can be converted without loss. (4 bits beside 8 give 8, in which no
    numbers are shifted; so do codes beside numbers.)"""
    bits, codes = {layout.bits for layout in layouts}, {layout.codes for layout in layouts}
    is_narrow = bits == {4} and len(codes) == 1
    return GroupLayout(
        4 if is_narrow else 8,
        min(layout.group_size for layout in layouts),
        any(layout.has_offsets for layout in layouts),
        codes.pop() if is_narrow else "integer",
    )
