"""Calls under schemas on a whole engine with drafts, many at once, some of them given up."""

from __future__ import annotations

import json
from dataclasses import dataclass
from random import Random
from typing import Any

import jsonschema
import pytest
from engine_thread import serving

import stemma as st
from stemma.bench.speculation.conversations import conversations
from stemma.frontend.dsl.function import Function
from stemma.runtime.checkpoint.location import EMBEDDED_MODEL

TREE = {
    "$ref": "#/$defs/node",
    "$defs": {
        "node": {
            "type": "object",
            "properties": {
                "name": {"enum": ["root", "leaf", "branch"]},
                "size": {"type": "integer"},
                "below": {"type": "array", "items": {"$ref": "#/$defs/node"}},
            },
            "required": ["name", "size", "below"],
            "additionalProperties": False,
        }
    },
}


@st.function
def _tree(s: st.ProgramState, seed: int, temperature: float = 0.8) -> None:
    s += st.user("Draw a tree as JSON.")
    s += st.assistant(
        st.gen("tree", max_tokens=60, temperature=temperature, seed=seed, json_schema=TREE)
    )


@dataclass(frozen=True)
class Work:
    """A program and its arguments; `schemas`: of its replies, by name."""

    program: Function
    arguments: dict[str, Any]
    schemas: dict[str, Any]


def _works() -> list[Work]:
    found = [Work(_tree, {"seed": seed}, {"tree": TREE}) for seed in range(20)]
    cases = conversations()
    for case in (*cases["extract"], *cases["extract_many"]):
        schemas = {
            f"reply{turn}": limits["json_schema"]
            for turn, limits in enumerate(case.limits)
            if "json_schema" in limits
        }
        found.append(Work(case.program, {"case": case}, schemas))
    return found


@pytest.mark.parametrize("num_documents", [60, pytest.param(2000, marks=pytest.mark.slow)])
def test_every_document_that_ends_is_valid(num_documents: int) -> None:
    """In a pool in which few of them fit at once; what is given up leaves nothing."""
    rng, num_valid, num_given_up, works = Random(0), 0, 0, _works()
    options = {"dtype": "auto", "kernels": "auto", "max_model_len": None}
    with serving(EMBEDDED_MODEL, speculate="auto", max_total_tokens=4096, **options) as backend:
        while num_valid < num_documents:
            chosen = rng.choices(works, k=rng.randint(1, 12))
            states = [
                work.program.stream(
                    **work.arguments, temperature=rng.choice((0.0, 0.7)), backend=backend
                )
                for work in chosen
            ]
            for work, state in zip(chosen, states, strict=True):
                if rng.random() < 0.1:
                    num_given_up += 1
                    next(state.text_iter(), None)
                    state.cancel()
                else:
                    num_valid += _num_valid(work, state)
        counts = backend.get_server_info()["stats"]
    assert counts["num_accepted_tokens"] > num_documents and num_given_up


def _num_valid(work: Work, state: st.ProgramState) -> int:
    """Documents that ended by themselves, all of them valid."""
    num_valid = 0
    for name, schema in work.schemas.items():
        if state.get_meta_info(name)["finish_reason"] != "length":
            jsonschema.validate(json.loads(state[name]), schema)
            num_valid += 1
    return num_valid


def test_drafts_under_a_grammar_that_a_process_follows_change_nothing() -> None:
    """In float64, in which rounding decides nothing; in the second round all has been said."""
    said = {}
    for speculate in ("off", "auto"):
        with serving(EMBEDDED_MODEL, speculate=speculate, max_model_len=512) as backend:
            said[speculate] = [
                [
                    state["tree"]
                    for state in _tree.run_batch([{"seed": i} for i in range(4)], backend=backend)
                ]
                for _ in range(3)
            ]
            counts = backend.get_server_info()["stats"]
            paths = backend.get_server_info()["grammars"]
    assert said["auto"] == said["off"]
    assert counts["num_accepted_tokens"] > 20, paths
