"""How experts are chosen: the reference against the papers' words, the GPU's kernel against it."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from stemma.kernels.model_options import RoutingOptions
from stemma.kernels.reference.experts import route_experts as reference
from stemma.kernels.triton.routing import route_experts as on_a_gpu

NAN = float("nan")


@st.composite
def routings(draw: st.DrawFn) -> tuple[RoutingOptions, int]:
    """Options and a number of experts that has room for them."""
    num_groups = draw(st.sampled_from([1, 1, 2, 3, 8]))
    group_size = draw(st.integers(2, 9))
    num_chosen_groups = draw(st.integers(1, num_groups))
    options = RoutingOptions(
        num_chosen=draw(st.integers(1, min(8, num_chosen_groups * group_size))),
        scoring=draw(st.sampled_from(["softmax", "sigmoid"])),
        is_normalized=draw(st.booleans()),
        weight_factor=draw(st.sampled_from([1.0, 2.5])),
        num_groups=num_groups,
        num_chosen_groups=num_chosen_groups,
        group_rank=draw(st.sampled_from(["best", "best_two"])),
    )
    return options, num_groups * group_size


@settings(max_examples=25, deadline=None)
@given(routings(), st.booleans(), st.integers(0, 2**31))
def test_the_kernel_chooses_as_the_reference_does(
    routing: tuple[RoutingOptions, int], has_bias: bool, seed: int
) -> None:
    options, num_experts = routing
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(2, num_experts, generator=generator) * 3
    bias = torch.randn(num_experts, generator=generator) + 15 if has_bias else None
    expected_ids, expected = reference(logits, bias, options)
    expert_ids, weights = on_a_gpu(logits, bias, options)
    assert expert_ids.tolist() == expected_ids.tolist()
    torch.testing.assert_close(weights, expected)


@pytest.mark.parametrize("num_tokens", [0, 3, 5])
def test_padding_gets_no_expert(num_tokens: int) -> None:
    options, logits = RoutingOptions(num_chosen=2, is_normalized=True), torch.randn(5, 4)
    expected_ids, expected = on_a_gpu(logits, None, options)
    logits[num_tokens:] = NAN
    for route in (on_a_gpu, reference):
        expert_ids, weights = route(logits, None, options, torch.tensor([num_tokens]).int())
        assert expert_ids[:num_tokens].equal(expected_ids[:num_tokens])
        torch.testing.assert_close(weights[:num_tokens], expected[:num_tokens])
        assert (expert_ids[num_tokens:] == -1).all() and not weights[num_tokens:].any()


@settings(max_examples=50, deadline=None)
@given(routings(), st.integers(0, 2**31))
def test_experts_are_the_best_of_the_best_groups(
    routing: tuple[RoutingOptions, int], seed: int
) -> None:
    options, num_experts = routing
    logits = torch.randn(1, num_experts, generator=torch.Generator().manual_seed(seed)).double()
    bias = torch.linspace(-0.3, 0.3, num_experts).double()
    expert_ids, weights = reference(logits, bias, options)
    scores = (logits.softmax(-1) if options.scoring == "softmax" else logits.sigmoid())[0]
    ranks = (scores + bias).tolist()
    size = num_experts // options.num_groups
    groups = [range(first, first + size) for first in range(0, num_experts, size)]
    num_best = 1 if options.group_rank == "best" else 2
    groups.sort(key=lambda ids: -sum(sorted(ranks[i] for i in ids)[-num_best:]))
    allowed = [i for ids in groups[: options.num_chosen_groups] for i in ids]
    best = sorted(allowed, key=lambda i: -ranks[i])[: options.num_chosen]
    assert expert_ids[0].tolist() == best
    chosen = scores[best] / (scores[best].sum() if options.is_normalized else 1)
    torch.testing.assert_close(weights[0], chosen * options.weight_factor)


@pytest.mark.filterwarnings("ignore:invalid value")  # numpy's, of the interpreter
@pytest.mark.parametrize("scoring", ["softmax", "sigmoid"])
def test_a_logit_that_is_not_a_number_is_chosen_first(scoring: str) -> None:
    for num_groups in (1, 3):
        options = RoutingOptions(
            2, scoring, True, 1.0, num_groups, 1, "best_two"  # type: ignore[arg-type]
        )  # fmt: skip
        logits = torch.randn(2, 9, generator=torch.Generator().manual_seed(0))
        logits[0, 4] = NAN
        expected_ids, expected = reference(logits, None, options)
        expert_ids, weights = on_a_gpu(logits, None, options)
        assert expert_ids.tolist() == expected_ids.tolist()
        assert weights[0].isnan().all() and expected[0].isnan().all()
        torch.testing.assert_close(weights[1], expected[1])


@pytest.mark.parametrize("route", [reference, on_a_gpu])
def test_of_equal_ranks_the_lower_id_wins(route: object) -> None:
    assert callable(route)
    options = RoutingOptions(3, num_groups=4, num_chosen_groups=2)
    expert_ids, weights = route(torch.zeros(2, 8), None, options)
    assert expert_ids.tolist() == [[0, 1, 2]] * 2
    torch.testing.assert_close(weights, torch.full((2, 3), 0.125))


@pytest.mark.filterwarnings("ignore:invalid value")  # numpy's, of the interpreter
@pytest.mark.parametrize("scoring", ["softmax", "sigmoid"])
@pytest.mark.parametrize("route", [reference, on_a_gpu])
def test_a_row_that_is_not_a_number_has_valid_experts_and_harms_no_other(
    route: object, scoring: str
) -> None:
    assert callable(route)
    options = RoutingOptions(2, scoring, True, 2.0, 2, 1)  # type: ignore[arg-type]
    logits = torch.randn(3, 6, generator=torch.Generator().manual_seed(0))
    expected_ids, expected = route(logits, None, options)
    logits[1] = NAN
    expert_ids, weights = route(logits, None, options)
    assert int(expert_ids.min()) >= 0 and int(expert_ids.max()) < 6
    assert weights[1].isnan().all()
    assert torch.equal(expert_ids[::2], expected_ids[::2])
    assert torch.equal(weights[::2], expected[::2])
