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
    "gptq (3, 4 and 8 bits), awq (gemm, 4 bits), compressed-tensors (pack-quantized, "
    "int-quantized), mxfp4 (of experts) and fp8 (in blocks, or a scale a weight)"
)
OUR_QUANTIZER = "stemma"  # in meta.quantizer, as GPTQModel has it
GROUP_SIZE = 32  # of MXFP4
_FIELD = "quantization_config"
_MAX_BLOCK = 1 << 16  # guess, far above any format's
_COMPRESSED_FORMATS = ("pack-quantized", "int-quantized")


@dataclass(frozen=True, slots=True)
class PackedConfig:
    """How to read the packed tensors of a quantized checkpoint."""

    method: Literal["gptq", "awq", "compressed-tensors", "mxfp4", "fp8"]
    bits: int
    group_size: int | None  # None: a row's inputs are one group
    kept: KeptModules
    zero_shift: int = 0  # gptq: subtracted from the zero points before packing
    activations: Literal["exact", "int8"] = "exact"
    rounds_rest: bool = False  # written by `stemma quantize`: floating linears have to be rounded
    block: tuple[int, int] | None = None  # fp8: rows and columns with one scale; None: all of them

    @property
    def is_floating(self) -> bool:
        """Whether weights become floating when they are loaded, and may then be rounded."""
        return self.method == "fp8"


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
    raise section.fail(
        "quant_method",
        f"one of {SUPPORTED}; the model's unquantized checkpoint can be rounded with "
        "--quantization int8, w8a8 or int4",
    )


def _fp8(section: Fields) -> PackedConfig:
    """DeepSeek's. Which weights are not in 8 bits (`modules_to_not_convert`) their types say."""
    section.restrict("fmt", "e4m3")
    block = section.get("weight_block_size")
    if block is None:
        return PackedConfig("fp8", 8, None, ALL_MODULES)
    is_pair = isinstance(block, list) and len(block) == 2
    if not is_pair or not all(type(size) is int and 0 < size <= _MAX_BLOCK for size in block):
        raise section.fail(
            "weight_block_size", f"two integers in [1, {_MAX_BLOCK:,}], rows and columns, or null"
        )
    return PackedConfig("fp8", 8, None, ALL_MODULES, block=(block[0], block[1]))


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
    return PackedConfig("awq", _bits(section, (4,)), _group_size(section), kept_by_awq(section))


def _compressed(section: Fields) -> PackedConfig:
    """github.com/vllm-project/compressed-tensors, which llm-compressor writes."""
    if section.get("format") not in _COMPRESSED_FORMATS:
        raise section.fail("format", f"one of {_COMPRESSED_FORMATS}")
    groups = section.nested("config_groups")
    if groups is None or len(groups.values) != 1:
        raise section.fail("config_groups", "one group, for all linears alike")
    (name,) = groups.values
    scheme = groups.nested(name)
    weights = None if scheme is None else scheme.nested("weights")
    if scheme is None or weights is None:
        raise groups.fail(name, "an object with 'weights'")
    if weights.get("type") not in (None, "int"):
        raise weights.fail("type", "'int'")
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
