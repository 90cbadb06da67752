"""Reading GPTQ, AWQ and compressed-tensors: the weights are those that were packed, bit by bit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from quantized_checkpoints import (
    Array,
    Module,
    act_ordered,
    awq_tensors,
    compressed_tensors,
    gptq_tensors,
    random_module,
    write_checkpoint,
)
from torch import Tensor

from stemma.errors import InvalidRequest, ModelLoadError
from stemma.kernels.ops import Weight
from stemma.kernels.quantized_tensors import QuantizedWeight
from stemma.runtime.checkpoint.loader import open_weights
from stemma.runtime.checkpoint.quantized.quantization_config import packed_config

CPU = torch.device("cpu")
GPTQ: dict[str, Any] = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False}
AWQ: dict[str, Any] = {
    "quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm",
}  # fmt: skip


def compressed_config(
    bits: int, strategy: str, layout: str, inputs: object = None
) -> dict[str, Any]:
    weights = {"num_bits": bits, "type": "int", "strategy": strategy, "group_size": 32}
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs}
    return {
        "quant_method": "compressed-tensors", "format": layout, "config_groups": {"group_0": group},
    }  # fmt: skip


def take(folder: Path, names: list[str], sizes: list[int], num_inputs: int) -> Weight:
    with open_weights(folder, "auto", "none", torch.float32, CPU) as source:
        return source.take_weight(names, sizes, num_inputs)


def dequantized(weight: Weight) -> Array:
    """float64, by the words of QuantizedWeight."""
    assert isinstance(weight, QuantizedWeight)
    values = weight.values.numpy()
    if weight.bits == 8:
        numbers = values.astype(np.float64)
    else:
        numbers = np.empty((values.shape[0], values.shape[1] * 2))
        numbers[:, 0::2], numbers[:, 1::2] = values % 16, values // 16
        numbers -= 8
    matrix = numbers * np.repeat(weight.scales.double().numpy(), weight.group_size, axis=1)
    if weight.offsets is not None:
        matrix += np.repeat(weight.offsets.double().numpy(), weight.group_size, axis=1)
    if weight.input_order is None:
        return matrix
    moved = np.empty_like(matrix)
    moved[:, weight.input_order.numpy()] = matrix
    return moved


def assert_same(weight: Weight, *modules: Module) -> QuantizedWeight:
    assert isinstance(weight, QuantizedWeight)
    expected = np.concatenate([module.weight for module in modules])
    np.testing.assert_allclose(dequantized(weight), expected, rtol=1e-6, atol=1e-9)
    return weight


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("group_size", [32, 128, 256])
@pytest.mark.parametrize("is_symmetric", [False, True])
@pytest.mark.parametrize("layout", ["gptq", "gptq_v2"])
def test_gptq(tmp_path: Path, bits: int, group_size: int, is_symmetric: bool, layout: str) -> None:
    module = random_module(0, 24, 256, bits=bits, group_size=group_size, is_symmetric=is_symmetric)
    tensors = gptq_tensors("m", module, zero_shift=1 if layout == "gptq" else 0)
    said = -1 if group_size == 256 else group_size
    config = {**GPTQ, "bits": bits, "group_size": said, "checkpoint_format": layout}
    weight = assert_same(
        take(write_checkpoint(tmp_path, tensors, config), ["m"], [24], 256), module
    )
    assert (weight.bits, weight.group_size) == (bits, group_size)
    assert (weight.offsets is None) == is_symmetric


def test_gptq_as_its_first_tools_wrote_it(tmp_path: Path) -> None:
    """The section in a file of its own, no g_idx."""
    module = random_module(1, 8, 64)
    tensors = gptq_tensors("m", module)
    del tensors["m.g_idx"]
    folder = write_checkpoint(tmp_path, tensors, None)
    (folder / "quantize_config.json").write_text(json.dumps({"bits": 4, "group_size": 32}))
    assert_same(take(folder, ["m"], [8], 64), module)


@pytest.mark.parametrize("group_size", [32, 64])
def test_awq(tmp_path: Path, group_size: int) -> None:
    module = random_module(2, 24, 128, group_size=group_size)
    config = {**AWQ, "group_size": group_size}
    folder = write_checkpoint(tmp_path, awq_tensors("m", module), config)
    assert_same(take(folder, ["m"], [24], 128), module)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("has_zeros", [False, True])
@pytest.mark.parametrize("strategy", ["group", "channel"])
def test_compressed_tensors_packed(
    tmp_path: Path, bits: int, has_zeros: bool, strategy: str
) -> None:
    size = 32 if strategy == "group" else 128
    module = random_module(3, 12, 128, bits=bits, group_size=size, is_symmetric=not has_zeros)
    tensors = compressed_tensors("m", module, is_packed=True, has_zeros=has_zeros)
    config = compressed_config(bits, strategy, "pack-quantized")
    folder = write_checkpoint(tmp_path, tensors, config)
    assert assert_same(take(folder, ["m"], [12], 128), module).activations == "exact"


@pytest.mark.parametrize("has_zeros", [False, True])
def test_compressed_tensors_with_8_bit_inputs(tmp_path: Path, has_zeros: bool) -> None:
    module = random_module(4, 12, 64, bits=8, group_size=64, is_symmetric=not has_zeros)
    tensors = compressed_tensors("m", module, is_packed=False, has_zeros=has_zeros)
    inputs = {"num_bits": 8, "type": "int", "strategy": "token", "dynamic": True}
    config = compressed_config(8, "channel", "int-quantized", inputs)
    weight = take(write_checkpoint(tmp_path, tensors, config), ["m"], [12], 64)
    assert assert_same(weight, module).activations == "int8"


def test_modules_of_a_layer_are_stacked(tmp_path: Path) -> None:
    q, k = random_module(5, 16, 64), random_module(6, 8, 64, is_symmetric=True)
    folder = write_checkpoint(tmp_path, awq_tensors("q", q) | awq_tensors("k", k), AWQ)
    assert_same(take(folder, ["q", "k"], [16, 8], 64), q, k)


def test_stacked_modules_may_differ_in_bits_and_groups(tmp_path: Path) -> None:
    """As with GPTQModel's `dynamic`."""
    fine = random_module(7, 16, 128)
    wide = random_module(8, 8, 128, bits=8, group_size=128, is_symmetric=True)
    tensors = gptq_tensors("a", fine) | gptq_tensors("b", wide)
    weight = take(write_checkpoint(tmp_path, tensors, GPTQ), ["a", "b"], [16, 8], 128)
    assert isinstance(weight, QuantizedWeight) and (weight.bits, weight.group_size) == (8, 32)
    assert_same(weight, fine, wide)


