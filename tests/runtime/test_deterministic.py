"""`deterministic` (docs/how-it-works/determinism.md): in bfloat16 and float32 a request's tokens
and log-probabilities are the same, bit for bit, alone on an empty cache as in any batch, after

    cache hits and shared prefixes    chunked prefill           preemption
    KV kept by the host or on disk    any number of threads     pages of any size

for every kind of kernel: windows, sinks, soft caps, experts, latents, adapters, quantized weights
and KV.
"""

from __future__ import annotations

import random
from array import array
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from adapters import make_adapter
from checkpoints import make_checkpoint
from engine_harness import hope
from fakes import FakeListener
from mixtures import make_mixture, pack_experts
from scripted_drafters import ScriptedDrafter, sometimes_right, speculate
from waiting import ready

import stemma as st
from stemma.errors import InvalidRequest
from stemma.kernels.native.bindings import why_not_native
from stemma.runtime.config import EngineConfig
from stemma.runtime.loaded_model import LoadedModel
from stemma.runtime.schedule.request import FinishReason, Request, Scoring
from stemma.runtime.schedule.sampling_params import SamplingParams

pytestmark = pytest.mark.skipif(
    why_not_native(torch.bfloat16) is not None, reason=str(why_not_native(torch.bfloat16))
)

Outcome = tuple[object, ...]
Options = dict[str, Any]


def _prompts() -> list[list[int]]:
    """Some share a prefix; lengths at and around the edges of blocks of 64 keys and pages of 16."""
    rng = random.Random(5)
    text = [rng.randrange(256) for _ in range(200)]
    shared = (0, 1, 63, 64, 65, 128, 150, 150)
    own = (129, 60, 3, 1, 20, 0, 37, 2)
    prompts = [text[:n] + [rng.randrange(256) for _ in range(m)] for n, m in zip(shared, own)]
    return [*prompts, text + text[:100]]


PROMPTS = _prompts()
ADAPTERS = ("first", "second", None)
# By the name of a checkpoint below, and what else is asked for.
CASES: dict[str, tuple[str, Options]] = {
    "bfloat16": ("llama", {}),
    "float32": ("llama", {"dtype": "float32"}),
    "int8": ("llama", {"quantization": "int8"}),
    "w8a8": ("llama", {"quantization": "w8a8"}),
    "int4": ("llama", {"quantization": "int4"}),
    "KV in int8": ("llama", {"kv_cache_dtype": "int8"}),
    "KV in fp8": ("llama", {"kv_cache_dtype": "fp8"}),
    "KV in int4": ("wide llama", {"kv_cache_dtype": "int4"}),
    "adapters": ("llama", {"lora_paths": ("first", "second")}),
    "normed heads": ("qwen3", {"dtype": "float32"}),
    "windows": ("gemma2", {}),
    "windows in float32": ("gemma2", {"dtype": "float32"}),
    "experts": ("Qwen2Moe", {}),
    "experts in float32": ("Qwen2Moe", {"dtype": "float32"}),
    "learned sinks, experts in MXFP4": ("mxfp4", {}),
    "learned sinks in float32": ("GptOss", {"dtype": "float32"}),
    "latents": ("DeepseekV3", {}),
    "latents in float32": ("DeepseekV3", {"dtype": "float32"}),
    "selected keys": ("DeepseekV32", {}),
    "selected keys in float32": ("DeepseekV32", {"dtype": "float32"}),
    "short convolutions": ("lfm2", {}),
    "delta rule": ("Qwen3Next", {"state_interval": 64}),
    "delta rule in float32": ("Qwen3_5", {"dtype": "float32", "state_interval": 64}),
    "state-space scan": ("GraniteMoeHybrid", {}),
    "decays by channel": ("KimiLinear", {}),
    "layers of one block": ("NemotronH", {}),
    "chunks": ("Llama4", {}),
    "heads of two sizes": ("Gemma4", {}),
    "streams": ("Gemma3n", {}),
    "state-space scan in float32": ("GraniteMoeHybrid", {"dtype": "float32"}),
}
# Of a case before them in bfloat16: the other type is tested in small steps, which join as well.
TWINS = [case for case in CASES if case.removesuffix(" in float32") in set(CASES) - {case}]


