"""Exactness (see test_exactness.py, part a) of adapters that come, go, wait, and share the disk.

    fewer slots than adapters in flight, with arrivals and aborts in any order
    adapters unloaded, or replaced under their names, while requests wait and run with them
    the KV of a process before this one: an adapter's is for the same adapter alone
    forks of programs, each branch with its own adapter, under load

In float64 through the reference kernels, where one token of another's KV or matrices would tell.
"""

from __future__ import annotations

import functools
import random
import shutil
import threading
from array import array
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import zmq
from adapters import make_adapter
from fakes import FakeListener
from preemptions import admit_all
from waiting import PATIENCE_S, ready

import stemma as st
from stemma.errors import ModelNotFound
from stemma.frontend.client.backend import Backend
from stemma.frontend.client.client import Connection
from stemma.runtime.checkpoint.lora.registry import AdapterRegistry
from stemma.runtime.config import EngineConfig
from stemma.runtime.gateway.gateway import Gateway
from stemma.runtime.loaded_model import LoadedModel
from stemma.runtime.schedule.request import FinishReason, Request
from stemma.runtime.schedule.sampling_params import SamplingParams

Load = Callable[..., LoadedModel]
NAMES = ("a0", "a1", "a2", "a3")
TEXT = random.Random(5).choices(range(256), k=600)


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)  # the products are tiny: threads would only wait for each other
    yield
    torch.set_num_threads(num_threads)


@pytest.fixture(scope="module")
def folders(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("adapters")
    return {
        name: make_adapter(root / name, checkpoint, rank=2 + seed, seed=seed)
        for seed, name in enumerate(NAMES)
    }


@pytest.fixture(scope="module")
def load(checkpoint: Path, folders: dict[str, Path]) -> Load:
    def load(**options: Any) -> LoadedModel:
        standard = {"max_total_tokens": 2048, "lora_paths": tuple(folders.items())}
        options = {"dtype": "float64", "kernels": "reference", **standard, **options}
        return LoadedModel(EngineConfig(model=checkpoint, **options))

    return load


def request_of(
    loaded: LoadedModel, name: str | None, prompt: Sequence[int], max_tokens: int = 12
) -> Request:
    adapter = None if name is None else registry_of(loaded).find(name)
    return Request(
        loaded.engine.next_request_id(),
        array("i", prompt),
        SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True),
        FakeListener(),
        namespace="" if adapter is None else adapter.namespace(""),
        adapter=adapter,
    )


def registry_of(loaded: LoadedModel) -> AdapterRegistry:
    assert loaded.adapters is not None
    return loaded.adapters


def step(loaded: LoadedModel, num_steps: int | None = None) -> None:
    """So many steps, None: until there is no work, also none that the disk has."""
    engine = loaded.engine
    while num_steps != 0 and (engine.has_work or engine.scheduler.num_waiting):
        if not engine.has_work:
            assert engine.kv_store is not None
            assert ready([engine.kv_store], 30.0), "no fetch was done"
            engine.kv_store.collect()
        engine.step()
        engine.scheduler.check()
        num_steps = None if num_steps is None else num_steps - 1


def serve(loaded: LoadedModel, name: str | None, prompt: Sequence[int]) -> Request:
    request = request_of(loaded, name, prompt)
    loaded.engine.submit(request)
    step(loaded)
    assert request.finish_reason is FinishReason.LENGTH, request.error
    return request


@pytest.fixture(scope="module")
def alone(load: Load) -> Callable[[str | None, int], list[int]]:
    """The truth: what follows TEXT[:length], alone in an engine with a slot for each."""
    loaded = load()

    @functools.cache
    def said(name: str | None, length: int) -> list[int]:
        loaded.engine.flush_cache()
        request = serve(loaded, name, TEXT[:length])
        assert request.num_cached_tokens == 0
        return list(request.output_ids)

    assert len({tuple(said(name, 40)) for name in (None, *NAMES)}) == 5, "they are too alike"
    return said


