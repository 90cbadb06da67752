"""Recorded forward passes give the same results; what cannot be recorded is refused."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

from stemma.kernels.attention_rows import AttentionRows
from stemma.kernels.native.bindings import why_not_native
from stemma.kernels.registry import Kernels, select_kernels

pytestmark = pytest.mark.skipif(
    why_not_native(torch.bfloat16) is not None, reason="nothing is compiled on this machine"
)
HEADS, KV_HEADS, DIM = 4, 2, 16


class Block:
    """One attention layer and one gated linear over fixed input tensors."""

    def __init__(self, kernels: Kernels) -> None:
        torch.manual_seed(0)
        size = HEADS * DIM
        self.kernels = kernels
        self.table = torch.randn(50, size).bfloat16()
        self.norm = kernels.make_rms_norm(torch.ones(size).bfloat16(), 1e-5)
        self.qkv = kernels.make_linear(
            torch.randn(size + 2 * KV_HEADS * DIM, size).bfloat16(), None
        )
        self.gated = kernels.make_gated_linear(torch.randn(2 * size, size).bfloat16() / 8, None)
        self.kv_layer = torch.zeros(2, KV_HEADS, 64, DIM).bfloat16()
        self.ids = torch.zeros(2, dtype=torch.int64)
        self.slots = torch.zeros(2, dtype=torch.int64)
        self.cos = torch.ones(2, 1, DIM).bfloat16()
        self.plan: object = None

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
        self.plan = self.kernels.plan_attention(rows, self.kv_layer, HEADS)

    def forward(self) -> torch.Tensor:
        x = self.kernels.gather_rows(self.table, self.ids)
        heads = self.qkv(self.norm(x)).view(2, -1, DIM)
        self.kernels.rotate_and_store(heads, self.cos, self.cos, self.kv_layer, self.slots)
        out = self.kernels.paged_attention(heads[:, :HEADS], self.kv_layer, self.plan)
        self.norm(out.view(2, -1), x)
        return self.gated(x)


@pytest.fixture
def kernels() -> Kernels:
    return select_kernels(torch.bfloat16)


def capture_of(kernels: Kernels, run: Callable[[], torch.Tensor]) -> object:
    assert kernels.capture is not None
    return kernels.capture(run)[1]


def test_a_replay_gives_what_the_calls_give_for_every_later_step(kernels: Kernels) -> None:
    recorded, direct = Block(kernels), Block(kernels)
    assert kernels.capture is not None
    steps = [([i, 7 + i], [i, 32 + i], [i + 1, i + 1]) for i in range(5)]
    recorded.set_step(*steps[0])
    direct.set_step(*steps[0])
    first, captured = kernels.capture(recorded.forward)
    assert captured is not None and torch.equal(first, direct.forward())
    for step in steps[1:]:
        recorded.set_step(*step)
        direct.set_step(*step)
        captured.replay(recorded.plan)
        assert torch.equal(captured.result, direct.forward())
        assert torch.equal(recorded.kv_layer, direct.kv_layer)


def test_what_torch_computes_cannot_be_recorded(kernels: Kernels) -> None:
    block = Block(kernels)
    block.set_step([1, 2], [0, 32], [1, 1])
    index = torch.tensor([1, 0])
    assert capture_of(kernels, lambda: block.forward() * 2) is None
    assert capture_of(kernels, lambda: block.forward().add_(1)) is None
    assert capture_of(kernels, lambda: block.forward()[index]) is None
    assert capture_of(kernels, lambda: block.forward().transpose(0, 1).reshape(-1)) is None
    assert capture_of(kernels, lambda: torch.nn.functional.silu(block.forward())) is None
    assert capture_of(kernels, block.forward) is not None


def test_a_recording_that_raises_leaves_nothing_behind(kernels: Kernels) -> None:
    block = Block(kernels)
    block.set_step([1, 2], [0, 32], [1, 1])

    def fails() -> torch.Tensor:
        block.forward()
        raise ValueError("in the middle")

    with pytest.raises(ValueError, match="in the middle"):
        capture_of(kernels, fails)
    assert capture_of(kernels, block.forward) is not None
