"""A rank's part of weights: what it holds, and that nothing else is read for it."""

from __future__ import annotations

import os
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import make_checkpoint
from torch import Tensor

from stemma.errors import ModelLoadError
from stemma.kernels.quantized_tensors import QuantizedWeight
from stemma.kernels.reference.quantized import dequantize
from stemma.runtime.checkpoint.parts import WHOLE, Part
from stemma.runtime.checkpoint.quantized.quantizing import QuantizingWeights
from stemma.runtime.checkpoint.quantized.rounding import round_to_4_bits, round_to_8_bits
from stemma.runtime.checkpoint.safetensors.checkpoint import CheckpointWeights
from stemma.runtime.checkpoint.weight_parts import part_of
from stemma.runtime.models.layers.ranks import Ranks

NAMES = [f"model.layers.1.mlp.{name}_proj" for name in ("gate", "up")]
PARTS = {
    "whole": WHOLE,
    "outputs": Part([[(0, 40)], [(88, 128)]]),
    "outputs in pieces": Part([[(3, 4), (90, 100)], [(0, 128)]]),
    "inputs": Part(inputs=(32, 64)),
    "both": Part([[(5, 9)], [(0, 2)]], (0, 32)),
}


def cut(weight: Tensor, part: Part) -> Tensor:
    """Of [256, 64], two modules of 128 outputs."""
    if part.outputs is not None:
        rows = [
            row + 128 * nth
            for nth, own in enumerate(part.outputs)
            for first, end in own
            for row in range(first, end)
        ]
        weight = weight[rows]
    return weight if part.inputs is None else weight[:, slice(*part.inputs)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", PARTS)
def test_a_part_of_a_checkpoint_is_what_the_whole_has_there(
    checkpoint: Path, name: str, dtype: torch.dtype
) -> None:
    source, part = CheckpointWeights(checkpoint, dtype), PARTS[name]
    whole = source.take_weight(NAMES, [128, 128], 64)
    assert isinstance(whole, Tensor)
    found = source.take_part(NAMES, [128, 128], 64, part)
    assert isinstance(found, Tensor) and torch.equal(found, cut(whole, part))
    assert torch.equal(part_of(NAMES, whole, [128, 128], part), cut(whole, part))


@pytest.mark.parametrize("quantization", ["int8", "int4"])
@pytest.mark.parametrize("name", ["outputs", "inputs", "both"])
def test_a_part_is_rounded_as_the_whole_is(checkpoint: Path, name: str, quantization: Any) -> None:
    part, dtype = PARTS[name], torch.float32
    source = QuantizingWeights(CheckpointWeights(checkpoint, dtype), quantization, dtype, 32)
    whole = source.take_weight(NAMES, [128, 128], 64)
    found = source.take_part(NAMES, [128, 128], 64, part)
    assert isinstance(whole, QuantizedWeight) and isinstance(found, QuantizedWeight)
    assert torch.equal(dequantize(found, dtype), cut(dequantize(whole, dtype), part))


def test_all_ranks_together_read_each_byte_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_checkpoint(tmp_path, has_tokenizer=False)
    num_bytes = 0
    read = os.preadv

    def counted(*args: Any) -> int:
        nonlocal num_bytes
        count = read(*args)
        num_bytes += count
        return count

    source = CheckpointWeights(tmp_path, torch.float32)
    monkeypatch.setattr(os, "preadv", counted)
    taken = 0
    for rank in range(3):
        share = Ranks(rank, 3).share(128)
        assert share is not None
        parts = Part([[share], [share]]), Part(inputs=share)
        for names, sizes, num_inputs, part in (
            (NAMES, [128, 128], 64, parts[0]),
            (["model.layers.1.mlp.down_proj"], [64], 128, parts[1]),
        ):
            weight = source.take_part(names, sizes, num_inputs, part)
            assert isinstance(weight, Tensor)
            taken += weight.nbytes
    assert num_bytes == taken == 3 * 128 * 64 * 4


def test_shares_of_a_size_are_whole_units_where_they_can_be_and_cover_it() -> None:
    for size in (3, 64, 96, 128, 1000, 11008, 14336):
        for num_ranks in (2, 3, 4):
            shares = [Ranks(rank, num_ranks).share(size) for rank in range(num_ranks)]
            if size < num_ranks:
                assert shares == [None] * num_ranks
                continue
            bounds = [0, *(share[1] for share in shares if share is not None)]
            assert [share[0] for share in shares if share is not None] == bounds[:-1]
            assert bounds[-1] == size
            lengths = [end - first for first, end in pairwise(bounds)]
            assert max(lengths) <= 1.125 * min(lengths) + 1
    assert Ranks(0, 2).share(11008) == (0, 5376)  # 43 blocks of 256
    assert Ranks().share(64) is None


def test_a_group_that_shares_a_scale_is_never_cut() -> None:
    weight = torch.randn(8, 128, generator=torch.Generator().manual_seed(1))
    grouped = round_to_4_bits(weight, 32)
    with pytest.raises(ModelLoadError, match="o_proj: a rank's inputs 0 to 48 would cut a group"):
        part_of(["o_proj"], grouped, [8], Part(inputs=(0, 48)))
    of_rows = round_to_8_bits(weight, "exact")
    if of_rows.group_size == 128:  # one scale a row serves any part of it
        found = part_of(["o_proj"], of_rows, [8], Part(inputs=(0, 48)))
        assert isinstance(found, QuantizedWeight) and found.group_size == 48
