"""Recorded forward passes give the same results; what cannot be recorded is refused."""

from __future__ import annotations

import functools
from collections.abc import Callable

import numpy as np
import pytest
import torch

from stemma.kernels.attention_rows import AttentionRows
from stemma.kernels.model_options import DEFAULT_OPTIONS, AttentionOptions
from stemma.kernels.native.bindings import why_not_native
from stemma.kernels.native.capture import Recording
from stemma.kernels.native.communicator import SharedMemory, SharedMemoryCommunicator
from stemma.kernels.native.lora import NativeLoraPlan
from stemma.kernels.ops import KVLayer
from stemma.kernels.quantized_tensors import QuantizedKV
from stemma.kernels.reference.kv_store import quantized
from stemma.kernels.registry import Kernels, select_kernels
from stemma.runtime.execute.captured import MAX_CAPTURED_WITH_ADAPTERS

pytestmark = pytest.mark.skipif(
    why_not_native(torch.bfloat16) is not None, reason="nothing is compiled on this machine"
)
HEADS, KV_HEADS, DIM = 4, 2, 32


@functools.cache
def one_rank() -> SharedMemoryCommunicator:
    """The sum over one rank changes nothing, and is recorded all the same."""
    return SharedMemoryCommunicator(SharedMemory(1), 0, 1)


KV_DTYPES = [torch.bfloat16, torch.int8, torch.float8_e4m3fn, torch.uint8]  # uint8: 4 bits


class Block:
    """One attention layer and one gated linear over fixed input tensors."""

    def __init__(self, kernels: Kernels, kv_dtype: torch.dtype = torch.bfloat16) -> None:
        torch.manual_seed(0)
        size = HEADS * DIM
        self.kernels = kernels
        self.table = torch.randn(50, size).bfloat16()
        self.norm = kernels.make_rms_norm(torch.ones(size).bfloat16(), 1e-5)
        weights = torch.randn(DIM).bfloat16(), torch.randn(KV_HEADS * DIM).bfloat16()
        self.norm_heads = kernels.make_query_key_norm(*weights, HEADS, KV_HEADS, 1e-5)
        self.qkv = kernels.make_linear(
            torch.randn(size + 2 * KV_HEADS * DIM, size).bfloat16(), None
        )
        self.merge = kernels.make_linear(torch.randn(size, 2 * size).bfloat16() / 8, None)
        self.gated = kernels.make_gated_linear(torch.randn(2 * size, size).bfloat16() / 8, None)
        plain = torch.zeros((2, KV_HEADS, 64, DIM), dtype=torch.bfloat16)
        self.kv_layer: KVLayer = plain
        values = plain
        if kv_dtype is not torch.bfloat16:
            self.kv_layer = QuantizedKV(*quantized(plain, kv_dtype))
            values = self.kv_layer.values
        self.memory = values.view(torch.uint8)
        self.ids = torch.zeros(2, dtype=torch.int64)
        self.slots = torch.zeros(2, dtype=torch.int64)
        self.cos = torch.ones(2, 1, DIM).bfloat16()
        self.plan: object = None
        self.options = DEFAULT_OPTIONS
        self.sinks: torch.Tensor | None = None
        self.ranks = one_rank()

    def set_step(self, ids: list[int], slots: list[int], lens: list[int]) -> None:
        self.ids.copy_(torch.tensor(ids))
        self.slots.copy_(torch.tensor(slots))
        table = np.arange(64, dtype=np.int32).reshape(2, 32)
        rows = AttentionRows(
            np.array([0, 1, 2], dtype=np.int32),
            np.array(lens, dtype=np.int32),
            table,
            np.arange(2, dtype=np.int32),
            1,
        )
        self.plan = self.kernels.plan_attention(rows, self.kv_layer, HEADS, self.options)

    def forward(self) -> torch.Tensor:
        x = self.kernels.gather_rows(self.table, self.ids)
        share = self.kernels.gather_share(self.table[1:], self.ids, 1)
        self.ranks.all_reduce(share)
        self.kernels.add_in_place(x, share)
        self.kernels.scale_in_place(x, 1.5)
        heads = self.qkv(self.norm(x)).view(2, -1, DIM)
        self.norm_heads(heads)
        self.kernels.rotate_and_store(heads, self.cos, self.cos, self.kv_layer, self.slots)
        queries = heads[:, :HEADS]
        out = self.kernels.paged_attention(queries, self.kv_layer, self.plan, self.sinks)
        self.norm(out.view(2, -1), x)
        self.kernels.add_in_place(x, out.view(2, -1))
        return self.gated(self.merge(self.kernels.join_columns(x, share)))


@pytest.fixture
def kernels() -> Kernels:
    return select_kernels(torch.bfloat16)


def capture_of(kernels: Kernels, block: Block, run: Callable[[], torch.Tensor]) -> object:
    assert kernels.capture is not None
    return kernels.capture(run, [block.plan])[1]


