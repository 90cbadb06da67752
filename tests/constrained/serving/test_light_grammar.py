"""Outputs that begin in the engine and go on in a process where they come to a limit."""

from __future__ import annotations

import json
from collections.abc import Iterator

import numpy as np
import pytest
from grammars import ids_of
from waiting import ready

from stemma.constrained import lazy
from stemma.constrained.compiler import compile_grammar
from stemma.constrained.serving import light_grammar
from stemma.constrained.serving.compiler_service import GrammarCompiler
from stemma.constrained.serving.follower import Follower
from stemma.constrained.serving.grammar_state import PendingGrammar
from stemma.constrained.serving.light_grammar import LightGrammar, LightOutput
from stemma.constrained.spec import GrammarSpec
from stemma.constrained.vocabulary import single_bytes
from stemma.errors import EngineError

BYTES = single_bytes()
HANG_TIMEOUT_S = 120.0
TREE = GrammarSpec(
    "json_schema",
    json.dumps(
        {
            "type": "object",
            "properties": {"name": {"type": "string"}, "parts": {"items": {"$ref": "#"}}},
            "required": ["name"],
        }
    ),
)
# A state of the text is a set of as many places as it has an `a` in the last 60.
HEAVY = GrammarSpec(
    "json_schema",
    json.dumps(
        {
            "type": "object",
            "properties": {
                "x": {"type": "string", "pattern": "^(a|b)*a(a|b){60}$"},
                "y": {"$ref": "#"},
            },
            "required": ["x"],
            "additionalProperties": False,
        }
    ),
)
HEAVY_TEXT = b'{"x":"a' + b"abbaab" * 10 + b'"}'
HEAVY_STEPS = 150  # enough for 30 of these characters (by experiment)
TEXT = b'{"name":"x","parts":[{"name":"","q":1},{"name":"yy"}],"more":{"a":[]}}'


@pytest.fixture
def compiler() -> Iterator[GrammarCompiler]:
    made = GrammarCompiler(single_bytes)
    yield made
    made.close()


def opened(compiler: GrammarCompiler, spec: GrammarSpec) -> PendingGrammar:
    pending = compiler.ask(spec)
    while not pending.is_done:
        collect(compiler)
    assert isinstance(pending.bound, LightGrammar), pending
    return pending


def collect(compiler: GrammarCompiler) -> None:
    assert ready([compiler], HANG_TIMEOUT_S)
    compiler.collect()


def settle(compiler: GrammarCompiler, output: Follower) -> None:
    while not output.is_ready:
        compiler.parsers.send()
        collect(compiler)


def allowed(output: Follower) -> set[int]:
    out = np.full(BYTES.num_words, 0xFFFFFFFF, np.uint32)
    output.mask(out)
    return ids_of(out)


def follows(compiler: GrammarCompiler, output: Follower, text: bytes, spec: GrammarSpec) -> None:
    """As a matcher here does, at each place."""
    here = PendingGrammar(bound=compile_grammar(spec).bind(BYTES)).follower(True, frozenset({255}))
    at = 0
    while at < len(text):
        settle(compiler, output)
        assert output.error is None and output.is_finished == here.is_finished
        assert list(output.forced_run()) == list(here.forced_run())
        tokens = output.forced_run() or [text[at]]
        if not output.forced_run():
            assert allowed(output) == allowed(here), text[:at]
        for token in tokens[: len(text) - at]:
            assert token == text[at]
            assert output.consume(token) and here.consume(token)
            settle(compiler, output)
            at += 1


def test_a_light_output_has_no_process(compiler: GrammarCompiler) -> None:
    output = opened(compiler, TREE).follower(True, frozenset({255}))
    follows(compiler, output, TEXT, TREE)
    assert output.is_local and allowed(output) == {255}
    assert len(compiler.parsers) == 0


