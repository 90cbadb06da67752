"""The store behind the scheduler, over a scripted device: restarts, shared fetches, failures."""

from __future__ import annotations

import random
import threading
from array import array
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from engine_harness import EngineHarness
from engine_harness import assert_right as assert_output_right
from fakes import VOCAB_SIZE, chain_of
from hypothesis import given, settings
from hypothesis import strategies as st
from kv_blocks import FILE_BYTES, LAYOUT
from preemptions import admit_all
from waiting import PATIENCE_S, ready

from stemma.constrained.serving.grammar_state import PendingGrammar
from stemma.errors import InvalidRequest
from stemma.runtime.memory.disk.block_key import (
    BLOCK_TOKENS,
    Block,
    StateBlockLayout,
    blocks_of,
)
from stemma.runtime.memory.disk.block_store import Fetch
from stemma.runtime.memory.disk.folder import StoreFolder
from stemma.runtime.memory.disk.store import DiskStore
from stemma.runtime.memory.state_layout import StateLayout, StatePart
from stemma.runtime.schedule.cache.kv_cache import KVCacheOptions
from stemma.runtime.schedule.cache.state_cache import StateOptions
from stemma.runtime.schedule.cache.stored_prefixes import StoredPrefixes
from stemma.runtime.schedule.request import FinishReason, Request


def prompt(seed: int, length: int) -> list[int]:
    """`length` tokens; those of other seeds share no block."""
    tokens, chain = [], chain_of([seed])
    for _ in range(length):
        tokens.append(1 + chain % (VOCAB_SIZE - 1))
        chain = chain_of([tokens[-1]], chain)
    return tokens


def assert_right(request: Request) -> None:
    """The right output, and no error but that of a step that was told to fail: the engine reports
    what the scripted device finds wrong as a failed step too."""
    assert_output_right(request)
    assert request.error is None or "was told to fail" in request.error, request.error


@dataclass
class Shop(EngineHarness):
    """A House with a store; `restart` is another process with the same folder."""

    folder: Path = field(default_factory=Path)
    num_pages: int = 4096
    token_budget: int = 512
    num_host_pages: int = 0
    max_blocks: int = 1000
    max_fetch_s: float = 30.0
    num_states: int = 0  # slots of recurrent states; 0: the model has none

    def __post_init__(self) -> None:
        self.store = DiskStore(self.folder, LAYOUT, max_bytes=self.max_blocks * FILE_BYTES)
        states, self.state_store = None, None
        if self.num_states:
            self.state_store = DiskStore(self.folder, STATE_LAYOUT, max_bytes=1 << 20)
            states = StateOptions(self.num_states, 512, self.num_states, BLOCK_TOKENS)
        self.stored = StoredPrefixes(
            self.store, self.page_size, states=self.state_store, max_fetch_s=self.max_fetch_s
        )
        self.kv_cache = KVCacheOptions(
            num_host_pages=self.num_host_pages, stored=self.stored, states=states
        )
        super().__post_init__()

    @property
    def stores(self) -> list[DiskStore]:
        return [self.store] if self.state_store is None else [self.store, self.state_store]

    def restart(self) -> None:
        for store in self.stores:
            store.close()
        self.__post_init__()

    def wait(self, max_s: float = PATIENCE_S) -> None:
        """For a fetch to be done, as the gateway's poller does."""
        found = ready(self.stores, max_s)
        assert found, "no fetch was done"
        for store in found:
            store.collect()

    def with_slow_disk(self) -> threading.Event:
        """Nothing is read before it is set."""
        may_read, read = threading.Event(), self.store._read

        def slowly(fetch: Fetch) -> None:
            assert may_read.wait(PATIENCE_S)
            read(fetch)

        self.store._read = slowly  # type: ignore[method-assign]
        return may_read

    def run(self, max_steps: int = 5000) -> None:
        super().run(max_steps)
        while self.stored.num_held:
            self.wait()
            super().run(max_steps)

    def serve(self, tokens: list[int], max_tokens: int = 4, **fields: object) -> Request:
        request = self.submit(tokens, max_tokens, **fields)
        self.run()
        assert_right(request)
        for store in self.stores:
            assert store.flush(PATIENCE_S)
        return request

    def close(self) -> None:
        """Nothing is held, by anybody."""
        assert not self.stored._wanted and not self.stored._arriving and not self.stored._saving
        assert not self.stored._saving_states
        for store in self.stores:
            with store._changed:
                assert store._changed.wait_for(lambda: not store._num_fetched, PATIENCE_S)  # noqa: B023
        self.assert_nothing_held()
        for store in self.stores:
            store.close()


