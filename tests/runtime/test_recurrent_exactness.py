"""Models with recurrent layers say the same whatever is cached: in float64, each request alone in
an empty cache against prefix hits, chunks, batches, page sizes, preemption, forks and beams."""

from __future__ import annotations

import random
from array import array
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from adapters import make_adapter, merged
from beam_requests import submit_beam
from checkpoints import make_checkpoint
from engine_thread import serving
from fakes import FakeListener
from mixtures import make_mixture
from preemptions import admit_all
from scripted_drafters import ScriptedDrafter, always_wrong, oracle, sometimes_right, speculate
from waiting import ready

import stemma as st
from stemma.errors import InvalidRequest
from stemma.frontend.client.backend import Backend
from stemma.runtime.config import EngineConfig
from stemma.runtime.execute.model_runner import ModelRunner
from stemma.runtime.loaded_model import LoadedModel
from stemma.runtime.memory.disk.block_store import BlockStore
from stemma.runtime.schedule.beam_search import BeamParams
from stemma.runtime.schedule.plan import FinishedStep, RowResult, StepPlan, StepResult
from stemma.runtime.schedule.request import FinishReason, Request, Scoring
from stemma.runtime.schedule.sampling_params import SamplingParams

Load = Callable[..., LoadedModel]
TEXT = random.Random(5).choices(range(256), k=90)
JOBS = [
    (
        (*TEXT[:length], *own),
        SamplingParams(max_tokens=8, temperature=0.9 * (index % 2), seed=index, ignore_eos=True),
    )
    for index, (length, own) in enumerate(
        [(15, (1,)), (16, (2,)), (33, (3, 4, 5)), (64, ()), (64, ()), (64, (6,) * 20), (88, (7,))]
    )
]


def _lfm2(folder: Path) -> None:
    types = ["conv", "full_attention", "conv", "conv"]
    make_checkpoint(folder, "lfm2", num_layers=4, layer_types=types, init_std=0.3, seed=11)


MODELS: dict[str, Callable[[Path], object]] = {
    "lfm2": _lfm2,
    "qwen3_next": partial(make_mixture, family="Qwen3Next", has_tokenizer=True, seed=5),
    "kimi_linear": partial(
        make_mixture, family="KimiLinear", has_tokenizer=True, seed=5, init_std=0.15
    ),
    "nemotron_h": partial(
        make_mixture, family="NemotronH", has_tokenizer=True, seed=5, init_std=0.15
    ),
    "qwen3_5": partial(make_mixture, family="Qwen3_5", has_tokenizer=True, seed=5),
    "granite_hybrid": partial(
        make_mixture,
        family="GraniteMoeHybrid",
        has_tokenizer=True,
        seed=5,
        num_local_experts=6,
        init_std=0.3,
    ),
}
each_recurrence = pytest.mark.parametrize(
    "folder", ["lfm2", "qwen3_next", "kimi_linear", "nemotron_h"], indirect=True
)
"""One model of each recurrence, where its kernels or the shapes of its states matter."""
CHEAPEST = "lfm2"  # has every case of the scheduler; the others share them out


def _id(value: object) -> str:
    return "-".join(map(str, value)) if isinstance(value, tuple) else str(value)


def covering(names: str, **others: Sequence[object]) -> pytest.MarkDecorator:
    """Every case that a model is given with it, and all of them with the cheapest model."""
    cases: dict[object, None] = dict.fromkeys(case for own in others.values() for case in own)
    pairs = [(CHEAPEST, case) for case in cases]
    pairs += [(model, case) for model, own in others.items() for case in own]
    return pytest.mark.parametrize(("folder", names), pairs, indirect=["folder"], ids=_id)