@pytest.mark.parametrize("kv_dtype", KV_DTYPES, ids=str)
def test_a_replay_gives_what_the_calls_give_for_every_later_step(
    kernels: Kernels, kv_dtype: torch.dtype
) -> None:
    recorded, direct = Block(kernels, kv_dtype), Block(kernels, kv_dtype)
    recorded.options = direct.options = AttentionOptions(window=3, soft_cap=5.0)
    recorded.sinks = direct.sinks = torch.linspace(-1, 1, HEADS)
    assert kernels.capture is not None
    steps = [([i, 7 + i], [i, 32 + i], [i + 1, i + 1]) for i in range(5)]
    recorded.set_step(*steps[0])
    direct.set_step(*steps[0])
    first, captured = kernels.capture(recorded.forward, [recorded.plan])
    assert captured is not None and torch.equal(first, direct.forward())
    for step in steps[1:]:
        recorded.set_step(*step)
        direct.set_step(*step)
        captured.replay([recorded.plan])
        assert torch.equal(captured.result, direct.forward())
        assert torch.equal(recorded.memory, direct.memory) and recorded.memory.any()


def test_what_torch_computes_cannot_be_recorded(kernels: Kernels) -> None:
    block = Block(kernels)
    block.set_step([1, 2], [0, 32], [1, 1])
    index = torch.tensor([1, 0])
    assert capture_of(kernels, block, lambda: block.forward() * 2) is None
    assert capture_of(kernels, block, lambda: block.forward().add_(1)) is None
    assert capture_of(kernels, block, lambda: block.forward()[index]) is None
    assert capture_of(kernels, block, lambda: block.forward().transpose(0, 1).reshape(-1)) is None
    assert capture_of(kernels, block, lambda: torch.nn.functional.silu(block.forward())) is None
    assert capture_of(kernels, block, block.forward) is not None


def test_a_recording_that_raises_leaves_nothing_behind(kernels: Kernels) -> None:
    block = Block(kernels)
    block.set_step([1, 2], [0, 32], [1, 1])

    def fails() -> torch.Tensor:
        block.forward()
        raise ValueError("in the middle")

    with pytest.raises(ValueError, match="in the middle"):
        capture_of(kernels, block, fails)
    assert capture_of(kernels, block, block.forward) is not None


def test_a_replay_adds_the_adapters_of_its_own_step(kernels: Kernels) -> None:
    """Also where their mix is another than that of the recording."""
    torch.manual_seed(0)
    tables = [torch.randn(3, n * 4, 16).bfloat16() for n in (1, 2)]
    up = [torch.randn(3, n * 32, 4).bfloat16() for n in (1, 2)]
    loras = [kernels.make_lora(a, b, (32,) * n) for a, b, n in zip(tables, up, (1, 2))]
    weights = torch.randn(32, 16).bfloat16(), torch.randn(64, 16).bfloat16()
    linear = kernels.make_linear(weights[0], None)
    gated = kernels.make_gated_linear_with_lora(weights[1], None, "gelu", loras[1])
    x = torch.randn(4, 16).bfloat16()

    def forward(plan: object) -> torch.Tensor:
        y = linear(x)
        loras[0](x, y, plan)
        kernels.add_in_place(y, gated(x, plan))
        return y

    def plan_of(*slots: int) -> object:
        return kernels.plan_lora(np.array(slots, dtype=np.int32), 3)

    plan = plan_of(0, 1, 1, 2)
    assert kernels.capture is not None
    first, captured = kernels.capture(lambda: forward(plan), [], plan)
    assert captured is not None and torch.equal(first, forward(plan))
    for slots in ((3, 2, 1, 0), (0, 0, 0, 3), (2, 2, 2, 2)):
        x.copy_(torch.randn(4, 16))
        captured.replay([], plan_of(*slots))
        assert torch.equal(captured.result, forward(plan_of(*slots)))
        assert not torch.equal(captured.result, forward(plan))
    captured.replay([], plan)
    assert torch.equal(captured.result, forward(plan))


def test_as_many_tokens_as_are_recorded_with_adapters_are_no_products_of_torch(
    kernels: Kernels,
) -> None:
    plan = kernels.plan_lora(np.ones(MAX_CAPTURED_WITH_ADAPTERS, dtype=np.int32), 3)
    assert isinstance(plan, NativeLoraPlan) and not plan.long.runs


def test_recordings_compute_in_one_memory_and_keep_what_is_read(kernels: Kernels) -> None:
    """Whichever was replayed last; the shared memory is overwritten in between."""
    blocks = [Block(kernels) for _ in range(2)]
    kept: list[list[torch.Tensor]] = [[], []]
    steps = [([1, 2], [0, 32], [1, 1]), ([3, 4], [1, 33], [2, 2])]

    def forward(index: int) -> torch.Tensor:
        kept[index] = [kernels.gather_rows(blocks[index].table, blocks[index].ids)]
        return blocks[index].forward()

    def capture(index: int, beside: object) -> object:
        blocks[index].set_step(*steps[0])
        assert kernels.capture is not None
        _, captured = kernels.capture(
            lambda: forward(index), [blocks[index].plan], outputs=lambda: kept[index], beside=beside
        )
        return captured

    first = capture(0, None)
    second = capture(1, first)
    assert isinstance(first, Recording) and isinstance(second, Recording)
    assert first.scratch is second.scratch and first.scratch is not None
    direct = Block(kernels)
    direct.set_step(*steps[0])
    direct.forward()
    direct.set_step(*steps[1])
    expected = direct.forward()
    for index, captured in ((0, first), (1, second), (0, first)):
        blocks[index].set_step(*steps[1])
        first.scratch.random_()
        captured.replay([blocks[index].plan])
        assert torch.equal(captured.result, expected)
        assert torch.equal(kept[index][0], direct.table[direct.ids])