STATE_LAYOUT = StateBlockLayout(LAYOUT, StateLayout(1, StatePart((1,), "float64"), None))


OpenShop = Callable[..., Shop]


@pytest.fixture
def open_shop(tmp_path: Path) -> Iterator[OpenShop]:
    shops: list[Shop] = []

    def opened(**options: object) -> Shop:
        shops.append(Shop(folder=tmp_path, **options))  # type: ignore[arg-type]
        return shops[-1]

    yield opened
    for shop in shops:
        shop.close()


@pytest.mark.parametrize("page_size", [1, 16, 256])
def test_after_a_restart_a_prefix_is_read_and_not_computed(
    open_shop: OpenShop, page_size: int
) -> None:
    shop = open_shop(page_size=page_size, num_pages=4096 // page_size)
    first = shop.serve(prompt(1, 1000))
    assert first.num_disk_tokens == 0 and shop.store.stats.num_saved == 3
    shop.restart()
    again = shop.serve(prompt(1, 1000))
    assert again.num_disk_tokens == again.num_cached_tokens == 768
    assert again.output_ids == first.output_ids
    assert shop.executor.num_computed == 1000 - 768 + len(again.output_ids) - 1
    assert shop.engine.describe()["kv_store"]["num_restored_tokens"] == 768


def test_what_was_generated_is_kept_too(open_shop: OpenShop) -> None:
    shop = open_shop()
    first = shop.serve(prompt(1, 250), max_tokens=60)
    shop.restart()
    turn = [*first.token_ids, 3, 2, 1]
    assert len(first.token_ids) > 257 and shop.serve(turn).num_disk_tokens == 256


def test_the_last_token_is_computed_though_its_block_is_there(open_shop: OpenShop) -> None:
    shop = open_shop()
    shop.serve(prompt(1, 512), max_tokens=2)
    shop.restart()
    assert shop.serve(prompt(1, 512)).num_disk_tokens == 511


def test_a_page_that_would_not_be_full_is_computed(open_shop: OpenShop) -> None:
    shop = open_shop(page_size=16, num_pages=256)
    shop.serve(prompt(1, 512), max_tokens=2)
    shop.restart()
    assert shop.serve(prompt(1, 512)).num_disk_tokens == 496


def test_only_what_the_pool_lacks_is_fetched(open_shop: OpenShop) -> None:
    shop = open_shop()
    shop.serve(prompt(1, 1100))
    shop.restart()
    shop.serve(prompt(1, 400))
    num_fetched = shop.store.stats.num_fetched
    request = shop.serve(prompt(1, 1100))
    assert shop.store.stats.num_fetched - num_fetched == 3, "blocks 1, 2 and 3"
    assert request.num_disk_tokens == 1024 - 400
    assert shop.serve(prompt(1, 1100)).num_disk_tokens == 0, "all of it is in the pool now"


def test_the_host_is_asked_before_the_store(open_shop: OpenShop) -> None:
    shop = open_shop(num_pages=1200, num_host_pages=4096)
    shop.serve(prompt(1, 1000))
    shop.serve(prompt(2, 1000))
    again = shop.serve(prompt(1, 1000))
    assert again.num_host_tokens and not again.num_disk_tokens
    shop.restart()
    shop.serve(prompt(2, 1000))
    again = shop.serve(prompt(1, 1000))
    assert again.num_disk_tokens == 768 and not again.num_host_tokens


def test_namespaces_are_kept_apart(open_shop: OpenShop) -> None:
    shop = open_shop()
    shop.serve(prompt(1, 600), namespace="a")
    shop.restart()
    assert shop.serve(prompt(1, 600), namespace="b").num_disk_tokens == 0
    assert shop.serve(prompt(1, 600), namespace="a").num_disk_tokens == 512


def test_a_request_that_is_fetched_for_holds_nothing_and_others_run(open_shop: OpenShop) -> None:
    shop = open_shop()
    shop.serve(prompt(1, 600))
    shop.restart()
    disk = shop.with_slow_disk()
    held = shop.submit(prompt(1, 600))
    assert not shop.engine.has_work and shop.engine.describe()["num_waiting"] == 1
    other = shop.submit(prompt(2, 30))
    while not other.is_finished:
        shop.step()
    assert held.node is None and not held.is_admitted and not shop.engine.has_work
    disk.set()
    shop.run()
    assert_right(held)
    assert held.num_disk_tokens == 512


def test_what_is_fetched_is_of_no_use_once_the_pool_has_lost_what_comes_before(
    open_shop: OpenShop,
) -> None:
    shop = open_shop()
    shop.serve(prompt(1, 1100))
    shop.restart()
    shop.serve(prompt(1, 400))
    disk = shop.with_slow_disk()
    request = shop.submit(prompt(1, 1100))
    shop.engine.flush_cache()
    disk.set()
    shop.run()
    assert_right(request)
    assert request.num_disk_tokens == 0 and shop.store.stats.num_fetched == 1 + 3


def test_many_requests_with_one_prefix_share_a_fetch(open_shop: OpenShop) -> None:
    shop = open_shop()
    shop.serve(prompt(1, 600))
    shop.restart()
    requests = [shop.submit([*prompt(1, 600), 1 + index % 7, 1 + index // 7]) for index in range(9)]
    shop.run()
    for request in requests:
        assert_right(request)
        assert request.num_cached_tokens >= 512
    assert shop.store.stats.num_fetched == 2
    assert sum(request.num_disk_tokens for request in requests) == 512


def test_a_longer_sequence_fetches_only_what_is_not_on_its_way(open_shop: OpenShop) -> None:
    shop = open_shop()
    shop.serve(prompt(1, 1300))
    shop.restart()
    short, long = shop.submit(prompt(1, 600)), shop.submit(prompt(1, 1300))
    shop.run()
    assert_right(short)
    assert_right(long)
    assert shop.store.stats.num_fetched == 5
    assert short.num_disk_tokens == 512 and long.num_cached_tokens == 1280


def test_a_fetch_that_takes_too_long_is_not_waited_for(open_shop: OpenShop) -> None:
    shop = open_shop(max_fetch_s=0.0)
    shop.serve(prompt(1, 600))
    shop.restart()
    disk = shop.with_slow_disk()
    request = shop.submit(prompt(1, 600))
    while not request.is_finished:
        assert shop.engine.has_work
        shop.step()
    assert_right(request)
    assert request.num_disk_tokens == 0
    disk.set()


def test_a_damaged_block_is_computed_with_all_behind_it(open_shop: OpenShop) -> None:
    shop = open_shop()
    shop.serve(prompt(1, 1000))
    shop.restart()
    block = blocks_of(LAYOUT, "", array("i", prompt(1, 1000)))[1]
    StoreFolder(shop.folder, LAYOUT).path_of(block.key).write_bytes(b"damaged")
    assert shop.serve(prompt(1, 1000)).num_disk_tokens == 256
    assert shop.store.stats.num_corrupt == 1
    shop.restart()
    assert shop.serve(prompt(1, 1000)).num_disk_tokens == 768, "and is saved again"


def test_a_deadline_ends_a_request_that_is_fetched_for(open_shop: OpenShop) -> None:
    now_s = 0.0
    shop = open_shop(clock=lambda: now_s)
    shop.serve(prompt(1, 700))
    shop.restart()
    may_read = shop.with_slow_disk()
    late = shop.submit(prompt(1, 700), created_s=now_s, deadline_s=1.0)
    assert shop.stored.num_held == 1 and not shop.engine.has_work
    assert shop.engine.next_wake_s == late.deadline_s
    now_s = 1.5
    assert shop.engine.has_work
    shop.engine.step()
    assert late.error_kind == "DeadlineExceeded" and not shop.engine.has_work
    assert not shop.stored.num_held
    may_read.set()


@pytest.mark.parametrize("wait", [False, True])
def test_an_aborted_request_leaves_nothing_behind(open_shop: OpenShop, wait: bool) -> None:
    shop = open_shop()
    shop.serve(prompt(1, 600))
    shop.restart()
    request = shop.submit(prompt(1, 600))
    if wait:
        shop.wait()
    shop.engine.abort(request)
    assert request.finish_reason is FinishReason.ABORT
    assert not shop.engine.has_work and not shop.stored.num_held
    shop.serve(prompt(1, 600))


def test_a_request_is_restored_as_far_as_there_are_pages(open_shop: OpenShop) -> None:
    shop = open_shop(num_pages=1100)
    shop.serve(prompt(1, 1000))
    shop.restart()
    running = shop.submit(prompt(2, 300), max_tokens=200)
    shop.step()
    request = shop.submit(prompt(1, 700), max_tokens=20)
    shop.wait()
    shop.run()
    assert_right(running)
    assert_right(request)
    assert 0 < request.num_disk_tokens <= 512


@pytest.mark.parametrize("fail_step", [1, 2, 3])
def test_a_failed_step_takes_what_it_restored_back(open_shop: OpenShop, fail_step: int) -> None:
    shop = open_shop()
    shop.serve(prompt(1, 600))
    shop.restart()
    shop.executor.fail_steps = {fail_step}
    requests = [shop.submit([*prompt(1, 600), number]) for number in (1, 2, 3)]
    shop.run()
    for request in requests:
        assert_right(request)
    assert any(request.finish_reason is FinishReason.ERROR for request in requests)
    shop.serve(prompt(1, 600))


def test_a_request_under_a_grammar_is_restored_while_it_is_compiled(open_shop: OpenShop) -> None:
    shop = open_shop()
    shop.serve(prompt(1, 600))
    shop.restart()
    grammar = PendingGrammar()
    request = shop.submit(prompt(1, 600), grammar=grammar)
    shop.wait()
    shop.step()
    assert request.is_admitted and request.num_disk_tokens == 512
    shop.engine.abort(request)


def test_a_shared_prefix_is_on_disk_at_once(open_shop: OpenShop) -> None:
    shop = open_shop()
    request = shop.submit(prompt(1, 600), max_tokens=50)
    shop.step()
    shop.step()
    assert not request.is_finished and not list(shop.folder.rglob("*.kv"))
    cache = shop.engine.scheduler.kv_cache
    assert cache.share("", request.token_ids) == 512
    assert cache.share("nobody's", request.token_ids) == 0
    shop.step()
    assert shop.store.flush(PATIENCE_S) and len(list(shop.folder.rglob("*.kv"))) == 2
    shop.run()


@pytest.mark.parametrize("by", ["share", "abort"])
def test_what_a_failed_row_was_to_write_is_not_saved(open_shop: OpenShop, by: str) -> None:
    """Shared while it is computed; or read by a request that leaves before it is."""
    shop = open_shop(has_overlap=True, token_budget=2048, page_size=16)
    text = prompt(1, 600)
    shop.executor.row_errors = {1}
    shop.submit(text)
    reader = shop.submit([*text, 1, 2, 3])
    shop.step()
    assert reader.num_computed_tokens == 592, "it counts on the row before it"
    if by == "share":
        outcome = shop.engine.hints.share("", text)
        assert outcome.outcome == "clipped" and not outcome.num_tokens
    else:
        shop.engine.abort(reader)
    shop.run()
    assert shop.store.flush(60.0)
    num_saved = 2 if by == "share" else 0  # the reader computes it again
    assert shop.store.stats.num_saved == num_saved


def test_a_preempted_request_that_waits_is_kept_once(open_shop: OpenShop) -> None:
    """It is offered in each step; the store hears of it when it was preempted."""
    shop = open_shop(num_pages=1500)
    scheduler, num_looks = shop.engine.scheduler, 0
    note_use = shop.store.note_use

    def look(blocks: list[Block]) -> int:
        nonlocal num_looks
        num_looks += 1
        return note_use(blocks)

    shop.store.note_use = look  # type: ignore[method-assign,assignment]
    with pytest.MonkeyPatch.context() as patch:
        admit_all(patch, scheduler)
        for seed in (1, 2):
            shop.submit(prompt(seed, 700), max_tokens=200)
        while not scheduler.stats.num_preemptions:
            shop.step()
    num_before, num_steps = num_looks, len(shop.executor.plans)
    while len(scheduler.running) == 1 and shop.requests[0].finish_reason is None:
        shop.step()
    assert len(shop.executor.plans) - num_steps > 50 and num_looks - num_before <= 1
    shop.run()
    assert shop.store.flush(PATIENCE_S)


def test_blocks_must_be_whole_pages(tmp_path: Path) -> None:
    store = DiskStore(tmp_path, LAYOUT, max_bytes=1 << 20)
    with pytest.raises(InvalidRequest, match="page_size"):
        StoredPrefixes(store, 48)
    store.close()


EVENTS = st.lists(
    st.one_of(
        st.tuples(st.just("submit"), st.integers(0, 3), st.integers(1, 1100)),
        st.tuples(st.just("submit"), st.integers(0, 3), st.integers(1, 1100)),
        st.tuples(st.just("step"), st.just(0), st.integers(1, 3)),
        st.tuples(st.just("abort"), st.just(0), st.integers(0, 20)),
        st.tuples(st.just("run"), st.just(0), st.just(0)),
        st.tuples(st.just("flush"), st.just(0), st.just(0)),
        st.tuples(st.just("restart"), st.just(0), st.just(0)),
        st.tuples(st.just("share"), st.integers(0, 3), st.integers(1, 1100)),
    ),
    max_size=20,
)


Case = tuple[list[tuple[str, int, int]], int, int, int, int, set[int], bool]
CASES = st.tuples(
    EVENTS,
    st.sampled_from([1, 16]),  # page size
    st.sampled_from([1600, 4096]),  # tokens of the pool
    st.sampled_from([0, 800, 4096]),  # and of the host's
    st.sampled_from([3, 8, 1000]),  # blocks of the store
    st.sets(st.integers(1, 30), max_size=2),  # steps that fail
    st.booleans(),  # overlap
)


def play(folder: Path, case: Case) -> None:
    events, page_size, num_tokens, num_host_tokens, max_blocks, fail_steps, has_overlap = case
    shop = Shop(
        folder=folder,
        page_size=page_size,
        num_pages=num_tokens // page_size,
        num_host_pages=num_host_tokens // page_size,
        max_blocks=max_blocks,
        is_hopeful=True,
        has_overlap=has_overlap,
    )
    shop.executor.fail_steps = fail_steps
    for kind, seed, number in events:
        if kind == "submit":
            shop.submit(prompt(seed, number), max_tokens=1 + number % 40)
        elif kind == "step":
            for _ in range(number):
                shop.step()
        elif kind == "abort" and shop.requests:
            shop.engine.abort(shop.requests[number % len(shop.requests)])
        elif kind == "flush":
            shop.engine.flush_cache()
        elif kind == "share":
            shop.engine.scheduler.kv_cache.share("", prompt(seed, number))
        elif kind in ("run", "restart"):
            shop.run()
            if kind == "restart":
                shop.restart()
        shop.engine.scheduler.check()
    shop.run()
    for request in shop.requests:
        assert_right(request)
    assert shop.store.stats.num_corrupt == 0
    shop.close()


@settings(max_examples=20)
@given(CASES)
def test_stores_change_no_output_and_leak_nothing(
    tmp_path_factory: pytest.TempPathFactory,
    case: Case,
) -> None:
    play(tmp_path_factory.mktemp("store"), case)


@pytest.mark.slow
@settings(max_examples=1000)
@given(CASES)
def test_stores_change_no_output_and_leak_nothing_for_long(
    tmp_path_factory: pytest.TempPathFactory,
    case: Case,
) -> None:
    play(tmp_path_factory.mktemp("store"), case)


# --- models with recurrent layers -----------------------------------------------------------------


def with_states(open_shop: OpenShop, **options: object) -> Shop:
    return open_shop(**{"num_states": 24, "max_running": 4, **options})


@pytest.mark.parametrize("page_size", [1, 16])
def test_after_a_restart_a_call_goes_on_from_a_stored_state(
    open_shop: OpenShop, page_size: int
) -> None:
    shop = with_states(open_shop, page_size=page_size, num_pages=4096 // page_size)
    first = shop.serve(prompt(1, 1000))
    assert shop.state_store is not None and shop.state_store.stats.num_saved == 2  # 512 and 768
    shop.restart()
    again = shop.serve(prompt(1, 1000))
    assert again.num_disk_tokens == again.num_cached_tokens == 768
    assert shop.executor.num_computed == 1000 - 768 + len(again.output_ids) - 1
    assert again.output_ids == first.output_ids
    shop.engine.flush_cache()
    longer = shop.serve([*prompt(1, 700), 1, 2])  # 512 of it have a state
    assert longer.num_disk_tokens == longer.num_cached_tokens == 512
    stored = shop.engine.describe()["kv_store"]
    assert (stored["num_restored_states"], stored["states"]["num_blocks"]) == (2, 2)


def test_where_a_program_forks_a_state_is_stored(open_shop: OpenShop) -> None:
    shop = with_states(open_shop)
    shop.serve([*prompt(1, 600), 1] + prompt(2, 600), shared_ends=(300,))
    shop.restart()
    assert shop.serve(prompt(1, 300) + prompt(3, 300)).num_disk_tokens == 256


def test_a_prefix_longer_than_a_fetch_comes_back_to_the_last_state_within_it(
    open_shop: OpenShop,
) -> None:
    shop = with_states(open_shop)
    shop.serve(prompt(1, 1000))
    shop.restart()
    shop.store._max_fetched = 2
    assert shop.serve(prompt(1, 1000)).num_disk_tokens == 512


def test_requests_that_arrive_together_restore_a_state_once(open_shop: OpenShop) -> None:
    shop = with_states(open_shop)
    shop.serve(prompt(1, 600))
    shop.restart()
    for tail in (1, 2, 3):
        shop.submit([*prompt(1, 540), tail])
    shop.run()
    for request in shop.requests[-3:]:
        assert_right(request)
        assert request.num_cached_tokens >= 512
    assert shop.stored.num_restored_states == 1


def test_a_state_alone_comes_back_where_the_pool_has_the_kv(open_shop: OpenShop) -> None:
    shop = with_states(open_shop, num_states=2, max_running=1)
    first = shop.serve(prompt(1, 600))
    for number in (2, 3):
        shop.serve(prompt(number, 100))  # whose states take the slots
    again = shop.serve([*prompt(1, 600), 1])
    assert (again.num_disk_tokens, again.num_cached_tokens) == (0, 512)
    assert first.num_disk_tokens == 0 and shop.stored.num_restored_states == 1


def test_a_damaged_state_is_a_miss(open_shop: OpenShop) -> None:
    """What it was is computed, and saved again."""
    shop = with_states(open_shop)
    shop.serve(prompt(1, 600))
    for path in (shop.folder / STATE_LAYOUT.digest.hex()).glob("*/*.kv"):
        damaged = bytearray(path.read_bytes())
        damaged[-6] ^= 1
        path.write_bytes(damaged)
    shop.restart()
    again = shop.serve(prompt(1, 600))
    assert again.num_cached_tokens == 0 and shop.state_store is not None
    assert shop.state_store.stats.num_corrupt == 1
    shop.restart()
    assert shop.serve(prompt(1, 600)).num_cached_tokens == 512


def test_a_failed_step_saves_no_state(open_shop: OpenShop) -> None:
    shop = with_states(open_shop)
    shop.executor.fail_steps = {6}  # behind two chunks and three tokens: the copies
    shop.serve(prompt(1, 600))
    assert shop.state_store is not None and shop.state_store.stats.num_saved == 0
    shop.serve(prompt(1, 600))
    assert shop.state_store.stats.num_saved == 1


def test_random_requests_over_restarts_find_their_states(open_shop: OpenShop) -> None:
    rng = random.Random(2)
    shop = with_states(open_shop, num_pages=1200, num_host_pages=1500, num_states=7)
    num_restored = 0
    for _ in range(6):
        shop.executor.fail_steps = set(rng.sample(range(60), 2))
        for _ in range(8):
            for _ in range(rng.randrange(4)):
                tokens = prompt(rng.randrange(3), rng.choice((250, 520, 700))) + [
                    rng.randrange(1, 5)
                ]
                shop.submit(tokens, rng.choice((1, 20)), shared_ends=(rng.randrange(500),))
            shop.run()
            if rng.random() < 0.3:
                shop.engine.flush_cache()
        for store in shop.stores:
            assert store.flush(PATIENCE_S)
        for request in shop.requests:
            assert_right(request)
        num_restored += shop.stored.num_restored_states
        shop.restart()
    assert num_restored > 5