VARIED: dict[str, Options] = {
    "DeepseekV32": {"index_topk": 70},
    "KimiLinear": {"init_std": 0.15},
    "NemotronH": {"head_dim": 16, "init_std": 0.15},
    "Llama4": {"head_dim": 16, "attention_chunk_size": 70},
    "Gemma4": {"global_head_dim": 32, "sliding_window": 70},
    "Gemma3n": {"sliding_window": 70},
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Makes each checkpoint once."""
    root, made = tmp_path_factory.mktemp("deterministic"), set[str]()

    def folder_of(name: str) -> Path:
        folder = root / name
        if name in made:
            return folder
        made.add(name)
        if name in ("Qwen2Moe", "DeepseekV3"):
            make_mixture(folder, name, has_tokenizer=True)
        elif name in ("Qwen3Next", "Qwen3_5", "GraniteMoeHybrid"):
            make_mixture(folder, name, has_tokenizer=True, head_dim=16, init_std=0.3)
        elif name in VARIED:
            make_mixture(folder, name, has_tokenizer=True, **VARIED[name])
        elif name in ("GptOss", "mxfp4"):
            sizes = {"head_dim": 16, "sliding_window": 70, "intermediate_size": 64}
            make_mixture(folder, "GptOss", has_tokenizer=True, **sizes)
            if name == "mxfp4":
                pack_experts(folder)
        elif name == "wide llama":
            make_checkpoint(folder, head_dim=32, init_std=0.3)
        elif name in ("first", "second"):
            make_adapter(folder, folder_of("llama"), rank=3, seed=len(name))
        else:
            fields: dict[str, Options] = {
                "gemma2": {"sliding_window": 70, "query_pre_attn_scalar": 16},
                "lfm2": {"num_layers": 3, "layer_types": ["conv", "full_attention", "conv"]},
            }
            make_checkpoint(folder, name, head_dim=16, init_std=0.3, **fields.get(name, {}))
        return folder

    return folder_of


@pytest.fixture
def load(folders: Callable[[str], Path]) -> Callable[..., LoadedModel]:
    def load(case: str, **options: Any) -> LoadedModel:
        name, given = CASES[case]
        given = {"dtype": "bfloat16", "deterministic": True, "max_total_tokens": 4096, **given}
        if names := given.get("lora_paths"):
            given["lora_paths"] = tuple((name, folders(name)) for name in names)
        return LoadedModel(EngineConfig(model=folders(name), **{**given, **options}))

    return load


def request_of(loaded: LoadedModel, index: int, max_tokens: int) -> Request:
    """Generates, greedy or drawn; every fourth scores its own prompt."""
    adapter = None
    if loaded.adapters is not None and (name := ADAPTERS[index % 3]) is not None:
        adapter = loaded.adapters.find(name)
    prompt, scoring = PROMPTS[index], None
    if index % 4 == 3:
        scoring = Scoring(10, (*prompt[11:], 65), num_top=2)
    return Request(
        loaded.engine.next_request_id(),
        array("i", prompt),
        SamplingParams(
            max_tokens=max_tokens,
            temperature=index % 2 * 0.8,
            seed=index,
            ignore_eos=True,
            logprobs=2,
        ),
        FakeListener(),
        namespace="" if adapter is None else adapter.namespace(""),
        adapter=adapter,
        scoring=scoring,
    )


def outcome_of(request: Request) -> Outcome:
    """All numbers that a client may see of it."""
    assert request.finish_reason in (FinishReason.LENGTH, FinishReason.STOP), request.error
    assert isinstance(request.listener, FakeListener)
    results = [(r.token_id, r.logprob, r.top_logprobs) for r in request.listener.results]
    return (results, request.scores, request.score_tops)


def serve(
    loaded: LoadedModel, indices: Sequence[int], apart: int = 0, max_tokens: int = 6
) -> list[Outcome]:
    """Requests that arrive `apart` steps after each other."""
    requests = [request_of(loaded, index, max_tokens) for index in indices]
    engine, step, waiting = loaded.engine, 0, list(requests)
    while waiting or engine.has_work or not all(request.is_finished for request in requests):
        while waiting and step >= apart * (len(requests) - len(waiting)):
            engine.submit(waiting.pop(0))
        if not engine.has_work and not waiting:  # blocks come from a store
            assert engine.kv_store is not None
            assert ready([engine.kv_store], 60.0)
            engine.kv_store.collect()
        engine.step()
        step += 1
    return [outcome_of(request) for request in requests]


def alone(loaded: LoadedModel, max_tokens: int = 6) -> list[Outcome]:
    """Each request by itself on an empty cache."""
    outcomes = []
    for index in range(len(PROMPTS)):
        loaded.engine.flush_cache()
        outcomes += serve(loaded, [index], max_tokens=max_tokens)
    return outcomes


ALL = range(len(PROMPTS))


@pytest.fixture(scope="module")
def truths() -> dict[str, list[Outcome]]:
    """What each case says alone, once a test has had it say so."""
    return {}


@pytest.mark.parametrize("case", CASES)
def test_numbers_are_identical_in_any_batch(
    load: Callable[..., LoadedModel], truths: dict[str, list[Outcome]], case: str
) -> None:
    expected = truths[case] = alone(load(case, speculate="off"))
    if case not in TWINS:
        loaded = load(case)
        assert serve(loaded, ALL) == expected  # together, sharing prefixes
        assert serve(loaded, ALL, apart=2) == expected  # from the cache, one after the other
    small = load(case, chunked_prefill_size=23, page_size=16, max_running_requests=3)
    assert serve(small, ALL) == expected
    assert serve(small, ALL[::-1], apart=2) == expected[::-1]


@pytest.mark.parametrize("case", CASES)
def test_numbers_are_identical_whatever_is_drafted(
    load: Callable[..., LoadedModel], truths: dict[str, list[Outcome]], case: str
) -> None:
    loaded = load(case, speculate="off")
    expected = truths.get(case) or alone(loaded)
    outputs = {
        tuple(prompt): [token_id for token_id, *_ in said]
        for prompt, (said, *_) in zip(PROMPTS, expected)
    }
    speculate(loaded.engine, ScriptedDrafter(outputs, sometimes_right(random.Random(7))))
    loaded.engine.flush_cache()
    assert serve(loaded, ALL, apart=2) == expected
    stats = loaded.engine.scheduler.stats
    assert 0 < stats.num_accepted_tokens < stats.num_draft_tokens


@pytest.mark.parametrize("case", ["bfloat16", "float32"])
def test_numbers_are_identical_after_preemption_and_from_the_host(
    load: Callable[..., LoadedModel], case: str
) -> None:
    expected = alone(load(case), max_tokens=50)
    tiny = load(case, max_total_tokens=368, chunked_prefill_size=40, host_kv_tokens=4096)
    for _ in range(2):
        hope(tiny.engine)
        assert serve(tiny, ALL, max_tokens=50) == expected
    host = tiny.engine.scheduler.kv_cache.host
    assert tiny.engine.scheduler.stats.num_preemptions > 0
    assert host is not None and host.num_loaded_tokens > 0


def test_numbers_are_identical_with_kv_of_an_earlier_process(
    load: Callable[..., LoadedModel], tmp_path: Path
) -> None:
    """Blocks of 256 tokens, which the other prompts do not fill; none of a run that was not
    deterministic."""
    outcomes, num_fetched = [], []
    for is_deterministic in (False, True, True):
        loaded = load("bfloat16", kv_store=tmp_path, deterministic=is_deterministic)
        outcomes.append(serve(loaded, [len(PROMPTS) - 1]))
        store = loaded.engine.kv_store
        assert store is not None and store.flush(60.0)
        num_fetched.append(store.stats.num_fetched)
        store.close()
    assert num_fetched == [0, 0, 1]
    assert outcomes[1] == outcomes[2]


@st.function
def story(s: st.ProgramState, number: int) -> list[object]:
    s += "A prefix that all of them share, of some length: "
    forks = s.fork(2)
    for index, branch in enumerate(forks):
        branch += f"story {number}.{index} of old times "
        branch += st.gen("x", max_tokens=24, temperature=0.0, ignore_eos=True, logprobs=2)
    return [[branch["x"], branch.get_meta_info("x")["logprobs"]] for branch in forks]


def test_programs_say_the_same_alone_and_in_a_batch_with_any_number_of_threads() -> None:
    found = []
    for num_threads in (1, 2):
        with st.Engine(
            deterministic=True, dtype="bfloat16", num_threads=num_threads, max_total_tokens=8192
        ) as engine:
            for index in (0, 5):
                engine.flush_cache()
                found.append((index, story.run(index, backend=engine).ret_value))
            states = story.run_batch([{"number": index} for index in range(8)], backend=engine)
            found += [(index, states[index].ret_value) for index in (0, 5)]
    for index in (0, 5):
        values = [value for number, value in found if number == index]
        assert len(values) == 4 and all(value == values[0] for value in values)


@pytest.mark.parametrize(
    ("options", "needed"),
    [
        ({"device": "cuda"}, "false on a GPU"),
        ({"kernels": "cpu"}, "auto with deterministic"),
        ({"dtype": "float64"}, "bfloat16 or float32"),
        ({"dtype": "float32", "quantization": "int8"}, "bfloat16"),
        ({"dtype": "float32", "kv_cache_dtype": "int8"}, "auto with dtype=float32"),
        ({"dtype": "float32", "enable_lora": True}, "bfloat16"),
    ],
    ids=str,
)
def test_what_cannot_be_deterministic_is_refused(
    load: Callable[..., LoadedModel], options: Options, needed: str
) -> None:
    with pytest.raises(InvalidRequest, match=needed):
        load("bfloat16", **options)


def test_a_model_that_only_torch_computes_is_refused(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, head_dim=12)
    with pytest.raises(InvalidRequest, match=r"deterministic.* multiple of 16 \(here 12\)"):
        LoadedModel(EngineConfig(model=tmp_path, deterministic=True, max_total_tokens=256))
