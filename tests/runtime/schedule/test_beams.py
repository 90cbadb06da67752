"""Beam searches in the scheduler find what the rules find, whatever happens to their requests; all
pages, locks and table rows add up after each step (EngineHarness)."""

from __future__ import annotations

import random
from itertools import pairwise
from typing import Any

import pytest
from beam_requests import BeamListener, scripted_search, submit_beam
from engine_harness import EngineHarness, assert_right
from fakes import STOP_ID, VOCAB_SIZE, ScriptedGrammar

from stemma.constrained.serving.grammar_state import GrammarState, PendingGrammar
from stemma.runtime.schedule.beam_search import BeamParams, EarlyStopping
from stemma.runtime.schedule.request import FinishReason
from stemma.runtime.schedule.sampling_params import SamplingParams

STOPS = frozenset({STOP_ID})


def _submit(
    harness: EngineHarness,
    prompt: list[int],
    params: BeamParams,
    max_tokens: int = 8,
    grammar: ScriptedGrammar | None = None,
    stop_ids: frozenset[int] = STOPS,
) -> BeamListener:
    return submit_beam(
        harness.engine,
        prompt,
        params,
        SamplingParams(max_tokens=max_tokens),
        stop_ids=stop_ids,
        grammar=None if grammar is None else PendingGrammar(bound=grammar),
        on_new=lambda request: harness.executor.requests.update({request.id: request}),
    )


def _prompt(rng: random.Random, most: int = 12) -> list[int]:
    return [rng.randrange(1, VOCAB_SIZE) for _ in range(rng.randint(1, most))]


def _params(rng: random.Random) -> BeamParams:
    early: EarlyStopping = rng.choice((True, False, "never"))
    return BeamParams(rng.randint(1, 5), rng.choice((0.0, 1.0, 2.0, -1.0)), early)


@pytest.mark.parametrize("page_size", [1, 2, 4])
@pytest.mark.parametrize("has_overlap", [False, True])
def test_a_search_finds_what_the_rules_find(page_size: int, has_overlap: bool) -> None:
    for seed in range(20):
        rng = random.Random(seed)
        harness = EngineHarness(page_size=page_size, num_pages=256, has_overlap=has_overlap)
        prompt, params, max_tokens = _prompt(rng), _params(rng), rng.randint(1, 10)
        found = _submit(harness, prompt, params, max_tokens)
        harness.run()
        assert found.outputs == scripted_search(prompt, params, max_tokens, STOPS), seed
        best = found.outputs[0]
        assert found.leader.output_ids.tolist() == best[0]
        reason = FinishReason.STOP if best[2] else FinishReason.LENGTH
        assert found.leader.finish_reason is reason
        assert found.ended[-1] is found.leader
        harness.assert_nothing_held()


@pytest.mark.parametrize("page_size", [1, 8])
def test_a_step_computes_one_token_of_each_hypothesis(page_size: int) -> None:
    harness = EngineHarness(num_pages=256, page_size=page_size)
    prompt, params = list(range(1, 8)) * 2, BeamParams(4, early_stopping="never")
    found = _submit(harness, prompt, params, max_tokens=20)
    harness.run()
    first, second, *later = harness.executor.plans
    assert first.num_tokens == len(prompt)
    # Those who join a running one go on from its last whole page, later on from its last token.
    num_behind = len(prompt) % page_size + 1
    assert sorted(len(row.input_ids) for row in second.rows) == [1] + [num_behind] * 3
    assert {len(row.input_ids) for plan in later for row in plan.rows} == {1}
    assert {len(plan.rows) for plan in (second, *later)} == {4}
    assert found.leader.num_cached_tokens == 0


@pytest.mark.parametrize("page_size", [1, 3])
@pytest.mark.parametrize("has_overlap", [False, True])
def test_a_search_survives_preemption_small_budgets_and_neighbours(
    page_size: int, has_overlap: bool
) -> None:
    num_preemptions = 0
    for seed in range(30):
        rng = random.Random(seed)
        harness = EngineHarness(
            page_size=page_size,
            num_pages=rng.randint(26, 40) // page_size,
            token_budget=rng.choice((8, 12, 32)),
            max_running=rng.randint(2, 8),
            is_hopeful=True,
            has_overlap=has_overlap,
            max_model_len=24,
        )
        searches, calls = [], []
        for _ in range(rng.randint(1, 3)):
            prompt, params, max_tokens = _prompt(rng, 8), _params(rng), rng.randint(1, 12)
            found = _submit(harness, prompt, params, max_tokens)
            searches.append((found, scripted_search(prompt, params, max_tokens, STOPS)))
            for _ in range(rng.randint(0, 2)):
                calls.append(harness.submit(_prompt(rng, 8), rng.randint(1, 12), stop_ids=STOPS))
            for _ in range(rng.randint(0, 4)):
                harness.step()
        harness.run()
        for found, expected in searches:
            assert found.outputs == expected, seed
        for call in calls:
            assert_right(call)
        num_preemptions += harness.engine.scheduler.stats.num_preemptions
        harness.assert_nothing_held()
    assert num_preemptions > 30


