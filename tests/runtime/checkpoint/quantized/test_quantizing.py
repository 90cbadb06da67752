"""Rounding weights at load: how far numbers may be from the weights, and which weights stay."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from stemma.errors import InvalidRequest, ModelLoadError
from stemma.kernels.quantized_tensors import QuantizedWeight
from stemma.runtime.checkpoint.loader import DummyWeights
from stemma.runtime.checkpoint.location import EMBEDDED_MODEL
from stemma.runtime.checkpoint.quantized.quantizing import QuantizingWeights
from stemma.runtime.checkpoint.quantized.rounding import (
    group_size_for,
    round_to_4_bits,
    round_to_8_bits,
)
from stemma.runtime.checkpoint.safetensors.revision import model_revision
from stemma.runtime.config import EngineConfig
from stemma.runtime.models.model_config import read_model_config


def numbers_of(weight: QuantizedWeight) -> npt.NDArray[np.float64]:
    """[out_features, in_features], by the class's own words."""
    values = weight.values.numpy()
    if weight.bits == 8:
        return values.astype(np.float64)
    pairs = np.stack((values & 15, values >> 4), axis=-1)
    return pairs.reshape(values.shape[0], -1).astype(np.float64) - 8


def dequantized(weight: QuantizedWeight) -> npt.NDArray[np.float64]:
    scales = weight.scales.double().numpy().repeat(weight.group_size, axis=1)
    plain = scales * numbers_of(weight)
    if weight.offsets is None:
        return plain
    return plain + weight.offsets.double().numpy().repeat(weight.group_size, axis=1)


def random_weight(seed: int, num_outputs: int, num_inputs: int, scale: float = 0.05) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(num_outputs, num_inputs, generator=generator) * scale


@given(st.integers(0, 99), st.sampled_from([1e-3, 0.05, 30.0]), st.sampled_from([32, 96]))
def test_8_bits_are_within_half_a_step(seed: int, scale: float, num_inputs: int) -> None:
    weight = random_weight(seed, 5, num_inputs, scale)
    quantized = round_to_8_bits(weight)
    error = np.abs(dequantized(quantized) - weight.double().numpy())
    # half a step, and what the largest number misses where its scale was rounded to float16
    assert (error <= quantized.scales.double().numpy() * (0.5 + 127 / 2048)).all()
    assert quantized.scales.shape == (5, 1) and quantized.offsets is None
    assert np.abs(numbers_of(quantized)).max() >= 126


@given(st.integers(0, 99), st.sampled_from([32, 64, 128]), st.booleans())
def test_4_bits_are_nearest_and_no_worse_than_the_whole_range(
    seed: int, group_size: int, is_one_sided: bool
) -> None:
    weight = random_weight(seed, 3, 256)
    if is_one_sided:
        weight = weight.abs()
    quantized = round_to_4_bits(weight, group_size)
    exact, groups = weight.double().numpy(), weight.double().numpy().reshape(-1, group_size)
    low, high = np.minimum(groups.min(1), 0), np.maximum(groups.max(1), 0)
    step = ((high - low) / 15).astype(np.float16).astype(np.float64)
    zero = np.clip(np.round(-low / step), 1, 15)
    nearest = np.clip(np.round(groups / step[:, None] + zero[:, None]), 0, 15)
    simple = ((nearest - zero[:, None]) * step[:, None] - groups) ** 2
    error = ((dequantized(quantized) - exact) ** 2).reshape(-1, group_size)
    assert (error.sum(1) <= simple.sum(1) * 1.0001).all()
    if group_size == 128 and not is_one_sided:
        assert error.sum() < 0.98 * simple.sum()


def test_4_bit_scales_and_zero_points_are_what_gptq_can_hold() -> None:
    quantized = round_to_4_bits(random_weight(0, 16, 256), 64)
    assert quantized.offsets is not None
    assert torch.equal(quantized.scales, quantized.scales.half().float())
    zeros = 8 - quantized.offsets / quantized.scales
    assert torch.equal(zeros, zeros.round()) and zeros.min() >= 1 and zeros.max() <= 15


def test_rows_of_zeros_stay_zero() -> None:
    assert not dequantized(round_to_4_bits(torch.zeros(2, 64), 64)).any()
    assert not dequantized(round_to_8_bits(torch.zeros(2, 64))).any()


