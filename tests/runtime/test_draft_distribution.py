"""What is drawn behind drafts follows the model, and a draft is right as often as it is likely.

To draw, and to compare with a draft that is certain of its token, is the speculative sampling of
Leviathan et al. 2023 (arXiv:2211.17192): there a draft d counts with min(1, p(d) / 1), and else the
token comes from p without d, made to sum to 1. The model here says what `logit_bias` does.
"""

from __future__ import annotations

import random
from array import array
from collections import Counter
from collections.abc import Iterator, Sequence

import numpy as np
import pytest
from checkpoints import make_checkpoint
from exactness_jobs import Load, loading
from fakes import FakeListener
from scripted_drafters import speculate

from stemma.runtime.schedule.request import Request
from stemma.runtime.schedule.sampling_params import SamplingParams
from stemma.runtime.speculate.drafter import Draft, Subject

TOKENS = tuple(range(100, 108))  # all others are less likely than 1 in 10**12
OUTPUT_TOKENS = 125  # of a request: short ones, of which many share a step
LOGITS = (30.0, 29.6, 31.2, 28.0, 30.5, 29.0, 30.9, 27.5)


class Guesser:
    """Is certain of tokens that it takes at random, and counts what becomes of them."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self.num_verified, self.num_right = Counter[int](), Counter[int]()

    def open(self, subject: Subject) -> Guesser:
        return self

    def extend(self, tokens: Sequence[int]) -> None:
        pass

    def propose(self, room: int, tail: Sequence[int] = ()) -> Draft:
        tokens = tuple(self._rng.choices(TOKENS, k=min(room, 3)))
        return Draft(tokens, (0.9,) * len(tokens), "scripted")

    def note(self, draft: Draft, num_accepted: int) -> None:
        self.num_verified.update(draft.tokens[: num_accepted + 1])
        self.num_right.update(draft.tokens[:num_accepted])

    def close(self) -> None:
        pass


@pytest.fixture(scope="module")
def load(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Load]:
    """A model whose logits are all 0."""
    sizes = {"hidden_size": 16, "num_layers": 1, "num_heads": 2, "num_kv_heads": 1}
    folder = tmp_path_factory.mktemp("silent")
    yield from loading(make_checkpoint(folder, init_std=0.0, intermediate_size=16, **sizes))


@pytest.mark.parametrize("num_tokens", [16_000, pytest.param(400_000, marks=pytest.mark.slow)])
@pytest.mark.parametrize("temperature", [0.7, 1.0])
def test_draws_behind_drafts_follow_the_model(
    load: Load, temperature: float, num_tokens: int
) -> None:
    engine = load(kernels="cpu", dtype="float32", max_total_tokens=16_384).engine
    speculate(engine, guesser := Guesser(random.Random(0)))  # type: ignore[arg-type]
    num_requests = num_tokens // OUTPUT_TOKENS
    requests = [
        Request(
            engine.next_request_id(),
            array("i", (1, 2, 3)),
            SamplingParams(
                max_tokens=OUTPUT_TOKENS,
                temperature=temperature,
                seed=seed,
                logit_bias=tuple(zip(TOKENS, LOGITS)),
            ),
            FakeListener(),
        )
        for seed in range(num_requests)
    ]
    for request in requests:
        engine.submit(request)
    while engine.has_work:
        engine.step()
    weights = np.exp(np.array(LOGITS) / temperature)
    chances = weights / weights.sum()
    counts = Counter(token_id for request in requests for token_id in request.output_ids)
    assert counts.total() == num_requests * OUTPUT_TOKENS
    expected = chances * counts.total()
    drawn = np.array([counts[token_id] for token_id in TOKENS])
    freedom = len(TOKENS) - 1
    chi_square = ((drawn - expected) ** 2 / expected).sum()
    # Mean freedom, variance 2 freedom; five standard deviations with fixed seeds.
    assert chi_square < freedom + 5 * np.sqrt(2 * freedom), chi_square
    for token_id, chance in zip(TOKENS, chances):
        num = guesser.num_verified[token_id]
        share = guesser.num_right[token_id] / num
        assert abs(share - chance) < 5 * np.sqrt(chance * (1 - chance) / num), token_id
    assert guesser.num_verified.total() > num_tokens / 5
