"""The model runner against Hugging Face transformers, and against itself in other batches."""

from __future__ import annotations

from array import array
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from checkpoints import make_checkpoint
from step_plans import GREEDY, Feed, PlanDriver

from stemma.kernels.registry import select_kernels
from stemma.kernels.sampling_rows import AdjustedRows
from stemma.runtime.execute.model_runner import ModelRunner
from stemma.runtime.execute.sampler import NON_FINITE
from stemma.runtime.models.model_config import read_model_config
from stemma.runtime.schedule.plan import Adjustment
from stemma.runtime.schedule.sampling_params import SamplingParams

VOCAB_SIZE = 131
PROMPT = torch.randint(0, VOCAB_SIZE, (45,), generator=torch.Generator().manual_seed(7)).tolist()
CASES = {
    "llama": {},
    "llama-wide-heads": {
        "head_dim": 32,
        "is_sharded": True,
        "attention_bias": True,
        "mlp_bias": True,
    },
    "mistral": {"num_kv_heads": 1, "tie_word_embeddings": True, "sliding_window": 300},
    "qwen2": {
        "num_kv_heads": 4,
        "is_sharded": True,
        "rope_parameters": {"rope_type": "default", "rope_theta": 5e5},
    },
}


@pytest.fixture(scope="module", params=sorted(CASES))
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(
        tmp_path_factory.mktemp(request.param),
        request.param.split("-")[0],
        vocab_size=VOCAB_SIZE,
        has_tokenizer=False,
        **CASES[request.param],  # type: ignore[arg-type]
    )


@pytest.fixture(scope="module")
def hf_logprobs(checkpoint: Path) -> torch.Tensor:
    """[len(PROMPT), VOCAB_SIZE] log-probabilities of PROMPT by transformers in float64."""
    return _hf_logprobs(checkpoint, PROMPT)


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("kernels", ["reference", "auto"])
@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_logprobs_equal_transformers_in_any_chunking(
    checkpoint: Path, hf_logprobs: torch.Tensor, dtype: str, kernels: str, page_size: int
) -> None:
    """Whole prompt, chunks of 7, single tokens and a mixed batch of all these, in one runner."""
    driver = PlanDriver(_runner(checkpoint, dtype=dtype, kernels=kernels, page_size=page_size))
    # transformers norms in float32 whatever the dtype, so its float64 is good to 1e-5.
    expected = hf_logprobs[range(len(PROMPT) - 1), PROMPT[1:]]
    best = hf_logprobs.argmax(-1).tolist()
    for logprobs, argmax in [
        *(_scores(driver, chunk) for chunk in (len(PROMPT), 7, 1)),
        *_scores_mixed(driver, [len(PROMPT), 7, 1, 16, 1]),
    ]:
        assert argmax[:-1] == best[:-1]
        torch.testing.assert_close(
            torch.tensor(logprobs[:-1]).double(), expected, atol=5e-5, rtol=0
        )


def test_greedy_tokens_do_not_depend_on_batch_or_chunk_in_float64(checkpoint: Path) -> None:
    prompts = [PROMPT[:1], PROMPT[3:20], PROMPT[:40], PROMPT[10:12]]
    runner = _runner(checkpoint, dtype="float64", kernels="reference", page_size=16)
    together = PlanDriver(runner).generate(prompts, 12, chunk=5)
    for prompt, output in zip(prompts, together, strict=True):
        assert PlanDriver(runner, seed=1).generate([prompt], 12) == [output]
    assert len({tuple(output) for output in together}) == len(prompts)


