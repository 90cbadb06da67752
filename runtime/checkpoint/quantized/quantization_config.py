"""The quantization section of a checkpoint's config.json, checked. Torch-free.

Only values that the tensors do not show are stored: bits and groups follow from their shapes.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from ..config.fields import Fields
from .modules_to_not_convert import (
    ALL_MODULES,
    KeptModules,
    kept_by_awq,
    kept_by_compressed,
    kept_by_gptq,
)

SUPPORTED = (
    "gptq (3, 4 and 8 bits), awq (gemm, 4 bits), compressed-tensors, mxfp4 (of experts), fp8, "
    "fbgemm_fp8, modelopt (FP8, NVFP4) and bitsandbytes"
)
OUR_QUANTIZER = "stemma"  # in meta.quantizer, as GPTQModel has it
GROUP_SIZE = 32  # of MXFP4
_FIELD = "quantization_config"
_MAX_BLOCK = 1 << 16  # guess, far above any format's
_NVFP4_GROUP_SIZE = 16
_FOLDED = ("weight_input", "weight_output")
_INTEGERS = ("pack-quantized", "int-quantized")
_8_BIT_FLOATS = ("float-quantized", "naive-quantized", "mxfp8-quantized")
_4_BIT_FLOATS = ("nvfp4-pack-quantized", "mxfp4-pack-quantized")


@dataclass(frozen=True, slots=True)
class PackedConfig:
    """How to read the packed tensors of a quantized checkpoint."""

    method: Literal["gptq", "awq", "compressed-tensors", "mxfp4", "fp8", "float4", "bitsandbytes"]
    bits: int
    group_size: int | None  # None: a row's inputs are one group
    kept: KeptModules
    zero_shift: int = 0  # gptq: subtracted from the zero points before packing
    activations: Literal["exact", "int8"] = "exact"
    rounds_rest: bool = False  # written by `stemma quantize`: floating linears have to be rounded
    block: tuple[int, int] | None = None  # fp8: rows and columns with one scale; None: all of them
    scales: str = ""  # fp8: the last name of the tensors with scales
    packed: str = ""  # float4: that of the tensors with codes

    @property
    def is_floating(self) -> bool:
        """Whether weights become floating when they are loaded, and may then be rounded."""
        return self.method == "fp8" or (self.method == "bitsandbytes" and self.bits == 4)


def packed_config(folder: Path) -> PackedConfig | None:
    """None: the weights are floating.

    Raises ModelLoadError for an unsupported value, with the field and the supported values.
    """
    config = Fields.read(folder / "config.json")
    section = config.nested(_FIELD)
    if section is None:  # as AutoGPTQ wrote it at first
        alone = folder / "quantize_config.json"
        return _gptq(Fields.read(alone)) if alone.exists() else None
    method = section.get("quant_method")
    if method == "gptq":
        return _gptq(section)
    if method == "awq":
        return _awq(section)
    if method == "compressed-tensors":
        return _compressed(section)
    if method == "mxfp4":  # experts alone, whatever else the section says
        return PackedConfig("mxfp4", 4, GROUP_SIZE, ALL_MODULES)
    if method == "fp8":
        return _fp8(section)
    if method == "fbgemm_fp8":
        return _floats_of_8_bits()
    if method == "modelopt":
        return _modelopt(section)
    if method == "bitsandbytes":
        bits = 4 if section.get("load_in_4bit") else 8
        return PackedConfig("bitsandbytes", bits, None, ALL_MODULES)
    raise section.fail(
        "quant_method",
        f"one of {SUPPORTED}; the model's unquantized checkpoint can be rounded with "
        "--quantization int8, w8a8 or int4",
    )


def _fp8(section: Fields) -> PackedConfig:
    """DeepSeek's."""
    section.restrict("fmt", "e4m3")
    return _floats_of_8_bits(_block(section, "weight_block_size"), "weight_scale_inv")


def _floats_of_8_bits(
    block: tuple[int, int] | None = None, scales: str = "weight_scale"
) -> PackedConfig:
    """Which weights are not in 8 bits (`modules_to_not_convert`, `ignore`) their types say."""
    return PackedConfig("fp8", 8, None, ALL_MODULES, block=block, scales=scales)


def _block(section: Fields, field: str) -> tuple[int, int] | None:
    block = section.get(field)
    if block is None:
        return None
    is_pair = isinstance(block, list) and len(block) == 2
    if not is_pair or not all(type(size) is int and 0 < size <= _MAX_BLOCK for size in block):
        raise section.fail(field, f"two integers in [1, {_MAX_BLOCK:,}], rows and columns, or null")
    return block[0], block[1]


def _modelopt(section: Fields) -> PackedConfig:
    """NVIDIA's Model Optimizer."""
    method = section.get("quant_algo")
    if method == "FP8":
        return _floats_of_8_bits()
    if method == "NVFP4":
        return PackedConfig("float4", 4, _NVFP4_GROUP_SIZE, ALL_MODULES, packed="weight")
    raise section.fail("quant_algo", "'FP8' or 'NVFP4'")