CIRCUMSTANCES: dict[str, dict[str, Any]] = {
    "chunks of 7": {"chunked_prefill_size": 7},
    "pages of 16, three at a time": {
        "page_size": 16, "chunked_prefill_size": 23, "max_running_requests": 3
    },
    "states every 16 tokens": {"state_interval": 16, "chunked_prefill_size": 40},
    "no checkpoints": {"state_checkpoints": 0, "max_running_requests": 2},
    "few checkpoints": {"state_checkpoints": 2, "max_running_requests": 2, "state_interval": 16},
    "few checkpoints, and a host": {
        "state_checkpoints": 2, "max_running_requests": 2, "state_interval": 16,
        "host_kv_tokens": 2048
    },
    "a small pool, and a host": {
        "max_total_tokens": 144, "page_size": 16, "state_interval": 16, "host_kv_tokens": 2048
    },
    "a CPU's kernels": {"kernels": "cpu", "chunked_prefill_size": 40},
    "a CPU's kernels, pages of 16": {"kernels": "cpu", "page_size": 16, "state_interval": 16},
    "queued": {"device": "cuda", "chunked_prefill_size": 40, "state_interval": 16},
}  # fmt: skip
FOR_ALL_MODELS = ("states every 16 tokens", "a CPU's kernels, pages of 16", "queued")


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)


@pytest.fixture(scope="module")
def folders() -> dict[str, Path]:
    """Of the models that a test has asked for."""
    return {}


@pytest.fixture(params=MODELS)
def folder(
    request: pytest.FixtureRequest,
    folders: dict[str, Path],
    tmp_path_factory: pytest.TempPathFactory,
) -> Path:
    name = request.param
    if name not in folders:
        folders[name] = tmp_path_factory.mktemp(name)
        MODELS[name](folders[name])
    return folders[name]


def load(folder: Path, **options: Any) -> LoadedModel:
    exact = {"dtype": "float64", "kernels": "reference", "max_total_tokens": 2048}
    return LoadedModel(EngineConfig(model=folder, speculate="off", **(exact | options)))


@pytest.fixture(scope="module")
def truths() -> dict[Path, list[list[int]]]:
    """What each model says alone, once a test has had it say so."""
    return {}


@pytest.fixture
def alone(folder: Path, truths: dict[Path, list[list[int]]]) -> list[list[int]]:
    if folder not in truths:
        truths[folder] = said_alone(load(folder))
    return truths[folder]


def said_alone(loaded: LoadedModel) -> list[list[int]]:
    outputs: list[list[int]] = []
    for job in JOBS:
        outputs += outputs_of(serve(loaded, [job]))
        loaded.engine.flush_cache()
    assert len({tuple(output) for output in outputs}) >= len(outputs) - 1
    return outputs


@covering(
    "name",
    qwen3_next=[*FOR_ALL_MODELS, "chunks of 7", "few checkpoints"],
    kimi_linear=[*FOR_ALL_MODELS, "a CPU's kernels", "few checkpoints, and a host"],
    nemotron_h=[*FOR_ALL_MODELS, "pages of 16, three at a time", "a small pool, and a host"],
    qwen3_5=FOR_ALL_MODELS,
    granite_hybrid=[*FOR_ALL_MODELS, "no checkpoints"],
)
def test_tokens_are_identical_missed_and_hit(
    folder: Path, alone: list[list[int]], name: str
) -> None:
    loaded = load(folder, **CIRCUMSTANCES[name])
    loaded.engine.scheduler.segment_cost_tokens = 0  # whatever is shared is a segment
    assert outputs_of(serve(loaded, JOBS)) == alone
    for _ in range(2):
        hits = serve(loaded, JOBS[::-1])
        assert outputs_of(hits) == alone[::-1]
    states = loaded.engine.describe()["states"]
    assert states["num_replayed_tokens"] > 0
    if "host" in name:
        assert states["num_loaded"] > 0
    if "checkpoints" not in name:
        assert sum(request.num_cached_tokens for request in hits) > 200


@covering("host_kv_tokens", qwen3_next=[0], kimi_linear=[2048], nemotron_h=[2048])
def test_tokens_are_identical_after_preemption(
    folder: Path, alone: list[list[int]], monkeypatch: pytest.MonkeyPatch, host_kv_tokens: int
) -> None:
    loaded = load(
        folder, max_total_tokens=140, chunked_prefill_size=32, host_kv_tokens=host_kv_tokens
    )
    scheduler = loaded.engine.scheduler
    admit_all(monkeypatch, scheduler)
    for _ in range(2):
        assert outputs_of(serve(loaded, JOBS)) == alone
    assert scheduler.stats.num_preemptions > 0