def test_what_was_not_converted_stays_floating(tmp_path: Path) -> None:
    module = random_module(9, 8, 64)
    plain = torch.randn(8, 64)
    tensors = awq_tensors("a", module) | {"b.weight": plain, "norm.weight": torch.ones(4).half()}
    folder = write_checkpoint(tmp_path, tensors, AWQ | {"modules_to_not_convert": ["b"]})
    with open_weights(folder, "auto", "none", torch.bfloat16, CPU) as source:
        alone = source.take_weight(["b"], [8], 64)
        mixed = source.take_weight(["a", "b"], [8, 8], 64)
        norm = source.take("norm.weight", (4,))
    assert isinstance(alone, Tensor) and torch.equal(alone, plain.bfloat16())
    assert isinstance(mixed, Tensor) and mixed.dtype is norm.dtype is torch.bfloat16
    expected = torch.from_numpy(module.weight).float().bfloat16()
    assert torch.equal(mixed, torch.cat((expected, plain.bfloat16())))


COMPRESSED = compressed_config(4, "group", "pack-quantized")


@pytest.mark.parametrize(
    ("config", "packed"), [(GPTQ, "qweight"), (AWQ, "qweight"), (COMPRESSED, "weight_scale")]
)
def test_floating_weights_of_which_a_quantized_config_says_nothing_are_refused(
    tmp_path: Path, config: dict[str, Any], packed: str
) -> None:
    tensors = {"a.b.weight": torch.ones(8, 64), "lm_head.weight": torch.ones(8, 64)}
    folder = write_checkpoint(tmp_path, tensors, config)
    match = (
        rf"'a\.b\.{packed}' is missing, while quantization_config says quant_method "
        rf"'{config['quant_method']}': 'a\.b\.weight' is there instead, torch\.float32"
    )
    with pytest.raises(ModelLoadError, match=match):
        take(folder, ["a.b"], [8], 64)
    with pytest.raises(ModelLoadError, match=rf"'c\.{packed}' is missing, .* '[\w-]+'$"):
        take(folder, ["c"], [8], 64)
    assert isinstance(take(folder, ["lm_head"], [8], 64), Tensor)


