"""GGUF's number formats against the gguf package's own dequantization."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from stemma.errors import ModelLoadError
from stemma.kernels.quantized_tensors import E2M1_NUMBERS
from stemma.runtime.checkpoint.gguf.blocks import (
    LAYOUTS,
    GroupLayout,
    fits_half,
    to_floats,
    to_groups,
)
from stemma.runtime.checkpoint.gguf.formats import FORMATS, format_of

QUANTIZED = [number for number, form in FORMATS.items() if form.is_quantized]
WIDEST = GroupLayout(8, 16, True)


def random_blocks(number: int, num_rows: int, num_blocks: int, seed: int = 0) -> NDArray[np.uint8]:
    """Rows of any bytes, but for their float16 scales, which are numbers around 1."""
    form = FORMATS[number]
    rng = np.random.default_rng(seed)
    blocks = rng.integers(0, 256, (num_rows, num_blocks, form.block_bytes), dtype=np.uint8)
    scale_places = {"Q6_K": [208], "Q4_0": [0], "Q5_0": [0], "Q8_0": [0], "MXFP4": []}.get(
        form.name, [0, 2]
    )
    for place in scale_places:
        halves = rng.standard_normal((num_rows, num_blocks, 1)).astype(np.float16)
        blocks[..., place : place + 2] = halves.view(np.uint8)
    return blocks.reshape(num_rows, -1)


@pytest.mark.parametrize("number", QUANTIZED, ids=lambda n: FORMATS[n].name)
def test_floats_have_the_bits_of_the_gguf_package(number: int) -> None:
    rows = random_blocks(number, num_rows=17, num_blocks=3)
    expected = gguf.dequantize(rows, gguf.GGMLQuantizationType(number))
    values = to_floats(FORMATS[number], torch.from_numpy(rows)).numpy()
    assert values.dtype == np.float32
    assert np.array_equal(values.view(np.uint32), expected.view(np.uint32))


@pytest.mark.parametrize("name", ["F32", "F16", "BF16"])
def test_floats_stay_what_they_are(name: str) -> None:
    number = next(n for n, form in FORMATS.items() if form.name == name)
    values = np.random.default_rng(0).standard_normal((5, 8)).astype(np.float32)
    stored = gguf.quantize(values, gguf.GGMLQuantizationType(number)).view(np.uint8)
    expected = gguf.dequantize(stored, gguf.GGMLQuantizationType(number))
    read = to_floats(FORMATS[number], torch.from_numpy(stored))
    assert np.array_equal(read.float().numpy(), expected)


@pytest.mark.parametrize("is_widest", [False, True], ids=["own", "widest"])
@pytest.mark.parametrize("number", QUANTIZED, ids=lambda n: FORMATS[n].name)
def test_groups_are_the_same_weights(number: int, is_widest: bool) -> None:
    """In 8 bits exactly; where nibbles count from -8 on, but for one rounding of the offset."""
    form = FORMATS[number]
    layout = WIDEST if is_widest else LAYOUTS[form.name]
    rows = torch.from_numpy(random_blocks(number, num_rows=6, num_blocks=2, seed=1))
    values, scales, offsets = to_groups(form, rows, layout)
    if layout.bits == 4:
        values = torch.stack((values & 15, values >> 4), -1).flatten(-2).int()
        is_code = layout.codes == "fp4"
        values = torch.tensor(E2M1_NUMBERS)[values] if is_code else values - 8
    weights = values.float().view(6, -1, layout.group_size) * scales.unsqueeze(-1)
    assert (offsets is not None) == layout.has_offsets
    if offsets is not None:
        weights += offsets.unsqueeze(-1)
    expected = to_floats(form, rows)
    is_exact = layout.bits == 8 or not LAYOUTS[form.name].has_offsets
    tolerance = 0.0 if is_exact else 1e-6 * float(expected.abs().max())
    torch.testing.assert_close(weights.flatten(1), expected, rtol=0, atol=tolerance)


def test_half_precision_is_told_from_what_it_cannot_hold() -> None:
    assert fits_half(torch.tensor([65504.0]), None, torch.empty(0))
    assert not fits_half(torch.tensor([1.0]), torch.tensor([-70000.0]))


@pytest.mark.parametrize(("number", "name"), [(10, "Q2_K"), (23, "IQ4_XS"), (99, "number 99")])
def test_other_formats_are_refused_by_name(number: int, name: str) -> None:
    with pytest.raises(ModelLoadError, match=rf"here: format {name} is not supp.*Q4_0.*Q6_K"):
        format_of(number, "here")


def test_sizes_are_those_of_the_gguf_package() -> None:
    for number, form in FORMATS.items():
        kind = gguf.GGMLQuantizationType(number)
        assert (kind.name, *gguf.GGML_QUANT_SIZES[kind]) == (
            form.name,
            form.block_values,
            form.block_bytes,
        )
