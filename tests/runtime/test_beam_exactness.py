"""Beam search is that of transformers: in float64 the hypotheses of `generate(num_beams=k)`, in its
order, with its scores, for random models, prompts and parameters; and the same under grammars,
chunked prefill, any page size, preemption, overlap and beside other requests."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from beam_requests import BeamListener, submit_beam
from checkpoints import BYTE_VOCAB_SIZE, EOS_ID, make_checkpoint
from engine_harness import hope
from fakes import make_request

from stemma.constrained.compiler import compile_grammar
from stemma.constrained.serving.grammar_state import GrammarState, PendingGrammar
from stemma.constrained.spec import GrammarSpec
from stemma.constrained.vocabulary import single_bytes
from stemma.runtime.config import EngineConfig
from stemma.runtime.execute.model_runner import ModelRunner
from stemma.runtime.loaded_model import LoadedModel
from stemma.runtime.schedule.beam_search import BeamParams
from stemma.runtime.schedule.sampling_params import SamplingParams

Hypotheses = list[tuple[list[int], float]]

GRAMMARS = [
    PendingGrammar(bound=compile_grammar(spec).bind(single_bytes(BYTE_VOCAB_SIZE)))
    for spec in (
        GrammarSpec("regex", r"(ab|a|bb|cab)( [a-d]{1,3}){1,3}"),
        GrammarSpec("choices", '["north east","north west","southern","no","none","east"]'),
        GrammarSpec("regex", r"\{\"id\":[0-9]{1,4}\}|[^\n]{2,9}\n"),
    )
]


@pytest.fixture(scope="module", params=range(3))
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    seed: int = request.param
    return make_checkpoint(
        tmp_path_factory.mktemp(f"beams{seed}"), init_std=(0.1, 0.2, 0.3)[seed], seed=seed
    )


@pytest.fixture(scope="module")
def reference(folder: Path) -> Callable[..., Hypotheses]:
    """The hypotheses that transformers returns, without what pads them."""
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
    model.generation_config = transformers.GenerationConfig()

    def generate(
        prompt: Sequence[int], params: BeamParams, eos: Sequence[int], **options: Any
    ) -> Hypotheses:
        answer = model.generate(
            torch.tensor([prompt]),
            num_beams=params.width,
            num_return_sequences=params.width,
            length_penalty=params.length_penalty,
            early_stopping=params.early_stopping,
            do_sample=False,
            eos_token_id=list(eos),
            pad_token_id=eos[0],
            return_dict_in_generate=True,
            output_scores=True,
            **options,
        )
        found = zip(answer.sequences[:, len(prompt) :].tolist(), answer.sequences_scores.tolist())
        return [(_until(ids, eos), score) for ids, score in found if score > -1e6]

    return generate


@pytest.fixture(scope="module")
def load(folder: Path) -> Iterator[Callable[..., LoadedModel]]:
    loaded: dict[tuple[tuple[str, object], ...], LoadedModel] = {}

    def load_once(**options: Any) -> LoadedModel:
        options = {
            "dtype": "float64", "kernels": "reference", "max_total_tokens": 2048, **options
        }  # fmt: skip
        key = tuple(sorted(options.items()))
        if key not in loaded:
            has_overlap = options.pop("has_overlap", False)
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(ModelRunner, "can_overlap", has_overlap)
                loaded[key] = LoadedModel(EngineConfig(model=folder, num_threads=1, **options))
        loaded[key].engine.flush_cache()
        return loaded[key]

    yield load_once


def _until(token_ids: list[int], eos: Sequence[int]) -> list[int]:
    ends = [i for i, token_id in enumerate(token_ids) if token_id in eos]
    return token_ids[: ends[0]] if ends else token_ids


def _serve(loaded: LoadedModel, *found: BeamListener) -> list[Hypotheses]:
    while loaded.engine.has_work:
        loaded.engine.step()
        loaded.engine.scheduler.check()
    assert all(each.leader.error is None for each in found), found[0].leader.error
    return [[(ids, score) for ids, score, _ in each.outputs] for each in found]


def _assert_same(found: Hypotheses, expected: Hypotheses) -> None:
    assert [ids for ids, _ in found] == [ids for ids, _ in expected]
    # transformers adds up log-probabilities in float32, whatever the model's dtype is.
    assert [score for _, score in found] == pytest.approx([s for _, s in expected], rel=2e-5)


def _case(rng: random.Random) -> tuple[list[int], BeamParams, int, tuple[int, ...]]:
    """Prompt, parameters, max_tokens and stop tokens; these are bytes, too, so that they come."""
    prompt = [rng.randrange(256) for _ in range(rng.randint(1, 40))]
    params = BeamParams(
        rng.randint(2, 6),
        rng.choice((0.0, 0.5, 1.0, 1.0, 2.0, -1.0)),
        rng.choice((True, False, "never")),
    )
    num_stops = rng.choice((0, 40, 120))
    return prompt, params, rng.randint(1, 16), (EOS_ID, *rng.sample(range(256), num_stops))


def test_hypotheses_are_those_of_transformers(
    load: Callable[..., LoadedModel], reference: Callable[..., Hypotheses]
) -> None:
    num_stopped = 0
    for seed in range(30):
        prompt, params, max_tokens, eos = _case(random.Random(seed))
        expected = reference(prompt, params, eos, max_new_tokens=max_tokens)
        loaded = load()
        sampling = SamplingParams(max_tokens=max_tokens)
        found = submit_beam(loaded.engine, prompt, params, sampling, stop_ids=frozenset(eos))
        _assert_same(_serve(loaded, found)[0], expected)
        num_stopped += sum(has_stopped for _, _, has_stopped in found.outputs)
    assert num_stopped > 20


def test_adjustments_act_on_log_probabilities_as_those_of_transformers_do(
    load: Callable[..., LoadedModel], reference: Callable[..., Hypotheses]
) -> None:
    num_changed = 0
    for seed in range(20):
        rng = random.Random(seed)
        prompt, params, _, eos = _case(rng)
        # NOTE: not all at once: transformers adds a bias before it multiplies by a penalty.
        sampling = (
            SamplingParams(max_tokens=10, min_tokens=rng.randint(3, 9)),
            SamplingParams(max_tokens=10, repetition_penalty=rng.choice((0.7, 1.5))),
            SamplingParams(max_tokens=10, logit_bias=((rng.randrange(256), 5.0), (81, -4.0))),
        )[seed % 3]
        bias = {(token_id,): value for token_id, value in sampling.logit_bias}
        expected = reference(
            prompt,
            params,
            eos,
            max_new_tokens=10,
            min_new_tokens=sampling.min_tokens or None,
            repetition_penalty=sampling.repetition_penalty,
            sequence_bias=bias or None,
        )
        loaded, stops = load(), frozenset(eos)
        found = submit_beam(loaded.engine, prompt, params, sampling, stop_ids=stops)
        plain = submit_beam(
            loaded.engine, prompt, params, SamplingParams(max_tokens=10), stop_ids=stops
        )
        ours, without = _serve(loaded, found, plain)
        _assert_same(ours, expected)
        num_changed += ours != without
    assert num_changed > 10


def test_hypotheses_under_a_grammar_are_those_of_transformers(
    load: Callable[..., LoadedModel], reference: Callable[..., Hypotheses]
) -> None:
    """There the grammar says which tokens may come next, and that a finished output has ended."""
    num_stopped = 0
    for seed in range(20):
        rng = random.Random(seed)
        prompt, params, max_tokens, _ = _case(rng)
        eos, pending = (EOS_ID,), rng.choice(GRAMMARS)
        follow = partial(_follow, pending, frozenset(eos), len(prompt))
        expected = reference(
            prompt,
            params,
            eos,
            max_new_tokens=max_tokens,
            prefix_allowed_tokens_fn=lambda _, ids, follow=follow: _allowed(follow(ids)),
            stopping_criteria=[_EndsWithGrammar(follow)],
        )
        loaded = load()
        found = submit_beam(
            loaded.engine,
            prompt,
            params,
            SamplingParams(max_tokens=max_tokens),
            stop_ids=frozenset(eos),
            grammar=pending,
        )
        (ours,) = _serve(loaded, found)
        _assert_same(ours, expected[: len(ours)])
        assert len(ours) == params.width or len(ours) == len(expected)
        num_stopped += sum(has_stopped for _, _, has_stopped in found.outputs)
    assert num_stopped > 10


@pytest.mark.parametrize(
    ("page_size", "chunk", "num_tokens", "has_overlap"),
    [
        (1, 7, 2048, False), (1, 64, 64, True), (3, 5, 2048, True),
        (16, 16, 2048, True), (16, 64, 96, False),
    ],
)  # fmt: skip
def test_hypotheses_are_the_same_in_all_circumstances(
    load: Callable[..., LoadedModel],
    page_size: int,
    chunk: int,
    num_tokens: int,
    has_overlap: bool,
) -> None:
    rng = random.Random(page_size + chunk)
    cases = []
    for index in range(6):
        prompt, params, max_tokens, eos = _case(rng)
        grammar = None if index % 2 else GRAMMARS[index // 2]
        sampling = SamplingParams(
            max_tokens=max_tokens, repetition_penalty=rng.choice((1.0, 1.0, 1.3))
        )
        cases.append((prompt, params, sampling, frozenset(eos), grammar))
    alone = []
    for prompt, params, sampling, stops, grammar in cases:
        loaded = load()
        found = submit_beam(
            loaded.engine, prompt, params, sampling, stop_ids=stops, grammar=grammar
        )
        alone += _serve(loaded, found)
    options: dict[str, Any] = {"page_size": page_size, "max_total_tokens": num_tokens}
    loaded = load(
        chunked_prefill_size=chunk, max_running_requests=12, has_overlap=has_overlap, **options
    )
    engine = loaded.engine
    num_before = engine.scheduler.stats.num_preemptions
    hope(engine)
    searches = []
    for prompt, params, sampling, stops, grammar in cases:
        searches.append(
            submit_beam(engine, prompt, params, sampling, stop_ids=stops, grammar=grammar)
        )
        neighbour = make_request(engine.next_request_id(), prompt[:3], max_tokens=20)
        engine.submit(neighbour)
        engine.step()
        if rng.random() < 0.3:
            engine.abort(neighbour)
    together = _serve(loaded, *searches)
    for ours, expected in zip(together, alone, strict=True):
        assert [ids for ids, _ in ours] == [ids for ids, _ in expected]
        assert [s for _, s in ours] == pytest.approx([s for _, s in expected], rel=1e-9)
    if num_tokens < 2048:
        assert engine.scheduler.stats.num_preemptions > num_before


def _follow(
    pending: PendingGrammar, stop_ids: frozenset[int], num_prompt: int, token_ids: torch.Tensor
) -> GrammarState | None:
    """Where an output stands; None: it has ended, and is padded."""
    follower = pending.follower(False, stop_ids)
    assert isinstance(follower, GrammarState)
    mask = np.zeros(-(-BYTE_VOCAB_SIZE // 32), np.uint32)
    for token_id in token_ids[num_prompt:].tolist():
        follower.mask(mask)  # as before each draw: what is forced is forced from there on
        if token_id in stop_ids or follower.is_finished or not follower.consume(token_id):
            return None
    return follower


def _allowed(follower: GrammarState | None) -> list[int]:
    if follower is None:
        return [0]  # goes on as padding, which never ends
    mask = np.zeros(-(-BYTE_VOCAB_SIZE // 32), np.uint32)
    follower.mask(mask)
    bits: list[int] = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist()
    return bits


class _EndsWithGrammar:
    """A stopping criterion: the output is finished."""

    def __init__(self, follow: Callable[[torch.Tensor], GrammarState | None]) -> None:
        self._follow = follow

    def __call__(self, input_ids: torch.Tensor, scores: object, **kwargs: Any) -> torch.Tensor:
        states = [self._follow(ids) for ids in input_ids]
        return torch.tensor([state is not None and state.is_finished for state in states])
