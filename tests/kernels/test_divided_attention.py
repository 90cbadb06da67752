"""Attention over KV that ranks divide by pages is attention over all of it."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest
import torch
from ranks import ThreadCommunicator, on_ranks
from torch import Tensor

from stemma.kernels.attention_rows import AttentionRows
from stemma.kernels.context_share import PageShare, TokenShare
from stemma.kernels.divided_attention import with_divided_attention
from stemma.kernels.model_options import AttentionOptions
from stemma.kernels.native.bindings import why_not_native
from stemma.kernels.native.partial_attention import PartialAttention
from stemma.kernels.registry import select_kernels

PAGE_SIZE, NUM_PAGES, NUM_HEADS, NUM_KV_HEADS, DIM = 4, 1600, 4, 2, 8
KERNELS = select_kernels(torch.float64, "cpu", "reference")


def rows() -> AttentionRows:
    """A chunk behind more keys than a block has, queries that begin a sequence, and rows of one
    query, one of them of one key."""
    num_queries, lens = [150, 3, 1, 1, 1], [4700, 3, 1, 700, 17]
    table = np.random.default_rng(3).permutation(NUM_PAGES).astype(np.int32)
    entries, first = np.zeros((5, 1200), dtype=np.int32), 0
    for row, length in enumerate(lens):
        size = -(-length // PAGE_SIZE)
        entries[row, :size] = table[first : first + size]
        first += size
    return AttentionRows(
        query_start=np.cumsum([0, *num_queries]).astype(np.int32),
        seq_lens=np.array(lens, dtype=np.int32),
        page_table=entries,
        table_rows=np.arange(5, dtype=np.int32),
        page_size=PAGE_SIZE,
    )


def own_part(kv: Tensor, communicator: ThreadCommunicator) -> Tensor:
    """Of kv [..., num_slots, dim] the pages of a rank; what others have cannot be read there."""
    pages = PageShare(communicator.rank, communicator.num_ranks)
    ids = np.arange(NUM_PAGES)
    by_page = kv.unflatten(-2, (NUM_PAGES, PAGE_SIZE))
    return by_page[..., ids[pages.is_own(ids)], :, :].flatten(-3, -2).contiguous()


@pytest.mark.parametrize("num_ranks", [2, 3])
@pytest.mark.parametrize(
    "options",
    [
        AttentionOptions(),
        AttentionOptions(window=300, num_sink_tokens=5),
        AttentionOptions(chunk=64, soft_cap=2.0),
    ],
    ids=["all keys", "window", "chunks"],
)
def test_parts_of_all_ranks_are_attention_to_all_keys(
    num_ranks: int, options: AttentionOptions
) -> None:
    step, generator = rows(), torch.Generator().manual_seed(1)
    num_tokens = int(step.query_start[-1])
    kv = torch.randn(
        2, NUM_KV_HEADS, NUM_PAGES * PAGE_SIZE, DIM, dtype=torch.float64, generator=generator
    )
    q = torch.randn(num_tokens, NUM_HEADS, DIM, dtype=torch.float64, generator=generator)
    sinks = torch.randn(NUM_HEADS, dtype=torch.float64, generator=generator)
    plan = KERNELS.plan_attention(step, kv, NUM_HEADS, options)
    whole = KERNELS.paged_attention(q, kv, plan, sinks)

    def run(communicator: ThreadCommunicator) -> Tensor:
        kernels, own = with_divided_attention(KERNELS, communicator), own_part(kv, communicator)
        plan = kernels.plan_attention(step, own, NUM_HEADS, options)
        attended = kernels.paged_attention(q, own, plan, sinks)
        return TokenShare(num_tokens, communicator).gather(attended)

    for found in on_ranks(num_ranks, run):
        torch.testing.assert_close(found, whole, rtol=0, atol=1e-13)


@pytest.mark.skipif(why_not_native(torch.bfloat16) is not None, reason="no compiled kernels")
@pytest.mark.parametrize(
    "options",
    [AttentionOptions(), AttentionOptions(window=300), AttentionOptions(soft_cap=2.0)],
    ids=["all keys", "window", "soft cap"],
)
def test_compiled_parts_are_those_of_the_reference(
    options: AttentionOptions, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows of one query, and the prefix of a chunk."""
    compute, turn = PartialAttention.__call__, threading.Lock()  # a process has one pool of threads

    def in_turn(*args: Any) -> Tensor:
        with turn:
            return compute(*args)

    monkeypatch.setattr(PartialAttention, "__call__", in_turn)
    step, generator = rows(), torch.Generator().manual_seed(1)
    num_tokens, shape = int(step.query_start[-1]), (2, NUM_KV_HEADS, NUM_PAGES * PAGE_SIZE, 32)
    kv = torch.randn(shape, generator=generator).bfloat16()
    q = torch.randn(num_tokens, NUM_HEADS, 32, generator=generator).bfloat16()
    plan = KERNELS.plan_attention(step, kv.double(), NUM_HEADS, options)
    whole = KERNELS.paged_attention(q.double(), kv.double(), plan)
    compiled = select_kernels(torch.bfloat16)

    def run(communicator: ThreadCommunicator) -> tuple[Tensor, bool]:
        kernels, own = with_divided_attention(compiled, communicator), own_part(kv, communicator)
        plan = kernels.plan_attention(step, own, NUM_HEADS, options)
        attended = kernels.paged_attention(q, own, plan)
        return TokenShare(num_tokens, communicator).gather(attended), plan.whole is not None

    for found, is_compiled in on_ranks(2, run):
        assert is_compiled
        torch.testing.assert_close(found.double(), whole, rtol=2e-2, atol=2e-2)