@pytest.mark.parametrize("page_size", [1, 2])
def test_a_search_follows_its_grammar(page_size: int) -> None:
    for seed in range(20):
        rng = random.Random(seed)
        texts = [[rng.randrange(1, VOCAB_SIZE) for _ in range(rng.randint(1, 6))] for _ in range(8)]
        grammar = ScriptedGrammar.of(*texts)
        harness = EngineHarness(page_size=page_size, num_pages=128)
        prompt, params, max_tokens = _prompt(rng), _params(rng), rng.randint(3, 8)
        found = _submit(harness, prompt, params, max_tokens, grammar)
        harness.run()
        assert found.outputs == scripted_search(prompt, params, max_tokens, STOPS, grammar), seed
        for token_ids, _, has_stopped in found.outputs:
            assert token_ids in texts if has_stopped else len(token_ids) == max_tokens
        harness.assert_nothing_held()


@pytest.mark.parametrize("early", [True, False, "never"])
def test_a_search_closes_every_follower_however_it_ends(
    early: EarlyStopping, monkeypatch: pytest.MonkeyPatch
) -> None:
    followers: dict[GrammarState, bool] = {}
    init, close = GrammarState.__init__, GrammarState.close

    def begin(state: GrammarState, *args: Any) -> None:
        followers[state] = True
        init(state, *args)

    def end(state: GrammarState) -> None:
        followers[state] = False
        close(state)

    monkeypatch.setattr(GrammarState, "__init__", begin)
    monkeypatch.setattr(GrammarState, "close", end)
    for seed in range(20):
        rng = random.Random(seed)
        texts = [[rng.randrange(1, VOCAB_SIZE) for _ in range(rng.randint(1, 6))] for _ in range(8)]
        harness, params = EngineHarness(num_pages=128), BeamParams(2, 1.0, early)
        found = _submit(harness, _prompt(rng), params, 8, ScriptedGrammar.of(*texts))
        for _ in range(rng.randint(1, 12)):
            harness.step()
        if seed % 4 == 0 and not found.leader.is_finished:
            assert found.group is not None
            for request in reversed(found.group.requests):
                harness.engine.abort(request)
        harness.run()
        assert len(followers) > 1 and not any(followers.values()), seed


def test_hypotheses_share_what_they_begin_with() -> None:
    harness = EngineHarness(num_pages=256)
    prompt = [1, 2, 3, 4, 5, 6, 7] * 3
    found = _submit(harness, prompt, BeamParams(5, early_stopping="never"), max_tokens=12)
    while not found.leader.is_finished:
        harness.step()
        group = found.group
        assert group is not None
        running = [r for r in group.live if r.pages]
        for one, other in pairwise(running):
            same = 0
            while same < min(len(one.pages), len(other.pages)) and (
                one.token_ids[same] == other.token_ids[same]
            ):
                same += 1
            assert one.pages[:same] == other.pages[:same]


@pytest.mark.parametrize("has_overlap", [False, True])
def test_the_end_of_one_request_ends_the_search(has_overlap: bool) -> None:
    for seed in range(30):
        rng = random.Random(seed)
        harness = EngineHarness(
            num_pages=256, has_overlap=has_overlap, page_size=rng.choice((1, 2))
        )
        prompt = _prompt(rng)
        found = _submit(harness, prompt, BeamParams(4), 20, stop_ids=frozenset())
        call = harness.submit(prompt, 20)
        for _ in range(rng.randint(1, 6)):
            harness.step()
        group = found.group
        assert group is not None
        if seed % 3 == 0:
            harness.engine.abort(group.leader)
        elif seed % 3 == 1:
            harness.executor.row_errors.add(rng.choice(group.live).id)
        else:
            harness.executor.fail_steps.add(len(harness.executor.plans) + 1)
        harness.run()
        expected = FinishReason.ABORT if seed % 3 == 0 else FinishReason.ERROR
        assert expected in [request.finish_reason for request in found.ended], seed
        assert set(found.ended) == set(group.requests) and len(found.ended) == len(group.requests)
        assert not harness.engine.scheduler.beams
        if seed % 3 < 2:
            assert_right(call)
        harness.assert_nothing_held()


def test_only_the_call_counts_in_the_figures() -> None:
    harness = EngineHarness(num_pages=128)
    prompt = [1, 2, 3]
    _submit(harness, prompt, BeamParams(4, early_stopping="never"), 10)
    harness.run()
    stats, latencies = harness.engine.scheduler.stats, harness.engine.scheduler.latencies
    assert stats.num_finished == 1 and stats.num_prompt_tokens == len(prompt)
    assert sum(latencies.num_ended.values()) == 1
