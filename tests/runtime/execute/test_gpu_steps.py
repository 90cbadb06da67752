"""The engine on an accelerator says what it says on a CPU: to the last bit of every token.

In float64 through the reference kernels, with attention plans that are data (device_plans.py), so
that all of staging, padding, graphs and late answers is run, and only the kernels are others. The
kernels themselves: test_gpu_interpreted.py.
"""

from __future__ import annotations

import random
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from device_plans import device_kernels
from fakes import FakeListener
from fused_attention import plain_attention
from preemptions import admit_all
from step_plans import GREEDY, Feed, PlanDriver

from stemma.constrained.compiler import compile_grammar
from stemma.constrained.serving.grammar_state import PendingGrammar
from stemma.constrained.spec import GrammarSpec
from stemma.constrained.vocabulary import single_bytes
from stemma.errors import InvalidRequest
from stemma.kernels import prefill_attention
from stemma.kernels.prefill_attention import PrefillChoice, with_prefill_attention
from stemma.runtime.config import EngineConfig
from stemma.runtime.execute import accelerator as accelerators
from stemma.runtime.execute import model_runner
from stemma.runtime.execute.accelerator import require_devices
from stemma.runtime.execute.asynchronous import AsynchronousSteps
from stemma.runtime.execute.model_runner import ModelRunner, resolve_dtype
from stemma.runtime.execute.sampler import NON_FINITE
from stemma.runtime.loaded_model import LoadedModel
from stemma.runtime.memory.copies import PageFork, Transfer
from stemma.runtime.memory.sizing import step_bytes
from stemma.runtime.models.layers.stage import Stage
from stemma.runtime.models.model_config import read_model_config
from stemma.runtime.schedule.plan import Adjustment, StepPlan
from stemma.runtime.schedule.request import HiddenSum, Request, Scoring
from stemma.runtime.schedule.sampling_params import SamplingParams

Load = Callable[..., LoadedModel]
MakeRequests = Callable[[LoadedModel], list[Request]]

_RANDOM = random.Random(3)
TEXT = [_RANDOM.randrange(256) for _ in range(60)]
PROMPTS = [TEXT[:40], [*TEXT[:33], 5], TEXT[:32], [9], [*TEXT[:16], 1, 2, 3], TEXT[20:]]
BYTES = single_bytes(260)
LIST = GrammarSpec("regex", r'\{"id":[0-9]{1,4},"by":"[a-z]*"\}')


@pytest.fixture(scope="module")
def load(checkpoint: Path) -> Iterator[Load]:
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)

    def load_one(**options: Any) -> LoadedModel:
        options = {"max_total_tokens": 512, "max_model_len": 128, "dtype": "float64", **options}
        config = EngineConfig(
            model=checkpoint, kernels="reference", max_running_requests=8, **options
        )
        with pytest.MonkeyPatch.context() as patch:
            if options.get("device") == "cuda":
                patch.setattr(
                    model_runner, "select_kernels", lambda dtype, *_: device_kernels(dtype)
                )
            return LoadedModel(config)

    yield load_one
    torch.set_num_threads(num_threads)


def requests_of(loaded: LoadedModel) -> list[Request]:
    """Greedy, drawn, penalised, constrained, with log-probabilities, scored and embedded, at
    once."""
    base = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)
    drawn = replace(base, temperature=0.8, top_k=20, top_p=0.9, seed=7, logprobs=2)
    adjusted = replace(
        drawn, repetition_penalty=1.4, presence_penalty=0.7, frequency_penalty=0.3,
        logit_bias=((65, 3.0), (1, -100)), min_p=0.01,
    )  # fmt: skip
    options: list[dict[str, Any]] = [
        {"sampling": base},
        {"sampling": adjusted},
        {"sampling": replace(drawn, seed=9)},
        {"sampling": replace(base, max_tokens=14), "grammar": _grammar()},
        {"sampling": replace(adjusted, temperature=0.0, logprobs=0)},
        {"sampling": replace(drawn, max_tokens=14), "grammar": _grammar(), "jump_forward": False},
        {"sampling": base, "scoring": Scoring(20, (*TEXT[21:40], 65), num_top=3)},
        {"sampling": base, "hidden": HiddenSum(is_mean=True)},
        {"sampling": base, "hidden": HiddenSum(is_mean=False)},
    ]
    prompts = [*PROMPTS, TEXT[:40], TEXT[:50], PROMPTS[1]]
    return [
        Request(loaded.engine.next_request_id(), array("i", prompt), listener=FakeListener(), **own)
        for prompt, own in zip(prompts, options, strict=True)
    ]