def test_large_weights_are_rounded_chunk_by_chunk_alike() -> None:
    weight = random_weight(1, 700, 1024)  # more than one chunk
    for whole, part in (
        (round_to_8_bits(weight), round_to_8_bits(weight[600:])),
        (round_to_4_bits(weight, 128), round_to_4_bits(weight[600:], 128)),
    ):
        assert torch.equal(whole.values[600:], part.values)
        assert torch.equal(whole.scales[600:], part.scales)


def test_the_weight_is_left_as_it_was() -> None:
    weight = random_weight(2, 4, 128)
    before = weight.clone()
    round_to_8_bits(weight)
    round_to_4_bits(weight, 128)
    assert torch.equal(weight, before)


@pytest.mark.parametrize(
    ("in_features", "size"), [(4096, 128), (64, 64), (96, 32), (11008, 128), (80, None), (33, None)]
)
def test_a_group_divides_the_inputs(in_features: int, size: int | None) -> None:
    assert group_size_for(in_features) == size


class Plain(DummyWeights):
    """Every weight is taken from here as it is."""

    def __init__(self) -> None:
        super().__init__(torch.float32)
        self.given: dict[str, Tensor] = {}

    def take_stacked(self, names: Sequence[str], shapes: Sequence[Sequence[int]]) -> Tensor:
        taken = super().take_stacked(names, shapes)
        self.given[names[0]] = taken
        return taken


@pytest.mark.parametrize(
    ("quantization", "bits", "activations"),
    [("int8", 8, "exact"), ("w8a8", 8, "int8"), ("int4", 4, "exact")],
)
def test_linears_are_rounded_and_the_output_takes_8_bits(
    quantization: str, bits: int, activations: str
) -> None:
    source = QuantizingWeights(Plain(), quantization, torch.bfloat16)  # type: ignore[arg-type]
    qkv = source.take_weight(["a.q_proj", "a.k_proj"], [64, 32], 256)
    assert isinstance(qkv, QuantizedWeight)
    assert (qkv.bits, qkv.activations, qkv.out_features) == (bits, activations, 96)
    assert qkv.group_size == (128 if bits == 4 else 256)
    for output in (
        source.take_weight(["lm_head"], [50], 64),
        source.take_weight(["language_model.lm_head"], [50], 64),
        source.tie_weight(torch.ones(50, 64)),
    ):
        assert isinstance(output, QuantizedWeight)
        assert (output.bits, output.activations, output.out_features) == (8, "exact", 50)


def test_routers_small_inputs_norms_and_biases_stay() -> None:
    plain = Plain()
    source = QuantizingWeights(plain, "int4", torch.bfloat16)
    router = source.take_weight(["model.layers.0.mlp.gate"], [8], 64)
    assert isinstance(router, Tensor) and router.dtype is torch.bfloat16
    narrow = source.take_weight(["x.proj"], [8], 48)
    assert isinstance(narrow, Tensor)
    assert torch.equal(narrow, plain.given["x.proj.weight"].bfloat16())
    assert source.take("model.norm.weight", (4,)).tolist() == [1.0] * 4
    bias = source.take_stacked(["q.bias", "k.bias"], [(2,), (1,)])
    assert torch.equal(bias, plain.given["q.bias"])


@pytest.mark.parametrize("worst", [float("nan"), float("inf"), 1e9])
@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_a_weight_that_cannot_be_rounded_is_named(quantization: str, worst: float) -> None:
    class Broken(Plain):
        def take_stacked(self, names: Sequence[str], shapes: Sequence[Sequence[int]]) -> Tensor:
            taken = super().take_stacked(names, shapes)
            taken[1, 2] = worst
            return taken

    source = QuantizingWeights(Broken(), quantization, torch.float32)  # type: ignore[arg-type]
    with pytest.raises(ModelLoadError, match=r"m\.down_proj: a weight is not finite"):
        source.take_weight(["m.down_proj"], [8], 64)


def test_the_flag_names_what_there_is() -> None:
    with pytest.raises(InvalidRequest, match=r"quantization='int3'.*'int8', 'w8a8', 'int4'"):
        EngineConfig(quantization="int3")  # type: ignore[arg-type]


def test_kv_of_one_quantization_is_not_anothers(tmp_path: Path) -> None:
    config = read_model_config(EMBEDDED_MODEL)
    names = ("none", "int8", "w8a8", "int4")
    revisions = {model_revision(EMBEDDED_MODEL, config, 100, name) for name in names}
    assert len(revisions) == 4
    assert model_revision(EMBEDDED_MODEL, config, 100) in revisions
