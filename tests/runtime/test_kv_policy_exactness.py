"""Prompts of which a policy keeps a part of the KV: in float64 what is kept, and said behind it, is
what transformers computes with the same tokens left out; whatever is cached, chunked, batched,
preempted or swapped; and exact requests beside them say what they say alone.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from adapters import make_adapter
from checkpoints import make_checkpoint
from exactness_jobs import (
    CONSTRAINED,
    GREEDY,
    SAMPLED,
    Job,
    Load,
    loading,
    outputs_of,
    said_alone,
    serve,
)
from preemptions import admit_all

from stemma.errors import InvalidRequest, PromptTooLong
from stemma.frontend.protocol.kv_policy import KVPolicy, h2o, snapkv, streaming
from stemma.runtime.schedule.compression import CompressedPrefix
from stemma.runtime.schedule.request import FinishReason, Request

SNAP = snapkv(0.3, window=4, pool=5)
STREAM = streaming(24, sinks=3)
HITTERS = h2o(0.3, recent=6)


@pytest.fixture(scope="module")
def load(checkpoint: Path) -> Iterator[Load]:
    yield from loading(checkpoint)


def _jobs() -> list[Job]:
    """Long prompts of all kinds, under both policies."""
    kinds = (GREEDY, SAMPLED, CONSTRAINED)
    policies = (SNAP, STREAM, HITTERS)
    return [
        replace(kinds[index % 3][index], policy=policies[index % 3]) for index in (3, 4, 5, 6, 7)
    ] + [
        replace(GREEDY[6], policy=STREAM),
        replace(GREEDY[7], policy=SNAP),
        replace(GREEDY[7], policy=snapkv(17, window=4)),
        replace(GREEDY[6], policy=HITTERS),
    ]


JOBS = _jobs()


@pytest.fixture(scope="module")
def alone(load: Load) -> list[list[int]]:
    exact = said_alone(load, [replace(job, policy=None) for job in JOBS[:5]])
    said = []
    for job in JOBS:
        (request,) = serve(load(), [job])
        assert request.num_dropped > 0
        said.append(list(request.output_ids))
    assert said[:5] != exact, "nothing was lost with what was dropped"
    return said


@pytest.mark.parametrize("policy", [SNAP, snapkv(12, window=3, pool=1), HITTERS, h2o(9, recent=1)])
def test_outputs_are_those_of_transformers_with_the_same_tokens_left_out(
    load: Load, checkpoint: Path, policy: KVPolicy
) -> None:
    for job in (GREEDY[4], GREEDY[7]):
        (request,) = serve(load(), [replace(job, policy=policy)])
        assert list(request.output_ids) == _reference(checkpoint, job, policy)


def _reference(folder: Path, job: Job, policy: KVPolicy) -> list[int]:
    """Greedy, from a cache of which tokens were taken out by their attention probabilities."""
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float64, attn_implementation="eager"
    )
    prompt = torch.tensor([job.prompt])
    num = prompt.shape[1] - 1
    with torch.inference_mode():
        first = model(prompt[:, :-1], use_cache=True, output_attentions=True)
        kept = transformers.DynamicCache()
        for layer, attention in enumerate(first.attentions):
            keys, values = (
                first.past_key_values.layers[layer].keys,
                (first.past_key_values.layers[layer].values),
            )
            chosen = _chosen(attention[0], keys.shape[1], num, policy)
            index = chosen[None, :, :, None].expand(-1, -1, -1, keys.shape[-1])
            kept.update(keys.gather(2, index), values.gather(2, index), layer)
        said: list[int] = []
        token = prompt[:, -1:]
        for place in range(num, num + job.sampling.max_tokens):
            logits = model(token, past_key_values=kept, position_ids=torch.tensor([[place]])).logits
            token = logits[:, -1:].argmax(-1)
            said.append(int(token))
    return said


def _chosen(attention: torch.Tensor, num_kv_heads: int, num: int, policy: KVPolicy) -> torch.Tensor:
    """attention [heads, num, num] -> [KV heads, kept], by loops."""
    keep = policy.num_kept(num)
    rows = []
    for head in range(num_kv_heads):
        group = attention.shape[0] // num_kv_heads
        first = 0 if policy.kind == "h2o" else num - policy.window
        of_head = attention[head * group : (head + 1) * group, first:]
        votes = of_head.sum((0, 1))[: num - policy.window].tolist()
        half = 0 if policy.kind == "h2o" else policy.pool // 2
        best = [max(votes[max(0, i - half) : i + half + 1]) for i in range(len(votes))]
        order = sorted(range(len(best)), key=lambda i: (-best[i], i))[: keep - policy.window]
        rows.append([*sorted(order), *range(num - policy.window, num)])
    return torch.tensor(rows)


def test_a_stream_is_what_transformers_says_with_keys_turned_back(
    load: Load, checkpoint: Path
) -> None:
    policy = streaming(24, sinks=3)
    long = replace(GREEDY[4].sampling, max_tokens=45)
    for job in (replace(GREEDY[4], sampling=long), GREEDY[7]):
        (request,) = serve(load(), [replace(job, policy=policy)])
        assert request.num_text_tokens == len(job.prompt)
        assert request.num_dropped >= 36
        assert list(request.output_ids) == _streamed(checkpoint, job, policy)


def _streamed(folder: Path, job: Job, policy: KVPolicy) -> list[int]:
    """Greedy: blocks of tokens, each behind what is left in the cache of those before."""
    import transformers
    from transformers.models.llama.modeling_llama import rotate_half

    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
    keep, step = int(policy.keep), policy.num_dropped_at_once
    rest, held = list(job.prompt), 0
    cache = transformers.DynamicCache()

    def compute(tokens: list[int]) -> torch.Tensor:
        places = torch.arange(held, held + len(tokens))[None]
        given = torch.tensor([tokens])
        return model(given, past_key_values=cache, position_ids=places).logits[0, -1]

    def drop() -> None:
        angle = -step * model.model.rotary_emb.inv_freq.double()
        cos, sin = torch.cat((angle, angle)).cos(), torch.cat((angle, angle)).sin()
        for layer in cache.layers:
            last = layer.keys[:, :, policy.sinks + step :]
            turned = last * cos + rotate_half(last) * sin
            layer.keys = torch.cat((layer.keys[:, :, : policy.sinks], turned), 2)
            first = layer.values[:, :, : policy.sinks]
            layer.values = torch.cat((first, layer.values[:, :, policy.sinks + step :]), 2)

    said: list[int] = []
    with torch.inference_mode():
        while len(said) < job.sampling.max_tokens:
            while held + len(rest) - 1 >= keep + step:
                taken, rest = rest[: keep + step - held], rest[keep + step - held :]
                if taken:
                    compute(taken)
                drop()
                held = keep
            said.append(int(compute(rest).argmax()))
            held, rest = held + len(rest), said[-1:]
    return said


def test_a_text_may_be_longer_than_the_context(load: Load) -> None:
    """Of which exact prompts are refused; the KV that it takes is bounded."""
    loaded = load(max_model_len=80, chunked_prefill_size=16)
    long = tuple(range(1, 250)) * 2
    job = replace(GREEDY[0], prompt=long, policy=streaming(24, sinks=3))
    with pytest.raises(PromptTooLong):
        serve(loaded, [replace(job, policy=None)])
    (request,) = serve(loaded, [job])
    assert request.num_text_tokens == len(long)
    assert request.num_prompt_tokens <= 36
    loaded.engine.flush_cache()
    (later,) = serve(loaded, [replace(job, prompt=long + long)])
    (again,) = serve(loaded, [job])
    assert later.num_dropped > 900
    assert again.num_to_compress == 0
    assert again.output_ids == request.output_ids


def _chain_of(request: Request) -> Iterator[CompressedPrefix]:
    """Its compressed prefix, and those of which that was made."""
    prefix = request.compressed
    while prefix is not None:
        yield prefix
        prefix = prefix.behind


@pytest.mark.parametrize(
    ("options", "num_runs"),
    [
        ({"chunked_prefill_size": 5}, 1),
        ({"chunked_prefill_size": 64, "max_running_requests": 3}, 2),
        ({"kernels": "cpu", "chunked_prefill_size": 23}, 2),
        ({"schedule_policy": "program"}, 1),
        ({"speculate": "auto"}, 2),
    ],
)
def test_outputs_do_not_depend_on_chunks_batches_and_caches(
    load: Load, alone: list[list[int]], options: dict[str, Any], num_runs: int
) -> None:
    loaded = load(**options)
    exact = [replace(job, policy=None) for job in JOBS[:3]]
    expected = outputs_of([serve(load(), [job])[0] for job in exact])
    num_made = loaded.engine.scheduler.compressions.num_made
    for _ in range(num_runs):
        requests = serve(loaded, [*JOBS, *exact])
        assert outputs_of(requests) == [*alone, *expected]
    num_prefixes = len({each.token_id for request in requests for each in _chain_of(request)})
    assert loaded.engine.scheduler.compressions.num_made == num_made + num_prefixes


def test_pages_of_16_keep_whole_pages(load: Load) -> None:
    alone = [list(serve(load(page_size=16), [job])[0].output_ids) for job in JOBS]
    loaded = load(page_size=16, chunked_prefill_size=23)
    for _ in range(2):
        requests = serve(loaded, JOBS)
        assert outputs_of(requests) == alone
    assert any(request.compressed for request in requests)
    assert all(r.compressed is None or r.compressed.num_slots % 16 == 0 for r in requests)


@pytest.mark.parametrize("host", [0, 512])
def test_outputs_do_not_depend_on_preemption_and_eviction(
    load: Load, alone: list[list[int]], host: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prefixes are evicted before, and while, they are used, and made again."""
    loaded = load(
        max_total_tokens=140,
        chunked_prefill_size=32,
        host_kv_tokens=host,
        schedule_policy="program",
    )
    scheduler = loaded.engine.scheduler
    admit_all(monkeypatch, scheduler)
    # The working set has no room for who makes a prefix, at first.
    asked: Counter[int] = Counter()
    working_set = scheduler.working_set

    def is_welcome(request: Request) -> bool:
        asked[request.id] += 1
        is_late = asked[request.id] > 2 or not scheduler.running
        return request.compaction is None or is_late

    monkeypatch.setattr(working_set, "is_welcome", is_welcome)
    monkeypatch.setattr(working_set, "may_join", lambda request, num_missing: False)
    num_before, num_made = scheduler.stats.num_preemptions, scheduler.compressions.num_made
    for _ in range(3):
        assert outputs_of(serve(loaded, JOBS)) == alone
    assert scheduler.stats.num_preemptions > num_before
    assert scheduler.compressions.num_made > num_made + len(JOBS) * (not host)
    assert scheduler.compressions.num_held == 0
    loaded.engine.flush_cache()
    assert scheduler.kv_cache.num_free_pages == 140


