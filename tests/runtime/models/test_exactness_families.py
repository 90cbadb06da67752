"""Exactness (see test_exactness.py, part a) of what models differ in.

    windows, sinks, soft caps    which keys a query sees depends on its place alone
    KV in 8 bits                 what a key or value becomes depends on that vector alone
    weights in 8 or 4 bits       a token's activations are rounded with a scale of their own
    chunks                       likewise
    experts                      who else is in the step decides how many rows an expert gets
    KV that layers share         written once, by the first of them
    latent attention             one small row a token, for all heads
    selected keys                by their scores, then by their places: two heads leave many equal
    scaled queries               by their place alone
    LayerNorm, no gates          computed by torch

So cache hits, chunks, batches, shared segments, drafts, preemption, moves between tiers and
restarts change no token, greedy or drawn with a seed.
"""

from __future__ import annotations

import random
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import make_checkpoint
from fakes import FakeListener
from mixtures import make_mixture
from preemptions import admit_all
from scripted_drafters import ScriptedDrafter, sometimes_right, speculate
from step_plans import Feed, PlanDriver
from waiting import ready

from stemma.kernels.model_options import DEFAULT_OPTIONS, AttentionOptions
from stemma.runtime import loaded_model
from stemma.runtime.checkpoint.config.model_config import ModelConfig
from stemma.runtime.config import EngineConfig
from stemma.runtime.execute.model_runner import ModelRunner
from stemma.runtime.loaded_model import LoadedModel
from stemma.runtime.models.model_config import read_model_config
from stemma.runtime.schedule.request import Request
from stemma.runtime.schedule.sampling_params import SamplingParams

Load = Callable[..., LoadedModel]
TEXT = random.Random(5).choices(range(256), k=90)
# Prompts that share prefixes at and around page edges, greedy and drawn in turn.
JOBS = [
    (
        (*TEXT[:length], index),
        SamplingParams(max_tokens=8, temperature=0.9 * (index % 2), seed=index, ignore_eos=True),
    )
    for index, length in enumerate((15, 16, 33, 64, 64, 88))
]
WINDOWS = (AttentionOptions(window=24, num_sink_tokens=3, soft_cap=9.0, scale=0.2), DEFAULT_OPTIONS)


@dataclass(frozen=True)
class Model:
    """A checkpoint, how it is served, and what else its first and its other layers attend by."""

    make: Callable[[Path], object]
    options: dict[str, Any] = field(default_factory=dict)
    attention: tuple[AttentionOptions, AttentionOptions] | None = None


def _llama(folder: Path) -> Path:
    return make_checkpoint(folder, init_std=0.3, seed=11)


def _wide_llama(folder: Path) -> Path:
    """Its heads are what 4 bits take."""
    return make_checkpoint(folder, init_std=0.3, seed=11, head_dim=32)


def _gemma2(folder: Path) -> Path:
    own = {"head_dim": 16, "sliding_window": 20, "query_pre_attn_scalar": 24}
    caps = {"attn_logit_softcapping": 3.0, "final_logit_softcapping": 9.0}
    return make_checkpoint(folder, "gemma2", init_std=0.3, **own, **caps)


def _ministral3(folder: Path) -> Path:
    """Its queries are scaled from the 17th token on."""
    yarn = {
        "rope_type": "yarn", "rope_theta": 1e4, "factor": 16.0, "llama_4_scaling_beta": 0.4,
        "original_max_position_embeddings": 16, "mscale": 1.0, "mscale_all_dim": 1.0,
    }  # fmt: skip
    return make_checkpoint(folder, "ministral3", init_std=0.3, head_dim=16, rope_parameters=yarn)


def _mixture(family: str, **fields: Any) -> Callable[[Path], object]:
    return partial(make_mixture, family=family, has_tokenizer=True, init_std=0.3, seed=5, **fields)


