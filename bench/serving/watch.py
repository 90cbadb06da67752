"""What it costs the engine's loop to be watched, on the real scheduler and tree without a model.

For trees of some sizes a row: `look_ms` is one answer for somebody who has seen the earlier ones,
with `changed` nodes used since (their rows travel), `cpu_ms` the same by CPU time (which a busy
neighbour disturbs less), `first_ms` the first answer with everything, and `kB` and `first_kB`
what they weigh as JSON. With --steps a row for some numbers of decoding
requests instead: `off_us` and `on_us` are what recording adds to a step while nobody and while
somebody watches. The others are medians over the repeats.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from array import array
from collections.abc import Sequence
from typing import Any

import orjson

from ...flags import count
from ...runtime.engine import Engine
from ...runtime.gateway.observe.observer import Observer
from ...runtime.schedule.plan import FinishedStep, RowResult, StepPlan, StepResult
from ...runtime.schedule.request import FinishReason, Request
from ...runtime.schedule.sampling_params import SamplingParams
from ..harness.report import write_report

NUM_TOKENS = 48  # of a node, about
NUM_FAMILIES = 40
NUM_USED = 100  # paths, between two polls
VOCAB_SIZE = 8000


class _Device:
    """Returns a result for every row at once."""

    can_overlap = False
    segment_cost_tokens = 32

    def submit(self, plan: StepPlan) -> FinishedStep:
        sampled = RowResult(token_id=1)
        rows = tuple(sampled if row.sampling else RowResult() for row in plan.rows)
        return FinishedStep(StepResult(plan.step_id, rows, duration_s=0.001))


class _Deaf:
    """A listener that lets every request continue."""

    def on_token(self, request: Request, result: RowResult) -> FinishReason | None:
        return None

    def on_finish(self, request: Request) -> None:
        pass


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Flags of `stemma bench watch`."""
    parser.add_argument("--repeats", type=count, default=40)
    parser.add_argument("--nodes", type=count, nargs="+", default=[200, 2000, 20_000])
    parser.add_argument(
        "--steps", type=count, nargs="*", metavar="ROWS",
        help="what a step pays instead, by the requests in it (default: 1 8 64)",
    )  # fmt: skip


def run(args: argparse.Namespace) -> int:
    """Measure and report."""
    if args.steps is not None:
        rows = [step_cost(num_rows, args.repeats) for num_rows in args.steps or (1, 8, 64)]
        write_report("watch_steps", rows, args)
    else:
        write_report("watch", [look_cost(num, args.repeats) for num in args.nodes], args)
    return 0


def look_cost(num_nodes: int, repeats: int) -> dict[str, Any]:
    """For a tree with about that many nodes."""
    rng = random.Random(num_nodes)
    engine = _engine(8192 + num_nodes * NUM_TOKENS)
    tree = engine.scheduler.kv_cache.tree
    families = _fill(engine, num_nodes, rng)
    observer = Observer(engine, _text, refreshes_a_second=float("inf"))
    first_s, last = _timed(observer, None)
    first_bytes = len(orjson.dumps(last))
    while last["tree"]["nodes"]:  # until all texts have been decoded
        last = _timed(observer, last)[1]
    seconds, cpu_seconds, sizes, changed = [], [], [], []
    for _ in range(repeats):
        for family in rng.choices(families, k=NUM_USED):
            tree.match("", family)
        cpu_s = time.thread_time()
        spent_s, last = _timed(observer, last)
        cpu_seconds.append(time.thread_time() - cpu_s)
        seconds.append(spent_s)
        sizes.append(len(orjson.dumps(last)))
        changed.append(len(last["tree"]["nodes"]))
    return {
        "nodes": tree.num_nodes,
        "changed": statistics.median(changed),
        "look_ms": 1000 * statistics.median(seconds),
        "cpu_ms": 1000 * statistics.median(cpu_seconds),
        "kB": statistics.median(sizes) / 1000,
        "first_ms": 1000 * first_s,
        "first_kB": first_bytes / 1000,
    }


def step_cost(num_rows: int, repeats: int) -> dict[str, Any]:
    """For steps in which that many requests decode."""
    return {
        "rows": num_rows,
        "off_us": 1e6 * _flag_s(),
        "on_us": 1e6 * _recording_s(num_rows, repeats),
    }


def _recording_s(num_rows: int, repeats: int) -> float:
    engine = _engine(1 << 16)
    scheduler, log = engine.scheduler, engine.step_log
    for number in range(num_rows):
        prompt = array("i", [number + 2, *range(2, 20)])
        sampling = SamplingParams(max_tokens=repeats + 8)
        engine.submit(Request(id=number + 1, prompt=prompt, sampling=sampling, listener=_Deaf()))
    for _ in range(4):
        engine.step()
    log.is_on = True
    device, spent = _Device(), []
    for _ in range(repeats):
        began_s = time.perf_counter()
        log.begin(scheduler)
        spent_s = time.perf_counter() - began_s
        plan = scheduler.plan()
        assert plan is not None and len(plan.rows) == num_rows
        began_s = time.perf_counter()
        log.note_plan(plan, scheduler)
        spent_s += time.perf_counter() - began_s
        result = device.submit(plan).result()
        scheduler.apply(result)
        began_s = time.perf_counter()
        log.end(result, scheduler)
        spent.append(spent_s + time.perf_counter() - began_s)
    return statistics.median(spent)


def _flag_s(number: int = 100_000) -> float:
    """A step's cost to check that nobody watches: reads the flag as `Engine.step` does."""
    engine = _engine(64)
    began_s = time.perf_counter()
    for _ in range(number):
        is_watched = engine.step_log.is_on
        if is_watched:
            pass
        if is_watched:
            pass
        if is_watched:
            pass
    looked_s = time.perf_counter() - began_s
    began_s = time.perf_counter()
    for _ in range(number):
        pass
    return max(0.0, looked_s - (time.perf_counter() - began_s)) / number


def _timed(observer: Observer, last: dict[str, Any] | None) -> tuple[float, dict[str, Any]]:
    known = {} if last is None else {"run": last["run"], "tree": last["tree"]["version"]}
    began_s = time.perf_counter()
    answer = observer.watch(**known)
    return time.perf_counter() - began_s, answer


def _engine(num_tokens: int) -> Engine:
    return Engine(
        _Device(), num_pages=num_tokens, page_size=1, max_model_len=4096, token_budget=4096,
        max_running_requests=64, vocab_size=VOCAB_SIZE,
    )  # fmt: skip


def _fill(engine: Engine, num_nodes: int, rng: random.Random) -> list[array[int]]:
    """Sequences that leave their families at random places, so that these are split."""
    cache = engine.scheduler.kv_cache
    families = [_ids(rng, 200) for _ in range(NUM_FAMILIES)]
    while cache.tree.num_nodes < num_nodes:
        run = rng.choice(families)[: rng.randrange(1, 200)] + _ids(rng, 8)
        num_known = cache.tree.match("", run).num_tokens
        pages = cache.tree.match("", run).pages + cache.allocator.allocate(len(run) - num_known)
        cache.tree.insert("", run, pages)
    return families


def _ids(rng: random.Random, count: int) -> array[int]:
    return array("i", (rng.randrange(2, VOCAB_SIZE) for _ in range(count)))


def _text(ids: Sequence[int]) -> str:
    return " ".join(map(str, ids))