@pytest.mark.parametrize("folder", [CHEAPEST, "qwen3_next"], indirect=True)
def test_a_failed_row_harms_nobody(
    folder: Path, alone: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its states and KV are gone, whoever shares its prompt."""
    submit = ModelRunner.submit
    rng = random.Random(3)

    def failing(self: ModelRunner, plan: StepPlan) -> FinishedStep:
        result = submit(self, plan).result()
        rows = [
            RowResult(error="told to fail")
            if row.request_id in doomed and rng.random() < 0.5
            else r
            for row, r in zip(plan.rows, result.rows, strict=True)
        ]
        return FinishedStep(StepResult(result.step_id, tuple(rows), result.duration_s))

    doomed: set[int] = set()
    loaded = load(folder, chunked_prefill_size=30, state_interval=16)
    monkeypatch.setattr(ModelRunner, "submit", failing)
    for _ in range(3):
        first = loaded.engine.next_request_id() + 1
        doomed.update(range(first, first + len(JOBS)))
        requests = serve(loaded, JOBS + JOBS)
        assert {r.finish_reason for r in requests[: len(JOBS)]} >= {FinishReason.ERROR}
        assert outputs_of(requests[len(JOBS) :]) == alone


def test_scores_and_embeddings_are_identical(folder: Path) -> None:
    found = []
    for options in ({"state_checkpoints": 0, "max_running_requests": 1}, {}, {"page_size": 16}):
        loaded = load(folder, **options)
        requests = []
        for _ in range(2):
            requests = [
                request_of(loaded, TEXT[:60] + own, scoring=Scoring(59, tuple(own)))
                for own in ([1, 2], [3, 4], [5, 6])
            ]
            run(loaded, requests)
        found.append([score for request in requests for score in request.scores])
    for scores in found[1:]:
        assert scores == pytest.approx(found[0], abs=1e-9)


@covering(
    "options",
    qwen3_next=[()],
    kimi_linear=[(("page_size", 16),)],
    nemotron_h=[(("chunked_prefill_size", 8),)],
)
def test_a_beam_search_is_that_without_checkpoints(
    folder: Path, options: tuple[tuple[str, int], ...]
) -> None:
    plain = {"state_checkpoints": 0, "max_running_requests": 8}
    results = []
    for choice in (plain, dict(options)):
        loaded = load(folder, **choice)
        sampling = SamplingParams(max_tokens=7)
        beams = [submit_beam(loaded.engine, TEXT[:n], BeamParams(4), sampling) for n in (30, 40)]
        while loaded.engine.has_work:
            loaded.engine.step()
            loaded.engine.scheduler.check()
        results.append([[ids for ids, _, _ in beam.outputs] for beam in beams])
    assert results[0] == results[1]


RECURRENT_LINEAR = (
    "in_proj", "in_proj_qkvz", "in_proj_ba", "in_proj_qkv", "in_proj_z", "in_proj_a", "out_proj"
)  # fmt: skip


def test_adapters_of_recurrent_layers_say_what_merged_models_say(
    folder: Path, tmp_path: Path
) -> None:
    """Beside the model without one, whose states are not theirs."""
    adapter = make_adapter(tmp_path / "adapter", folder, (*RECURRENT_LINEAR, "q_proj"), std=0.1)
    truth = outputs_of(serve(load(merged(tmp_path / "merged", folder, adapter)), JOBS))
    loaded = load(folder, lora_paths=(("own", adapter),), chunked_prefill_size=40)
    assert loaded.adapters is not None
    own = loaded.adapters.find("own")
    plain = outputs_of(serve(loaded, JOBS))
    adapted = [
        request_of(loaded, prompt, sampling=sampling, adapter=own, namespace=own.namespace(""))
        for prompt, sampling in JOBS
    ]
    run(loaded, adapted)
    assert outputs_of(adapted) == truth
    assert plain != truth and outputs_of(serve(loaded, JOBS)) == plain


GEN: dict[str, Any] = {"temperature": 0.7, "ignore_eos": True, "max_tokens": 7}


@st.function
def agent(s: st.ProgramState, number: int) -> None:
    """Turns, forks, a choice, a grammar, a text that is taken back."""
    s += "You have one tool and answer in a word. "
    for turn in range(2):
        s += f"Agent {number}, turn {turn}: " + st.gen(f"t{turn}", **GEN)
    drafts = s.fork(3)
    drafts += lambda i: f"draft {i} " + st.gen("draft", **GEN)
    drafts.join()
    s += "choose " + st.select("choice", ["red", "green", "greenish blue"])
    s += "card " + st.gen("card", regex=r'\{"id":[0-9]{1,4},"by":"[a-z]{1,9}"\}', **GEN)
    s += "end " + st.gen("last", **GEN)


def said_by(backend: Backend) -> list[list[Any]]:
    states = agent.run_batch([{"number": i} for i in range(5)], seed=3, backend=backend)
    return [
        [s[name] for name in ("t0", "t1", "choice", "card", "last")]
        + [meta["output_ids"] for meta in s.get_meta_info("draft")]
        for s in states
    ]


SERVED: dict[str, dict[str, Any]] = {
    "ample": {"max_total_tokens": 4096},
    "few checkpoints": {
        "max_total_tokens": 500, "state_checkpoints": 4, "max_running_requests": 6
    },
    "pages of 16": {"max_total_tokens": 480, "page_size": 16, "state_interval": 32},
    "a host": {"max_total_tokens": 480, "state_checkpoints": 4, "host_kv_tokens": 4096},
}  # fmt: skip


@pytest.mark.parametrize(
    ("folder", "names"),
    [
        (CHEAPEST, tuple(SERVED)),
        ("qwen3_next", ("a host",)),
        ("kimi_linear", ("few checkpoints",)),
        ("nemotron_h", ("ample", "pages of 16")),
    ],
    indirect=["folder"],
    ids=_id,
)
def test_programs_say_the_same_with_and_without_checkpoints(
    folder: Path, names: tuple[str, ...]
) -> None:
    plain = {"state_checkpoints": 0, "max_running_requests": 2, "schedule_policy": "fcfs"}
    with serving(folder, max_total_tokens=4096, **plain) as backend:
        truth, most = said_by(backend), num_computed_by(backend)
    for name in names:
        with serving(folder, **SERVED[name]) as backend:
            assert said_by(backend) == truth
            if name in ("ample", "a host"):
                assert num_computed_by(backend) < most / 3


def num_computed_by(backend: Backend) -> int:
    return int(backend.get_server_info()["stats"]["num_computed_tokens"])


LONG = random.Random(6).choices(range(256), k=600)
LONG_JOBS = [
    ((*LONG[start:end], *own), SamplingParams(max_tokens=6, seed=end, ignore_eos=True))
    for start, end, own in [(0, 280, ()), (300, 562, (1, 2)), (0, 257, (3,))]
]


@each_recurrence
def test_a_second_engine_goes_on_from_stored_states(folder: Path, tmp_path: Path) -> None:
    """What it says is the same, and nearly nothing is computed again; if the states' files are
    damaged, all of it is."""
    truth = outputs_of(serve(load(folder), LONG_JOBS))
    num_computed = []
    for index in range(3):
        loaded = load(folder, kv_store=tmp_path / "store", chunked_prefill_size=400)
        assert outputs_of(serve(loaded, LONG_JOBS)) == truth
        num_computed.append(loaded.engine.scheduler.stats.num_computed_tokens)
        kept = loaded.engine.describe()["kv_store"]
        assert kept["num_restored_tokens"] == (512 if index == 1 else 0)
        for store in stores_of(loaded):
            assert store.flush(30.0)
            store.close()
        of_states = stores_of(loaded)[1].layout.digest.hex()
        for path in (tmp_path / "store" / of_states).glob("*/*.kv") if index == 1 else ():
            path.write_bytes(path.read_bytes()[:-9] + bytes(9))
    assert kept["states"]["num_corrupt"] > 0
    assert num_computed[1] < num_computed[0] / 3 and num_computed[2] == num_computed[0]


@each_recurrence
def test_what_needs_states_elsewhere_is_refused(folder: Path) -> None:
    on_gpu = {"device": "cuda", "dtype": "float32", "kernels": "auto"}
    cases: list[tuple[dict[str, Any], str]] = [
        ({"kv_store": "mooncake://127.0.0.1:1"}, "kv_store"),
        ({"kv_store": "store", **on_gpu}, "kv_store"),
        ({"host_kv_tokens": 100, **on_gpu}, "host_kv_tokens"),
    ]
    for options, named in cases:
        with pytest.raises(InvalidRequest, match="recurrent layers") as caught:
            load(folder, **options)
        assert caught.value.field == named


DRAFTED_JOBS = [*range(4), *range(5, len(JOBS))]  # two have one prompt
DRAFTED: dict[str, dict[str, Any]] = {
    "whole": {"state_interval": 16},
    "a CPU's kernels": {"kernels": "cpu", "chunked_prefill_size": 40},
    "pages of 16": {"page_size": 16, "chunked_prefill_size": 23, "max_running_requests": 3},
    "few checkpoints": {"state_checkpoints": 2, "max_running_requests": 2, "kernels": "cpu"},
    "queued": {"device": "cuda", "chunked_prefill_size": 40},
}


@covering(
    "drafts",
    qwen3_next=[("whole", "random"), ("a CPU's kernels", "random"), ("few checkpoints", "random")],
    kimi_linear=[("whole", "oracle"), ("a CPU's kernels", "random"), ("queued", "random")],
    nemotron_h=[("pages of 16", "random"), ("a CPU's kernels", "random"), ("pages of 16", "wrong")],
)
def test_tokens_are_identical_whatever_is_drafted(
    folder: Path, alone: list[list[int]], drafts: tuple[str, str]
) -> None:
    """Whoever goes on from where a request with drafts has ended, or was aborted."""
    name, kind = drafts
    jobs, expected = [JOBS[i] for i in DRAFTED_JOBS], [alone[i] for i in DRAFTED_JOBS]
    guess = {"oracle": oracle, "wrong": always_wrong, "random": sometimes_right(random.Random(1))}
    loaded = load(folder, **DRAFTED[name])
    outputs = {tuple(prompt): output for (prompt, _), output in zip(jobs, expected)}
    speculate(loaded.engine, ScriptedDrafter(outputs, guess[kind]))
    for _ in range(2):
        leaving = [request_of(loaded, prompt, sampling=sampling) for prompt, sampling in jobs]
        for request in leaving:
            loaded.engine.submit(request)
        for request in leaving[::2]:
            loaded.engine.step()
            loaded.engine.abort(request)
        assert outputs_of(serve(loaded, jobs)) == expected
    longer = [((*prompt, *output), sampling) for (prompt, sampling), output in zip(jobs, expected)]
    after_drafts = outputs_of(serve(loaded, longer))
    loaded.engine.flush_cache()
    assert outputs_of(serve(loaded, longer)) == after_drafts
    stats = loaded.engine.scheduler.stats
    assert stats.num_draft_tokens > 0 and (stats.num_accepted_tokens > 0) == (kind != "wrong")


@each_recurrence
def test_models_with_states_are_guessed_for(folder: Path) -> None:
    loaded = LoadedModel(EngineConfig(model=folder, max_total_tokens=64))
    assert loaded.engine.scheduler.speculation is not None


def request_of(loaded: LoadedModel, prompt: Sequence[int], **fields: Any) -> Request:
    sampling = fields.pop("sampling", SamplingParams())
    return Request(
        loaded.engine.next_request_id(), array("i", prompt), sampling, FakeListener(), **fields
    )


def run(loaded: LoadedModel, requests: Sequence[Request]) -> None:
    """To their ends, with the invariants checked after each step."""
    for request in requests:
        loaded.engine.submit(request)
    while loaded.engine.has_work or loaded.engine.scheduler.num_waiting:
        if loaded.engine.has_work:
            loaded.engine.step()
            loaded.engine.scheduler.check()
        else:  # blocks come from a store
            found = ready(stores_of(loaded), 30.0)
            assert found, "no fetch was done"
            for store in found:
                store.collect()
    assert all(request.is_finished for request in requests)


def stores_of(loaded: LoadedModel) -> list[BlockStore]:
    """Of KV and of states."""
    stores = (loaded.engine.kv_store, loaded.engine.state_store)
    return [store for store in stores if store is not None]


def serve(
    loaded: LoadedModel, jobs: Sequence[tuple[Sequence[int], SamplingParams]]
) -> list[Request]:
    requests = [request_of(loaded, prompt, sampling=sampling) for prompt, sampling in jobs]
    run(loaded, requests)
    return requests


def outputs_of(requests: Sequence[Request]) -> list[list[int]]:
    return [list(request.output_ids) for request in requests]
