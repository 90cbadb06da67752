"""Models that two ranks hold say what they say on one: one of each way in which layers differ.

The ranks are threads here, which makes no difference to a model; in processes of their own they are
in test_divided_exactness.py and test_ranks.py.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from caches import own_cache
from checkpoints import make_checkpoint
from family_cases import CASES, VOCAB_SIZE
from gguf import GGMLQuantizationType as Kind
from gguf_files import write_gguf
from mixtures import make_mixture
from ranks import ThreadCommunicator, on_grid, on_ranks
from step_plans import Feed, PlanDriver
from torch import Tensor

from stemma.errors import InvalidRequest
from stemma.runtime.checkpoint.gguf.convert import convert_gguf
from stemma.runtime.execute.model_runner import ModelRunner
from stemma.runtime.models.layers.expert_dispatch import SentExperts
from stemma.runtime.models.layers.expert_placement import ONE_GROUP, ExpertGroups
from stemma.runtime.models.layers.expert_share import OwnExperts, require_groups
from stemma.runtime.models.layers.ranks import Ranks, head_share
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


MIXTURES = [name for name in MODELS if "expert" in name]


def scores(
    folder: Path,
    row: ThreadCommunicator | None = None,
    expert_groups: ExpertGroups = ONE_GROUP,
    *,
    column: ThreadCommunicator | None = None,
    **options: Any,
) -> list[tuple[float, ...]]:
    """Log-probabilities of the prompts' tokens, computed together in two steps. row: ranks that
    divide layers; column: ranks that divide tokens."""
    ranks = Ranks(context=column, expert_groups=expert_groups)
    if row is not None:
        ranks = replace(ranks, rank=row.rank, num_ranks=row.num_ranks, communicator=row)
    runner = ModelRunner(
        folder,
        read_model_config(folder),
        dtype="float64",
        kernels="reference",
        num_pages=120,
        max_running_requests=4,
        num_state_checkpoints=2,
        ranks=ranks,
        **options,
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


# In which something else than full attention to all keys, or another state, meets divided tokens.
DIVIDED = {
    "windows, soft caps, two norms a block": _dense("gemma2"),
    "chunks": _mixture("Llama4"),
    "one block a layer, recurrent layers": _mixture("NemotronH"),
}


@pytest.mark.parametrize("num_ranks", [2, 3])
@pytest.mark.parametrize("name", [*MODELS, *WHOLE_ATTENTION, *DIVIDED])
def test_log_probabilities_are_those_of_one_rank_where_ranks_divide_tokens_and_kv(
    name: str, num_ranks: int, tmp_path: Path
) -> None:
    """53 tokens and 18 in a step, which three ranks share unevenly; pages lie anywhere."""
    (MODELS | WHOLE_ATTENTION | DIVIDED)[name](tmp_path)
    whole = scores(tmp_path)
    for of_rank in on_ranks(num_ranks, lambda ranks: scores(tmp_path, column=ranks)):
        for found, expected in zip(of_rank, whole, strict=True):
            assert found == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize(
    ("family", "options", "why"),
    [
        ("DeepseekV32", {}, "whose layers select keys"),
        (
            "Qwen3Next",
            {"num_adapter_slots": 1, "max_adapter_rank": 4},
            "whose layers are recurrent",
        ),
    ],
)
def test_what_cannot_be_computed_of_divided_tokens_is_refused(
    family: str, options: dict[str, int], why: str, tmp_path: Path
) -> None:
    make_mixture(tmp_path, family)

    def run(communicator: ThreadCommunicator) -> None:
        with pytest.raises(InvalidRequest, match=rf"cp_size > 1 is not allowed: .*{why}"):
            scores(tmp_path, column=communicator, **options)

    on_ranks(2, run)


@pytest.mark.parametrize("num_ranks", [2, 4])
@pytest.mark.parametrize("name", MIXTURES)
def test_log_probabilities_are_those_of_one_rank_where_ranks_have_other_experts(
    name: str, num_ranks: int, tmp_path: Path
) -> None:
    """Of four ranks two have the same experts, of which each computes a part."""
    MODELS[name](tmp_path)
    whole = scores(tmp_path)
    for of_rank in on_ranks(num_ranks, lambda ranks: scores(tmp_path, ranks, ExpertGroups(2))):
        for found, expected in zip(of_rank, whole, strict=True):
            assert found == pytest.approx(expected, abs=1e-9)


@pytest.mark.parametrize("num_ranks", [2, 4])
@pytest.mark.parametrize("name", MIXTURES)
def test_log_probabilities_are_those_of_one_rank_where_hot_experts_have_copies(
    name: str, num_ranks: int, tmp_path: Path
) -> None:
    MODELS[name](tmp_path)
    experts = read_model_config(tmp_path).experts
    assert experts is not None
    counts = [100, *range(experts.num_experts - 1)]
    groups = ExpertGroups(2, 1, dict.fromkeys(experts.layers, counts))
    placement = groups.placement(experts.layers[0], experts.num_experts)
    assert set(placement[0]) & set(placement[1])
    whole = scores(tmp_path)
    for of_rank in on_ranks(num_ranks, lambda ranks: scores(tmp_path, ranks, groups)):
        for found, expected in zip(of_rank, whole, strict=True):
            assert found == pytest.approx(expected, abs=1e-9)


@pytest.mark.parametrize(("num_ranks", "num_extra"), [(2, 0), (2, 1), (4, 0)])
@pytest.mark.parametrize("name", MIXTURES)
def test_log_probabilities_are_those_of_one_rank_where_tokens_are_sent_to_their_experts(
    name: str, num_ranks: int, num_extra: int, tmp_path: Path
) -> None:
    """Ranks divide the tokens; of four ranks two have the same experts."""
    MODELS[name](tmp_path)
    experts = read_model_config(tmp_path).experts
    assert experts is not None
    counts = [100, *range(experts.num_experts - 1)]
    groups = ExpertGroups(2, num_extra, dict.fromkeys(experts.layers, counts))
    whole = scores(tmp_path)
    for of_rank in on_ranks(
        num_ranks, lambda ranks: scores(tmp_path, expert_groups=groups, column=ranks)
    ):
        for found, expected in zip(of_rank, whole, strict=True):
            assert found == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_a_rank_that_is_sent_a_single_token_computes_it(dtype: torch.dtype) -> None:
    """Whose bytes begin anywhere: three choices of 4 bytes are before weights of 8."""

    def own(x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        return (x[:, None] * (ids >= 0)[..., None] * weights[..., None]).sum(1).to(x.dtype)

    def run(ranks: ThreadCommunicator) -> Tensor:
        x = torch.full((1, 3), 1.0 + ranks.rank, dtype=dtype)
        ids = torch.tensor([[0, 1, 2]]) + 3 * (1 - ranks.rank)  # all of them the other's
        weights = torch.tensor([[1.0, 2.0, 4.0]], dtype=torch.float64)
        return SentExperts(own, 3, ranks)(x, ids, weights)

    assert [found.tolist() for found in on_ranks(2, run)] == [[[7.0] * 3], [[14.0] * 3]]


SMALL = {"experts too small to be cut": _mixture("DeepseekV3", moe_intermediate_size=1)}


@pytest.mark.parametrize(
    ("name", "num_groups"),
    [
        *((name, 1) for name in (MODELS | WHOLE_ATTENTION | DIVIDED)),
        *((name, 2) for name in (*MIXTURES, *SMALL)),
    ],
)
def test_log_probabilities_are_those_of_one_rank_where_layers_and_tokens_are_divided(
    name: str, num_groups: int, tmp_path: Path
) -> None:
    """Two ranks of either kind; with groups, experts are divided and tokens are sent to them."""
    (MODELS | WHOLE_ATTENTION | DIVIDED | SMALL)[name](tmp_path)
    groups, whole = ExpertGroups(num_groups), scores(tmp_path)
    for of_rank in on_grid(2, 2, lambda row, column: scores(tmp_path, row, groups, column=column)):
        for found, expected in zip(of_rank, whole, strict=True):
            assert found == pytest.approx(expected, abs=1e-9)


@pytest.mark.parametrize(
    ("family", "num_ranks", "num_groups", "allowed"),
    [
        ("Mixtral", 8, 8, r"an integer in \[1, 4\], the experts that MixtralForCausalLM has"),
        ("NemotronH", 2, 2, "1: each rank computes all experts of NemotronHForCausalLM"),
        ("Gemma4", 2, 2, "1: Gemma4ForCausalLM has no experts to divide"),
        ("DeepseekV3", 64, 2, "1: 64 ranks are too many to divide the experts of Deepseek"),
    ],
)
def test_groups_that_would_have_no_experts_of_their_own_are_refused(
    family: str, num_ranks: int, num_groups: int, allowed: str, tmp_path: Path
) -> None:
    make_mixture(tmp_path, family)
    ranks = Ranks(num_ranks=num_ranks, expert_groups=ExpertGroups(num_groups))
    with pytest.raises(InvalidRequest, match=f"ep_size={num_groups} is not allowed.*{allowed}"):
        require_groups(read_model_config(tmp_path), ranks)


def test_a_rank_adds_what_its_experts_give_and_nothing_else() -> None:
    """Also where no token has chosen any of them."""

    def experts(x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        """Expert e multiplies by e + 2."""
        return (x[:, None] * (ids + 2)[..., None] * weights[..., None]).sum(1)

    x = torch.arange(1.0, 4.0)[:, None]
    weights = torch.tensor([[0.5, 0.5], [1.0, 2.0], [1.0, 1.0]])
    own = OwnExperts(experts)
    slots = torch.tensor([[-1, 5], [4, -1], [-1, -1]])
    assert own(x, slots, weights).tolist() == [[0.5 * 7], [2.0 * 6], [0.0]]
    assert own(x, torch.full((3, 2), -1), weights).sum() == 0


@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_weights_are_rounded_alike(quantization: str, tmp_path: Path) -> None:
    """The output projection is the embedding, and gets 8 bits."""
    make_checkpoint(tmp_path, has_tokenizer=False, tie_word_embeddings=True)
    whole = scores(tmp_path, quantization=quantization)
    for of_rank in on_ranks(2, lambda ranks: scores(tmp_path, ranks, quantization=quantization)):
        for found, expected in zip(of_rank, whole, strict=True):
            assert found == pytest.approx(expected, abs=1e-9)


@pytest.mark.parametrize("kind", [Kind.F16, Kind.Q4_0, Kind.Q8_0], ids=lambda kind: kind.name)
def test_gguf_files_are_divided(
    kind: Kind, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Queries and keys are in another order there; a tied embedding is packed as it is."""
    own_cache(monkeypatch, tmp_path / "cache")
    folder = make_checkpoint(tmp_path, tie_word_embeddings=True, hidden_size=128, num_heads=4)
    converted = convert_gguf(write_gguf(folder, tmp_path / "model.gguf", kind))
    whole = scores(converted)
    for of_rank in on_ranks(2, lambda ranks: scores(converted, ranks)):
        for found, expected in zip(of_rank, whole, strict=True):
            assert found == pytest.approx(expected, abs=1e-9)