def test_aborted_neighbours_leave_nothing_behind(load: Load, alone: list[list[int]]) -> None:
    loaded = load(chunked_prefill_size=8)
    for leaves in (1, 3, 6):
        left = [replace(job, leaves=leaves) for job in JOBS]
        requests = serve(loaded, [*left, *JOBS[:2]])
        assert outputs_of(requests[-2:]) == alone[:2]
        assert any(request.finish_reason is FinishReason.ABORT for request in requests)
        assert loaded.engine.scheduler.compressions.num_held == 0
        loaded.engine.flush_cache()
        kv_cache = loaded.engine.scheduler.kv_cache
        assert kv_cache.num_free_pages == kv_cache.num_pages


def test_a_long_stream_that_is_given_up_leaves_nothing_behind(load: Load) -> None:
    """Each prefix waits for the one before: a thousand of them."""
    loaded = load(max_model_len=64, max_total_tokens=100)
    prompt = tuple(index % 251 for index in range(5000))
    job = replace(GREEDY[0], prompt=prompt, policy=streaming(8, sinks=2))
    (left,) = serve(loaded, [replace(job, leaves=5)])
    assert left.finish_reason is FinishReason.ABORT
    assert not loaded.engine.has_work
    assert loaded.engine.scheduler.compressions.num_held == 0
    fails = replace(job, prompt=prompt[1:])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loaded.runner.steps, "submit", _fail)
        with pytest.raises(AssertionError, match="on purpose"):
            serve(loaded, [fails])
    assert loaded.engine.scheduler.compressions.num_held == 0
    loaded.engine.flush_cache()
    assert loaded.engine.scheduler.kv_cache.num_free_pages == 100


