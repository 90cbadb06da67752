"""The host tier and leases over a scripted device: swap, loads, failures, and what must always come
back."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field

import pytest
from engine_harness import FAMILIES, EngineHarness, assert_right
from fakes import FakeListener, make_request
from hypothesis import given, settings
from hypothesis import strategies as st

from stemma.radix.leases import Lease
from stemma.runtime.schedule.cache.kv_cache import KVCacheManager, KVCacheOptions
from stemma.runtime.schedule.program_record import ProgramRecord
from stemma.runtime.schedule.request import FinishReason, Request


def prompt(number: int, length: int) -> list[int]:
    """`length` tokens that share nothing with another number's after the first."""
    return [(number >> (index % 8)) % 2 + 1 + index % 3 for index in range(length)]


@dataclass
class Clock:
    """Seconds that a test lets pass."""

    now_s: float = 0.0

    def __call__(self) -> float:
        return self.now_s


@dataclass
class Farm(EngineHarness):
    """A House with a clock of its own, programs, and leases that a test takes."""

    leases: list[Lease] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.clock = Clock()
        self.cache.clock = self.clock

    @property
    def cache(self) -> KVCacheManager:
        return self.engine.scheduler.kv_cache

    def serve(self, tokens: list[int], max_tokens: int = 4, **fields: object) -> Request:
        request = self.submit(tokens, max_tokens, **fields)
        self.run()
        assert_right(request)
        return request

    def retain(self, tokens: list[int], due_s: float = 1.0, ttl_s: float = 100.0) -> Lease | None:
        lease = self.cache.retain("", tokens, due_s=due_s, ttl_s=ttl_s)
        if lease is not None:
            self.leases.append(lease)
        return lease

    def release_all(self) -> None:
        while self.leases:
            self.cache.release_lease(self.leases.pop())


def with_host(num_host_pages: int = 256, **options: object) -> KVCacheOptions:
    return KVCacheOptions(num_host_pages=num_host_pages, **options)  # type: ignore[arg-type]


def assert_nothing_held(farm: Farm) -> None:
    """Once all leases are released, every page of both tiers comes back."""
    farm.release_all()
    assert not len(farm.cache.leases)
    farm.assert_nothing_held()
    if farm.cache.host is not None:
        assert farm.cache.host.allocator.num_free == farm.cache.host.num_pages


