"""Weights in floats of 8 and 4 bits, and bitsandbytes': by the formats' descriptions in numpy, and
by their own packages where these are installed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from quantized_checkpoints import write_checkpoint
from torch import Tensor

from stemma.errors import ModelLoadError
from stemma.kernels.ops import Weight
from stemma.kernels.quantized_tensors import QuantizedWeight
from stemma.kernels.reference.quantized import dequantize
from stemma.runtime.checkpoint.formats import stored_method
from stemma.runtime.checkpoint.loader import open_weights

CPU = torch.device("cpu")
ROWS, COLUMNS = 48, 96
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
NAMES = ["m.q_proj", "m.k_proj"]  # parts of one product


def compressed(layout: str, weights: dict[str, Any]) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": {"type": "float", **weights}}
    return {
        "quant_method": "compressed-tensors", "format": layout, "config_groups": {"group_0": group},
    }  # fmt: skip


FP8: dict[str, dict[str, Any]] = {
    "channel": compressed("float-quantized", {"num_bits": 8, "strategy": "channel"}),
    "tensor": compressed("float-quantized", {"num_bits": 8, "strategy": "tensor"}),
    "block": compressed(
        "float-quantized", {"num_bits": 8, "strategy": "block", "block_structure": [32, 64]}
    ),
    "naive": compressed("naive-quantized", {"num_bits": 8, "strategy": "channel"}),
    "mx": compressed("mxfp8-quantized", {"num_bits": 8, "strategy": "group", "group_size": 32}),
    "fbgemm": {"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0},
    "modelopt": {"quant_method": "modelopt", "quant_algo": "FP8"},
}
BLOCKS = {
    "channel": (1, COLUMNS), "tensor": (ROWS, COLUMNS), "block": (32, 64), "naive": (1, COLUMNS),
    "mx": (1, 32), "fbgemm": (1, COLUMNS), "modelopt": (ROWS, COLUMNS),
}  # fmt: skip


def take(folder: Path, names: list[str], dtype: torch.dtype = torch.float32) -> Weight:
    with open_weights(folder, "auto", "none", dtype, CPU) as source:
        return source.take_weight(names, [ROWS] * len(names), COLUMNS)


def floating(weight: Weight) -> Tensor:
    return weight if isinstance(weight, Tensor) else dequantize(weight, torch.float32)


@pytest.mark.parametrize("kind", FP8)
def test_8_bit_floats_are_the_numbers_times_their_scales(tmp_path: Path, kind: str) -> None:
    rows, columns = BLOCKS[kind]
    tensors, expected = {}, []
    for seed, name in enumerate(NAMES):
        torch.manual_seed(seed)
        numbers = (100 * torch.randn(ROWS, COLUMNS)).to(torch.float8_e4m3fn)
        shape = (-(-ROWS // rows), -(-COLUMNS // columns))
        exponents = torch.randint(110, 130, shape, dtype=torch.uint8)
        scales = (
            torch.ldexp(torch.ones(shape), exponents.int() - 127)
            if kind == "mx"
            else (torch.rand(shape) + 0.5)
        )
        is_one = shape == (1, 1)
        tensors[f"{name}.weight"] = numbers
        tensors[f"{name}.weight_scale"] = (
            exponents if kind == "mx" else scales.reshape(()) if is_one else scales
        )
        tensors[f"{name}.input_scale"] = torch.ones(())
        wide = scales.repeat_interleave(rows, 0)[:ROWS].repeat_interleave(columns, 1)[:, :COLUMNS]
        expected.append(numbers.float() * wide)
    folder = write_checkpoint(tmp_path, tensors, FP8[kind])
    assert stored_method(folder) is None
    for dtype in (torch.float32, torch.bfloat16):
        found = take(folder, NAMES, dtype)
        assert isinstance(found, Tensor) and torch.equal(found, torch.cat(expected).to(dtype))


def test_the_number_of_scales_has_to_fit(tmp_path: Path) -> None:
    tensors = {
        "m.weight": torch.ones(ROWS, COLUMNS).to(torch.float8_e4m3fn),
        "m.weight_scale": torch.ones(ROWS - 1, 1),
    }
    folder = write_checkpoint(tmp_path, tensors, FP8["channel"])
    with pytest.raises(ModelLoadError, match=r"weight_scale.*one for each of 48 rows, found \[47"):
        take(folder, ["m"])


@pytest.mark.parametrize("kind", ["nvfp4", "mxfp4", "modelopt"])
def test_4_bit_floats_stay_packed(tmp_path: Path, kind: str) -> None:
    size = 32 if kind == "mxfp4" else 16
    tensors, expected = {}, []
    for seed, name in enumerate(NAMES):
        rng = np.random.default_rng(seed)
        codes = rng.integers(0, 16, (ROWS, COLUMNS))
        numbers = np.where(codes < 8, 1, -1) * np.array(E2M1)[codes % 8]
        packed = torch.from_numpy((codes[:, ::2] | codes[:, 1::2] << 4).astype(np.uint8))
        groups = (ROWS, COLUMNS // size)
        if kind == "mxfp4":
            exponents = rng.integers(118, 130, groups)
            scales = 2.0 ** (exponents - 127)
            stored = {"weight_scale": torch.from_numpy(exponents.astype(np.uint8))}
        else:
            own = torch.from_numpy(rng.uniform(1, 400, groups)).to(torch.float8_e4m3fn)
            factor = np.float32(rng.uniform(1e-4, 1e-3))
            scales = own.float().numpy() * factor
            stored = {"weight_scale": own}
            if kind == "modelopt":
                stored["weight_scale_2"] = torch.tensor(factor)
            else:
                stored["weight_global_scale"] = torch.tensor([1 / factor])
        stored["weight" if kind == "modelopt" else "weight_packed"] = packed
        tensors |= {f"{name}.{own}": tensor for own, tensor in stored.items()}
        expected.append(numbers * np.repeat(scales, size, 1))
    weights = {"num_bits": 4, "strategy": "tensor_group", "group_size": size}
    section = {
        "nvfp4": compressed("nvfp4-pack-quantized", weights),
        "mxfp4": compressed("mxfp4-pack-quantized", weights),
        "modelopt": {"quant_method": "modelopt", "quant_algo": "NVFP4"},
    }[kind]
    found = take(write_checkpoint(tmp_path, tensors, section), NAMES)
    assert isinstance(found, QuantizedWeight) and (found.bits, found.codes) == (4, "fp4")
    wanted = torch.from_numpy(np.concatenate(expected)).float()
    torch.testing.assert_close(floating(found), wanted, rtol=1e-6, atol=0)


def test_nf4_is_its_table_times_its_scales(tmp_path: Path) -> None:
    """Nested scales, blocks that end within a row, the first of a byte's codes in its high half."""
    rng, tensors, expected = np.random.default_rng(0), {}, []
    table = np.sort(rng.uniform(-1, 1, 16)).astype(np.float32)
    codes_of_scales = np.sort(rng.uniform(-1, 1, 256)).astype(np.float32)
    for name in NAMES:
        codes = rng.integers(0, 16, ROWS * COLUMNS)
        nested = rng.integers(0, 256, ROWS * COLUMNS // 64, dtype=np.uint8)
        peaks = rng.uniform(0.1, 1, 2).astype(np.float32)
        state = {
            "quant_type": "nf4", "blocksize": 64, "shape": [ROWS, COLUMNS], "dtype": "bfloat16",
            "nested_blocksize": 64, "nested_offset": 2.0, "nested_dtype": "float32",
        }  # fmt: skip
        stored = {
            "": (codes[::2] << 4 | codes[1::2]).astype(np.uint8)[:, None],
            ".absmax": nested,
            ".quant_map": table,
            ".nested_absmax": peaks,
            ".nested_quant_map": codes_of_scales,
            ".quant_state.bitsandbytes__nf4": np.frombuffer(json.dumps(state).encode(), np.uint8),
        }
        tensors |= {f"{name}.weight{own}": torch.tensor(array) for own, array in stored.items()}
        scales = codes_of_scales[nested] * np.repeat(peaks, 64)[: len(nested)] + 2
        expected.append((table[codes] * np.repeat(scales, 64)).reshape(ROWS, COLUMNS))
    section = {"quant_method": "bitsandbytes", "load_in_4bit": True}
    folder = write_checkpoint(tmp_path, tensors, section)
    found = take(folder, NAMES)
    assert isinstance(found, Tensor) and stored_method(folder) is None
    torch.testing.assert_close(found, torch.from_numpy(np.concatenate(expected)))


def test_bitsandbytes_8_bits_are_a_scale_a_row(tmp_path: Path) -> None:
    numbers = torch.randint(-127, 128, (ROWS, COLUMNS), dtype=torch.int8)
    peaks = torch.rand(ROWS) + 0.1
    tensors = {
        "m.weight": numbers, "m.SCB": peaks, "m.weight_format": torch.zeros((), dtype=torch.uint8),
    }  # fmt: skip
    section = {"quant_method": "bitsandbytes", "load_in_8bit": True}
    found = take(write_checkpoint(tmp_path, tensors, section), ["m"])
    assert isinstance(found, QuantizedWeight) and found.bits == 8
    torch.testing.assert_close(floating(found), numbers * peaks[:, None] / 127)


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("kind", ["nf4", "fp4"])
def test_what_bitsandbytes_writes_is_what_it_reads(tmp_path: Path, kind: str, nested: bool) -> None:
    functional = pytest.importorskip("bitsandbytes.functional")
    packed, state = functional.quantize_4bit(
        torch.randn(ROWS, COLUMNS), quant_type=kind, compress_statistics=nested
    )
    parts = {f"m.weight.{own}": tensor for own, tensor in state.as_dict(packed=True).items()}
    section = {"quant_method": "bitsandbytes", "load_in_4bit": True}
    found = take(write_checkpoint(tmp_path, {"m.weight": packed, **parts}, section), ["m"])
    torch.testing.assert_close(floating(found), functional.dequantize_4bit(packed, state))


@pytest.mark.parametrize(
    "scheme", ["FP8", "FP8_DYNAMIC", "FP8_BLOCK", "NVFP4A16", "MXFP4A16", "W4A16", "W8A8"]
)
def test_what_compressed_tensors_writes_is_what_it_reads(tmp_path: Path, scheme: str) -> None:
    quantization = pytest.importorskip("compressed_tensors.quantization")
    compressors = pytest.importorskip("compressed_tensors.compressors")
    model = torch.nn.Sequential()
    model.add_module("m", torch.nn.Linear(256, 128, bias=False))
    config = quantization.QuantizationConfig(
        config_groups={"group_0": quantization.preset_name_to_scheme(scheme, ["Linear"])}
    )
    quantization.apply_quantization_config(model, config)
    set_scales(model.m)
    compressor = compressors.ModelCompressor.from_pretrained_model(model)
    compressor.compress_model(model)
    stored = {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
    section = json.loads(json.dumps(compressor.quantization_config.model_dump(), default=str))
    folder = write_checkpoint(tmp_path, stored, {"quant_method": "compressed-tensors", **section})
    with open_weights(folder, "auto", "none", torch.float32, CPU) as source:
        found = source.take_weight(["m"], [128], 256)
    compressor.decompress_model(model)
    wanted = model.m.weight.detach().float()  # NVFP4's is rounded to bfloat16
    torch.testing.assert_close(floating(found), wanted, rtol=2**-8, atol=0)


def set_scales(linear: Any) -> None:
    """Such that most numbers are within the format's range."""
    bits, scales = linear.quantization_scheme.weights.num_bits, linear.weight_scale.data
    is_float = linear.quantization_scheme.weights.type == "float"
    limit = (448.0 if bits == 8 else 6.0) if is_float else 2.0 ** (bits - 1) - 1
    new = linear.weight.detach().abs().max() / limit * (0.5 + torch.rand(scales.shape) / 2)
    if hasattr(linear, "weight_global_scale"):
        linear.weight_global_scale.data.fill_(448 / float(new.max()))
        new = new * linear.weight_global_scale
    if linear.quantization_scheme.format == "mxfp4-pack-quantized":
        new = 2.0 ** new.log2().ceil()
    scales.copy_(new)