def _fail(plan: object) -> None:
    raise RuntimeError("on purpose")


def test_a_prefix_is_made_once_for_all_who_wait_for_it(load: Load) -> None:
    loaded = load()
    jobs = [replace(job, policy=SNAP) for job in (GREEDY[6], SAMPLED[6], GREEDY[6])]
    num_made = loaded.engine.scheduler.compressions.num_made
    requests = serve(loaded, jobs)
    assert loaded.engine.scheduler.compressions.num_made == num_made + 1
    assert sorted(request.num_to_compress > 0 for request in requests) == [False, False, True]


def test_kv_in_4_bits_is_kept_as_it_is(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, init_std=0.3, head_dim=32)
    for load in loading(tmp_path):
        loaded = load(kv_cache_dtype="int4", kernels="auto", dtype="float32")
        alone = [list(serve(loaded, [job])[0].output_ids) for job in JOBS[:3]]
        assert outputs_of(serve(loaded, JOBS[:3])) == alone


def test_kv_in_8_bits_and_adapters_are_kept_as_they_are(
    load: Load, checkpoint: Path, tmp_path: Path
) -> None:
    loaded = load(kv_cache_dtype="int8", kernels="auto", dtype="float32")
    alone = [list(serve(loaded, [job])[0].output_ids) for job in JOBS[:3]]
    assert outputs_of(serve(loaded, JOBS[:3])) == alone
    path = make_adapter(tmp_path / "first", checkpoint, ["q_proj", "v_proj"], rank=3, seed=1)
    adapted = load(lora_paths=(("first", path),))
    both = [JOBS[0], replace(JOBS[0], adapter="first")]
    base, other = outputs_of(serve(adapted, both))
    adapted.engine.flush_cache()
    assert outputs_of(serve(adapted, both[::-1])) == [other, base]
    assert base != other


def test_a_window_longer_than_a_chunk_is_refused(load: Load) -> None:
    loaded = load(chunked_prefill_size=5)
    with pytest.raises(InvalidRequest, match=r"kv_policy\.window.*at most 5"):
        loaded.context().compressed.of(array("i", range(90)), snapkv(0.5, window=8))