# --- slots ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_slots", [1, 2])
def test_preempted_requests_go_on_in_whichever_slot_is_free(
    load: Load,
    alone: Callable[[str | None, int], list[int]],
    num_slots: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A pool for two requests at a time, in which more are admitted."""
    loaded = load(
        max_loras_per_batch=num_slots, max_total_tokens=96, chunked_prefill_size=16, page_size=4
    )
    scheduler = loaded.engine.scheduler
    admit_all(monkeypatch, scheduler)
    work = [(name, 36 + i) for i in range(3) for name in ("a0", None, "a1", "a2")]
    requests = [request_of(loaded, name, TEXT[:length]) for name, length in work]
    for request in requests:
        loaded.engine.submit(request)
    step(loaded)
    assert [list(r.output_ids) for r in requests] == [alone(*each) for each in work]
    assert any(r.num_preemptions and r.adapter is not None for r in requests)
    slots = scheduler.adapters
    assert slots is not None and slots.num_evictions > 0


@pytest.mark.parametrize("seed", range(4))
def test_more_adapters_than_slots_in_any_order_say_what_each_says_alone(
    load: Load, alone: Callable[[str | None, int], list[int]], seed: int
) -> None:
    """With arrivals while others run, and some that leave, whether they wait or run."""
    rng = random.Random(seed)
    loaded = load(
        max_loras_per_batch=2,
        max_running_requests=rng.choice([3, 6]),
        chunked_prefill_size=rng.choice([16, 64]),
    )
    engine, work, requests = loaded.engine, [], []
    for _ in range(24):
        work.append((rng.choice((None, *NAMES)), rng.choice([20, 40, 41])))
        prompt, num = TEXT[: work[-1][1]], rng.choice([2, 12])
        requests.append(request_of(loaded, work[-1][0], prompt, num))
        engine.submit(requests[-1])
        if rng.random() < 0.2:
            engine.abort(rng.choice([request for request in requests if not request.is_finished]))
        step(loaded, rng.randrange(4))
    step(loaded)
    ended = [r.finish_reason for r in requests]
    assert set(ended) == {FinishReason.LENGTH, FinishReason.ABORT}
    for request, each in zip(requests, work):
        if request.finish_reason is FinishReason.LENGTH:
            assert list(request.output_ids) == alone(*each)[: len(request.output_ids)]
    told = engine.describe()["lora"]
    assert told["num_evictions"] >= 2 and told["num_in_use"] == 0


# --- adapters that go -----------------------------------------------------------------------------


def test_an_adapter_that_goes_serves_those_that_wait_and_run_with_it(
    load: Load, folders: dict[str, Path], alone: Callable[[str | None, int], list[int]]
) -> None:
    """And what comes under its name meanwhile is another one, for those that come later."""
    loaded = load(max_loras_per_batch=1, max_running_requests=2)
    registry, engine = registry_of(loaded), loaded.engine
    old = [request_of(loaded, "a0", TEXT[:40]) for _ in range(5)]
    for request in old:
        engine.submit(request)
    step(loaded, 3)
    assert engine.scheduler.num_waiting == 3 and len(engine.scheduler.running) == 2
    load_id = registry.unload("a0").load_id
    with pytest.raises(ModelNotFound):
        registry.find("a0")
    assert engine.scheduler.num_adapter_users(load_id) == 5
    registry.load("a0", folders["a3"])
    new = request_of(loaded, "a0", TEXT[:40])
    engine.submit(new)
    step(loaded)
    assert engine.scheduler.num_adapter_users(load_id) == 0
    assert {tuple(r.output_ids) for r in old} == {tuple(alone("a0", 40))}
    assert list(new.output_ids) == alone("a3", 40)


# --- the disk -------------------------------------------------------------------------------------


def test_after_a_restart_kv_is_for_the_adapter_that_computed_it(
    load: Load,
    folders: dict[str, Path],
    alone: Callable[[str | None, int], list[int]],
    tmp_path: Path,
) -> None:
    """By what it is: another name is the same one, another content under its name is not."""
    before = load(kv_store=tmp_path / "store")
    for name in (None, "a0"):
        assert serve(before, name, TEXT).num_disk_tokens == 0
    assert before.engine.kv_store is not None and before.engine.kv_store.flush(30.0)
    before.engine.kv_store.close()
    shutil.copytree(folders["a0"], tmp_path / "copy")
    names = {"a0": "a1", "renamed": "a0", "b": "a2"}  # and whose content they have
    paths = {"a0": folders["a1"], "renamed": tmp_path / "copy", "b": folders["a2"]}
    after = load(kv_store=tmp_path / "store", lora_paths=tuple(paths.items()))
    found = {}
    for name in ("a0", "b", "renamed", None):
        request = serve(after, name, TEXT)
        found[name] = request.num_disk_tokens
        assert list(request.output_ids) == alone(names.get(str(name)), len(TEXT))
    assert found == {"a0": 0, "b": 0, "renamed": 512, None: 512}
    assert after.engine.kv_store is not None
    after.engine.kv_store.close()


# --- programs -------------------------------------------------------------------------------------


@st.function
def forked(s: st.ProgramState, number: int) -> list[str]:
    """Branches under different adapters, each with two gens, and what they said under a third."""
    s += f"Question {number}: "
    s += st.gen("start", max_tokens=4, temperature=0, ignore_eos=True, lora_path="a0")
    forks = s.fork(4)
    for fork, name in zip(forks, ("a1", "", "a2", "a1")):
        fork += "one " + st.gen("x", max_tokens=4, temperature=0, ignore_eos=True, lora_path=name)
        fork += " two " + st.gen("y", max_tokens=4, temperature=0, ignore_eos=True, lora_path=name)
    forks.join("concate_and_append")
    s += "So: " + st.gen("end", max_tokens=6, temperature=0, ignore_eos=True, lora_path="a3")
    return [s.text(), *(fork["y"] for fork in forks)]


def test_forks_under_their_own_adapters_say_the_same_alone_and_under_load(load: Load) -> None:
    """Two slots for four adapters, and a pool that is short for all of them at once."""
    loaded = load(max_loras_per_batch=2, max_total_tokens=512, chunked_prefill_size=64)
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    gateway = Gateway(loaded, ["inproc://lora"], context=context)
    thread = threading.Thread(target=gateway.run, daemon=True)
    thread.start()
    backend = Backend(Connection("inproc://lora", context=context))
    arguments = [{"number": number} for number in range(5)]
    together = [state.ret_value for state in forked.run_batch(arguments, backend=backend)]
    for each, said in zip(arguments, together):
        backend.flush_cache()
        assert forked.run(**each, backend=backend).ret_value == said
    assert len({said[1] for said in together}) == 5
    assert all(said[1] == said[4] and len({*said}) == 4 for said in together)
    backend.connection.close()
    gateway.stop()
    thread.join(PATIENCE_S)
    assert not thread.is_alive()
    assert loaded.engine.describe()["lora"]["num_evictions"] > 5
