"""Exactness (see test_exactness.py) of draft models: outputs are those without any. A model that is
its own draft is always right, wherever its KV comes from: so the draft's KV is there, too."""

from __future__ import annotations

import math
import random
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from adapters import make_adapter
from checkpoints import make_checkpoint, make_long_token
from exactness_jobs import (
    GREEDY,
    JOBS,
    Job,
    Load,
    loading,
    outputs_of,
    said_alone,
    serve,
    truth,
    with_two_kinds_each,
)
from mixtures import make_mixture
from scripted_drafters import ScriptedDrafter, branching, speculate, verify_all

from stemma.errors import InvalidRequest
from stemma.runtime.config import EngineConfig
from stemma.runtime.loaded_model import LoadedModel
from stemma.runtime.schedule.plan import RowResult
from stemma.runtime.schedule.request import Request
from stemma.runtime.schedule.speculation import Speculation
from stemma.runtime.speculate.drafter import Draft, Side
from stemma.runtime.speculate.guesses import ModelDrafter, ModelText


@pytest.fixture(scope="module")
def load(checkpoint: Path) -> Iterator[Load]:
    yield from loading(checkpoint)


@pytest.fixture(scope="module")
def smaller(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of other shapes for the same tokens, and some more, which its output is padded by."""
    folder = tmp_path_factory.mktemp("draft")
    return make_checkpoint(
        folder, init_std=0.3, seed=3, num_layers=1, num_kv_heads=1, vocab_size=264
    )


@pytest.fixture(scope="module", params=JOBS)
def job_kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def jobs(job_kind: str) -> list[Job]:
    return JOBS[job_kind]


@pytest.fixture(scope="module")
def alone(checkpoint: Path, job_kind: str) -> list[list[int]]:
    return truth(checkpoint, job_kind)


@pytest.fixture(autouse=True)
def guesses_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever guesses cost: none at times, else as many as there is room for, or fewer."""
    rng = random.Random(4)

    def num_ahead(_: ModelDrafter, texts: list[Any], curve: Any, room: int, *__: Any) -> list[int]:
        return [rng.choice((0, rng.randrange(room + 1), room)) for _ in texts]

    monkeypatch.setattr(ModelDrafter, "num_ahead", num_ahead)
    monkeypatch.setattr(ModelDrafter, "pays", lambda *_: True)


def drafting(load: Load, **options: Any) -> LoadedModel:
    loaded = load(speculate="model,grammar", draft_candidates=2, **options)
    assert loaded.engine.scheduler.speculation is not None
    verify_all(loaded.engine.scheduler.speculation)
    return loaded


@pytest.fixture
def chains(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is guessed beside what is likeliest: all of it can be right."""
    monkeypatch.setattr(ModelDrafter, "num_beside", lambda _: 0)


def counts(loaded: LoadedModel) -> tuple[int, int]:
    """Tokens guessed, and those of them that were right."""
    stats = loaded.engine.scheduler.stats
    return stats.num_draft_tokens, stats.num_accepted_tokens


@with_two_kinds_each(
    "kind page_size chunk options",
    [
        ("itself", 1, 2048, {}),
        ("itself", 16, 23, {"host_kv_tokens": 512}),
        ("itself", 1, 32, {"max_total_tokens": 160}),
        ("smaller", 1, 7, {}),
        ("rounded", 1, 7, {"kernels": "cpu"}),
        ("layers", 1, 32, {"max_total_tokens": 160}),
    ],
)
def test_tokens_are_identical_with_a_draft_model(
    load: Load,
    checkpoint: Path,
    smaller: Path,
    jobs: list[Job],
    alone: list[list[int]],
    kind: str,
    page_size: int,
    chunk: int,
    options: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also beside requests that are aborted amid their guesses, and with too few pages for all."""
    draft: dict[str, Any] = {
        "itself": {"draft_model": str(checkpoint)},
        "smaller": {"draft_model": str(smaller)},
        "rounded": {"draft_model": str(checkpoint), "draft_quantization": "int4"},
        "layers": {"draft_layers": 1},
    }[kind]
    if kind == "itself":
        monkeypatch.setattr(ModelDrafter, "num_beside", lambda _: 0)
    loaded = drafting(load, page_size=page_size, chunked_prefill_size=chunk, **draft, **options)
    scheduler = loaded.engine.scheduler
    if "max_total_tokens" in options:
        monkeypatch.setattr(scheduler.admission, "_require_room", lambda *_: None)
    before = counts(loaded)
    leaving = [replace(job, arrives=i, leaves=i + 4) for i, job in enumerate(jobs)]
    for _ in range(2):  # the second time from the cache
        assert outputs_of(serve(loaded, [*jobs, *leaving]))[: len(jobs)] == alone
    drafted, accepted = (now - then for now, then in zip(counts(loaded), before))
    assert drafted > 0
    if kind == "itself" and jobs in (JOBS["greedy"], JOBS["sampled"]):
        assert accepted == drafted, "KV of the draft model is missing somewhere"
    elif kind == "rounded":
        assert accepted > 0


@with_two_kinds_each(
    "chunk options",
    [
        (2048, {}),
        (24, {"kernels": "cpu"}),
        (32, {"max_total_tokens": 160}),
    ],
)
def test_tokens_are_identical_whichever_branch_of_a_tree_is_right(
    load: Load,
    jobs: list[Job],
    alone: list[list[int]],
    chunk: int,
    options: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also beside requests that are aborted, with too few pages for all, and from what such steps
    have left in the cache."""
    loaded = load(speculate="model", draft_layers=1, chunked_prefill_size=chunk, **options)
    scheduler, stats = loaded.engine.scheduler, loaded.engine.scheduler.stats
    if "max_total_tokens" in options:
        monkeypatch.setattr(scheduler.admission, "_require_room", lambda *_: None)
    before = scheduler.speculation
    outputs = {job.prompt: output for job, output in zip(jobs, alone)}
    speculate(loaded.engine, ScriptedDrafter(outputs, branching(random.Random(chunk))))
    won: list[int] = []
    num_right: list[int] = []
    exchange, note = scheduler.kv_cache.exchange, Speculation.note

    def noted(
        speculation: Speculation, request: Request, follows: Sequence[int], num: int, is_over: bool
    ) -> None:
        num_right.append(num)
        note(speculation, request, follows, num, is_over)

    def exchanged(request: Request, pairs: Any, told: Any, first: int) -> None:
        assert pairs == told
        won.append(len(pairs))
        exchange(request, pairs, told, first)

    monkeypatch.setattr(scheduler.kv_cache, "exchange", exchanged)
    monkeypatch.setattr(Speculation, "note", noted)
    num_accepted = stats.num_accepted_tokens
    try:
        leaving = [replace(job, arrives=i, leaves=i + 4) for i, job in enumerate(jobs)]
        assert outputs_of(serve(loaded, [*jobs, *leaving]))[: len(jobs)] == alone
    finally:
        scheduler.speculation = before
    assert won, "no branch was verified"
    if jobs in (JOBS["greedy"], JOBS["sampled"]):
        later = followed(jobs, alone)
        assert outputs_of(serve(loaded, later)) == said_alone(load, later)
    assert 0 < stats.num_accepted_tokens < stats.num_draft_tokens
    if (
        jobs is not JOBS["constrained"]
    ):  # what is forced is not guessed, and a parser takes its time
        assert max(won) > 0, "no branch was ever right"
        assert stats.num_accepted_tokens - num_accepted == sum(num_right)


@pytest.mark.parametrize("kind", ["greedy", "sampled"])
def test_the_draft_models_kv_is_there_behind_branches(
    load: Load, checkpoint: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whose tokens its own guesses are, beside a wrong one."""
    propose, note = ModelText.propose, Speculation.note

    def turned(text: ModelText, room: int, tail: Sequence[int] = ()) -> Draft:
        draft = propose(text, room, tail)
        if not draft.tokens:
            return draft
        behind = (-1, *range(1, len(draft.tokens)))
        sides = map(Side, behind, draft.tokens, draft.confidences, draft.evidence)
        wrong = (draft.tokens[0] ^ 1,)
        return Draft(wrong, (0.9,), draft.source, draft.evidence[:1], tuple(sides))

    num_right: list[int] = []

    def noted(
        speculation: Speculation, request: Request, follows: Sequence[int], num: int, is_over: bool
    ) -> None:
        branches = speculation._verified[request].branches
        assert is_over or all(num == len(branch.path) for branch in branches)
        num_right.append(num)
        note(speculation, request, follows, num, is_over)

    monkeypatch.setattr(ModelText, "propose", turned)
    monkeypatch.setattr(Speculation, "note", noted)
    loaded = drafting(load, draft_model=str(checkpoint), chunked_prefill_size=90)
    assert outputs_of(serve(loaded, JOBS[kind])) == truth(checkpoint, kind)
    assert sum(num_right) > 20


def test_what_is_guessed_behind_a_side_is_what_the_draft_model_says_there(
    load: Load, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: dict[tuple[int, ...], int] = {}  # behind a text, and behind which it is said
    offer = Speculation.offer

    def noted(speculation: Speculation, request: Request, result: RowResult) -> None:
        num_own = len(result.ahead)
        paths = {-1: tuple(request.token_ids)}
        for place, own in enumerate(result.ahead):
            paths[place] = (*paths[place - 1], own.token_id)
        for number, side in enumerate(result.beside, num_own):
            paths[number] = (*paths[side.behind], side.token_id)
            if side.rank == 0:
                said[paths[side.behind]] = side.token_id
        offer(speculation, request, result)

    monkeypatch.setattr(Speculation, "offer", noted)
    monkeypatch.setattr("stemma.runtime.execute.candidates._LEAST_WORTH", -math.inf)
    loaded = drafting(load, draft_model=str(checkpoint))
    serve(loaded, JOBS["greedy"])
    assert len(said) > 10 and len({len(text) for text in said}) > 3
    sampling = replace(GREEDY[0].sampling, max_tokens=1)
    texts = list(said)[:20]
    later = serve(load(), [Job(text, sampling) for text in texts])
    assert outputs_of(later) == [[said[text]] for text in texts]


def followed(jobs: Sequence[Job], outputs: Sequence[Sequence[int]]) -> list[Job]:
    """Each job's output and a few tokens more: another turn of the same conversations."""
    return [
        replace(job, prompt=(*job.prompt, *output, 1, 2, 3)) for job, output in zip(jobs, outputs)
    ]


@pytest.mark.usefixtures("chains")
@pytest.mark.parametrize("kind", ["greedy", "sampled"])
def test_outputs_leave_the_draft_models_kv_for_the_next_turn(
    load: Load, checkpoint: Path, kind: str
) -> None:
    loaded = drafting(load, draft_model=str(checkpoint), page_size=1)
    jobs = JOBS[kind]
    first = outputs_of(serve(loaded, jobs))
    computed = loaded.engine.scheduler.stats.num_computed_tokens
    before = counts(loaded)
    later = followed(jobs, first)
    assert outputs_of(serve(loaded, later)) == said_alone(load, later)
    drafted, accepted = (now - then for now, then in zip(counts(loaded), before))
    assert drafted == accepted > 0
    computed = loaded.engine.scheduler.stats.num_computed_tokens - computed
    assert computed < sum(len(job.prompt) for job in later) / 2


@pytest.mark.usefixtures("chains")
def test_a_restart_finds_the_draft_models_kv_on_disk(
    load: Load, checkpoint: Path, tmp_path: Path
) -> None:
    """By which model drafted: without it, or with another, blocks are not taken."""
    rng = random.Random(2)
    (job,) = [replace(JOBS["greedy"][0], prompt=tuple(rng.randrange(256) for _ in range(600)))]
    (alone,) = said_alone(load, [job])
    found = []
    drafts = {"draft_model": str(checkpoint)}
    rounded = {**drafts, "draft_quantization": "int8"}
    for number, draft in enumerate((drafts, drafts, rounded)):
        loaded = drafting(load, kv_store=tmp_path / "store", grammar_timeout=10 + number, **draft)
        (request,) = serve(loaded, [job])
        assert list(request.output_ids) == alone
        found.append(request.num_disk_tokens)
        drafted, accepted = counts(loaded)
        assert 0 < drafted == accepted or draft is rounded
        store = loaded.engine.kv_store
        assert store is not None and store.flush(30.0)
        store.close()
    assert found == [0, 512, 0]


@with_two_kinds_each(
    "page_size chunk options",
    [
        (1, 2048, {}),
        (16, 23, {"host_kv_tokens": 512}),
        (1, 32, {"max_total_tokens": 160}),
    ],
)
def test_tokens_are_identical_where_the_draft_model_follows_some_requests_only(
    load: Load,
    checkpoint: Path,
    jobs: list[Job],
    alone: list[list[int]],
    page_size: int,
    chunk: int,
    options: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Some from their beginning, some never, some up to a step of their output, whose prefixes
    others have."""
    rng = random.Random(page_size + chunk)
    monkeypatch.setattr(ModelDrafter, "follows", lambda *_, **__: rng.random() < 0.6)
    monkeypatch.setattr(ModelText, "is_worth_following", lambda *_: rng.random() < 0.8)
    draft = {"draft_model": str(checkpoint)}
    loaded = drafting(load, page_size=page_size, chunked_prefill_size=chunk, **draft, **options)
    scheduler = loaded.engine.scheduler
    if "max_total_tokens" in options:
        monkeypatch.setattr(scheduler.admission, "_require_room", lambda *_: None)
    before = counts(loaded)
    for _ in range(3):
        leaving = [replace(job, arrives=i, leaves=i + 4) for i, job in enumerate(jobs)]
        assert outputs_of(serve(loaded, [*jobs, *leaving]))[: len(jobs)] == alone
    drafted, accepted = (now - then for now, then in zip(counts(loaded), before))
    assert 0 < accepted <= drafted or jobs is JOBS["constrained"]


@pytest.mark.parametrize(("page_size", "num_missing"), [(1, 40), (1, 1), (16, 48), (16, 20)])
@pytest.mark.parametrize("tier", ["pool", "host"])
def test_behind_a_prefix_that_was_not_followed_a_draft_model_sees_what_is_behind_that(
    load: Load,
    checkpoint: Path,
    page_size: int,
    num_missing: int,
    tier: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A request whose cached prefix has a part without the draft model's KV is guessed for as if
    its text began behind that part."""
    follow: list[bool] = []
    offered: dict[int, list[int]] = {}  # first, by request
    offer = Speculation.offer

    def noted(speculation: Speculation, request: Request, result: RowResult) -> None:
        offered.setdefault(request.id, [guess.token_id for guess in result.ahead])
        offer(speculation, request, result)

    monkeypatch.setattr(Speculation, "offer", noted)
    monkeypatch.setattr(ModelDrafter, "follows", lambda *_, **__: follow.pop(0))
    monkeypatch.setattr(ModelDrafter, "num_ahead", lambda _, texts, *__: [3] * len(texts))
    monkeypatch.setattr(ModelDrafter, "num_beside", lambda _: 0)
    rng = random.Random(num_missing + page_size)
    text = tuple(rng.randrange(256) for _ in range(num_missing + 70))
    sampling = replace(GREEDY[0].sampling, max_tokens=8)
    options: dict[str, Any] = {}
    if tier == "host":
        options = {"max_total_tokens": 160, "host_kv_tokens": 2048}
    loaded = drafting(
        load, draft_model=str(checkpoint), page_size=page_size, speculative_num_tokens=3, **options
    )
    parts = (num_missing, num_missing + 35, len(text))
    for is_followed, end in zip((False, True, True), parts, strict=True):
        follow[:] = [is_followed, True]
        (request,) = serve(loaded, [Job(text[:end], sampling)])
        if tier == "host":
            serve(loaded, [Job(tuple(rng.randrange(256) for _ in range(140)), sampling)])
    assert request.num_cached_tokens >= parts[1] - page_size
    assert (request.num_host_tokens > 0) == (tier == "host")
    first = num_missing // page_size * page_size
    drawn = request.output_ids[0]
    behind = Job((*text[first:], drawn), replace(sampling, max_tokens=3))
    assert offered[request.id] == said_alone(load, [behind])[0]
    assert list(request.output_ids) == said_alone(load, [Job(text, sampling)])[0]


def test_adapters_are_guessed_for_by_the_plain_draft_model(
    load: Load, checkpoint: Path, tmp_path: Path
) -> None:
    paths = tuple(
        (name, make_adapter(tmp_path / name, checkpoint, seed=i, std=0.05))
        for i, name in enumerate(("first", "second"))
    )
    names = (None, "first", "second")
    jobs = [replace(job, adapter=name) for job, name in zip(JOBS["sampled"], names * 3)]
    plain = load(lora_paths=paths)
    alone = [outputs_of(serve(plain, [job]))[0] for job in jobs]
    loaded = drafting(load, draft_model=str(checkpoint), lora_paths=paths, chunked_prefill_size=19)
    assert outputs_of(serve(loaded, jobs)) == alone
    drafted, accepted = counts(loaded)
    assert 0 < accepted <= drafted


@pytest.mark.parametrize(
    ("options", "answer"),
    [
        ({"draft_layers": 2}, "fewer than the model's 2 layers"),
        ({"draft_layers": 1, "tp_size": 2}, "draft_layers=1 .* none with tp_size > 1"),
        ({"draft_layers": 1, "speculate": "suffix"}, "auto, or model among others"),
        ({"speculate": "model"}, "unless draft_model or draft_layers is set"),
        ({"draft_quantization": "int4"}, "none without draft_model"),
        ({"draft_model": ""}, "a checkpoint's PATH, mtp, or left out"),
        ({"draft_model": "somewhere", "draft_layers": 1}, "0 with draft_model"),
        ({"draft_layers": 1, "speculative_num_tokens": 0}, "at least 1 with draft_layers"),
        ({"draft_model": "another"}, "token 259 is .* there and '<xxxxxx>' in the draft model"),
    ],
    ids=str,
)
def test_what_cannot_draft_is_refused_with_the_reason(
    checkpoint: Path, tmp_path: Path, options: dict[str, Any], answer: str
) -> None:
    if options.get("draft_model") == "another":
        other = shutil.copytree(checkpoint, tmp_path / "another")
        make_long_token(other, 8)
        options = {"draft_model": str(other)}
    with pytest.raises(InvalidRequest, match=answer):
        LoadedModel(EngineConfig(model=checkpoint, **options))


@pytest.mark.parametrize("family", ["Lfm2", "DeepseekV3", "Mixtral"])
def test_models_of_other_kinds_are_drafted_for_and_draft(
    smaller: Path, tmp_path: Path, family: str
) -> None:
    """States are drafted for; latents, and experts, also draft for themselves."""
    is_recurrent = family == "Lfm2"
    folder = tmp_path / "model"
    if is_recurrent:
        types = ["conv", "full_attention", "conv"]
        make_checkpoint(folder, "lfm2", num_layers=3, layer_types=types, init_std=0.3, seed=11)
    else:
        make_mixture(folder, family, has_tokenizer=True, seed=5)
    draft = {"draft_model": str(smaller if is_recurrent else folder)}
    for load in loading(folder):
        alone = said_alone(load, JOBS["greedy"])
        loaded = drafting(load, page_size=16, chunked_prefill_size=23, **draft)
        for _ in range(2):
            assert outputs_of(serve(loaded, JOBS["greedy"])) == alone
        drafted, accepted = counts(loaded)
        assert drafted > 0 and (is_recurrent or accepted == drafted)
