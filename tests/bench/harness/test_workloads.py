"""Workloads: the definitions token by token, their rotation, and the exchange form."""

from __future__ import annotations

import hashlib
import json

import pytest
from hypothesis import given
from hypothesis import strategies as strategy

import stemma as st
from stemma.bench.harness.workloads import DEFINITIONS, PromptBook, Workload, make_workload

# Of the JSON form without its description; made by another program from the same definitions.
DIGESTS = {
    "W1": "7c6f7b9a8604f3d4",
    "W2": "6f63ff5236b2c557",
    "W3": "cf43e263938a6532",
    "W4": "4a5a305c05a3f9d8",
    "W5": "5dec88d09d163cc6",
    "W6": "fe8e8bad003bf40e",
    "D1": "a1d781c32db2defb",
    "D32": "ea3acaee442fe723",
    "P1": "1a6b10ee78e9c159",
}


@pytest.mark.parametrize("name", DIGESTS)
def test_a_workload_has_the_tokens_of_its_definition(name: str) -> None:
    fields = json.loads(make_workload(name).to_json())
    del fields["description"]
    digest = hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()
    assert digest[:16] == DIGESTS[name]


def test_names_and_aliases_mean_the_same() -> None:
    for known in DEFINITIONS:
        assert make_workload(known.alias) == make_workload(known.name)
    with pytest.raises(st.InvalidRequest, match=r"work='W9'.*W1 \(fanout\)"):
        make_workload("W9")


@given(strategy.sampled_from(["W2", "W4", "P1"]), strategy.integers(1, 1000))
def test_a_rotation_keeps_the_structure_and_changes_the_tokens(name: str, repeat: int) -> None:
    plain = make_workload(name, vocab=1000)
    turned = plain.rotated(repeat)
    moved: dict[int, int] = {}
    for before, after in zip(plain.requests, turned.requests, strict=True):
        assert (before.id, before.parent, before.max_tokens) == (
            after.id, after.parent, after.max_tokens,
        )  # fmt: skip
        for old, new in zip(before.tokens, after.tokens, strict=True):
            assert moved.setdefault(old, new) == new and new < 1000
            assert (old == new) == (old < plain.low or repeat * 7919 % 700 == 0)
    assert len(set(moved.values())) == len(moved)


def test_the_exchange_form_is_read_back_as_it_was() -> None:
    for known in DEFINITIONS:
        made = make_workload(known.name, scale=0.05)
        assert Workload.from_json(made.to_json()) == made


def test_a_prompt_is_all_that_came_before_it() -> None:
    tree, book = make_workload("W4"), PromptBook()
    for stage in tree.stages():
        for item in stage:
            book.prompt(item)
            book.outputs[item.id] = [item.id] * item.max_tokens
    leaf = tree.requests[-1]
    assert leaf.parent is not None
    parent = book.prompts[leaf.parent]
    assert book.prompts[leaf.id] == [*parent, *[leaf.parent] * 32, *leaf.tokens]
    assert len(book.prompts[leaf.id]) + leaf.max_tokens == tree.num_tokens() == 688


def test_uneven_workloads_have_little_and_much_of_everything() -> None:
    for name in ("U1", "U2", "U3", "U4"):
        work = make_workload(name)
        for lengths in (
            [len(item.tokens) for item in work.requests],
            [item.max_tokens for item in work.requests],
        ):
            assert 3 * min(lengths) <= max(lengths), name
        assert work.num_tokens() <= 2048, name
    by_parent = make_workload("U4").children()
    numbers = {len(by_parent.get(item.id, [])) for item in make_workload("U4").requests}
    assert {0, 1, 2} <= numbers
    turns = {item.stage for item in make_workload("U2").requests}
    assert max(turns) >= 4 and len(make_workload("U2").stages()[-1]) < 8
    assert len(make_workload("U3", scale=0.25).requests) == 12
