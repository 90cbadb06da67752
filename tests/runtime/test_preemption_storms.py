"""Preemption storms: in a pool of a tenth of what they need and beside hostile neighbours, programs
say what they say with room for all.

Agents with forks, grammars, adapters and long shared prompts run in float64 through the reference
kernels. Admission is told to reserve nothing, so that pages run out all the time. The neighbours
abort their streams, fill the pool, send prompts that fit no pool, and have rows that fail.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import zmq
from adapters import make_adapter
from preemptions import admit_all

import stemma as st
from stemma.frontend.client.backend import Backend
from stemma.frontend.client.client import Connection
from stemma.runtime.config import EngineConfig
from stemma.runtime.execute.model_runner import ModelRunner
from stemma.runtime.gateway.gateway import Gateway
from stemma.runtime.loaded_model import LoadedModel
from stemma.runtime.schedule.plan import PendingStep, RowResult, StepPlan, StepResult
from stemma.runtime.schedule.queue.policy import POLICY_NAMES

HANGS_S = 300.0
ROOMY = 16384
DOOMED = 666  # the seed of gens whose rows fail
GEN: dict[str, Any] = {"temperature": 0.7, "ignore_eos": True}
ADAPTERS = ("", "first", "second")
CARD = r'\{"id":[0-9]{1,4},"colour":"(red|green|blue)","by":"[a-z]{1,9}"\}'


@st.function
def agent(s: st.ProgramState, number: int) -> None:
    """About 190 tokens a branch: a shared beginning, two turns, three drafts, a card."""
    adapter = ADAPTERS[number % 3]
    s += "You have one tool, and you answer in a word. " + f"Agent {number}: "
    for turn in range(2):
        s += f"turn {turn}: " + st.gen(f"t{turn}", max_tokens=20, lora_path=adapter, **GEN)
    drafts = s.fork(3)
    drafts += lambda i: f"draft {i} " + st.gen("draft", max_tokens=24, lora_path=adapter, **GEN)
    drafts.join()
    s += "card " + st.gen("card", regex=CARD, max_tokens=40, lora_path=adapter, **GEN)
    s += "end " + st.gen("last", max_tokens=12, lora_path=adapter, **GEN)


@st.function
def hostile(s: st.ProgramState, text: str, max_tokens: int = 50, seed: int = 1) -> None:
    s += text + st.gen("x", max_tokens=max_tokens, seed=seed, **GEN)


def said_by(backend: Backend, num_agents: int) -> list[Any]:
    states = agent.run_batch([{"number": i} for i in range(num_agents)], seed=3, backend=backend)
    return [
        [s[name] for name in ("t0", "t1", "card", "last")]
        + [meta["output_ids"] for meta in s.get_meta_info("draft")]
        for s in states
    ]


@dataclass(frozen=True)
class Failing:
    """A step in which the rows of doomed gens fail."""

    step: PendingStep
    plan: StepPlan

    def result(self) -> StepResult:
        result = self.step.result()
        failed = RowResult(error="this row was told to fail")
        rows = [
            failed if row.sampling is not None and row.sampling.seed == DOOMED else outcome
            for row, outcome in zip(self.plan.rows, result.rows, strict=True)
        ]
        return replace(result, rows=tuple(rows))


@contextmanager
def serving(checkpoint: Path, **options: Any) -> Iterator[tuple[Backend, LoadedModel]]:
    """A gateway in a thread of this process; at its end every page is there."""
    options = {"speculate": "off", "max_running_requests": 24, **options}
    config = EngineConfig(model=checkpoint, dtype="float64", kernels="reference", **options)
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    loaded = LoadedModel(config)
    gateway = Gateway(loaded, ["inproc://storms"], context=context)
    thread = threading.Thread(target=gateway.run, daemon=True)
    thread.start()
    backend = Backend(Connection("inproc://storms", context=context))
    try:
        yield backend, loaded
        while (info := backend.get_server_info())["num_programs"] or info["num_running"]:
            time.sleep(0.01)  # programs that were cancelled
    finally:
        backend.shutdown()
        gateway.stop()
        thread.join(HANGS_S)
        assert not thread.is_alive()
    loaded.engine.flush_cache()
    kv_cache = loaded.engine.scheduler.kv_cache
    kv_cache.check([])
    assert kv_cache.allocator.num_free == kv_cache.num_pages, "a page was lost"


class Neighbours:
    """Hostile clients, until `stop`; each kind counts what it did."""

    def __init__(self, backend: Backend, pool: int) -> None:
        self._backend = backend
        self._pool = pool
        self._is_over = threading.Event()
        self.errors: list[BaseException] = []
        self.counts = dict.fromkeys(("aborted", "refused", "huge", "failed"), 0)
        self._threads = [
            threading.Thread(target=self._repeat, args=(name,)) for name in self.counts
        ]

    def __enter__(self) -> Neighbours:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        for thread in self._threads:
            thread.join(HANGS_S)
            assert not thread.is_alive(), "a hostile program has no end"
        assert not self.errors, self.errors

    def _repeat(self, name: str) -> None:
        number = 0
        while not self._is_over.is_set():
            number += 1
            try:
                getattr(self, f"_{name}")(number)
            except BaseException as error:
                self.errors.append(error)
                return
            self.counts[name] += 1

    def _aborted(self, number: int) -> None:
        state = hostile.run(text=f"{number} gone", stream=True, backend=self._backend)
        next(iter(state.text_iter("x")))
        state.cancel()

    def _refused(self, number: int) -> None:
        with pytest.raises(st.ProgramError, match="prompt is too long"):
            hostile.run(text=f"{number}" + "y" * self._pool, backend=self._backend)

    def _huge(self, number: int) -> None:
        text = f"{number}" + "z" * (self._pool - 80)
        assert hostile.run(text=text, max_tokens=8, backend=self._backend)["x"] is not None

    def _failed(self, number: int) -> None:
        with pytest.raises(st.ProgramError, match="told to fail"):
            hostile.run(text=f"{number} doomed", seed=DOOMED, backend=self._backend)


@pytest.fixture(scope="module")
def adapters(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, ...]:
    folder = tmp_path_factory.mktemp("adapters")
    return tuple(
        (name, make_adapter(folder / name, checkpoint, rank=3 + i, seed=i))
        for i, name in enumerate(ADAPTERS[1:])
    )


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)


def weather_a_storm(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch, num_agents: int, **options: Any
) -> tuple[int, dict[str, int]]:
    """Returns the number of preemptions, and what the neighbours did meanwhile."""
    base = {"lora_paths": options.pop("lora_paths"), "max_loras_per_batch": 2}
    with serving(checkpoint, max_total_tokens=ROOMY, **base) as (backend, loaded):
        truth = said_by(backend, num_agents)
        needed = loaded.engine.scheduler.kv_cache.tree.num_pages  # of a token each
    pool = -(-needed // 160) * 16
    with monkeypatch.context() as patch:
        patch.setattr(ModelRunner, "can_overlap", True)
        submit = ModelRunner.submit
        patch.setattr(ModelRunner, "submit", lambda self, plan: Failing(submit(self, plan), plan))
        with serving(checkpoint, max_total_tokens=pool, **base, **options) as (backend, loaded):
            assert loaded.engine.has_overlap
            scheduler = loaded.engine.scheduler
            admit_all(patch, scheduler)
            with Neighbours(backend, pool) as neighbours:
                assert said_by(backend, num_agents) == truth
            return scheduler.stats.num_preemptions, neighbours.counts


TIERED = {"host_kv_tokens": 1024, "chunked_prefill_size": 48}


def test_programs_say_the_same_in_a_storm(
    checkpoint: Path, adapters: tuple[Any, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    options = {"lora_paths": adapters, "page_size": 16, **TIERED}
    num_preemptions, did = weather_a_storm(checkpoint, monkeypatch, 8, **options)
    assert num_preemptions >= 8 and all(did.values()), (num_preemptions, did)


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, TIERED], ids=["device", "tiers"])
@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("policy", POLICY_NAMES)
def test_programs_say_the_same_in_a_long_storm(
    checkpoint: Path,
    adapters: tuple[Any, ...],
    monkeypatch: pytest.MonkeyPatch,
    policy: str,
    page_size: int,
    options: dict[str, Any],
) -> None:
    options = {
        "lora_paths": adapters, "page_size": page_size, "schedule_policy": policy, **options
    }  # fmt: skip
    num_preemptions, did = weather_a_storm(checkpoint, monkeypatch, 32, **options)
    print(f"{num_preemptions} preemptions; neighbours: {did}")
    assert num_preemptions >= 32 and all(did.values()), (num_preemptions, did)
