"""What the engine tells those who watch: true, bounded, as changes, and nothing unless asked."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest
from engine_harness import FAMILIES, EngineHarness
from fakes import ScriptedGrammar
from hypothesis import given, settings
from hypothesis import strategies as st

from stemma.constrained.serving.grammar_state import PendingGrammar
from stemma.errors import InvalidProgram
from stemma.radix.recent import recent_nodes
from stemma.radix.residency import residency
from stemma.radix.tree import RadixTree
from stemma.runtime.gateway.observe import observer as observer_module
from stemma.runtime.gateway.observe import tree_view
from stemma.runtime.gateway.observe.observer import Observer
from stemma.runtime.gateway.observe.pool_map import FREE, MAX_CELLS, REQUESTS, UNSHOWN, pool_map
from stemma.runtime.gateway.observe.tree_view import MAX_TIMES, NodeRow, UseTimes
from stemma.runtime.schedule import step_log
from stemma.runtime.schedule.cache.kv_cache import KVCacheOptions
from stemma.runtime.schedule.request import Scoring


def text_of(ids: Sequence[int]) -> str:
    return "".join(chr(97 + token_id) for token_id in ids)


def watching(harness: EngineHarness) -> Observer:
    """Looks at the tree each time that it is asked."""
    return Observer(harness.engine, text_of, refreshes_a_second=float("inf"))


class Reader:
    """What somebody who only ever takes the changes knows."""

    def __init__(self, watched: Observer) -> None:
        self.watched = watched
        self.rows: dict[int, NodeRow] = {}
        self.texts: dict[int, str] = {}
        self.steps: dict[int, dict[str, Any]] = {}
        self.names: dict[str, Any] = {}
        self.pool: dict[str, Any] = {"version": 0}
        self.last: dict[str, Any] = {}

    def read(self) -> None:
        tree = self.last.get("tree", {}).get("version")
        self.last = self.watched.watch(
            self.last.get("run"), max(self.steps, default=0), tree, self.pool["version"]
        )
        told = self.last["tree"]
        if told["is_whole"]:
            self.rows.clear()
            self.texts.clear()
        for number, _ in told["removed"]:
            self.rows.pop(number, None)
            self.texts.pop(number, None)
        for item in told["nodes"]:
            self.rows[item[0]] = NodeRow(*item)
        self.texts |= {int(number): text for number, text in told["texts"].items()}
        self.steps |= {step["id"]: step for step in self.last["steps"]["items"]}
        self.names |= self.last["steps"]["names"]
        self.pool = self.last["pool"] or self.pool


def assert_true_of(reader: Reader, harness: EngineHarness) -> None:
    """What the reader knows is what is there."""
    cache = harness.engine.scheduler.kv_cache
    on_device = {node.id: node for node in cache.tree.nodes()}
    shown = {number: row for number, row in reader.rows.items() if number > 0}
    assert shown.keys() == on_device.keys()
    for number, row in shown.items():
        node = on_device[number]
        assert (row.num_tokens, row.start) == (len(node.token_ids), node.start)
        assert (row.lock_ref, row.lease_ref, row.pin_ref) == (
            node.lock_ref, node.lease_ref, node.pin_ref
        )  # fmt: skip
        assert row.parent == (None if node.parent is None else node.parent.id)
        if not node.is_root:
            path, _ = cache.tree.path(node)
            assert reader.texts[number] == text_of(node.token_ids[: tree_view.MAX_TEXT_TOKENS])
            if cache.host is not None:
                on_host = cache.host.tree.match_length(node.namespace, path) - node.start
                assert row.on_host == max(0, on_host)
    if cache.host is not None:
        colder = sum(row.num_tokens for number, row in reader.rows.items() if number < 0)
        both = sum(row.on_host for row in shown.values())
        assert colder + both == cache.host.tree.num_pages * cache.page_size
    described = reader.last["engine"]
    num_pages = sum(-(-row.num_tokens // cache.page_size) for row in shown.values())
    assert num_pages * cache.page_size == described["cached_tokens"]  # a tail has a page


def cells_of(pool: dict[str, Any]) -> list[int]:
    return [owner for owner, count in pool["cells"] for _ in range(count)]


def assert_pool_true_of(pool: dict[str, Any], harness: EngineHarness) -> None:
    cache, cells = harness.engine.scheduler.kv_cache, cells_of(pool)
    assert len(cells) == pool["num_pages"] == cache.num_pages
    for node in cache.tree.nodes():
        assert {cells[page] for page in node.pages} <= {node.id}
    assert cells.count(FREE) == cache.allocator.num_free
    held = sum(owner == REQUESTS for owner in cells)
    assert cells.count(FREE) + held + cache.tree.num_pages == cache.num_pages


PROMPTS = st.builds(
    lambda family, cut, tail: family[:cut] + tail,
    st.sampled_from(FAMILIES),
    st.integers(1, 40),
    st.lists(st.integers(1, 7), max_size=6),
)
ACTIONS = st.lists(
    st.one_of(
        st.tuples(st.just("submit"), PROMPTS, st.integers(1, 12)),
        st.tuples(st.just("score"), PROMPTS, st.integers(1, 12)),
        st.tuples(st.just("step"), st.just([]), st.integers(1, 5)),
        st.tuples(st.just("lease"), PROMPTS, st.integers(0, 1)),
        st.tuples(st.just("flush"), st.just([]), st.just(0)),
    ),
    max_size=24,
)


@given(ACTIONS, st.sampled_from([0, 48]), st.sampled_from([1, 4]))
@settings(max_examples=60)
def test_changes_add_up_to_what_is_there(
    actions: list[tuple[str, list[int], int]], num_host_pages: int, page_size: int
) -> None:
    options = KVCacheOptions(num_host_pages=num_host_pages)
    harness = EngineHarness(num_pages=96 // page_size, page_size=page_size, kv_cache=options)
    watched = watching(harness)
    reader = Reader(watched)
    reader.read()
    cache = harness.engine.scheduler.kv_cache
    for kind, prompt, number in actions:
        if kind == "submit":
            harness.submit(prompt, number)
        elif kind == "score":
            harness.submit(prompt, 1, scoring=Scoring(0, tuple(prompt[1:]) + (1,)))
        elif kind == "lease":
            if number:
                cache.pin("", prompt, ttl_s=100.0)
            else:
                cache.retain("", prompt, due_s=1.0, ttl_s=100.0)
        elif kind == "flush":
            harness.engine.flush_cache()
        for _ in range(number if kind == "step" else 0):
            if harness.engine.has_work:
                harness.step()
        reader.read()
        assert_true_of(reader, harness)
        pool = pool_map(cache, cache.tree.nodes(), harness.engine.scheduler.running)
        assert_pool_true_of(pool, harness)
    harness.run()
    for _ in range(2):  # the pool is looked at every second time
        reader.read()
    assert_pool_true_of(reader.pool, harness)
    told = [step["tokens"] for step in reader.steps.values()]
    kinds = ("prefill", "decode", "forced", "score")
    stats = harness.engine.scheduler.stats
    assert sum(tokens[kind] for tokens in told for kind in kinds) == stats.num_computed_tokens
    assert sum(s["evicted_tokens"] for s in reader.steps.values()) == cache.num_evicted_tokens
    assert sum(s["num_preempted"] for s in reader.steps.values()) == stats.num_preemptions
    rows = [row for step in reader.steps.values() for row in step["rows"]]
    numbers = {row[0] for row in rows} | {i for s in reader.steps.values() for i in s["decode"]}
    assert {str(number) for number in numbers} == reader.names.keys()


def test_nothing_is_recorded_unless_somebody_watches(monkeypatch: pytest.MonkeyPatch) -> None:
    harness = EngineHarness()
    watched = watching(harness)
    harness.submit(FAMILIES[0][:20])
    harness.run()
    assert len(harness.engine.step_log) == 0
    reader = Reader(watched)
    reader.read()
    harness.submit(FAMILIES[1][:20])
    harness.run()
    reader.read()
    assert len(reader.steps) == len(harness.engine.step_log) > 1
    before = reader.last["run"]
    later = observer_module.time.perf_counter() + observer_module.WATCHED_S + 1
    monkeypatch.setattr(observer_module.time, "perf_counter", lambda: later)
    watched.tick()
    harness.submit(FAMILIES[2][:20])
    harness.run()
    assert len(harness.engine.step_log) == 0
    reader.read()
    assert reader.last["tree"]["is_whole"] and reader.last["run"] != before
    assert_true_of(reader, harness)


def test_steps_tell_chunks_hits_and_decoding() -> None:
    harness = EngineHarness(token_budget=16)
    reader = Reader(watching(harness))
    reader.read()
    harness.submit(FAMILIES[0][:40], max_tokens=4)
    harness.run()
    harness.submit(FAMILIES[0][:40], max_tokens=2)
    harness.run()
    reader.read()
    rows = [row for step in reader.steps.values() for row in step["rows"]]
    chunks = [row for row in rows if row[0] == 1]
    assert [row[1:4] for row in chunks] == [
        ("prefill", 16, 0), ("prefill", 16, 0), ("prefill", 8, 0)
    ]  # fmt: skip
    again = [row for row in rows if row[0] == 2]
    assert [row[1:4] for row in again] == [("prefill", 1, 39)]
    assert sum(step["decode"] == [1] for step in reader.steps.values()) == 3
    assert all(step["ms"] >= step["plan_ms"] >= 0 for step in reader.steps.values())


def test_what_a_grammar_forces_is_told_apart() -> None:
    run = (3, 4, 5, 6)
    texts = [(first, *run, last) for first in (1, 2) for last in (1, 2)]
    grammar = PendingGrammar(bound=ScriptedGrammar.of(*texts))
    for grammars_first in (True, False):
        harness = EngineHarness()
        reader = Reader(watching(harness))
        reader.read()
        late = PendingGrammar() if not grammars_first else grammar
        harness.submit([3, 3], max_tokens=20, grammar=late)
        if not grammars_first:
            harness.step()
            late.bound = grammar.bound
        harness.run()
        reader.read()
        told = [step["tokens"] for step in reader.steps.values()]
        sums = {kind: sum(tokens[kind] for tokens in told) for kind in told[0]}
        assert (sums["prefill"], sums["decode"], sums["forced"]) == (2, 1, 4)
    late = PendingGrammar(bound=ScriptedGrammar.of((*run, 1), (*run, 2)))
    harness = EngineHarness()
    reader = Reader(watching(harness))
    reader.read()
    harness.submit([3, 3], max_tokens=20, grammar=late)
    harness.run()
    reader.read()
    told = [step["tokens"] for step in reader.steps.values()]
    assert sum(tokens["forced"] for tokens in told) == 4


def test_waiting_requests_say_what_they_wait_for() -> None:
    harness = EngineHarness(num_pages=400, token_budget=8, max_running=2)
    reader = Reader(watching(harness))
    harness.submit(FAMILIES[0][:40])
    harness.submit(FAMILIES[0][:40])
    harness.step()
    reader.read()
    queue = reader.last["queue"]
    assert [(told["id"], told["why"]) for told in queue["waiting"]] == [(2, "prefix")]
    assert queue["running"][0]["depth"] == 8
    for family in FAMILIES:
        harness.submit(family[60:64], max_tokens=40)
    for _ in range(12):
        harness.step()
    reader.read()
    queue = reader.last["queue"]
    assert queue["num_running"] == 2 and {told["why"] for told in queue["waiting"]} == {"rows"}
    harness.run()


def test_a_view_of_a_large_tree_is_bounded_and_counts_what_it_leaves_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(tree_view, "MAX_NODES", 50)
    harness = EngineHarness(num_pages=4000)
    cache = harness.engine.scheduler.kv_cache
    drawn = random.Random(3)
    for _ in range(300):
        ids = [drawn.randrange(1, 8) for _ in range(8)]
        inserted = cache.tree.insert("", ids, cache.allocator.allocate(8))
        cache.allocator.free(inserted.duplicate_pages)
    newest = cache.tree.match("", ids).node
    reader = Reader(watching(harness))
    reader.read()
    told = reader.last["tree"]
    assert 40 <= len(reader.rows) <= 50 + 8
    assert newest.id in reader.rows
    assert told["num_nodes"] == cache.tree.num_nodes
    assert told["num_hidden"] == cache.tree.num_nodes - (len(reader.rows) - 1)
    for row in reader.rows.values():
        children = sum(other.parent == row.id for other in reader.rows.values())
        known = {node.id: node for node in cache.tree.nodes()}[row.id]
        assert row.num_hidden + children == len(known.children)
    assert UNSHOWN in cells_of(reader.pool)


def test_texts_come_a_bounded_number_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tree_view, "MAX_DECODED", 3)
    harness = EngineHarness()
    for family in FAMILIES:
        for cut in (10, 20):
            harness.submit(family[:cut] + [7])
    harness.run()
    reader = Reader(watching(harness))
    reader.read()
    assert len(reader.texts) == 3
    for _ in range(8):
        reader.read()
    assert_true_of(reader, harness)


def test_old_steps_are_dropped_and_told_as_missed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_log, "MAX_STEPS_A_CALL", 4)
    harness = EngineHarness()
    reader = Reader(watching(harness))
    harness.submit(FAMILIES[0][:4], max_tokens=2)
    reader.read()
    harness.run()
    reader.read()
    harness.submit(FAMILIES[1][:4], max_tokens=20)
    harness.run()
    reader.read()
    assert len(reader.last["steps"]["items"]) == 4
    first = reader.last["steps"]["items"][0]["id"]
    assert reader.last["steps"]["num_missed"] == first - 3 > 0


def test_a_pool_of_any_size_has_few_cells() -> None:
    harness = EngineHarness(num_pages=3 * MAX_CELLS + 1)
    harness.submit(FAMILIES[0])
    harness.run()
    cache = harness.engine.scheduler.kv_cache
    pool = pool_map(cache, cache.tree.nodes(), ())
    cells = cells_of(pool)
    assert pool["pages_per_cell"] == 4 and len(cells) == -(-cache.num_pages // 4) <= MAX_CELLS
    used = {page // 4 for node in cache.tree.nodes() for page in node.pages}
    assert {index for index, owner in enumerate(cells) if owner != FREE} == used


@pytest.mark.parametrize("value", ["1", 1.5, True])
def test_versions_that_are_no_numbers_are_refused(value: Any) -> None:
    harness = EngineHarness()
    with pytest.raises(InvalidProgram):
        watching(harness).watch("", value)


def test_use_times_are_those_of_the_first_note_after_the_use() -> None:
    times = UseTimes()
    for now in range(3 * MAX_TIMES):
        times.note(10 * now, float(now))
    latest = 3 * MAX_TIMES - 1
    assert times.when_s(10 * latest) == latest
    assert times.when_s(10 * latest - 5) == latest
    assert times.when_s(10 * latest - 10) == latest - 1
    assert times.when_s(10 * latest + 1) is None
    assert 0 < times.when_s(1) <= 2 * MAX_TIMES  # type: ignore[operator]


RUNS = st.lists(st.lists(st.integers(1, 2), min_size=1, max_size=8), max_size=8)


@given(RUNS, RUNS)
def test_residency_is_what_matching_every_path_would_say(
    hot: list[list[int]], cold: list[list[int]]
) -> None:
    trees = RadixTree(), RadixTree()
    for tree, runs in zip(trees, (hot, cold)):
        for number, run in enumerate(runs):
            tree.insert("", run, range(100 * number, 100 * number + len(run)))
    hotter, colder = trees
    found = residency(hotter, recent_nodes(colder, (), 1000))
    for node in hotter.nodes():
        path, _ = hotter.path(node)
        shared = max(0, colder.match_length("", path) - node.start)
        assert found.num_shared.get(node.id, 0) == shared
    only = {run.node.id: run.num_tokens for run in found.only_colder}
    for node in colder.nodes():
        path, _ = colder.path(node)
        assert only.get(node.id, 0) == node.end - max(node.start, hotter.match_length("", path))
