"""Stacks of experts as places of their own."""

from __future__ import annotations

from stemma.runtime.checkpoint.safetensors.safetensors_header import Place
from stemma.runtime.checkpoint.safetensors.stacked_experts import can_unstack, unstacked


def test_a_stack_is_cut_into_gates_ups_and_downs() -> None:
    places = {
        "a.experts.gate_up_proj": Place("BF16", (3, 4, 5), 100, 120),
        "a.experts.down_proj": Place("F32", (3, 5, 2), 220, 120),
    }
    parts = unstacked(places)
    assert parts["a.experts.gate_up_proj"] == {
        f"a.experts.{expert}.{name}_proj.weight": Place("BF16", (2, 5), start, 20)
        for expert, name, start in (
            (0, "gate", 100), (0, "up", 120), (1, "gate", 140), (1, "up", 160), (2, "gate", 180),
            (2, "up", 200),
        )
    }  # fmt: skip
    downs = parts["a.experts.down_proj"]
    assert [place.start for place in downs.values()] == [220, 260, 300]
    assert {(place.shape, place.num_bytes) for place in downs.values()} == {((5, 2), 40)}


def test_what_is_no_stack_stays_as_it_is() -> None:
    for name, shape, size in (
        ("a.shared_mlp.input_linear.weight", (4, 5), 40),  # of one expert
        ("a.experts.gate_up_proj", (3, 5, 2), 60),  # no two halves
        ("a.experts.gate_up_proj", (1 << 40, 0, 2), 0),  # a header may say anything
        ("a.experts.gate_up_proj", (1 << 20, 2, 1), 1 << 22),
        ("a.experts_gate", (3, 4, 5), 120),
    ):
        assert not unstacked({name: Place("BF16", shape, 0, size)}), name


def test_stacks_of_experts_with_biases_are_not_cut() -> None:
    """gpt-oss lays them out the other way round."""
    stack = "model.layers.0.mlp.experts.gate_up_proj"
    assert can_unstack([stack]) and not can_unstack([stack, f"{stack}_bias"])