def with_group(**fields: object) -> dict[str, Any]:
    return {**COMPRESSED, "config_groups": {"g": {"weights": _WEIGHTS, **fields}}}


_WEIGHTS = COMPRESSED["config_groups"]["group_0"]["weights"]
NAME = "model.layers.1.mlp.up_proj"


@pytest.mark.parametrize(
    ("config", "is_kept"),
    [
        ({**AWQ, "modules_to_not_convert": ["up_proj"]}, True),
        ({**AWQ, "modules_to_not_convert": [NAME]}, True),
        ({**AWQ, "modules_to_not_convert": ["layers.1."]}, True),
        ({**AWQ, "modules_to_not_convert": ["down_proj", "mlp.up."]}, False),
        ({**AWQ, "modules_to_not_convert": []}, False),
        ({**GPTQ, "modules_to_not_convert": ["mlp"]}, True),
        ({**GPTQ, "dynamic": {r"-:model\.layers\.1\.": {}}}, True),
        ({**GPTQ, "dynamic": {r"-:.*up_proj$": {}}}, True),
        ({**GPTQ, "dynamic": {r"+:.*up_proj": {"bits": 8}, "-:mlp": {}}}, False),
        ({**GPTQ, "modules_in_block_to_quantize": [["self_attn.q_proj"], ["mlp.gate"]]}, True),
        ({**GPTQ, "modules_in_block_to_quantize": ["mlp.up_proj"]}, False),
        ({**COMPRESSED, "ignore": [NAME]}, True),
        ({**COMPRESSED, "ignore": ["re:.*up_proj"]}, True),
        ({**COMPRESSED, "ignore": ["up_proj", "model.layers.1", NAME + "s"]}, False),
        (with_group(targets=["Linear"]), False),
        (with_group(targets=[r"re:.*self_attn"]), True),
        (with_group(targets=[r"re:.*self_attn", NAME]), False),
    ],
)
def test_which_modules_may_be_floating(
    tmp_path: Path, config: dict[str, Any], is_kept: bool
) -> None:
    folder = write_checkpoint(tmp_path, {f"{NAME}.weight": torch.ones(8, 64)}, config)
    if is_kept:
        assert isinstance(take(folder, [NAME], [8], 64), Tensor)
    else:
        with pytest.raises(ModelLoadError, match="is there instead"):
            take(folder, [NAME], [8], 64)


