"""Random schemas against jsonschema: what is accepted is valid, what is valid is accepted."""

from __future__ import annotations

import itertools
import json
import re
from decimal import Decimal, localcontext
from random import Random
from typing import Any

import jsonschema
import numpy as np
import numpy.typing as npt
import pytest
from canonical_json import in_decimals, spellings
from grammar_oracle import grammar_matches
from hypothesis import given, settings
from hypothesis import strategies as st
from random_schemas import random_instance, random_schema

from stemma.constrained.grammar import NOTHING, Grammar
from stemma.constrained.regular.build import TooManyStates, build_dfa
from stemma.constrained.regular.dfa import DEAD, Dfa
from stemma.constrained.schema.schema_grammar import SchemaGrammar, schema_grammar
from stemma.errors import InvalidGrammar, UnsupportedSchema

SEEDS = st.integers(0, 2**32)
MAX_INVALID_SPELLINGS = 20
MAX_WALK = 60  # bytes, after which a walk makes for an end
NO_DOCUMENT = SchemaGrammar(Grammar.of(NOTHING), (), False)

SCALAR = {"type": ["null", "boolean", "number", "string"]}
# Nested twice at most, so that the grammar is regular.
SHALLOW = {
    "$defs": {
        "scalar": SCALAR,
        "flat": {
            "items": {"$ref": "#/$defs/scalar"},
            "additionalProperties": {"$ref": "#/$defs/scalar"},
        },
    },
    "items": {"$ref": "#/$defs/flat"},
    "additionalProperties": {"$ref": "#/$defs/flat"},
}


def compiled(schema: Any) -> SchemaGrammar | None:
    """None: it is refused."""
    try:
        return schema_grammar(schema)
    except UnsupportedSchema:
        return None
    except InvalidGrammar as error:
        assert "matches no document" in str(error), schema
        return NO_DOCUMENT


def validator_of(schema: Any) -> Any:
    kind = jsonschema.Draft202012Validator
    return kind(in_decimals(schema), format_checker=kind.FORMAT_CHECKER)


def check_instances(seed: int) -> None:
    rng = Random(seed)
    schema = random_schema(rng)
    built = compiled(schema)
    if built is None:
        return
    validator = validator_of(schema)
    for _ in range(12):
        instance = random_instance(rng, 2)
        is_valid = validator.is_valid(in_decimals(instance))
        most = None if is_valid else MAX_INVALID_SPELLINGS
        texts = itertools.islice(spellings(instance), most)
        is_accepted = any(grammar_matches(built.grammar, text) for text in texts)
        assert is_accepted == is_valid, f"{json.dumps(schema)} on {json.dumps(instance)}"


def check_walks(seed: int) -> None:
    rng = Random(seed)
    schema = random_schema(rng)
    schema = {**SHALLOW, "allOf": [schema], "$defs": SHALLOW["$defs"] | definitions(schema)}
    built = compiled(schema)
    if built is None:
        return
    try:
        dfa = build_dfa(built.grammar, max_states=20_000)
    except TooManyStates:
        return
    validator = validator_of(schema)
    distance = distances(dfa)
    for _ in range(0 if dfa.is_empty else 6):
        text = random_text(dfa, distance, rng)
        if built.needs_unique_keys and has_key_twice(text):
            continue  # the matcher's part
        if re.search("[0-9][Ee]", text):
            continue  # 1e999999 is beyond the validator
        document = json.loads(text, parse_float=Decimal)
        with localcontext() as context:
            context.prec = 4 * MAX_WALK
            assert validator.is_valid(document), f"{json.dumps(schema)} makes {text}"


def definitions(schema: Any) -> dict[str, Any]:
    """Its `$defs`, which its references expect at the root."""
    found: dict[str, Any] = schema.get("$defs", {}) if isinstance(schema, dict) else {}
    return found


def has_key_twice(text: str) -> bool:
    found = []

    def pairs(members: list[tuple[str, Any]]) -> None:
        found.append(len(members) > len(dict(members)))

    json.loads(text, object_pairs_hook=pairs)
    return any(found)


def distances(dfa: Dfa) -> npt.NDArray[np.int64]:
    """Bytes from each state to an accepting one."""
    far = dfa.num_states + 1
    found = np.where(dfa.accepting, 0, far)
    while True:
        step = np.where(dfa.transitions == DEAD, far, found[dfa.transitions]).min(axis=1) + 1
        nearer = np.minimum(found, step)
        if (nearer == found).all():
            return found
        found = nearer


def random_text(dfa: Dfa, distance: npt.NDArray[np.int64], rng: Random) -> str:
    """A random walk; long ones take the shortest way to an end."""
    state, text = dfa.start, bytearray()
    while not dfa.accepting[state] or rng.random() < 0.5:
        classes = [c for c, to in enumerate(dfa.transitions[state]) if to != DEAD]
        if len(text) > MAX_WALK:
            classes = [c for c in classes if distance[dfa.transitions[state, c]] < distance[state]]
        if not classes:
            break
        chosen = rng.choice(classes)
        text.append(rng.choice(np.flatnonzero(dfa.class_of == chosen).tolist()))
        state = int(dfa.transitions[state, chosen])
    return text.decode()


@settings(max_examples=120, deadline=None)
@given(SEEDS)
def test_random_instances_are_accepted_exactly_where_they_are_valid(seed: int) -> None:
    check_instances(seed)


@settings(max_examples=50, deadline=None)
@given(SEEDS)
def test_random_walks_end_in_valid_documents(seed: int) -> None:
    check_walks(seed)


@pytest.mark.slow
@pytest.mark.parametrize("start", range(0, 5000, 500))
def test_many_random_schemas(start: int) -> None:
    for seed in range(start, start + 500):
        check_instances(seed)
        check_walks(seed)
