"""Opens the source of weights that a model folder needs; random weights without a checkpoint."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from ...errors import ModelLoadError
from ...frontend.client.progress import ByteProgress
from ...kernels.ops import Weight
from ...kernels.quantized_tensors import QuantizedWeight
from .formats import require_quantization
from .gguf.convert import weights_files
from .gguf.source import GgufWeights
from .quantized.bitsandbytes import BitsAndBytes4Format
from .quantized.dequantizing import DequantizingWeights, FloatFormat
from .quantized.fp8 import Fp8Format
from .quantized.packed import PackedWeights
from .quantized.quantization_config import GROUP_SIZE, PackedConfig, packed_config
from .quantized.quantizing import Quantization, QuantizingWeights
from .quantized.rounding import MAX_GROUP_SIZE
from .safetensors.checkpoint import CheckpointWeights
from .weight_source import WeightSource, stacked_shape

LoadFormat = Literal["auto", "safetensors", "gguf", "dummy"]


@contextmanager
def open_weights(
    folder: Path,
    load_format: LoadFormat,
    quantization: Quantization | Literal["none"],
    dtype: torch.dtype,
    device: torch.device,
    on_progress: ByteProgress | None = None,
) -> Iterator[WeightSource]:
    """A source, open while the model is built.

    Raises ModelLoadError for a folder without readable weights, InvalidRequest for a quantization
    of weights that are quantized already.
    """
    if load_format == "dummy":
        yield _dummy(folder, quantization, dtype, device)
        return
    ggufs = weights_files(folder) if load_format in ("auto", "gguf") else []
    if load_format == "gguf" and not ggufs:
        raise _no_gguf(folder)
    if ggufs:
        with closing(
            GgufWeights(
                ggufs[0], dtype, device, on_progress, has_stored_weights=quantization != "none"
            )
        ) as file:
            if file.is_quantized:
                require_quantization(quantization, folder, "GGUF")
            yield _quantizing(file, quantization, dtype)
        return
    config = packed_config(folder)
    if config is not None and not config.is_floating:
        require_quantization(quantization, folder, config.method)
    rounds = quantization != "none" or (config is not None and config.rounds_rest)
    with closing(
        CheckpointWeights(folder, dtype, device, on_progress, has_stored_weights=rounds)
    ) as checkpoint:
        if config is None:
            yield _quantizing(checkpoint, quantization, dtype)
            return
        if config.is_floating:
            floating = DequantizingWeights(
                checkpoint, _float_format(config), has_stored_weights=rounds
            )
            yield _quantizing(floating, quantization, dtype)
            return
        packed = PackedWeights(checkpoint, config)
        yield _rounded_alike(packed, config, dtype) if config.rounds_rest else packed


def _float_format(config: PackedConfig) -> FloatFormat:
    if config.method == "bitsandbytes":
        return BitsAndBytes4Format()
    return Fp8Format(config.block, config.scales)


def _no_gguf(folder: Path) -> ModelLoadError:
    files = sorted(folder.glob("*.gguf"))
    if not files:
        return ModelLoadError(f"{folder} holds no GGUF file")
    return ModelLoadError(
        f"{folder} holds safetensors beside its GGUF files: give the one that is meant, as in "
        f"{files[0]}"
    )


def _quantizing(
    source: WeightSource, quantization: Quantization | Literal["none"], dtype: torch.dtype
) -> WeightSource:
    if quantization == "none":
        return source
    return QuantizingWeights(source, quantization, dtype)


def _dummy(
    folder: Path,
    quantization: Quantization | Literal["none"],
    dtype: torch.dtype,
    device: torch.device,
) -> WeightSource:
    """Random weights, with the bits of the checkpoint's weights."""
    source = DummyWeights(dtype, device)
    config = packed_config(folder) if (folder / "config.json").exists() else None
    if config is not None and config.method == "mxfp4":
        return DummyWeights(dtype, device, has_mxfp4=True)
    if quantization == "none" and config is not None and not config.is_floating:
        return _rounded_alike(source, config, dtype)
    return _quantizing(source, quantization, dtype)


def _rounded_alike(
    source: WeightSource, config: PackedConfig, dtype: torch.dtype
) -> QuantizingWeights:
    """Rounds the floating weights in `source` like the packed ones."""
    group_size = config.group_size or MAX_GROUP_SIZE
    return QuantizingWeights(source, _as_rounded(config), dtype, group_size)


def _as_rounded(config: PackedConfig) -> Quantization:
    if config.activations == "int8":
        return "w8a8"
    return "int8" if config.bits == 8 else "int4"


_STD = 0.02  # Llama's initializer_range
_MXFP4_SCALE = 2.0**-8  # times numbers whose root mean square is 5.5


class DummyWeights(WeightSource):
    """A `WeightSource` of normal numbers from a fixed seed; norms are 1, so logits are finite.

    Made on the device, in the dtype: nothing is copied. Other devices give other numbers.
    """

    def __init__(
        self,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
        seed: int = 0,
        *,
        has_mxfp4: bool = False,
    ) -> None:
        """has_mxfp4: experts that are one tensor are in 4 bits."""
        self._has_mxfp4 = has_mxfp4
        self.dtype = dtype
        self.device = torch.device(device)
        self._generator = torch.Generator(self.device).manual_seed(seed)

    def __contains__(self, name: str) -> bool:
        return False

    def take(self, name: str, shape: Sequence[int], dtype: torch.dtype | None = None) -> Tensor:
        if name.endswith("norm.weight"):
            return torch.ones(tuple(shape), dtype=dtype or self.dtype, device=self.device)
        values = torch.empty(tuple(shape), dtype=dtype or self.dtype, device=self.device)
        return values.normal_(std=_STD, generator=self._generator)

    def take_stacked(self, names: Sequence[str], shapes: Sequence[Sequence[int]]) -> Tensor:
        return self.take(names[0], stacked_shape(shapes))

    def take_weight(
        self, names: Sequence[str], out_features: Sequence[int], in_features: int
    ) -> Weight:
        return self.take_stacked(
            [f"{name}.weight" for name in names], [(size, in_features) for size in out_features]
        )

    def take_experts(
        self, name: str, num_experts: int, out_features: int, in_features: int
    ) -> Weight:
        if not self._has_mxfp4:
            return self.take(name, (num_experts, out_features, in_features))
        shape = (num_experts, out_features, in_features // 2)
        values = torch.empty(shape, dtype=torch.uint8, device=self.device)
        values.random_(256, generator=self._generator)
        groups = (num_experts, out_features, in_features // GROUP_SIZE)
        scales = torch.full(groups, _MXFP4_SCALE, dtype=torch.bfloat16, device=self.device)
        return QuantizedWeight(4, GROUP_SIZE, values, scales, None, codes="fp4")

    def tie_weight(self, table: Tensor) -> Weight:
        return table

    def skip(self, name: str) -> None:
        """Does nothing: no names are recorded."""

    def finish(self) -> None:
        """Does nothing: no tensor is left over."""
