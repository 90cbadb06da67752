"""Models that two ranks hold say what they say on one: one of each way in which layers differ.

The ranks are threads here, which makes no difference to a model; in processes of their own they are
in test_tensor_exactness.py and test_ranks.py.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from checkpoints import make_checkpoint
from family_cases import CASES, VOCAB_SIZE
from mixtures import make_mixture
from ranks import ThreadCommunicator, on_ranks
from step_plans import Feed, PlanDriver

from stemma.runtime.execute.model_runner import ModelRunner
from stemma.runtime.models.layers.ranks import ALONE, Ranks, head_share
from stemma.runtime.models.model_config import read_model_config

PROMPTS = [[(7 * i + 3) % 100 for i in range(33)], [(11 * i + 5) % 100 for i in range(20)]]


def _dense(architecture: str, **options: object) -> Callable[[Path], object]:
    case = CASES.get(architecture)
    fields = {**(case.options if case is not None else {}), **options}
    kind = architecture if case is None else case.architecture
    return lambda folder: make_checkpoint(
        folder, kind, vocab_size=VOCAB_SIZE, has_tokenizer=False, **fields
    )


def _mixture(family: str, **options: object) -> Callable[[Path], object]:
    return lambda folder: make_mixture(folder, family, **options)


MODELS = {
    "biases": _dense("llama"),
    "one KV head for both ranks": _dense("qwen3", num_kv_heads=1),
    "projections in one tensor": _dense("phi3"),
    "norms of each head, one stream": _dense("cohere"),
    "no gates, a bias of logits": _dense("phi"),
    "experts": _mixture("Mixtral"),
    "experts in one tensor, biases, sinks": _mixture("GptOss"),
    "latent attention, a shared expert": _mixture("DeepseekV3"),
    "gated attention, recurrent layers, a gated shared expert": _mixture("Qwen3Next"),
}
# Of which each rank computes attention as a whole.
WHOLE_ATTENTION = {
    "one norm of all heads": _dense("olmo2"),
    "layers that share KV": _mixture("Gemma3n"),
}


def scores(folder: Path, communicator: ThreadCommunicator | None = None) -> list[tuple[float, ...]]:
    """Log-probabilities of the prompts' tokens, computed together in two steps."""
    ranks = ALONE
    if communicator is not None:
        ranks = Ranks(communicator.rank, communicator.num_ranks, communicator)
    runner = ModelRunner(
        folder,
        read_model_config(folder),
        dtype="float64",
        kernels="reference",
        num_pages=120,
        max_running_requests=4,
        num_state_checkpoints=2,
        ranks=ranks,
    )
    driver = PlanDriver(runner)
    sequences = [driver.sequence() for _ in PROMPTS]
    for own in (slice(0, 9), slice(9, None)):
        rows = driver.step(
            [Feed(sequences[i], prompt[own], is_scored=True) for i, prompt in enumerate(PROMPTS)]
        )
    return [row.target_logprobs for row in rows]


@pytest.mark.parametrize("name", [*MODELS, *WHOLE_ATTENTION])
def test_log_probabilities_are_those_of_one_rank(name: str, tmp_path: Path) -> None:
    (MODELS | WHOLE_ATTENTION)[name](tmp_path)
    share = head_share(read_model_config(tmp_path), Ranks(0, 2))
    assert share.is_divided == (name in MODELS)
    whole = scores(tmp_path)
    for of_rank in on_ranks(2, lambda communicator: scores(tmp_path, communicator)):
        for found, expected in zip(of_rank, whole, strict=True):
            assert found == pytest.approx(expected, abs=1e-9)