def test_bfloat16_replay_stays_within_the_reference_paths_own_error(
    checkpoint: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Invariant 1c: the fast path's token is, on the reference path, at most tau below the best."""
    tokens = PROMPT[:20]
    runners = {k: _runner(checkpoint, dtype="bfloat16", kernels=k) for k in ("auto", "reference")}
    output = PlanDriver(runners["auto"]).generate([tokens], 20, chunk=6)[0]
    replayed = _all_logits(runners["reference"], tokens + output)
    exact = _all_logits(_runner(checkpoint, dtype="float32", kernels="reference"), tokens + output)
    # A margin is a difference of two logits, and each may be off by the measured error.
    tau = 2 * (replayed - exact).abs().max().item()
    at = range(len(tokens) - 1, len(tokens) + len(output) - 1)
    margin = max(
        (replayed[i].max() - replayed[i][t]).item() for i, t in zip(at, output, strict=True)
    )
    with capsys.disabled():
        print(f"\n  bfloat16 replay: largest margin {margin:.4f}, tau {tau:.4f}", end="")
    assert margin <= tau


def test_rows_that_read_pages_written_in_the_same_step_see_them(checkpoint: Path) -> None:
    """The second row shares the first one's prompt pages, stored in the same plan."""
    runner = _runner(checkpoint, dtype="float64", kernels="auto", page_size=16)
    driver = PlanDriver(runner)
    owner, reader = driver.sequence(), driver.sequence()
    alone = PlanDriver(runner).generate([PROMPT[:32] + [5, 6]], 1)
    driver.share(owner, reader, 32)
    results = driver.step([Feed(owner, PROMPT[:32]), Feed(reader, [5, 6], GREEDY)])
    assert [results[1].token_id] == alone[0]


def test_from_previous_takes_the_token_sampled_before(checkpoint: Path) -> None:
    runner = _runner(checkpoint, dtype="float64")
    expected = PlanDriver(runner).generate([PROMPT[:5], PROMPT[5:30]], 3)
    driver = PlanDriver(runner)
    first, second = driver.sequence(), driver.sequence()
    steps = [driver.step([Feed(first, PROMPT[:5], GREEDY), Feed(second, PROMPT[5:30], GREEDY)])]
    # The rows change places between the plans.
    steps.append(
        driver.step(
            [Feed(second, [0], GREEDY, from_previous=1), Feed(first, [0], GREEDY, from_previous=0)]
        )
    )
    steps.append(
        driver.step(
            [Feed(first, [0], GREEDY, from_previous=1), Feed(second, [0], GREEDY, from_previous=0)]
        )
    )
    outputs = [[steps[0][0], steps[1][1], steps[2][0]], [steps[0][1], steps[1][0], steps[2][1]]]
    assert [[row.token_id for row in rows] for rows in outputs] == expected


def test_penalties_count_a_token_that_the_plan_did_not_know(checkpoint: Path) -> None:
    """What came of the row that `from_previous` names is the newest output."""
    counted: list[tuple[list[int], list[int]]] = []

    def spy(logits: torch.Tensor, rows: AdjustedRows, previous_tokens: torch.Tensor) -> None:
        latest = [int(previous_tokens[i]) for i in rows.latest.tolist() if i >= 0]
        counted.append((rows.token_id.tolist(), latest))

    kernels = replace(select_kernels(torch.float32), adjust_logits=spy)
    sampling = SamplingParams(temperature=0.0, presence_penalty=1.0)
    driver = PlanDriver(_runner(checkpoint, kernels=kernels))
    sequence, other = driver.sequence(), driver.sequence()
    nothing = Adjustment(array("i"), array("i"), array("d"), array("i"))
    feeds = [Feed(other, PROMPT[:3]), Feed(sequence, PROMPT[:9], sampling, adjustment=nothing)]
    first = driver.step(feeds)[1].token_id
    known = replace(nothing, output_ids=array("i", [7]))
    driver.step([Feed(sequence, [0], sampling, from_previous=1, adjustment=known)])
    assert counted == [([], []), ([7], [first])]


def test_logprobs_are_those_of_the_model_at_temperature_one(
    checkpoint: Path, hf_logprobs: torch.Tensor
) -> None:
    """Also where penalties, a bias or a mask change what is drawn."""
    driver = PlanDriver(_runner(checkpoint, dtype="float32"))
    top = hf_logprobs[-1].topk(4).indices.tolist()
    sampling = SamplingParams(temperature=3.0, top_k=2, logprobs=4, repetition_penalty=1.5)
    # Two of the four best tokens cannot come, so the other two are the kept set.
    adjustment = Adjustment(
        array("i"), array("i", top[:2]), array("d", [5.0, 5.0]), array("i", top[:1]), tuple(top[2:])
    )
    feed = Feed(driver.sequence(), PROMPT, sampling, is_scored=True, adjustment=adjustment)
    result = driver.step([feed])[0]
    top = hf_logprobs[-1].topk(4)
    assert [entry.token_id for entry in result.top_logprobs] == top.indices.tolist()
    assert [entry.logprob for entry in result.top_logprobs] == pytest.approx(
        top.values.tolist(), abs=1e-4
    )
    assert result.token_id in top.indices[:2].tolist()
    assert result.logprob == pytest.approx(hf_logprobs[-1][result.token_id].item(), abs=1e-4)
    assert len(result.target_logprobs) == len(PROMPT)


@pytest.mark.parametrize("kernels", ["reference", "auto"])
def test_a_row_with_non_finite_logits_fails_alone_and_leaves_no_trace(
    checkpoint: Path, kernels: str
) -> None:
    runner = _runner(checkpoint, dtype="float32", kernels=kernels, page_size=16, num_pages=12)
    driver = PlanDriver(runner)
    expected = PlanDriver(runner).generate([PROMPT[:20]], 2)[0]
    for layer in runner.pool.layers:
        layer.fill_(torch.nan)  # stale values of a failed request in every page
    bad, good = driver.sequence(), driver.sequence()
    bad.pages, bad.length = [driver.take_page()], 5  # claims KV that is not a number
    feeds = [Feed(bad, [1], GREEDY), Feed(good, PROMPT[:20], GREEDY)]
    results = driver.step(feeds)
    assert results[0].error == NON_FINITE and results[0].token_id is None
    assert results[1].error is None and results[1].token_id == expected[0]
    results = driver.step([Feed(good, expected[:1], GREEDY), Feed(bad, [1], None, is_scored=True)])
    assert results[0].token_id == expected[1] and results[1].error == NON_FINITE


def test_warm_up_leaves_results_as_they_are(checkpoint: Path) -> None:
    runner = _runner(checkpoint, dtype="float64")
    before = PlanDriver(runner).generate([PROMPT[:9]], 3)
    runner.warm_up()
    assert PlanDriver(runner).generate([PROMPT[:9]], 3) == before


def _runner(folder: Path, **options: object) -> ModelRunner:
    settings = {"num_pages": 40, "max_running_requests": 8, "dtype": "float32", "page_size": 16}
    settings.update(options)
    if settings["page_size"] == 1 and "num_pages" not in options:
        settings["num_pages"] = 500
    config = read_model_config(folder)
    return ModelRunner(folder, config, max_model_len=100, **settings)  # type: ignore[arg-type]


def _scores(driver: PlanDriver, chunk: int) -> tuple[list[float], list[int]]:
    return _scores_mixed(driver, [chunk])[0]


def _scores_mixed(driver: PlanDriver, chunks: list[int]) -> list[tuple[list[float], list[int]]]:
    """PROMPT once for each chunk size, all in the same steps; scores of PROMPT[1:] and a 0."""
    sequences = [driver.sequence() for _ in chunks]
    scores: list[tuple[list[float], list[int]]] = [([], []) for _ in chunks]
    targets = [*PROMPT[1:], 0]
    while active := [i for i, s in enumerate(sequences) if s.length < len(PROMPT)]:
        feeds = []
        for i in active:
            start = sequences[i].length
            ids = PROMPT[start : start + chunks[i]]
            feeds.append(Feed(sequences[i], ids, targets=targets[start : start + len(ids)]))
        for i, result in zip(active, driver.step(feeds), strict=True):
            scores[i][0].extend(result.target_logprobs)
            scores[i][1].extend(result.target_argmax)
    for sequence in sequences:
        driver.release(sequence)
    return scores


def _all_logits(runner: ModelRunner, tokens: list[int]) -> torch.Tensor:
    """[len(tokens), VOCAB_SIZE] logits of one prefill, taken where the runner computes them."""
    seen: list[torch.Tensor] = []
    compute = runner.model.compute_logits

    def spy(hidden: torch.Tensor) -> torch.Tensor:
        seen.append(compute(hidden))
        return seen[-1]

    runner.model.compute_logits = spy  # type: ignore[method-assign]
    driver = PlanDriver(runner)
    driver.step([Feed(driver.sequence(), tokens, is_scored=True)])
    runner.model.compute_logits = compute  # type: ignore[method-assign]
    return torch.cat(seen)


def _hf_logprobs(folder: Path, tokens: list[int]) -> torch.Tensor:
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float64, attn_implementation="eager"
    )
    with torch.inference_mode():
        logits: torch.Tensor = model(torch.tensor([tokens])).logits[0]
    return logits.log_softmax(-1)