MODELS = {
    "int8 KV": Model(_llama, {"kv_cache_dtype": "int8"}),
    "int4 KV": Model(_wide_llama, {"kv_cache_dtype": "int4"}),
    "windows": Model(_llama, attention=WINDOWS),
    "windows in fp8 KV": Model(_llama, {"kv_cache_dtype": "fp8"}, WINDOWS),
    "w8a8": Model(_llama, {"quantization": "w8a8"}),
    "gemma2": Model(_gemma2),
    "mixtral": Model(_mixture("Mixtral", sliding_window=20)),
    "mixtral int4": Model(_mixture("Mixtral", intermediate_size=64), {"quantization": "int4"}),
    "qwen2_moe": Model(_mixture("Qwen2Moe")),
    "gpt_oss": Model(_mixture("GptOss", sliding_window=20, num_hidden_layers=3)),
    "gpt_oss in int8 KV": Model(_mixture("GptOss"), {"kv_cache_dtype": "int8"}),
    "gpt_oss in int4 KV": Model(_mixture("GptOss", head_dim=32), {"kv_cache_dtype": "int4"}),
    "llama4": Model(_mixture("Llama4", attention_chunk_size=20)),
    "gemma3n": Model(_mixture("Gemma3n")),
    "gemma4": Model(_mixture("Gemma4")),
    "deepseek_v3": Model(_mixture("DeepseekV3")),
    "deepseek_v32": Model(_mixture("DeepseekV32", index_topk=20)),
    "glm_moe_dsa": Model(_mixture("GlmMoeDsa", index_topk=20, indexer_types=["full", "shared"])),
    "ernie4_5_moe": Model(_mixture("Ernie4_5_Moe")),
    "phi": Model(partial(make_checkpoint, architecture="phi", init_std=0.3, seed=5)),
    "ministral3": Model(_ministral3),
    "hunyuan": Model(
        partial(make_checkpoint, architecture="hunyuan", head_dim=16, init_std=0.3, seed=5)
    ),
}
CIRCUMSTANCES: dict[str, dict[str, Any]] = {
    "chunks of 7": {"chunked_prefill_size": 7},
    "pages of 16, three at a time": {
        "page_size": 16, "chunked_prefill_size": 23, "max_running_requests": 3
    },
    "a CPU's kernels": {"kernels": "cpu", "chunked_prefill_size": 40},
    "a CPU's kernels, pages of 16": {"kernels": "cpu", "page_size": 16},
    "queued": {"device": "cuda", "chunked_prefill_size": 64},
}  # fmt: skip
FOR_ALL_MODELS = "a CPU's kernels, pages of 16"
PREEMPTED: dict[str, dict[str, Any]] = {
    "swapped": {"host_kv_tokens": 1024},
    "computed again": {},
    "swapped, queued": {"host_kv_tokens": 1024, "device": "cuda", "page_size": 1},
}


