"""Rotation and KV stores: Triton in the interpreter and the reference, plain and quantized KV."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from stemma.kernels.ops import KVLayer
from stemma.kernels.quantized_tensors import QuantizedKV
from stemma.kernels.reference import kv_store as reference
from stemma.kernels.registry import Kernels, select_kernels
from stemma.runtime.checkpoint.config.rope_scaling import RopeKind, RopeScaling
from stemma.runtime.models.layers.rotary import RotaryTable

# Infinities are part of the arithmetic; the interpreter's numpy warns of them.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

DTYPES = [torch.float32, torch.float16]
NUMBERS = [torch.int8, torch.float8_e4m3fn]
NUM_SPARE = 4
# (tokens, query heads, KV heads, head_dim, rotary_dim)
SHAPES = {
    "one token": (1, 4, 2, 64, 64),
    "MQA": (3, 6, 1, 80, 80),
    "MHA": (2, 10, 10, 96, 96),
    "heads of 112, half rotated": (2, 4, 2, 112, 56),
    "heads of 256, a quarter rotated": (2, 3, 3, 256, 64),
    "an odd number of pairs": (2, 2, 1, 10, 6),
    "nothing": (0, 4, 2, 64, 64),
}
SCALINGS = [
    None,
    RopeScaling(RopeKind.LINEAR, 4.0, 64, 256),
    RopeScaling(RopeKind.DYNAMIC, 2.0, 64, 256),
    RopeScaling(RopeKind.LLAMA3, 8.0, 64, 256),
    RopeScaling(RopeKind.YARN, 4.0, 64, 256, attention_factor=1.2),
]


@pytest.fixture(scope="module")
def kernels() -> Kernels:
    return select_kernels(torch.float32, mode="triton")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("numbers", [None, *NUMBERS], ids=str)
@pytest.mark.parametrize("case", SHAPES)
def test_rotate_and_store_equals_the_reference(
    kernels: Kernels, dtype: torch.dtype, numbers: torch.dtype | None, case: str
) -> None:
    num_tokens, num_heads, num_kv_heads, head_dim, rotary_dim = SHAPES[case]
    heads = _randn(dtype, num_tokens, num_heads + 2 * num_kv_heads, head_dim)
    cos, sin = _table(rotary_dim, dtype).at(torch.arange(num_tokens) * 7)
    slots = torch.randperm(num_tokens + NUM_SPARE)[:num_tokens]
    queries, stored = [], []
    for rotate_and_store in (reference.rotate_and_store, kernels.rotate_and_store):
        rotated, kv_layer = heads.clone(), _layer(heads, num_kv_heads, numbers)
        rotate_and_store(rotated, cos, sin, kv_layer, slots)
        queries.append(rotated[:, :num_heads])
        stored.append(_contents(kv_layer))
    # A float32 product-sum may be rounded once or twice.
    tolerance = 1e-6 if dtype is torch.float32 else 1e-3
    torch.testing.assert_close(queries[1], queries[0], atol=tolerance, rtol=tolerance)
    for found, expected in zip(stored[1], stored[0], strict=True):
        if found.dtype is torch.uint8:  # at most the neighbouring number
            assert (found.int() - expected.int()).abs().max() <= 1
        else:
            torch.testing.assert_close(found, expected, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("scaling", SCALINGS, ids=lambda s: s.kind.value if s else "plain")
def test_pairs_are_turned_by_the_table_of_each_scaling(
    kernels: Kernels, scaling: RopeScaling | None
) -> None:
    """As complex numbers, in float64; what lies past rotary_dim stays."""
    rotary_dim, half, positions = 48, 24, torch.tensor([0, 1, 63, 255])
    table = _table(rotary_dim, torch.float32, scaling)
    cos, sin = table.at(positions)
    heads = _randn(torch.float32, 4, 4, 64)
    rotated, kv_layer = heads.clone(), torch.zeros(2, 1, 4, 64)
    kernels.rotate_and_store(rotated, cos, sin, kv_layer, torch.arange(4))
    before = torch.complex(heads[..., :half].double(), heads[..., half:rotary_dim].double())
    turned = before * torch.complex(cos[..., :half].double(), sin[..., half:].double())
    expected = torch.cat((turned.real, turned.imag, heads[..., rotary_dim:].double()), -1)
    torch.testing.assert_close(rotated[:, :2].double(), expected[:, :2], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(kv_layer[0, 0].double(), expected[:, 2], atol=1e-5, rtol=1e-5)
    assert torch.equal(kv_layer[1, 0], heads[:, 3])
    assert float(cos[0, 0, 0]) == pytest.approx(scaling.attention_factor if scaling else 1.0)


@pytest.mark.parametrize("backend", ["triton", "cpu", "auto", "reference"])
def test_every_backend_rotates_a_part_of_a_head(backend: str) -> None:
    dtype = torch.float32 if backend == "triton" else torch.bfloat16
    kernels = select_kernels(dtype, mode=backend)  # type: ignore[arg-type]
    heads = _randn(dtype, 3, 5, 40)
    cos, sin = _table(16, dtype).at(torch.arange(3))
    rotated, kv_layer = heads.clone(), torch.zeros(2, 1, 3, 40, dtype=dtype)
    kernels.rotate_and_store(rotated, cos, sin, kv_layer, torch.arange(3))
    expected = heads.double()
    reference.rotate(expected[:, :4], cos.double(), sin.double())
    tolerance = 0.05 if dtype is torch.bfloat16 else 1e-6
    torch.testing.assert_close(rotated[:, :3].double(), expected[:, :3], atol=tolerance, rtol=0)
    torch.testing.assert_close(kv_layer[0, 0].double(), expected[:, 3], atol=tolerance, rtol=0)
    assert torch.equal(rotated[:, :3, 16:], heads[:, :3, 16:])
    assert torch.equal(kv_layer[1, 0], heads[:, 4])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("numbers", [None, *NUMBERS], ids=str)
@pytest.mark.parametrize(("num_kv_heads", "head_dim"), [(1, 64), (3, 80), (9, 128)])
def test_store_kv_equals_the_reference_bit_by_bit(
    kernels: Kernels,
    dtype: torch.dtype,
    numbers: torch.dtype | None,
    num_kv_heads: int,
    head_dim: int,
) -> None:
    """Vectors of zeros, of NaN and infinity, and keys that lie strided among others."""
    heads = _randn(dtype, 4, 3 * num_kv_heads, head_dim)
    k, v = heads[:, :num_kv_heads], heads[:, 2 * num_kv_heads :]
    k[0, 0], v[1, 0, 3], k[2, 0, 5] = 0.0, torch.nan, -torch.inf
    slots = torch.tensor([5, 0, 7, 2])
    found, expected = (_layer(heads, num_kv_heads, numbers) for _ in range(2))
    kernels.store_kv(k, v, found, slots)
    reference.store_kv(k, v, expected, slots)
    for ours, theirs in zip(_contents(found), _contents(expected), strict=True):
        assert torch.equal(ours.nan_to_num(nan=-7.0), theirs.nan_to_num(nan=-7.0))
    if isinstance(found, QuantizedKV):
        assert found.scales[0, 0, 5] == 0 and found.scales[1, 0, 0].isnan()
        assert found.scales[0, 0, 7].isinf()
    assert not any(part[:, :, [1, 3, 4, 6]].any() for part in _contents(found))


@pytest.mark.parametrize("numbers", NUMBERS, ids=str)
def test_a_quantized_number_is_off_by_half_a_step_at_most(
    kernels: Kernels, numbers: torch.dtype
) -> None:
    """int8: half the scale; float8 of 3 bits: a sixteenth of the value, or half the least step."""
    k = _randn(torch.float32, 2, 4, 128) * torch.logspace(-30, 3, 4)[:, None]
    kv_layer = _layer(k, 4, numbers)
    assert isinstance(kv_layer, QuantizedKV)
    kernels.store_kv(k, -k, kv_layer, torch.arange(2))
    scales = kv_layer.scales[..., :2, None]
    found = kv_layer.values[:, :, :2].float() * scales
    expected = torch.stack((k, -k)).transpose(1, 2)
    step = scales if numbers is torch.int8 else (expected.abs() / 8).clamp(min=scales * 2**-9)
    assert ((found - expected).abs() <= 0.5001 * step).all()
    largest = 127 if numbers is torch.int8 else 448
    assert (kv_layer.values[:, :, :2].float().abs().amax(-1) == largest).all()


def test_every_8_bit_float_and_every_tie_is_rounded_as_torch_does(kernels: Kernels) -> None:
    """One vector of all 127 finite numbers, their midpoints and the neighbours of those."""
    codes = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    midpoints = (codes[1:] + codes[:-1]) / 2
    above = torch.nextafter(midpoints, midpoints + 1)
    below = torch.nextafter(midpoints, midpoints - 1)
    x = torch.cat((codes, midpoints, above, below, torch.zeros(7)))  # the largest is 448: scale 1
    k = torch.stack((x, -x))[None]
    kv_layer = _layer(k, 2, torch.float8_e4m3fn)
    assert isinstance(kv_layer, QuantizedKV)
    kernels.store_kv(k, k, kv_layer, torch.zeros(1, dtype=torch.int64))
    expected = k[0].to(torch.float8_e4m3fn).view(torch.uint8)
    assert torch.equal(kv_layer.values.view(torch.uint8)[0, :, 0], expected)


def test_padding_may_write_the_same_slot(kernels: Kernels) -> None:
    heads = _randn(torch.float32, 4, 4, 16)
    cos, sin = _table(16, torch.float32).at(torch.zeros(4, dtype=torch.int64))
    kv_layer = torch.zeros(2, 1, 3, 16)
    kernels.rotate_and_store(heads.clone(), cos, sin, kv_layer, torch.tensor([0, 2, 2, 2]))
    assert torch.equal(kv_layer[1, 0, 0], heads[0, 3]) and not kv_layer[:, :, 1].any()


def _table(rotary_dim: int, dtype: torch.dtype, scaling: RopeScaling | None = None) -> RotaryTable:
    return RotaryTable(
        rotary_dim,
        256,
        10_000.0,
        scaling,
        kernels=select_kernels(torch.float32, mode="reference"),
        dtype=dtype,
        device=torch.device("cpu"),
    )


def _layer(heads: Tensor, num_kv_heads: int, numbers: torch.dtype | None) -> KVLayer:
    """An empty layer for the heads' tokens and some more."""
    shape = (2, num_kv_heads, len(heads) + NUM_SPARE, heads.shape[-1])
    if numbers is None:
        return torch.zeros(shape, dtype=heads.dtype)
    values = torch.zeros(shape, dtype=torch.uint8).view(numbers)
    return QuantizedKV(values, torch.zeros(shape[:-1]))


def _contents(kv_layer: KVLayer) -> list[Tensor]:
    if isinstance(kv_layer, Tensor):
        return [kv_layer]
    return [kv_layer.values.view(torch.uint8), kv_layer.scales]


def _randn(dtype: torch.dtype, *shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(shape, generator=generator).to(dtype)