@pytest.mark.parametrize(
    ("config", "match"),
    [
        ({**AWQ, "modules_to_not_convert": "mlp"}, "'modules_to_not_convert': expected a list"),
        ({**AWQ, "modules_to_not_convert": [["a"], [["b"]]]}, "expected a list of names"),
        ({**GPTQ, "dynamic": ["-:a"]}, "'dynamic': expected an object"),
        ({**GPTQ, "dynamic": {"-:(": {}}}, "'dynamic': expected regular expressions"),
        ({**COMPRESSED, "ignore": ["re:*"]}, "'ignore': expected regular expressions"),
    ],
)
def test_names_of_modules_that_are_none_are_refused(
    tmp_path: Path, config: dict[str, Any], match: str
) -> None:
    folder = write_checkpoint(tmp_path, {"a": torch.ones(1)}, config)
    with pytest.raises(ModelLoadError, match=match):
        packed_config(folder)


@pytest.mark.parametrize("method", ["gptq", "awq", "compressed"])
def test_packed_tensors_of_which_the_config_says_nothing_are_refused(
    tmp_path: Path, method: str
) -> None:
    module = random_module(10, 8, 64)
    tensors = {
        "gptq": gptq_tensors("m", module),
        "awq": awq_tensors("m", module),
        "compressed": compressed_tensors("m", module, is_packed=True, has_zeros=False),
    }[method]
    folder = write_checkpoint(tmp_path, tensors, None)
    packed = "weight_packed" if method == "compressed" else "qweight"
    match = rf"'m\.weight' is missing from the checkpoint, but 'm\.{packed}' is there: packed"
    with pytest.raises(ModelLoadError, match=match):
        take(folder, ["m"], [8], 64)