def _gptq(section: Fields) -> PackedConfig:
    """github.com/ModelCloud/GPTQModel, and AutoGPTQ before it."""
    layout = section.get("checkpoint_format") or "gptq"
    if layout not in ("gptq", "gptq_v2"):
        raise section.fail("checkpoint_format", "'gptq' or 'gptq_v2'")
    shift = 1 if layout == "gptq" else 0
    return PackedConfig(
        "gptq",
        _bits(section, (3, 4, 8)),
        _group_size(section),
        kept_by_gptq(section),
        zero_shift=shift,
        rounds_rest=_is_ours(section),
    )


def _is_ours(section: Fields) -> bool:
    meta = section.nested("meta")
    quantizers = meta.get("quantizer") if meta is not None else None
    return str(quantizers).find(f"'{OUR_QUANTIZER}:") >= 0


def _awq(section: Fields) -> PackedConfig:
    """github.com/casper-hansen/AutoAWQ."""
    version = section.get("version")
    if version is not None and str(version).lower() != "gemm":
        raise section.fail("version", "'gemm', the only layout of awq that is read")
    return PackedConfig(
        "awq",
        _bits(section, (4,)),
        _group_size(section),
        kept_by_awq(section),
        rounds_rest=_is_ours(section),
    )


def _compressed(section: Fields) -> PackedConfig:
    """github.com/vllm-project/compressed-tensors, which llm-compressor writes."""
    layout = section.get("format")
    if layout not in (*_INTEGERS, *_8_BIT_FLOATS, *_4_BIT_FLOATS):
        raise section.fail("format", f"one of {(*_INTEGERS, *_8_BIT_FLOATS, *_4_BIT_FLOATS)}")
    _require_no_online_transform(section)
    groups = section.nested("config_groups")
    if groups is None or len(groups.values) != 1:
        raise section.fail("config_groups", "one group, for all linears alike")
    (name,) = groups.values
    scheme = groups.nested(name)
    weights = None if scheme is None else scheme.nested("weights")
    if scheme is None or weights is None:
        raise groups.fail(name, "an object with 'weights'")
    kind = weights.get("type")
    if kind not in (None, "int") and layout in _INTEGERS:
        raise weights.fail("type", "'int'")
    if layout in _8_BIT_FLOATS and (layout != "naive-quantized" or kind == "float"):
        _bits(weights, (8,), "num_bits")
        return _floats_of_8_bits(_float_block(weights))
    if layout in _4_BIT_FLOATS:
        _bits(weights, (4,), "num_bits")
        default = _NVFP4_GROUP_SIZE if layout == "nvfp4-pack-quantized" else GROUP_SIZE
        size = _group_size(weights) or default
        kept = kept_by_compressed(section, scheme)
        return PackedConfig("float4", 4, size, kept, packed="weight_packed")
    return _compressed_integers(section, scheme, weights)


def _compressed_integers(section: Fields, scheme: Fields, weights: Fields) -> PackedConfig:
    if weights.get("strategy") not in ("group", "channel"):
        raise weights.fail("strategy", "'group' or 'channel'")
    size = _group_size(weights) if weights.get("strategy") == "group" else None
    kept = kept_by_compressed(section, scheme)
    inputs = scheme.nested("input_activations")
    if inputs is None:
        bits = _bits(weights, (4, 8), "num_bits")
        return PackedConfig("compressed-tensors", bits, size, kept)
    if inputs.get("type") not in (None, "int"):
        raise inputs.fail("type", "'int'")
    _bits(inputs, (8,), "num_bits")
    inputs.restrict("symmetric", True)
    if inputs.get("dynamic") is not True or inputs.get("strategy") != "token":
        raise scheme.fail("input_activations", "null, or dynamic with a scale a token")
    bits = _bits(weights, (8,), "num_bits")
    return PackedConfig(
        "compressed-tensors",
        bits,
        size,
        kept,
        activations="int8",
        rounds_rest=_is_ours(section),
    )


def _float_block(weights: Fields) -> tuple[int, int] | None:
    """Rows and columns with one scale; None: a row has one, or the whole weight."""
    strategy = weights.get("strategy")
    if strategy == "block":
        return _block(weights, "block_structure")
    if strategy == "group":
        return 1, _group_size(weights) or _MAX_BLOCK
    if strategy not in ("tensor", "channel"):
        raise weights.fail("strategy", "'tensor', 'channel', 'block' or 'group'")
    return None


def _require_no_online_transform(section: Fields) -> None:
    """What is folded into the weights is there already; what the model has to compute would be
    left out in silence."""
    config = section.nested("transform_config")
    schemes = None if config is None else config.nested("config_groups")
    for name in {} if schemes is None else schemes.values:
        scheme = schemes.nested(name) if schemes is not None else None
        transforms = None if scheme is None else scheme.get("apply")
        for applied in transforms if isinstance(transforms, list) else [transforms]:
            location = applied.get("location") if isinstance(applied, dict) else None
            if location not in _FOLDED:
                raise section.fail(
                    "transform_config",
                    f"transforms at {' or '.join(_FOLDED)} alone, which are within the weights",
                )


def _bits(section: Fields, allowed: tuple[int, ...], field: str = "bits") -> int:
    bits = section.get(field)
    if bits not in allowed:
        raise section.fail(field, " or ".join(str(each) for each in allowed))
    return int(bits)


def _group_size(section: Fields) -> int | None:
    size = section.get("group_size")
    if size in (-1, None):
        return None
    if not isinstance(size, int) or isinstance(size, bool) or size < 16 or size & (size - 1):
        raise section.fail("group_size", "-1, or a power of two from 16 on")
    return size
