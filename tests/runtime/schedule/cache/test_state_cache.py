"""Recurrent states in the scheduler: whatever happens to requests, each row finds in its slot the
state behind the tokens before it, and all slots add up after each step (EngineHarness)."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
from beam_requests import scripted_search, submit_beam
from engine_harness import FAMILIES, EngineHarness, assert_right, hope
from fakes import STOP_ID, VOCAB_SIZE, FakeListener, expected_output
from scripted_drafters import ScriptedDrafter, oracle, speculate

from stemma.runtime.schedule.beam_search import BeamParams
from stemma.runtime.schedule.cache.kv_cache import KVCacheOptions
from stemma.runtime.schedule.cache.state_cache import StateCache, StateOptions
from stemma.runtime.schedule.request import FinishReason, HiddenSum, Request, Scoring
from stemma.runtime.schedule.sampling_params import SamplingParams

TEXT = FAMILIES[0]


def harness_of(
    num_checkpoints: int = 8,
    interval: int = 16,
    max_running: int = 8,
    num_host_pages: int = 0,
    num_host_states: int = 64,
    **options: int | bool,
) -> EngineHarness:
    states = StateOptions(max_running + num_checkpoints, interval, num_host_states)
    settings = {"num_pages": 512, "token_budget": 256, **options}
    kv_cache = KVCacheOptions(states=states, num_host_pages=num_host_pages)
    return EngineHarness(max_running=max_running, kv_cache=kv_cache, **settings)  # type: ignore[arg-type]


def states_of(harness: EngineHarness) -> StateCache:
    states = harness.engine.scheduler.kv_cache.states
    assert states is not None
    return states


def ran(harness: EngineHarness, *prompts: list[int], **fields: object) -> list[Request]:
    """Requests with these prompts, together."""
    requests = [harness.submit(prompt, **fields) for prompt in prompts]  # type: ignore[arg-type]
    harness.run()
    for request in requests:
        assert_right(request)
    return requests


def num_computed(harness: EngineHarness, *prompts: list[int], **fields: object) -> int:
    before = harness.executor.num_computed
    ran(harness, *prompts, **fields)
    return harness.executor.num_computed - before


def test_a_call_goes_on_where_an_earlier_one_ended() -> None:
    harness = harness_of(interval=512)
    (first,) = ran(harness, TEXT[:30], max_tokens=5)
    longer = [*first.token_ids, 1, 2, 3]
    assert num_computed(harness, longer, max_tokens=1) == 4  # the last token was never computed
    assert states_of(harness).num_replayed_tokens == 0


def test_where_texts_part_the_second_leaves_a_state_for_the_third() -> None:
    harness = harness_of(interval=512)
    ran(harness, [*TEXT[:40], 1], max_tokens=1)
    (second,) = ran(harness, [*TEXT[:40], 2], max_tokens=1)
    (third,) = ran(harness, [*TEXT[:40], 3], max_tokens=1)
    assert (second.num_cached_tokens, third.num_cached_tokens) == (0, 40)
    assert states_of(harness).num_replayed_tokens == 40


def test_replayed_tokens_take_no_pages() -> None:
    harness = harness_of(interval=512)
    ran(harness, [*TEXT[:40], 1], max_tokens=1)
    ran(harness, [*TEXT[:40], 2], max_tokens=1)
    cache = harness.engine.scheduler.kv_cache
    assert harness.num_pages - cache.allocator.num_free == 42
    assert any(
        row.kv_start == 40 and row.start == 0 for p in harness.executor.plans for row in p.rows
    )


def test_long_prompts_leave_a_state_every_interval() -> None:
    harness = harness_of(interval=16)
    ran(harness, TEXT[:80], max_tokens=1)
    (request,) = ran(harness, [*TEXT[:60], 1], max_tokens=1)
    assert request.num_cached_tokens == 48


def test_what_calls_are_known_to_share_is_computed_once() -> None:
    """Though they come in one step: the others wait until its state is there."""
    harness = harness_of(interval=512)
    prompts = [[*TEXT[:40], tail] for tail in (1, 2, 3, 4)]
    assert num_computed(harness, *prompts, max_tokens=1, shared_ends=(40,)) == 44


def test_choices_are_scored_behind_one_computation_of_their_prompt() -> None:
    harness = harness_of(interval=512)
    prompts = [[*TEXT[:40], *choice] for choice in ([1, 2], [3, 4], [5, 6])]
    requests = [harness.submit(p, scoring=Scoring(39, tuple(p[40:]))) for p in prompts]
    harness.run()
    for request in requests:
        assert_right(request)
    assert harness.executor.num_computed == 39 + 3 * 3


def test_a_split_keeps_checkpoints_on_both_sides() -> None:
    harness = harness_of(interval=16)
    ran(harness, TEXT[:80], max_tokens=1)
    ran(harness, [*TEXT[:40], 1], max_tokens=1)  # splits the run at 40, between 32 and 48
    for length, cached in ((41, 40), (35, 32), (79, 64)):
        (request,) = ran(harness, [*TEXT[:length], 2], max_tokens=1)
        assert request.num_cached_tokens == cached


def test_states_under_a_lease_are_given_up_last() -> None:
    harness = harness_of(num_checkpoints=2, interval=512, max_running=1)
    (first,) = ran(harness, TEXT[:30], max_tokens=2)
    cache = harness.engine.scheduler.kv_cache
    lease = cache.retain("", first.token_ids[:-1], due_s=1e6, ttl_s=1e7)
    assert lease is not None
    for family in FAMILIES[1:]:
        for length in (20, 30, 40):
            ran(harness, [length, *family[:length]], max_tokens=2)
    (again,) = ran(harness, [*first.token_ids, 1], max_tokens=1)
    assert again.num_cached_tokens == 31
    assert states_of(harness).checkpoints.num_evicted > 2


def test_namespaces_have_their_own_states() -> None:
    harness = harness_of(interval=16)
    ran(harness, TEXT[:60], max_tokens=1, namespace="a")
    (other,) = ran(harness, TEXT[:60], max_tokens=1, namespace="b")
    assert other.num_cached_tokens == 0


def test_a_failed_step_leaves_no_state() -> None:
    harness = harness_of(interval=16)
    harness.executor.fail_steps = {2}
    request = harness.submit(TEXT[:70], max_tokens=2)
    harness.run()
    assert request.finish_reason is FinishReason.ERROR
    (again,) = ran(harness, TEXT[:70], max_tokens=2)
    assert again.num_cached_tokens == 16  # of the step before


def test_a_failed_row_leaves_no_state() -> None:
    harness = harness_of(interval=16)
    bad = harness.submit(TEXT[:70], max_tokens=2)
    harness.executor.row_errors = {bad.id}
    harness.run()
    assert bad.finish_reason is FinishReason.ERROR
    (again,) = ran(harness, TEXT[:70], max_tokens=2)
    assert again.num_cached_tokens == 0


def test_without_checkpoints_everything_is_computed() -> None:
    harness = harness_of(num_checkpoints=0, max_running=1)
    for _ in range(2):
        (request,) = ran(harness, TEXT[:50], max_tokens=3)
        assert request.num_cached_tokens == 0
    assert states_of(harness).num_replayed_tokens == 49


def test_the_only_checkpoint_becomes_the_live_state_where_no_slot_is_left() -> None:
    harness = harness_of(num_checkpoints=0, max_running=1)
    (first,) = ran(harness, TEXT[:30], max_tokens=5)
    (again,) = ran(harness, [*first.token_ids, 1, 2], max_tokens=3)
    assert again.num_cached_tokens == 34
    assert not any(plan.state_loads for plan in harness.executor.plans)


def draft_for(harness: EngineHarness, rng: random.Random) -> None:
    """Guess outputs, at times rightly."""

    class Outputs(dict[tuple[int, ...], list[int]]):
        def get(self, prompt: tuple[int, ...], default: object = None) -> list[int]:
            return expected_output(prompt, 50)[0]

    def guess(follows: Sequence[int]) -> list[int]:
        wanted = follows[: rng.randrange(8)]
        return [t if rng.random() < 0.8 else rng.randrange(VOCAB_SIZE) for t in wanted]

    speculate(harness.engine, ScriptedDrafter(Outputs(), guess))


def test_a_state_that_was_to_move_on_behind_drafts_is_gone_if_that_step_fails() -> None:
    harness = harness_of(interval=512)
    outputs = {tuple(TEXT[:30]): expected_output(TEXT[:30], 9)[0]}
    speculate(harness.engine, ScriptedDrafter(outputs, oracle))
    (first,) = ran(harness, TEXT[:30], max_tokens=6)
    assert harness.engine.scheduler.stats.num_accepted_tokens
    harness.executor.fail_steps = {len(harness.executor.plans) + 1}
    failed = harness.submit([3, 2, 1])
    harness.run()
    assert failed.finish_reason is FinishReason.ERROR
    (again,) = ran(harness, [*first.token_ids, 1], max_tokens=1)
    assert again.num_cached_tokens == 0


def test_a_call_goes_on_where_an_earlier_one_ended_amid_its_drafts() -> None:
    harness = harness_of(interval=512)
    outputs = {tuple(TEXT[:30]): expected_output(TEXT[:30], 9)[0]}
    speculate(harness.engine, ScriptedDrafter(outputs, oracle))
    (first,) = ran(harness, TEXT[:30], max_tokens=6)
    (again,) = ran(harness, [*first.token_ids, 1], max_tokens=1)
    assert again.num_cached_tokens == len(first.token_ids) - 1
    assert harness.executor.num_computed == 30 + 5 + 2


def test_a_state_that_the_device_evicts_with_its_kv_comes_back_with_it() -> None:
    harness = harness_of(interval=512, num_pages=64, num_host_pages=512)
    (first,) = ran(harness, TEXT[:40], max_tokens=5)
    ran(harness, FAMILIES[1][:50], max_tokens=5)
    assert num_computed(harness, [*first.token_ids, 1], max_tokens=1) == 2
    states = states_of(harness)
    assert states.num_replayed_tokens == 0 and (states.num_stored, states.num_loaded) == (2, 1)


def test_a_state_that_gives_way_to_others_is_gone_on_from_on_the_host() -> None:
    """Its KV is still on the device, and is not loaded."""
    harness = harness_of(1, interval=512, max_running=1, num_host_pages=512)
    (first,) = ran(harness, TEXT[:40], max_tokens=5)
    for family in FAMILIES[1:]:
        ran(harness, family[:40], max_tokens=5)
    (again,) = ran(harness, [*first.token_ids, 1], max_tokens=1)
    assert (again.num_cached_tokens, again.num_host_tokens) == (44, 0)
    assert states_of(harness).num_replayed_tokens == 0


def test_kv_goes_to_the_host_and_back_as_far_as_its_last_state() -> None:
    harness = harness_of(interval=16, num_pages=64, num_host_pages=512)
    harness.executor.fail_steps = {4}  # the end of the first call: there is no state of it
    harness.submit(TEXT[:59], max_tokens=8)
    harness.run()
    ran(harness, FAMILIES[1][:60], max_tokens=1)
    host = harness.engine.scheduler.kv_cache.host
    assert host is not None and host.tree.num_pages == 48
    (again,) = ran(harness, TEXT[:58], max_tokens=1)
    assert again.num_cached_tokens == 48 and states_of(harness).num_replayed_tokens == 0


def test_where_texts_part_on_the_host_the_second_leaves_a_state_for_the_third() -> None:
    harness = harness_of(interval=512, num_pages=64, num_host_pages=512)
    ran(harness, [*TEXT[:40], 1], max_tokens=2)
    ran(harness, FAMILIES[1][:60], max_tokens=1)
    ran(harness, [*TEXT[:40], 2], max_tokens=1)
    (third,) = ran(harness, [*TEXT[:40], 3], max_tokens=1)
    assert third.num_cached_tokens == 40


def test_a_preempted_request_goes_on_from_the_host() -> None:
    """It computes each token once, but for those of unfinished pages."""
    harness = harness_of(interval=512, num_pages=96, num_host_pages=512, is_hopeful=True)
    ran(harness, *[family[:30] for family in FAMILIES], max_tokens=30)
    assert harness.engine.scheduler.stats.num_preemptions
    assert states_of(harness).num_loaded and not states_of(harness).num_replayed_tokens
    assert harness.executor.num_computed == 3 * (30 + 29)


def test_what_is_demoted_has_its_states_on_the_host() -> None:
    harness = harness_of(interval=16, num_host_pages=512)
    (first,) = ran(harness, TEXT[:40], max_tokens=5)
    cache = harness.engine.scheduler.kv_cache
    assert cache.demote("", first.token_ids) == 44
    assert states_of(harness).num_stored == 3  # at 16, at 32 and at the end
    harness.run()
    freed = cache.tree.evict(44)
    cache.allocator.free(freed)
    (again,) = ran(harness, [*first.token_ids, 1], max_tokens=1)
    assert again.num_cached_tokens == 44 and len(freed) == 44


def test_a_failed_step_leaves_no_state_on_the_host() -> None:
    harness = harness_of(1, interval=512, max_running=1, num_host_pages=512)
    (first,) = ran(harness, TEXT[:40], max_tokens=2)
    ran(harness, FAMILIES[1][:40], max_tokens=2)
    harness.executor.fail_steps = {len(harness.executor.plans) + 1}
    harness.submit(FAMILIES[2][:40])  # for which the first one's state is stored
    harness.run()
    states = states_of(harness)
    assert states.num_stored == 1 and states.host is not None and len(states.host) == 0
    (again,) = ran(harness, [*first.token_ids, 1], max_tokens=1)
    assert again.num_cached_tokens == 0


@pytest.mark.parametrize(
    ("page_size", "num_checkpoints", "num_host_states", "has_drafts"),
    [
        (1, 0, 0, False), (1, 3, 60, True), (1, 30, 3, False),
        (16, 0, 60, True), (16, 3, 40, False), (16, 30, 0, True),
    ],
)  # fmt: skip
def test_random_requests_find_their_states(
    page_size: int, num_checkpoints: int, num_host_states: int, has_drafts: bool
) -> None:
    """In a pool that is too small, with aborts, preemptions, failed rows and steps, and pauses;
    with a host tier, unless that has no states, which is too small as well."""
    rng = random.Random(7 * page_size + num_checkpoints + num_host_states)
    harness = harness_of(
        num_checkpoints, 16, max_running=6, num_pages=150 // page_size, page_size=page_size,
        token_budget=48, num_host_pages=400 // page_size if num_host_states else 0,
        num_host_states=num_host_states,
    )  # fmt: skip
    harness.executor.fail_steps = set(rng.sample(range(900), 12))
    if has_drafts:
        draft_for(harness, rng)
    while len(harness.requests) < 300 or harness.engine.has_work:
        for _ in range(rng.choice((0, 0, 1, 4))):
            if len(harness.requests) < 300:
                submit_random(harness, rng)
        if rng.random() < 0.05 and harness.requests:
            harness.engine.abort(rng.choice(harness.requests[-20:]))
        if rng.random() < 0.1:
            hope(harness.engine)
        if rng.random() < 0.01:
            harness.engine.flush_cache()
        harness.step()
    for request in harness.requests:
        assert_right(request)
    stats = harness.engine.scheduler.stats
    assert stats.num_preemptions or page_size > 1
    assert states_of(harness).num_replayed_tokens
    assert bool(states_of(harness).num_stored) == bool(num_host_states)
    assert states_of(harness).num_loaded or page_size > 1 or not num_host_states
    assert stats.num_cached_tokens and bool(stats.num_accepted_tokens) == has_drafts
    harness.assert_nothing_held()


def submit_random(harness: EngineHarness, rng: random.Random) -> None:
    prompt = FAMILIES[rng.randrange(3)][: rng.randrange(70)] + [rng.randrange(1, 4)] * 2
    fields: dict[str, object] = {"shared_ends": (rng.randrange(len(prompt)),)}
    if rng.random() < 0.1:
        start = rng.randrange(len(prompt))
        fields = {"scoring": Scoring(start, (*prompt[start + 1 :], 2))}
    elif rng.random() < 0.1:
        fields = {"hidden": HiddenSum(is_mean=rng.random() < 0.5)}
    request = harness.submit(
        prompt,
        max_tokens=rng.choice((1, 8, 40)),
        namespace=rng.choice(("a", "b")),
        stop_ids=rng.choice((frozenset(), frozenset({STOP_ID}))),
        listener=FakeListener(stop_after=rng.choice((None, None, 3))),
        **fields,
    )
    if rng.random() < 0.03:
        harness.executor.row_errors.add(request.id)


@pytest.mark.parametrize("page_size", [1, 3])
@pytest.mark.parametrize("num_checkpoints", [0, 8])
def test_a_beam_search_finds_its_states(page_size: int, num_checkpoints: int) -> None:
    num_preemptions = 0
    for seed in range(25):
        rng = random.Random(seed)
        harness = harness_of(
            num_checkpoints, 8, max_running=rng.randint(2, 8), page_size=page_size,
            num_pages=rng.randint(40, 90) // page_size, token_budget=rng.choice((8, 12, 32)),
            max_model_len=36, is_hopeful=True,
        )  # fmt: skip
        searches = []
        for _ in range(rng.randint(1, 3)):
            prompt = [rng.randrange(1, 9) for _ in range(rng.randint(1, 20))]
            params, stops = BeamParams(rng.randint(1, 5)), frozenset({STOP_ID})
            found = submit_beam(
                harness.engine, prompt, params, SamplingParams(max_tokens=9), stop_ids=stops,
                on_new=lambda request: harness.executor.requests.update({request.id: request}),  # noqa: B023
            )  # fmt: skip
            searches.append((found, scripted_search(prompt, params, 9, stops)))
            for _ in range(rng.randint(0, 4)):
                harness.step()
        harness.run()
        for found, expected in searches:
            assert found.outputs == expected, seed
        num_preemptions += harness.engine.scheduler.stats.num_preemptions
        harness.assert_nothing_held()
    assert num_preemptions