def test_packed_tensors_are_all_taken(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    module = random_module(10, 8, 64)
    packed = compressed_tensors("m", module, is_packed=True, has_zeros=True)
    for folder, tensors, config in (
        (tmp_path / "gptq", gptq_tensors("m", module), GPTQ),
        (tmp_path / "awq", awq_tensors("m", module), AWQ),
        (tmp_path / "ct", packed, compressed_config(4, "group", "pack-quantized")),
    ):
        write_checkpoint(folder, tensors, config)
        with open_weights(folder, "auto", "none", torch.float32, CPU) as source:
            source.take_weight(["m"], [8], 64)
            source.finish()
    assert not caplog.records


def test_a_packed_router_becomes_floating(tmp_path: Path) -> None:
    """Which a model takes as a tensor; some quantizers pack it like any linear."""
    module = random_module(12, 8, 64)
    name = "model.layers.0.mlp.gate"
    numbers = random_module(13, 8, 64, bits=8, group_size=64, is_symmetric=True)
    for folder, tensors, config, packed in (
        (tmp_path / "gptq", gptq_tensors(name, module), GPTQ, module),
        (tmp_path / "awq", awq_tensors(name, module), AWQ, module),
        (
            tmp_path / "ct",
            compressed_tensors(name, numbers, is_packed=False, has_zeros=False),
            compressed_config(8, "channel", "int-quantized"),
            numbers,
        ),
    ):
        write_checkpoint(folder, tensors, config)
        with open_weights(folder, "auto", "none", torch.bfloat16, CPU) as source:
            router = source.take(f"{name}.weight", (8, 64), torch.float32)
            assert source.take(f"{name}.weight", (8, 64)).dtype is torch.bfloat16
        np.testing.assert_allclose(router.numpy(), packed.weight, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("is_symmetric", [False, True])
def test_groups_whose_inputs_do_not_follow_each_other(
    tmp_path: Path, bits: int, is_symmetric: bool
) -> None:
    """GPTQ's act-order, and compressed-tensors' actorder "group"."""
    plain = random_module(11, 24, 256, bits=bits, is_symmetric=is_symmetric)
    module = act_ordered(plain, 0)
    tensors = gptq_tensors("m", module)
    folder = write_checkpoint(tmp_path / "gptq", tensors, {**GPTQ, "bits": bits, "desc_act": True})
    weight = assert_same(take(folder, ["m"], [24], 256), module)
    assert weight.input_order is not None and weight.group_size == 32
    packed = compressed_tensors("m", module, is_packed=True, has_zeros=not is_symmetric)
    config = compressed_config(bits, "group", "pack-quantized")
    folder = write_checkpoint(tmp_path / "ct", packed, config)
    again = assert_same(take(folder, ["m"], [24], 256), module)
    assert again.input_order is not None and torch.equal(again.values, weight.values)


def test_large_weights_are_put_in_order_piece_by_piece(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("stemma.runtime.checkpoint.quantized.packed._CHUNK_NUMBERS", 5 * 64)
    module = act_ordered(random_module(11, 24, 64), 1)
    folder = write_checkpoint(tmp_path, gptq_tensors("m", module), GPTQ)
    assert_same(take(folder, ["m"], [24], 64), module)


@pytest.mark.parametrize("group_size", [32, 64])
def test_act_order_whose_groups_are_in_order_after_all_is_read_as_without(
    tmp_path: Path, group_size: int
) -> None:
    module = random_module(11, 8, 64, group_size=group_size)
    folder = write_checkpoint(tmp_path, gptq_tensors("m", module), {**GPTQ, "desc_act": True})
    assert assert_same(take(folder, ["m"], [8], 64), module).input_order is None


def test_modules_of_a_layer_have_one_order_of_inputs(tmp_path: Path) -> None:
    q, k = (act_ordered(random_module(seed, 8, 64), 7) for seed in (1, 2))
    other = act_ordered(random_module(3, 8, 64), 8)
    tensors = gptq_tensors("q", q) | gptq_tensors("k", k) | gptq_tensors("v", other)
    tensors |= gptq_tensors("w", random_module(4, 8, 64)) | {"x.weight": torch.ones(8, 64)}
    folder = write_checkpoint(tmp_path, tensors, GPTQ | {"modules_to_not_convert": ["x"]})
    assert_same(take(folder, ["q", "k"], [8, 8], 64), q, k)
    for name in ("v", "w"):
        match = rf"tensors 'q\.g_idx' and '{name}\.g_idx': expected one order of inputs"
        with pytest.raises(ModelLoadError, match=match):
            take(folder, ["q", "k", name], [8, 8, 8], 64)
    floating = take(folder, ["q", "v", "x"], [8, 8, 8], 64)  # which have no groups any more
    assert isinstance(floating, Tensor)
    expected = np.concatenate([q.weight, other.weight, np.ones((8, 64))])
    np.testing.assert_allclose(floating.numpy(), expected, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize(
    "groups", [[0] * 33 + [1] * 31, [0] * 32 + [2] * 32, [-1] + [0] * 31 + [1] * 32, [0] * 63]
)
def test_groups_of_the_wrong_size_are_refused(tmp_path: Path, groups: list[int]) -> None:
    tensors = gptq_tensors("m", random_module(11, 8, 64))
    tensors["m.g_idx"] = torch.tensor(groups, dtype=torch.int32)
    folder = write_checkpoint(tmp_path, tensors, {**GPTQ, "desc_act": True})
    with pytest.raises(ModelLoadError, match=r"'m\.g_idx': expected (32 inputs in each|shape)"):
        take(folder, ["m"], [8], 64)


@pytest.mark.parametrize(
    ("config", "match"),
    [
        (
            {"quant_method": "hqq"},
            r"expected one of gptq \(3, 4 and 8 bits\), awq.*--quantization.*found 'hqq'",
        ),
        ({"quant_method": "modelopt", "quant_algo": "W4A8_AWQ"}, "'quant_algo': .*'NVFP4'"),
        ({}, "'quant_method': .*found nothing"),
        ({**GPTQ, "bits": 2}, "'bits': expected 3 or 4 or 8, found 2"),
        ({**GPTQ, "group_size": 100}, "'group_size': expected -1, or a power of two.*found 100"),
        ({**GPTQ, "checkpoint_format": "marlin"}, "'checkpoint_format': .*found 'marlin'"),
        ({**AWQ, "version": "gemv"}, "'version': expected 'gemm'.*found 'gemv'"),
        ({**AWQ, "bits": 8}, "'bits': expected 4, found 8"),
        (compressed_config(4, "group", "marlin-24"), "'format': .*found 'marlin-24'"),
        (compressed_config(4, "group", "float-quantized"), "'num_bits': expected 8, found 4"),
        (compressed_config(8, "head", "float-quantized"), "'strategy': .*found 'head'"),
        (compressed_config(4, "tensor", "pack-quantized"), "'strategy': .*found 'tensor'"),
        (compressed_config(2, "group", "pack-quantized"), "'num_bits': .*found 2"),
        (
            compressed_config(8, "channel", "int-quantized", {"num_bits": 8, "dynamic": False}),
            "'input_activations': expected null, or dynamic",
        ),
        (
            compressed_config(
                8,
                "channel",
                "int-quantized",
                {"num_bits": 8, "dynamic": True, "strategy": "token", "symmetric": False},
            ),
            "'symmetric': expected True, nothing else",
        ),
        (
            {
                **compressed_config(8, "channel", "float-quantized"),
                "transform_config": {"config_groups": {"u": {"apply": [{"location": "input"}]}}},
            },
            "'transform_config': expected transforms at weight_input or weight_output alone",
        ),
    ],
)
def test_other_quantizations_are_refused_by_name(
    tmp_path: Path, config: dict[str, Any], match: str
) -> None:
    folder = write_checkpoint(tmp_path, {"a": torch.ones(1)}, config)
    with pytest.raises(ModelLoadError, match=match):
        packed_config(folder)


def test_a_checkpoint_that_is_quantized_is_not_rounded_again(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path, awq_tensors("m", random_module(12, 8, 64)), AWQ)
    with pytest.raises(InvalidRequest, match=r"quantization='int8'.*quantized already \(awq\)"):
        with open_weights(folder, "auto", "int8", torch.float32, CPU):
            pass


@pytest.mark.parametrize("name", ["qweight", "qzeros", "scales"])
def test_misshapen_packed_tensors_are_named(tmp_path: Path, name: str) -> None:
    for make, config in ((gptq_tensors, GPTQ), (awq_tensors, AWQ)):
        tensors = make("m", random_module(13, 8, 64))
        tensors[f"m.{name}"] = tensors[f"m.{name}"][:1].contiguous()
        match = r"'m\.(qweight|qzeros|scales)': expected .*, found"
        if name == "scales":  # one scale for all inputs is fine, but not with the other tensors
            tensors.pop("m.g_idx", None)
            match = r"'m\.qzeros': expected shape"
        folder = write_checkpoint(tmp_path / make.__name__, tensors, config)
        with pytest.raises(ModelLoadError, match=match):
            take(folder, ["m"], [8], 64)


@pytest.mark.parametrize(
    ("name", "tensor"),
    [
        ("qzeros", torch.ones(2, 1)),
        ("qzeros", torch.tensor(1, dtype=torch.int32)),
        ("scales", torch.ones(2, 8, dtype=torch.int32)),
    ],
)
def test_packed_tensors_of_another_kind_are_named(
    tmp_path: Path, name: str, tensor: torch.Tensor
) -> None:
    tensors = {**gptq_tensors("m", random_module(14, 8, 64)), f"m.{name}": tensor}
    folder = write_checkpoint(tmp_path, tensors, GPTQ)
    with pytest.raises(ModelLoadError, match=rf"'m\.{name}': expected"):
        take(folder, ["m"], [8], 64)


def test_a_missing_packed_tensor_is_named(tmp_path: Path) -> None:
    tensors = gptq_tensors("m", random_module(14, 8, 64))
    del tensors["m.scales"]
    folder = write_checkpoint(tmp_path, tensors, GPTQ)
    with pytest.raises(ModelLoadError, match=r"'m\.scales' is missing"):
        take(folder, ["m"], [8], 64)