def _grammar() -> PendingGrammar:
    return PendingGrammar(bound=compile_grammar(LIST).bind(BYTES))


def serve(loaded: LoadedModel) -> list[Request]:
    requests = requests_of(loaded)
    for request in requests:
        loaded.engine.submit(request)
    while loaded.engine.has_work:
        loaded.engine.step()
        loaded.engine.scheduler.check()
    assert all(request.error is None for request in requests), [r.error for r in requests]
    return requests


@pytest.fixture(scope="module")
def truth(load: Load) -> list[Request]:
    return serve(load())


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"cuda_graph_max_tokens": 0},
        {"cuda_graph_max_tokens": 5, "page_size": 16, "chunked_prefill_size": 24},
        {"disable_overlap": True, "chunked_prefill_size": 16},
        {"page_size": 16, "max_total_tokens": 160, "chunked_prefill_size": 32},
        {
            "max_total_tokens": 130,
            "host_kv_tokens": 512,
            "chunked_prefill_size": 32,
            "cuda_graph_max_tokens": 8,
        },
    ],
    ids=str,
)
def test_tokens_scores_and_embeddings_are_those_of_the_cpu(
    load: Load, truth: Sequence[Request], options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded = load(device="cuda", **options)
    if options.get("max_total_tokens"):  # small enough that requests are preempted
        admit_all(monkeypatch, loaded.engine.scheduler)
    assert_same(serve(loaded), truth)
    if options.get("max_total_tokens"):
        assert loaded.engine.scheduler.stats.num_preemptions > 0, "the pool was not small enough"
    steps = loaded.runner.steps
    assert isinstance(steps, AsynchronousSteps) and loaded.engine.has_overlap != options.get(
        "disable_overlap", False
    )
    assert (steps.forward.num_graphs > 0) == (options.get("cuda_graph_max_tokens") != 0)


@pytest.mark.parametrize(
    "options",
    [{}, {"page_size": 16, "chunked_prefill_size": 24}, {"cuda_graph_max_tokens": 0}],
    ids=str,
)
def test_prompts_that_torchs_kernel_attends_for_give_the_same(
    load: Load, truth: Sequence[Request], options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whole ones and the first chunks of others; some behind a cached prefix are not its."""
    lengths: list[int] = []
    attend = prefill_attention.attend_whole

    def noted(q: torch.Tensor, *args: Any) -> torch.Tensor:
        lengths.append(len(q))
        return attend(q, *args)

    choice = PrefillChoice("torch", plain_attention, min_tokens=8, unit_tokens=4)
    monkeypatch.setattr(prefill_attention, "attend_whole", noted)
    monkeypatch.setattr(
        model_runner, "with_prefill", lambda own, *_, **__: with_prefill_attention(own, choice)
    )
    loaded = load(device="cuda", **options)
    assert_same(serve(loaded), truth)
    assert lengths


def assert_same(found: Sequence[Request], truth: Sequence[Request]) -> None:
    for request, expected in zip(found, truth, strict=True):
        assert request.output_ids == expected.output_ids
        assert request.finish_reason is expected.finish_reason
        assert request.scores == pytest.approx(expected.scores, abs=1e-9)
        assert _logprobs_of(request) == _logprobs_of(expected)
        if request.hidden is not None:
            assert expected.hidden is not None
            assert request.hidden.pooled() == pytest.approx(expected.hidden.pooled(), abs=1e-9)


def _logprobs_of(request: Request) -> list[Any]:
    """What was told beside each token."""
    assert isinstance(request.listener, FakeListener)
    return [
        (
            None if result.logprob is None else round(result.logprob, 8),
            [(top.token_id, round(top.logprob, 8)) for top in result.top_logprobs],
        )
        for result in request.listener.results
    ]


def test_a_step_replayed_padded_and_run_as_it_is_give_equal_results(checkpoint: Path) -> None:
    """Five tokens are padded to eight; the graph is recorded with other rows than it replays."""
    outputs = []
    for graph_max_tokens in (0, 64):
        driver = PlanDriver(_runner(checkpoint, graph_max_tokens=graph_max_tokens), seed=1)
        outputs.append(driver.generate([TEXT[:5], TEXT[7:9], TEXT[30:43]], 4, chunk=3))
    assert outputs[0] == outputs[1]


def test_a_graph_draws_what_is_drawn_without_one_unless_logits_change(checkpoint: Path) -> None:
    """Rows of any parameters, three in four; one of them is told more, or has a bias."""
    params = [
        SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, seed=seed)
        for temperature, top_k, top_p, min_p, seed in
        [(0.0, None, 1.0, 0.0, 1), (1.5, None, 1.0, 0.0, 2), (3.0, 5, 0.9, 0.01, 3)]
    ]  # fmt: skip
    bias = Adjustment(array("i"), array("i", [65]), array("d", [4.0]), array("i"))
    drawn, used = [], []
    for graph_max_tokens in (0, 64):
        runner = _runner(checkpoint, graph_max_tokens=graph_max_tokens)
        steps = runner.steps
        assert isinstance(steps, AsynchronousSteps)
        behind: list[int] = []
        sample = steps._vocabulary.sample
        steps._vocabulary.sample = lambda *args: (behind.append(step), sample(*args))[1]  # noqa: B023
        step = -1
        driver = PlanDriver(runner)
        sequences = [driver.sequence() for _ in params]
        feeds = [Feed(s, TEXT[i : i + 3], p) for i, (s, p) in enumerate(zip(sequences, params))]
        tokens = [[row.token_id for row in driver.step(feeds)]]
        for step in range(8):
            told = replace(params[1], logprobs=0) if step == 5 else params[1]
            pending = [
                Feed(s, [0], p, from_previous=i, adjustment=bias if (step, i) == (3, 0) else None)
                for i, (s, p) in enumerate(zip(sequences, [params[0], told, params[2]]))
            ]
            results = driver.step(pending)
            assert (results[1].logprob is not None) == (step == 5)
            tokens.append([row.token_id for row in results])
        drawn.append(tokens)
        used.append(sorted(steps.forward._graphs))
        assert behind == ([3] if graph_max_tokens else [*range(-1, 8)])
    assert drawn[0] == drawn[1] and len({tuple(column) for column in zip(*drawn[0])}) == 3
    assert used[1] == [(4, False, True), (16, False, False)]


def test_all_graphs_are_captured_at_the_start(checkpoint: Path) -> None:
    runner = _runner(checkpoint, graph_max_tokens=16, num_pages=64, max_running_requests=5)
    assert isinstance(runner.steps, AsynchronousSteps)
    told: list[tuple[int, int]] = []
    runner._capture(runner.steps.forward, lambda done, total: told.append((done, total)))
    graphs = set(runner.steps.forward._graphs)
    # Up to 8 tokens light ones too, as no step has more than 5 rows; of one token only that.
    assert len(graphs) == 5 + 4 - 1
    assert len(told) == told[-1][1] == 5 + 4
    driver = PlanDriver(runner)
    driver.generate([TEXT[:5], TEXT[7:9], TEXT[30:39]], 3, chunk=3)
    sequence = driver.sequence()
    driver.step([Feed(sequence, TEXT[:1], replace(GREEDY, logprobs=0))])
    assert set(runner.steps.forward._graphs) == graphs


def test_two_steps_may_be_pending_and_the_second_takes_what_the_first_sampled(
    checkpoint: Path,
) -> None:
    runner = _runner(checkpoint)
    expected = PlanDriver(runner).generate([TEXT[:5], TEXT[5:30]], 4)
    driver = PlanDriver(runner)
    first, second = driver.sequence(), driver.sequence()
    plans = [
        driver.plan([Feed(first, TEXT[:5], GREEDY), Feed(second, TEXT[5:30], GREEDY)]),
        driver.plan([Feed(second, [0], GREEDY, from_previous=1),
                     Feed(first, [0], GREEDY, from_previous=0)]),
        driver.plan([Feed(first, [0], GREEDY, from_previous=1),
                     Feed(second, [0], GREEDY, from_previous=0)]),
        driver.plan([Feed(second, [0], GREEDY, from_previous=1),
                     Feed(first, [0], GREEDY, from_previous=0)]),
    ]  # fmt: skip
    pending = [runner.submit(plans[0]), runner.submit(plans[1])]
    results = []
    for plan in [*plans[2:], None, None]:
        results.append([row.token_id for row in pending.pop(0).result().rows])
        if plan is not None:
            pending.append(runner.submit(plan))
    swapped = [row if step % 2 == 0 else row[::-1] for step, row in enumerate(results)]
    assert [list(tokens) for tokens in zip(*swapped, strict=True)] == expected


@pytest.mark.parametrize("num_stages", [1, 4])
def test_submit_waits_for_nothing(
    num_stages: int, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two steps, or as many as there are stages."""
    waits: list[object] = []
    monkeypatch.setattr(accelerators.PassedEvent, "wait", lambda event: waits.append(event))
    runner = _runner(checkpoint, stage=Stage(num_stages=num_stages))
    waits.clear()
    driver = PlanDriver(runner)
    sequence = driver.sequence()
    feeds = [Feed(sequence, TEXT[:20], GREEDY, is_scored=True)]
    feeds += [Feed(sequence, [0], GREEDY, from_previous=0)] * max(1, num_stages - 1)
    steps = [runner.submit(driver.plan([feed])) for feed in feeds]
    assert not waits
    for step in steps:
        step.result()
    assert len(waits) == len(steps)


def test_a_row_that_is_not_finite_fails_alone_and_padding_spoils_nothing(checkpoint: Path) -> None:
    runner = _runner(checkpoint, page_size=16, num_pages=12)
    expected = PlanDriver(runner).generate([TEXT[:20]], 2)[0]
    for layer in runner.pool.layers:
        layer.fill_(torch.nan)
    driver = PlanDriver(runner)
    bad, good = driver.sequence(), driver.sequence()
    bad.pages, bad.length = [driver.take_page()], 5  # claims KV that is not a number
    results = driver.step([Feed(bad, [1], GREEDY), Feed(good, TEXT[:20], GREEDY)])
    assert results[0].error == NON_FINITE and results[0].token_id is None
    assert results[1].error is None and results[1].token_id == expected[0]
    results = driver.step([Feed(good, expected[:1], GREEDY), Feed(bad, [1], None, is_scored=True)])
    assert results[0].token_id == expected[1] and results[1].error == NON_FINITE


def test_a_chunk_that_samples_nothing_multiplies_no_logits(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of no rows, in a step that is too large for a graph."""
    runner = _runner(checkpoint, graph_max_tokens=0)
    asked: list[torch.Tensor] = []
    monkeypatch.setattr(runner.model, "compute_logits", asked.append)
    driver = PlanDriver(runner)
    driver.step([Feed(driver.sequence(), TEXT[:5], None)])
    assert not asked


def test_a_gpu_s_pages_have_16_tokens_unless_somebody_says_so_or_layers_are_recurrent() -> None:
    for device, size, expected in (
        ("cpu", None, (1, 1)),
        ("cuda", None, (16, 1)),
        ("cuda", 4, (4, 4)),
    ):
        config = EngineConfig(device=device, page_size=size)
        pages = [config.for_model(has_states=has).tokens_a_page for has in (False, True)]
        assert tuple(pages) == expected


def test_kv_of_random_weights_is_not_filed_under_the_checkpoint_s(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match=r"load_format='dummy'.*kv_store"):
        EngineConfig(load_format="dummy", kv_store=tmp_path)


def test_the_warm_up_runs_what_few_requests_need(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else it would be compiled while others wait."""
    runner = _runner(checkpoint, num_host_pages=2)
    seen: list[StepPlan] = []
    submit = runner.steps.submit
    monkeypatch.setattr(runner.steps, "submit", lambda plan: (seen.append(plan), submit(plan))[1])
    runner.warm_up()
    rows = [row for plan in seen for row in plan.rows]
    assert any(row.mask is not None and row.adjustments for row in rows)
    fork, *others = [copy for plan in seen for copy in plan.transfers]
    assert isinstance(fork, PageFork)
    assert [copy.kind for copy in others if isinstance(copy, Transfer)] == ["store", "load"]


def test_the_spare_page_is_no_request_s(checkpoint: Path) -> None:
    runner = _runner(checkpoint, page_size=4, num_pages=12)
    runner.warm_up()
    assert runner.num_pages == 12
    assert all(layer.shape[2] == 13 * 4 for layer in runner.pool.layers)


def test_a_device_that_is_not_there_is_refused_with_the_remedy(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(accelerators, "is_interpreted", lambda: False)
    monkeypatch.setattr(accelerators, "why_no_cuda", lambda: "torch finds no CUDA device")
    with pytest.raises(
        InvalidRequest, match=r"device='cuda:1'.*cpu; torch finds no CUDA"
    ) as caught:
        ModelRunner(checkpoint, read_model_config(checkpoint), device="cuda:1")
    assert caught.value.field == "device"
    for wrong in ("gpu", "cuda:x", "cuda:-1", "CUDA"):
        with pytest.raises(InvalidRequest, match="device="):
            EngineConfig(device=wrong)


def test_bfloat16_is_a_gpu_s_choice_and_refused_in_the_interpreter(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert resolve_dtype("auto", "cuda") is torch.float32
    with pytest.raises(InvalidRequest, match=r"dtype='bfloat16'.*interpreter"):
        resolve_dtype("bfloat16", "cuda")
    monkeypatch.setattr(model_runner, "is_interpreted", lambda: False)
    assert resolve_dtype("auto", "cuda") is torch.bfloat16


def test_a_step_s_memory_grows_with_its_tokens_and_rows(checkpoint: Path) -> None:
    config = read_model_config(checkpoint)
    base = step_bytes(config, dtype_bytes=2, num_tokens=64, num_rows=8)
    assert step_bytes(config, dtype_bytes=2, num_tokens=128, num_rows=8) > base
    rows = step_bytes(config, dtype_bytes=2, num_tokens=64, num_rows=9)
    assert rows - base == config.vocab_size * 18


def test_each_process_of_a_model_needs_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accelerators, "is_interpreted", lambda: False)
    monkeypatch.setattr(accelerators, "why_no_cuda", lambda: None)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    require_devices("cuda:1", 2)
    with pytest.raises(InvalidRequest, match=r"device='cuda:2' is not allowed.*cuda:0 to cuda:1"):
        require_devices("cuda:2", 2)
    with pytest.raises(InvalidRequest, match="4 processes need a GPU each, and there are 3"):
        require_devices("cuda", 4)


def _runner(folder: Path, **options: Any) -> ModelRunner:
    options = {"num_pages": 300, "max_running_requests": 4, "dtype": "float64", **options}
    config = read_model_config(folder)
    kernels = device_kernels(torch.float64)
    return ModelRunner(folder, config, device="cuda", kernels=kernels, **options)