def test_a_page_of_the_host_that_is_not_to_be_had_loses_none_of_the_device(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    farm = Farm(num_pages=64, token_budget=64, kv_cache=with_host())
    farm.serve(prompt(1, 20))
    farm.serve(prompt(2, 20))
    assert farm.cache.host is not None
    monkeypatch.setattr(farm.cache.host.allocator, "allocate_at_most", lambda _: array("i"))
    farm.serve(prompt(3, 50))
    assert farm.cache.num_evicted_tokens and not farm.cache.host.tree.num_pages
    assert_nothing_held(farm)


def test_what_the_device_evicts_is_loaded_and_not_computed_again() -> None:
    farm = Farm(num_pages=64, token_budget=64, kv_cache=with_host())
    first = prompt(1, 50)
    farm.serve(first)
    farm.serve(prompt(2, 50))
    num_computed = farm.executor.num_computed
    again = farm.serve(first)
    assert again.num_cached_tokens == 49
    assert 30 <= again.num_host_tokens <= 49
    assert farm.executor.num_computed - num_computed == 1 + 3
    assert_nothing_held(farm)


def test_without_a_host_it_is_computed_again() -> None:
    farm = Farm(num_pages=64, token_budget=64)
    farm.serve(prompt(1, 50))
    farm.serve(prompt(2, 50))
    assert farm.serve(prompt(1, 50)).num_cached_tokens < 20


def test_a_page_goes_to_the_host_once() -> None:
    farm = Farm(num_pages=64, token_budget=64, kv_cache=with_host())
    for _ in range(3):
        for number in (1, 2, 5):
            farm.serve(prompt(number, 50))
    host = farm.cache.host
    assert host is not None
    assert host.num_stored_tokens == host.tree.num_pages <= 3 * 54
    assert host.num_loaded_tokens > 2 * 3 * 30


def test_the_host_keeps_what_was_used_last() -> None:
    farm = Farm(num_pages=64, token_budget=64, kv_cache=with_host(64))
    for number in (1, 2, 5, 9):
        farm.serve(prompt(number, 50))
    assert farm.serve(prompt(5, 50)).num_host_tokens > 30
    assert farm.serve(prompt(1, 50)).num_host_tokens == 0
    assert_nothing_held(farm)


def test_a_preempted_request_is_swapped_and_recomputes_next_to_nothing() -> None:
    computed = {}
    for num_host_pages in (0, 512):
        farm = Farm(
            num_pages=96,
            token_budget=64,
            is_hopeful=True,
            kv_cache=KVCacheOptions(num_host_pages=num_host_pages),
        )
        for number in range(1, 7):
            farm.submit(prompt(number, 30), max_tokens=30)
        farm.run()
        for request in farm.requests:
            assert_right(request)
        stats = farm.engine.scheduler.stats
        assert stats.num_preemptions > 0
        computed[num_host_pages] = farm.executor.num_computed
        assert_nothing_held(farm)
    needed = sum(30 + len(r.output_ids) - 1 for r in farm.requests)
    assert computed[512] <= needed + 24 * stats.num_preemptions
    assert computed[512] < computed[0]


def test_a_preempted_request_keeps_its_kv_before_other_content() -> None:
    cache = KVCacheManager(64, 1)
    request = make_request(1, prompt(1, 30))
    cache.attach(request)
    cache.reserve(request, 30)
    request.num_computed_tokens = 30
    cache.release(request)
    cache.keep_preempted(request, request.token_ids[:30])
    other = make_request(2, prompt(2, 30))
    cache.attach(other)
    cache.reserve(other, 30)
    other.num_computed_tokens = 30
    cache.release(other)
    assert cache.retain("", other.token_ids, due_s=0.0, ttl_s=9.0, priority=1000) is not None
    cache._make_room(64 - 30)
    assert cache.tree.match_length("", request.token_ids) == 30
    cache.forget_preempted(request)
    assert request.lease is None and not len(cache.leases)


def test_leases_decide_what_stays_on_the_device_and_follow_it_to_the_host() -> None:
    farm = Farm(num_pages=64, token_budget=64, kv_cache=with_host(100))
    kept = prompt(1, 40)
    farm.serve(kept)
    lease = farm.retain(kept)
    assert lease is not None and lease.num_kept_tokens == 40
    farm.serve(prompt(2, 20))
    farm.serve(prompt(5, 20))
    assert farm.cache.tree.match_length("", kept) == 40, "LRU would have evicted it"
    farm.serve(prompt(9, 60))  # needs nearly all pages: the lease is broken
    assert lease.num_kept_tokens < 40 and lease.colder is not None
    assert lease.is_active and lease.colder.num_kept_tokens == 40
    for number in (17, 33, 65, 129):  # more than the host has room for
        farm.serve(prompt(number, 60))
    assert farm.serve(kept).num_cached_tokens == 39
    farm.cache.release_lease(lease)
    assert not lease.is_active
    assert_nothing_held(farm)


def test_what_is_due_is_loaded_before_its_use() -> None:
    farm = Farm(num_pages=64, token_budget=64, kv_cache=with_host())
    kept = prompt(1, 40)
    farm.serve(kept)
    lease = farm.retain(kept, due_s=10.0)
    farm.serve(prompt(9, 60))
    assert lease is not None and lease.num_kept_tokens < 40
    farm.clock.now_s = 9.99
    farm.serve(prompt(3, 4))
    assert lease.num_kept_tokens == 40 == farm.cache.tree.match_length("", kept)
    assert farm.serve(kept).num_host_tokens == 0, "it was there already"
    assert_nothing_held(farm)


def test_what_only_the_host_has_can_be_leased_and_is_loaded_when_due() -> None:
    farm = Farm(num_pages=64, token_budget=64, kv_cache=with_host())
    farm.serve(prompt(1, 40))
    farm.serve(prompt(9, 60))
    lease = farm.retain(prompt(1, 40), due_s=10.0)
    assert lease is not None and lease.num_kept_tokens < 20 and lease.num_tokens == 40
    farm.cache.update_lease(lease, due_s=5.0, ttl_s=9.0)
    farm.clock.now_s = 5.0
    farm.serve([1, 2, 3], max_tokens=1)
    assert lease.num_kept_tokens == 40
    farm.clock.now_s = 9.0
    farm.serve([1, 2, 3], max_tokens=1)
    assert not lease.is_active and not len(farm.cache.leases)
    assert_nothing_held(farm)


def test_what_is_due_earlier_does_not_give_way_to_a_prefetch() -> None:
    farm = Farm(num_pages=64, token_budget=64, kv_cache=with_host())
    farm.serve(prompt(1, 40))
    late = farm.retain(prompt(1, 40), due_s=10.0)
    farm.serve(prompt(9, 56))
    early = farm.retain(prompt(9, 56), due_s=5.0)
    farm.clock.now_s = 9.99
    farm.serve([1, 2, 3], max_tokens=1)
    assert early is not None and early.num_kept_tokens == 56
    assert late is not None and late.num_kept_tokens < 40


def test_what_an_ended_program_alone_has_used_goes_first_and_is_not_copied() -> None:
    farm = Farm(num_pages=64, token_budget=64, kv_cache=with_host())
    program = ProgramRecord(label="ended")
    farm.serve(prompt(5, 20))
    farm.serve(prompt(1, 30), program=program)
    lease = farm.retain(prompt(1, 30))
    assert lease is not None
    farm.cache.release_lease(lease, is_last_use=True)
    farm.serve(prompt(2, 30))
    assert farm.cache.tree.match_length("", prompt(5, 20)) == 20
    assert farm.cache.tree.match_length("", prompt(1, 30)) < 15
    host = farm.cache.host
    assert host is not None and host.tree.match_length("", prompt(1, 30)) == 0


def test_evictions_are_counted_for_whom_and_whose() -> None:
    farm = Farm(num_pages=64, token_budget=64)
    mine, yours = ProgramRecord(label="mine"), ProgramRecord(label="yours")
    farm.serve(prompt(1, 50), program=yours)
    request = farm.serve(prompt(2, 50), program=mine)
    assert set(request.evicted) == {"yours"} and 36 <= request.evicted["yours"] <= 53


def test_disabled_leases_keep_nothing() -> None:
    farm = Farm(kv_cache=KVCacheOptions(has_leases=False))
    farm.serve(prompt(1, 20))
    assert farm.retain(prompt(1, 20)) is None
    assert farm.cache.pin("", prompt(1, 20), ttl_s=9.0) is None
    assert not len(farm.cache.leases)


def test_an_unknown_namespace_leaves_nothing_behind() -> None:
    cache = KVCacheManager(64, 1, with_host())
    for number in range(9):
        assert cache.retain(f"client {number}", [1, 2, 3], due_s=1.0, ttl_s=1.0) is None
    assert not cache.tree.roots and cache.host is not None and not cache.host.tree.roots


@pytest.mark.parametrize("fail_step", range(2, 9))
def test_a_failed_step_takes_its_copies_back_on_both_tiers(fail_step: int) -> None:
    farm = Farm(num_pages=64, token_budget=24, max_running=3, kv_cache=with_host(100))
    for number in (1, 2, 5):
        farm.serve(prompt(number, 50))
    farm.executor.fail_steps = {len(farm.executor.plans) + fail_step}
    for number in (1, 2, 5, 9):
        farm.submit(prompt(number, 50))
        farm.step()
    farm.run()
    for request in farm.requests:
        assert_right(request)
    farm.executor.fail_steps = set()
    for number in (1, 2, 5, 9):
        farm.serve(prompt(number, 50))
    assert_nothing_held(farm)


def test_what_a_plan_in_flight_is_to_write_reaches_the_host_only_once_it_is_written() -> None:
    farm = Farm(has_overlap=True, kv_cache=with_host())
    farm.executor.row_errors = {1}
    host = farm.cache.host
    assert host is not None
    failed = farm.submit([3], max_tokens=1)
    farm.step()
    assert farm.cache.tree.match_length("", [3]) == 1, "it is published when it is planned"
    assert farm.engine.hints.demote("", [3]).outcome == "missing"
    farm.run()
    assert failed.finish_reason is FinishReason.ERROR
    assert not host.tree.match_length("", [3])
    farm.serve([3], max_tokens=1)
    assert farm.engine.hints.demote("", [3]).num_tokens == 1
    assert_nothing_held(farm)


def test_the_computed_part_of_a_prompt_can_be_demoted_while_the_rest_is_computed() -> None:
    farm = Farm(has_overlap=True, kv_cache=with_host(), token_budget=8)
    text = prompt(1, 30)
    farm.submit(text)
    farm.step()
    farm.step()  # the first chunk is there, the second in flight
    outcome = farm.engine.hints.demote("", text)
    assert (outcome.outcome, outcome.num_tokens) == ("clipped", 8)
    assert "is being computed" in outcome.reason
    farm.run()
    assert farm.engine.hints.demote("", text).num_tokens == 30
    assert_nothing_held(farm)


# --- hints --------------------------------------------------------------------------------------


def test_pins_are_accepted_clipped_rejected_or_missing() -> None:
    farm = Farm(num_pages=64, kv_cache=KVCacheOptions(pin_share=0.5))
    hints, text = farm.engine.hints, prompt(1, 40)
    assert hints.pin("", text).outcome == "missing"
    farm.serve(text)
    first = hints.pin("", text[:20])
    assert (first.outcome, first.reason, first.num_tokens) == ("accepted", "", 20)
    second = hints.pin("", text, ttl_s=1e9)
    assert (second.outcome, second.num_tokens) == ("clipped", 32)
    assert "600 s" in second.reason and "of the pool" in second.reason
    farm.serve(prompt(2, 10))
    assert hints.pin("", prompt(2, 10)).outcome == "rejected"
    for outcome in (first, second):
        assert outcome.lease is not None
        farm.leases.append(outcome.lease)
    assert hints.pin("another's", text).outcome == "missing"
    assert_nothing_held(farm)


def test_retains_say_how_much_is_cached_and_within_which_limits() -> None:
    farm = Farm(num_pages=64)
    hints, text = farm.engine.hints, prompt(1, 40)
    farm.serve(text, max_tokens=1)
    assert hints.retain("", text, 5.0).outcome == "accepted"
    assert hints.retain("", [*text, 1], 5.0).outcome == "accepted", "its last token has no KV yet"
    partly = hints.retain("", [*text, 1, 2, 3], 5.0, priority=5000)
    assert (partly.outcome, partly.num_tokens) == ("clipped", 40)
    assert "priorities end at 100" in partly.reason and "not cached" in partly.reason
    off = Farm(kv_cache=KVCacheOptions(has_leases=False))
    off.serve(text)
    assert off.engine.hints.retain("", text).outcome == "rejected"
    assert off.engine.hints.pin("", text).outcome == "rejected"


def test_what_is_demoted_is_on_the_host_and_leaves_the_device_first() -> None:
    farm = Farm(num_pages=64, kv_cache=with_host())
    farm.serve(prompt(5, 20))
    farm.serve(prompt(1, 30))
    assert farm.engine.hints.demote("", prompt(1, 30)) == ("accepted", "", 30, None)
    assert farm.engine.has_work, "the copy is made at once"
    farm.run()
    farm.serve(prompt(2, 30))
    assert farm.cache.tree.match_length("", prompt(5, 20)) == 20
    assert farm.cache.tree.match_length("", prompt(1, 30)) < 15
    assert farm.serve(prompt(1, 30)).num_host_tokens > 10
    assert_nothing_held(farm)


def test_what_is_prefetched_is_on_the_device_before_it_is_asked_for() -> None:
    farm = Farm(num_pages=64, token_budget=64, kv_cache=with_host())
    hints = farm.engine.hints
    farm.serve(prompt(1, 40))
    farm.serve(prompt(2, 58))
    assert farm.cache.tree.match_length("", prompt(1, 40)) < 10
    assert hints.prefetch("", prompt(1, 40)) == ("accepted", "", 40, None)
    farm.run()
    assert farm.serve(prompt(1, 40)).num_host_tokens == 0
    assert hints.prefetch("", [7, 7, 7]).outcome == "missing"
    assert hints.prefetch("", [*prompt(1, 40), 7, 7, 7])[0::2] == ("clipped", 40)
    farm.serve(prompt(2, 58))
    busy = farm.submit(prompt(17, 58), max_tokens=5)
    farm.step()
    assert hints.prefetch("", prompt(1, 40)).outcome == "deferred"
    farm.run()
    assert_right(busy)
    assert_nothing_held(farm)


def test_hints_for_tiers_that_are_not_there_are_rejected() -> None:
    farm = Farm(num_pages=64)
    hints, text = farm.engine.hints, prompt(1, 40)
    farm.serve(text)
    for outcome in (
        hints.demote("", text),
        hints.demote("", text, "remote"),
        hints.demote("", text, "disk"),
        hints.prefetch("", text, "host"),
        hints.share("", text),
    ):
        assert outcome.outcome == "rejected" and outcome.reason and not outcome.num_tokens


# --- random programs ------------------------------------------------------------------------------


@st.composite
def prefixes(draw: st.DrawFn) -> list[int]:
    family = draw(st.sampled_from(FAMILIES))
    return family[: draw(st.integers(1, 60))] + draw(st.lists(st.integers(1, 2), max_size=6))


NUMBERS = st.integers(0, 20)
EVENTS = st.lists(
    st.one_of(
        st.tuples(st.just("submit"), prefixes(), st.integers(1, 16)),
        st.tuples(st.just("submit"), prefixes(), st.integers(1, 16)),
        st.tuples(st.just("retain"), prefixes(), st.integers(0, 9)),
        st.tuples(st.just("pin"), prefixes(), st.integers(1, 9)),
        st.tuples(st.just("release"), st.booleans(), NUMBERS),
        st.tuples(st.just("update"), st.just(None), NUMBERS),
        st.tuples(st.just("wait"), st.just(None), st.integers(1, 9)),
        st.tuples(st.just("demote"), prefixes(), st.just(0)),
        st.tuples(st.just("prefetch"), prefixes(), st.just(0)),
        st.tuples(st.just("abort"), st.just(None), NUMBERS),
        st.tuples(st.just("step"), st.just(None), st.integers(1, 4)),
        st.tuples(st.just("flush"), st.just(None), st.just(0)),
    ),
    max_size=30,
)
FARMS = st.builds(
    Farm,
    num_pages=st.sampled_from([72, 90, 200]),
    page_size=st.just(1),
    token_budget=st.sampled_from([3, 16, 64]),
    max_running=st.sampled_from([1, 3, 8]),
    kv_cache=st.builds(
        KVCacheOptions,
        has_leases=st.booleans(),
        pin_share=st.sampled_from([0.25, 1.0]),
        num_host_pages=st.sampled_from([0, 40, 300]),
    ),
    is_hopeful=st.booleans(),
    has_overlap=st.booleans(),
) | st.builds(
    Farm,
    num_pages=st.sampled_from([6, 9, 20]),
    page_size=st.just(16),
    token_budget=st.sampled_from([16, 64]),
    max_running=st.sampled_from([1, 8]),
    kv_cache=st.builds(
        KVCacheOptions,
        pin_share=st.sampled_from([0.25, 1.0]),
        num_host_pages=st.sampled_from([0, 4, 40]),
    ),
    is_hopeful=st.booleans(),
    has_overlap=st.booleans(),
)


def play(farm: Farm, events: list[tuple[str, object, int]]) -> None:
    programs = [ProgramRecord(label=str(number)) for number in range(3)]
    for kind, what, number in events:
        if kind == "submit":
            assert isinstance(what, list)
            farm.submit(
                what,
                number,
                listener=FakeListener(),
                program=([None, *programs])[number % 4],
            )
        elif kind == "retain":
            assert isinstance(what, list)
            farm.retain(what, due_s=number, ttl_s=1 + number * 2)
        elif kind == "pin":
            assert isinstance(what, list)
            lease = farm.cache.pin("", what, ttl_s=number)
            farm.leases.extend([] if lease is None else [lease])
        elif kind == "release" and farm.leases:
            lease = farm.leases.pop(number % len(farm.leases))
            farm.cache.release_lease(lease, is_last_use=bool(what))
        elif kind == "update" and farm.leases:
            farm.cache.update_lease(farm.leases[number % len(farm.leases)], due_s=1.0, ttl_s=4.0)
        elif kind == "demote":
            assert isinstance(what, list)
            farm.engine.hints.demote("", what)
        elif kind == "prefetch":
            assert isinstance(what, list)
            farm.engine.hints.prefetch("", what)
        elif kind == "wait":
            farm.clock.now_s += number
        elif kind == "abort" and farm.requests:
            farm.engine.abort(farm.requests[number % len(farm.requests)])
        elif kind == "step":
            for _ in range(number):
                farm.step()
        elif kind == "flush":
            farm.engine.flush_cache()
        farm.engine.scheduler.check()
    farm.run()


@settings(max_examples=150, deadline=None)
@given(FARMS, EVENTS)
def test_leases_and_tiers_starve_nobody_leak_nothing_and_change_no_output(
    farm: Farm, events: list[tuple[str, object, int]]
) -> None:
    play(farm, events)
    for request in farm.requests:
        assert_right(request)
        assert request.finish_reason is not FinishReason.ERROR
    assert_nothing_held(farm)


@settings(max_examples=100, deadline=None)
@given(FARMS, EVENTS, st.sets(st.integers(1, 30), max_size=4), st.sets(st.integers(1, 8)))
def test_failed_steps_and_rows_spoil_no_tier(
    farm: Farm,
    events: list[tuple[str, object, int]],
    fail_steps: set[int],
    row_errors: set[int],
) -> None:
    farm.executor.fail_steps = fail_steps
    farm.executor.row_errors = row_errors
    play(farm, events)
    for request in farm.requests:
        assert_right(request)
    assert_nothing_held(farm)