@pytest.mark.parametrize("num_here", range(0, len(TEXT), 5))
def test_an_output_goes_on_elsewhere_from_any_place(
    compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch, num_here: int
) -> None:
    output = opened(compiler, TREE).follower(True, frozenset({255}))
    follows(compiler, output, TEXT[:num_here], TREE)
    assert isinstance(output, LightOutput)
    output._left_s, output._mask = -1.0, None
    assert not output.is_ready and not output.is_local
    settle(compiler, output)
    assert len(compiler.parsers) == 1
    rest = opened(compiler, TREE).follower(True, frozenset({255}))
    follows(compiler, rest, TEXT[:num_here], TREE)
    assert list(output.forced_run()) == list(rest.forced_run())
    assert output.forced_run() or allowed(output) == allowed(rest)
    for token in TEXT[num_here:]:
        assert output.consume(token)
        settle(compiler, output)
    assert allowed(output) == {255} and output.error is None


def test_a_call_that_takes_much_hands_over(
    compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(light_grammar, "FIRST_S", 60.0)  # steps are the limit
    monkeypatch.setattr(lazy, "LIGHT_STEPS", HEAVY_STEPS)
    output = opened(compiler, HEAVY).follower(True, frozenset({255}))
    follows(compiler, output, HEAVY_TEXT, HEAVY)
    assert not output.is_local and len(compiler.parsers) == 1
    assert output.error is None and allowed(output) == {255}


def test_outputs_of_a_grammar_share_its_process(
    compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(light_grammar, "FIRST_S", -1.0)
    grammar = opened(compiler, TREE)
    outputs = [grammar.follower(True, frozenset({255})) for _ in range(5)]
    assert not any(output.is_ready for output in outputs)
    outputs.pop().close()  # while it waits
    for output in outputs:
        settle(compiler, output)
    late = grammar.follower(True, frozenset({255}))
    for output in [*outputs, late]:
        follows(compiler, output, TEXT, TREE)
        assert not output.is_local
    assert len(compiler.parsers) == 1


def test_a_fork_goes_its_own_way(
    compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    output = opened(compiler, TREE).follower(True, frozenset({255}))
    follows(compiler, output, TEXT[:20], TREE)
    settle(compiler, output)
    other = output.fork()
    assert isinstance(other, LightOutput)
    other._left_s, other._mask = -1.0, None
    settle(compiler, other)
    assert output.is_local and not other.is_local
    for token in TEXT[20:]:
        for one in (output, other):
            assert one.consume(token)
            settle(compiler, one)
    assert allowed(output) == allowed(other) == {255}


def test_without_a_process_it_is_the_outputs_error(
    compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    grammar = opened(compiler, TREE)
    assert isinstance(grammar.bound, LightGrammar)
    monkeypatch.setattr(grammar.bound, "_open", lambda _, on_open: on_open(EngineError("no room")))
    first, second = (grammar.follower(True, frozenset()) for _ in range(2))
    assert isinstance(first, LightOutput)
    first._left_s = -1.0
    assert first.is_ready is True and first.error == "no room" and allowed(first) == set()
    assert second.is_ready and second.error is None
    first.close()


def test_a_look_ahead_that_takes_much_changes_nothing(
    compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(light_grammar, "FIRST_S", 60.0)
    monkeypatch.setattr(lazy, "LIGHT_STEPS", HEAVY_STEPS)
    output = opened(compiler, HEAVY).follower(True, frozenset({255}))
    begun, rest = HEAVY_TEXT[:10], HEAVY_TEXT[10:]
    follows(compiler, output, begun, HEAVY)
    before = allowed(output)
    ahead = output.look_ahead()
    assert ahead is not None
    num_seen = 0
    for token in rest:
        if not ahead.consume(token):
            break
        allowed(ahead)
        num_seen += 1
    ahead.close()
    assert num_seen < len(rest), "it comes to the limit"
    assert allowed(output) == before
    for token in rest:
        settle(compiler, output)
        assert output.consume(token)
    settle(compiler, output)
    assert allowed(output) == {255} and output.error is None
