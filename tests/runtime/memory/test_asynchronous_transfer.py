"""A GPU's tier moves leave KV bit-equal, in plan order, and only the results wait for them."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kv_layouts import LAYOUTS, memory_of, random_pool

from stemma.kernels.ops import MakePageCopy
from stemma.kernels.reference.kv_store import PageCopy
from stemma.kernels.registry import select_kernels
from stemma.runtime.execute.model_runner import ModelRunner
from stemma.runtime.memory import asynchronous_transfer as queued_transfer
from stemma.runtime.memory.asynchronous_transfer import AsynchronousKVTransfer
from stemma.runtime.memory.copies import (
    BlockRestore,
    BlockSave,
    PageFork,
    TierCopy,
    Transfer,
)
from stemma.runtime.memory.device_pool import DeviceKVPool
from stemma.runtime.memory.disk.block_key import BLOCK_TOKENS, Block
from stemma.runtime.memory.host_pool import HostKVPool, PinnedKVPool
from stemma.runtime.memory.transfer import KVTransfer
from stemma.runtime.models.model_config import read_model_config
from stemma.runtime.schedule.plan import PageUpdate, Row, RowResult, StepPlan
from stemma.runtime.schedule.sampling_params import SamplingParams

NUM_PAGES, NUM_HOST_PAGES = 12, 20
BLOCK = Block(b"key", None, b"")


class LateQueue:
    """A queue whose copies to the host are late: made when somebody waits for them, or when
    something is copied the other way, which may just have been stored."""

    device = torch.device("cpu")

    def __init__(self) -> None:
        self.num_copies = 0
        self.num_waits = 0
        self._host: list[torch.Tensor] = []  # kept, so that no other memory has their addresses
        self._late: list[Callable[[], object]] = []

    def own(self, host: torch.Tensor) -> None:
        self._host.append(host)

    def pinned(self, num_bytes: int) -> torch.Tensor:
        memory = torch.empty(num_bytes, dtype=torch.uint8)
        self.own(memory)
        return memory

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        assert target.shape == source.shape and target.dtype is source.dtype
        self.num_copies += 1
        if any(_memory(target) == _memory(host) for host in self._host):
            held = source.clone()  # the device packs into other memory meanwhile
            self._late.append(lambda: target.copy_(held))
        else:
            self._flush()
            target.copy_(source)

    def event(self) -> LateQueue:
        return self

    def wait(self) -> None:
        self.num_waits += 1
        self._flush()

    def _flush(self) -> None:
        for copy in self._late:
            copy()
        self._late.clear()


def _memory(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def transfer_of(
    device: DeviceKVPool, make_page_copy: MakePageCopy = PageCopy
) -> tuple[AsynchronousKVTransfer, LateQueue]:
    host, queue = PinnedKVPool(device, NUM_HOST_PAGES), LateQueue()
    queue.own(host.pages[0])
    return AsynchronousKVTransfer(device, host, make_page_copy, queue), queue


def same_bits(one: DeviceKVPool, other: DeviceKVPool) -> bool:
    return all(map(torch.equal, memory_of(one), memory_of(other)))


@pytest.mark.parametrize(
    ("kind", "page_size"),
    [
        ("bfloat16", 16),
        ("float32", 4),
        ("int8", 1),
        ("fp8", 4),
        ("latent", 1),
        ("latent", 16),
        ("unlike layers", 4),
    ],
)
@settings(max_examples=10, deadline=None)
@given(data=st.data())
def test_any_moves_leave_what_the_cpus_copies_leave(
    kind: str, page_size: int, data: st.DataObject
) -> None:
    """Pages are stored, overwritten and loaded again within one plan."""
    plain, device = (random_pool(LAYOUTS[kind], NUM_PAGES, page_size) for _ in range(2))
    copies: list[TierCopy] = []
    for _ in range(data.draw(st.integers(1, 5))):
        count = data.draw(st.integers(0, NUM_PAGES))

        def draw(num_pages: int, count: int = count) -> list[int]:
            first = data.draw(st.integers(0, num_pages - count))
            scattered = data.draw(st.permutations(range(num_pages)))[:count]
            return data.draw(st.sampled_from([list(range(first, first + count)), scattered]))

        kind = data.draw(st.sampled_from(["store", "load", "fork"]))
        if kind == "fork":
            ids = data.draw(st.permutations(range(NUM_PAGES)))
            sources = [data.draw(st.sampled_from(ids[count:]))] * count if ids[count:] else []
            copies.append(PageFork(array("i", sources), array("i", ids[: len(sources)])))
            continue
        copies.append(Transfer(kind, array("i", draw(NUM_PAGES)), array("i", draw(NUM_HOST_PAGES))))
    KVTransfer(plain, HostKVPool(plain, NUM_HOST_PAGES)).run(copies)
    transfer, queue = transfer_of(device)
    assert transfer.run(copies).payloads() == () and queue.num_waits == 0
    assert same_bits(device, plain)


@pytest.mark.parametrize("make_page_copy", [PageCopy, None], ids=["reference", "triton"])
@pytest.mark.parametrize(
    ("kind", "page_size"),
    [("bfloat16", 16), ("bfloat16", 128), ("int8", 64), ("latent", 128), ("unlike layers", 64)],
)
def test_blocks_are_the_cpus_and_come_back_from_any_token_on(
    kind: str, page_size: int, make_page_copy: MakePageCopy | None
) -> None:
    num_block_pages = BLOCK_TOKENS // page_size
    if make_page_copy is None:
        make_page_copy = select_kernels(torch.float32, mode="triton").make_page_copy
    plain, device = (random_pool(LAYOUTS[kind], 3 * num_block_pages, page_size) for _ in range(2))
    order = np.random.default_rng(5).permutation(3 * num_block_pages).tolist()
    pages = array("i", order[:num_block_pages])
    others = array("i", order[num_block_pages : 2 * num_block_pages - 1])
    save = BlockSave(BLOCK, pages)
    (expected,) = KVTransfer(plain, None).run([save])
    transfer, queue = transfer_of(device, make_page_copy)
    queued = transfer.run([save, BlockSave(BLOCK, pages)])
    assert queue.num_waits == 0
    payload, again = queued.payloads()
    assert queue.num_waits == 1
    assert np.array_equal(payload, expected) and np.array_equal(again, expected)
    restore = BlockRestore(expected, page_size, others)
    KVTransfer(plain, None).run([restore])
    transfer.run([restore])
    assert same_bits(device, plain)


def test_a_run_of_host_pages_is_one_copy_and_large_transfers_are_cut(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    device = random_pool(LAYOUTS["int8"], NUM_PAGES, 4)
    transfer, queue = transfer_of(device)
    scattered, run = array("i", [7, 3, 9, 1, 0]), array("i", range(10, 15))
    transfer.run([Transfer("store", scattered, run)])
    assert queue.num_copies == 1 + 2  # the pages' numbers, and the pages of either layer
    before = random_pool(LAYOUTS["int8"], NUM_PAGES, 4)
    for tensor in memory_of(device):
        tensor.zero_()
    page_bytes = device.num_bytes // NUM_PAGES
    monkeypatch.setattr(queued_transfer, "_MAX_STAGED_BYTES", page_bytes)
    transfer.run([Transfer("load", scattered, run)])
    assert queue.num_copies == 3 + 1 + 3 * 2
    for page in range(NUM_PAGES):
        slots = slice(4 * page, 4 * page + 4)
        for new, old in zip(memory_of(device), memory_of(before), strict=True):
            bits = new[:, slots]
            assert torch.equal(bits, old[:, slots]) if page in scattered else not bits.any()


def test_the_pool_is_done_before_the_bus_takes_what_was_packed() -> None:
    """Unless something is loaded that was just stored. Two layers, one after the other."""
    device = random_pool(LAYOUTS["int8"], NUM_PAGES, 4)
    transfer, queue = transfer_of(device)
    order: list[str] = []
    copy, event = queue.copy, queue.event

    def copied(target: torch.Tensor, source: torch.Tensor) -> None:
        is_late = any(_memory(target) == _memory(each) for each in queue._host)
        order.append("out" if is_late else "in")
        copy(target, source)

    def passed() -> LateQueue:
        order.append("event")
        return event()

    queue.copy, queue.event = copied, passed  # type: ignore[method-assign]
    pages = [array("i", [page]) for page in range(NUM_PAGES)]
    stores = [Transfer("store", pages[i], pages[i]) for i in (3, 5)]
    transfer.run([stores[0], PageFork(pages[3], pages[4]), stores[1]])
    numbers = ["in"] * 4
    assert order == [*numbers, "event", "event", *["out"] * 4, "event"]
    order.clear()
    transfer.run([*stores, Transfer("load", pages[7], pages[3]), stores[0]])
    first, second = [*["out"] * 2, "in", "event"], [*["out"] * 3, "in", "event"]
    assert order == [*numbers, *first, *second, "out", "event"]
    order.clear()
    transfer.run([*stores, Transfer("load", pages[7], pages[8])])
    assert order == [*numbers[:3], "in", "event", "in", "event", *["out"] * 4, "event"]


def test_a_runner_on_a_gpu_continues_from_what_it_stored_as_one_on_a_cpu(checkpoint: Path) -> None:
    """Interpreted: a prompt's pages go to the host, are overwritten, and come back elsewhere."""

    def last(device: str) -> RowResult:
        runner = ModelRunner(
            checkpoint, read_model_config(checkpoint), dtype="float32", device=device,
            num_pages=8, page_size=8, num_host_pages=4, max_running_requests=2, max_model_len=64,
        )  # fmt: skip
        sampling = SamplingParams(temperature=0.0, logprobs=0)
        first = Row(0, 0, 0, tuple(range(5, 21)), PageUpdate(0, (3, 6)))
        other = Row(1, 1, 0, tuple(range(60, 76)), PageUpdate(0, (3, 6)))
        then = Row(0, 0, 16, (7,), PageUpdate(0, (5, 1, 2)), sampling=sampling)
        store = Transfer("store", array("i", [3, 6]), array("i", [2, 0]))
        load = Transfer("load", array("i", [5, 1]), array("i", [2, 0]))
        plans = [
            StepPlan(0, (first,)),
            StepPlan(1, (other,), transfers=(store,)),
            StepPlan(2, (then,), transfers=(load,)),
        ]
        return [runner.submit(plan).result() for plan in plans][-1].rows[0]

    found, expected = last("cuda"), last("cpu")
    assert found.token_id == expected.token_id
    assert found.logprob == pytest.approx(expected.logprob, abs=1e-4)


@pytest.mark.parametrize("kind", LAYOUTS)
def test_a_pinned_pool_is_as_large_as_a_plain_one(kind: str) -> None:
    device = random_pool(LAYOUTS[kind], 2, 4)
    pinned, plain = PinnedKVPool(device, 5), HostKVPool(device, 5)
    assert pinned.num_bytes == plain.num_bytes and all(len(each) == 5 for each in pinned.pages)