def in_turn(names: str, cases: Sequence[str], for_all: Sequence[str] = ()) -> pytest.MarkDecorator:
    """Each model with those for all, and with one of the others: each of them by a few models."""
    pairs = [
        (model, case)
        for index, model in enumerate(MODELS)
        for case in (*for_all, cases[index % len(cases)])
    ]
    return pytest.mark.parametrize(("model", names), pairs, indirect=["model"])


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
def model(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture
def engine_of(
    model: str,
    folders: dict[str, Path],
    tmp_path_factory: pytest.TempPathFactory,
    monkeypatch: pytest.MonkeyPatch,
) -> Load:
    """Loads the model in float64 with the reference's kernels unless told."""
    made = MODELS[model]
    if model not in folders:
        folders[model] = tmp_path_factory.mktemp("model")
        made.make(folders[model])

    def with_attention(path: Path) -> ModelConfig:
        config = read_model_config(path)
        if made.attention is None:
            return config
        layers = (0, *[1] * (config.num_layers - 1))
        return replace(config, attention_kinds=made.attention, kind_of_layer=layers)

    def load(**options: Any) -> LoadedModel:
        options = {
            "dtype": "float64", "kernels": "reference", "max_total_tokens": 2048,
            **made.options, **options,
        }  # fmt: skip
        return LoadedModel(EngineConfig(model=folders[model], **{"speculate": "off", **options}))

    monkeypatch.setattr(loaded_model, "read_model_config", with_attention)
    return load


@pytest.fixture(scope="module")
def truths() -> dict[str, list[list[int]]]:
    """What each model says alone, once a test has had it say so."""
    return {}


@pytest.fixture
def alone(model: str, engine_of: Load, truths: dict[str, list[list[int]]]) -> list[list[int]]:
    if model not in truths:
        truths[model] = said_alone(engine_of())
    return truths[model]


def said_alone(loaded: LoadedModel) -> list[list[int]]:
    outputs: list[list[int]] = []
    for job in JOBS:
        outputs += outputs_of(serve(loaded, [job]))
        loaded.engine.flush_cache()
    assert len({tuple(output) for output in outputs}) == len(outputs), "the jobs are too alike"
    return outputs


@in_turn("name", [name for name in CIRCUMSTANCES if name != FOR_ALL_MODELS], [FOR_ALL_MODELS])
def test_tokens_are_identical_missed_and_hit(
    engine_of: Load, alone: list[list[int]], name: str
) -> None:
    loaded = engine_of(**CIRCUMSTANCES[name])
    loaded.engine.scheduler.segment_cost_tokens = 0  # whatever is shared is a segment
    assert outputs_of(serve(loaded, JOBS)) == alone
    hits = serve(loaded, JOBS[::-1])
    assert outputs_of(hits) == alone[::-1]
    assert sum(request.num_cached_tokens for request in hits) > 150
    assert loaded.engine.scheduler.stats.num_shared_tokens > 0


def test_tokens_are_identical_whatever_is_drafted(engine_of: Load, alone: list[list[int]]) -> None:
    loaded = engine_of(page_size=16, chunked_prefill_size=23)
    outputs = {prompt: output for (prompt, _), output in zip(JOBS, alone, strict=True)}
    speculate(loaded.engine, ScriptedDrafter(outputs, sometimes_right(random.Random(1))))
    assert outputs_of(serve(loaded, JOBS)) == alone
    stats = loaded.engine.scheduler.stats
    assert stats.num_draft_tokens > stats.num_accepted_tokens > 0


@in_turn("name", list(PREEMPTED))
def test_tokens_are_identical_after_preemption(
    engine_of: Load, alone: list[list[int]], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Computed again, or swapped to the host and back."""
    loaded = engine_of(max_total_tokens=128, chunked_prefill_size=32, **PREEMPTED[name])
    scheduler = loaded.engine.scheduler
    admit_all(monkeypatch, scheduler)
    monkeypatch.setattr(scheduler.kv_cache.costs, "can_pay", lambda num_tokens: True)
    for _ in range(2):
        assert outputs_of(serve(loaded, JOBS)) == alone
    assert scheduler.stats.num_preemptions > 0
    host = scheduler.kv_cache.host
    assert host is None or host.num_loaded_tokens > 0, "nothing came back from the host"


def test_tokens_are_identical_after_a_restart_over_a_store(
    engine_of: Load, alone: list[list[int]], tmp_path: Path
) -> None:
    """Blocks of 256 tokens: of a longer prompt than the others'."""
    job = ((*TEXT, *TEXT, *TEXT, 7), JOBS[0][1])
    outputs = []
    for _ in range(2):
        loaded = engine_of(kv_store=tmp_path, max_model_len=512)
        (request,) = serve(loaded, [job])
        outputs.append(list(request.output_ids))
        store = loaded.engine.kv_store
        assert store is not None and store.flush(30.0)
        num_fetched = store.stats.num_fetched
        store.close()
    assert outputs[0] == outputs[1] and num_fetched == 1


def test_fewer_bits_of_kv_do_change_what_is_said(tmp_path: Path) -> None:
    """Else the tests above would hold nothing of them: the logprobs of the same tokens."""
    folder = _wide_llama(tmp_path)
    plain = _logprobs(_runner(folder, "cpu", "float64", "auto"))
    for kv_cache_dtype, most in (("int8", 0.5), ("fp8", 0.5), ("int4", 2.0)):
        found = _logprobs(_runner(folder, "cpu", "float64", kv_cache_dtype))
        error = max(abs(a - b) for a, b in zip(plain, found, strict=True))
        assert 1e-4 < error < most, kv_cache_dtype


@pytest.mark.parametrize(("kv_cache_dtype", "tolerance"), [("int8", 0.1), ("fp8", 0.4)])
def test_a_gpus_kernels_say_nearly_the_same(
    checkpoint: Path, kv_cache_dtype: str, tolerance: float
) -> None:
    """Triton's interpreter in float16 against the reference in float32; a float of 8 bits that is
    rounded the other way is another by up to an eighth."""
    found = _logprobs(_runner(checkpoint, "cuda", "float16", kv_cache_dtype))
    expected = _logprobs(_runner(checkpoint, "cpu", "float32", kv_cache_dtype))
    assert found == pytest.approx(expected, abs=tolerance)


def _runner(folder: Path, device: str, dtype: str, kv_cache_dtype: str) -> ModelRunner:
    return ModelRunner(
        folder, read_model_config(folder), dtype=dtype, device=device, num_pages=8,
        page_size=16, max_running_requests=2, max_model_len=96,
        kernels="triton" if device == "cuda" else "reference",
        kv_cache_dtype=kv_cache_dtype,  # type: ignore[arg-type]
    )  # fmt: skip


def _logprobs(runner: ModelRunner) -> list[float]:
    """Of the tokens after a prompt and a step of decoding."""
    driver = PlanDriver(runner)
    sequence, found = driver.sequence(), []
    for tokens in (TEXT[:5], TEXT[5:6]):
        sampling = SamplingParams(temperature=0.0, logprobs=0)
        (result,) = driver.step([Feed(sequence, tokens, sampling)])
        assert result.logprob is not None
        found.append(result.logprob)
    return found


def serve(
    loaded: LoadedModel, jobs: Sequence[tuple[Sequence[int], SamplingParams]]
) -> list[Request]:
    """Run jobs to their ends, with the invariants checked after each step."""
    engine = loaded.engine
    requests = [
        Request(engine.next_request_id(), array("i", prompt), sampling, FakeListener())
        for prompt, sampling in jobs
    ]
    for request in requests:
        engine.submit(request)
    while engine.has_work or not all(request.is_finished for request in requests):
        if engine.has_work:
            engine.step()
            engine.scheduler.check()
        else:  # blocks come from a store
            done = ready([each for each in (engine.kv_store, engine.state_store) if each], 30.0)
            assert done, "no fetch was done"
            for store in done:
                store.collect()
    return requests


def outputs_of(requests: Sequence[Request]) -> list[list[int]]:
    return [list(request.output_ids) for request in requests]
