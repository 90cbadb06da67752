"""Forced tokens: allowed, canonical, and held back while anything could change them."""

from __future__ import annotations

import json
import random

import pytest
from grammars import SINGLE_BYTES, allowed, expressions, random_walk, vocabularies, vocabulary_of
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from stemma.constrained import jump_forward
from stemma.constrained.compiler import compile_grammar
from stemma.constrained.fsm import FsmGrammar
from stemma.constrained.grammar import Expression, Grammar
from stemma.constrained.jump_forward import whole_characters
from stemma.constrained.lark import regular_to_lark
from stemma.constrained.pushdown import PushdownGrammar
from stemma.constrained.regular.build import build_dfa
from stemma.constrained.regular.regex_parser import parse_regex
from stemma.constrained.spec import GrammarSpec
from stemma.constrained.vocabulary import Vocabulary

WORDS = [
    "",
    "the",
    "Bob",
    "new york",
    " lead",
    "#1",
    "/path",
    "ünïcode",
    "東京",
    ":",
    ",",
    "'s",
    "3",
]
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "created_at": {"type": "string"},
        "count": {"type": "integer"},
        "is_active": {"type": "boolean"},
        "colour": {"enum": ["red", "green", "dark-red"]},
        "tags": {"type": "array", "items": {"type": "string"}},
    },
    "additionalProperties": False,
}
SCHEMA["required"] = list(SCHEMA["properties"])  # type: ignore[call-overload]


def fsm(pattern: str, vocabulary: Vocabulary) -> FsmGrammar:
    expression = parse_regex(pattern, dialect="python", anchored=True)
    return FsmGrammar(build_dfa(Grammar.of(expression)), vocabulary)


def document(picks: random.Random) -> str:
    values = {
        "name": " ".join(picks.choices(WORDS, k=picks.randrange(3))),
        "created_at": picks.choice(WORDS),
        "count": picks.randrange(-20, 2000),
        "is_active": picks.random() < 0.5,
        "colour": picks.choice(["red", "green", "dark-red"]),
        "tags": picks.choices(WORDS, k=picks.randrange(3)),
    }
    return json.dumps(values, separators=(",", ":"), ensure_ascii=False)


@pytest.fixture(scope="module")
def bpe() -> Vocabulary:
    """Byte-level BPE, trained on documents such as those that are written with it."""
    picks = random.Random(1)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=600,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator((document(picks) for _ in range(300)), trainer)
    byte_of = {c: b for b, c in enumerate(byte_characters())}
    ids = sorted(tokenizer.get_vocab().items(), key=lambda item: item[1])
    tokens = [bytes(byte_of[c] for c in text) for text, _ in ids]
    return Vocabulary(tokens, lambda text: tokenizer.encode(text).ids, len(tokens))


def byte_characters() -> list[str]:
    """GPT-2's characters for the 256 bytes."""
    shown = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = iter(range(256, 512))
    return [chr(b) if b in shown else chr(next(others)) for b in range(256)]


def test_forced_tokens_are_those_of_the_whole_text(bpe: Vocabulary) -> None:
    """Whatever the text: an output that is canonical stays canonical through every forced run."""
    grammar = compile_grammar(GrammarSpec("json_schema", json.dumps(SCHEMA))).bind(bpe)
    assert grammar.path == "fsm"
    picks = random.Random(2)
    num_forced = num_tokens = 0
    for _ in range(60):
        canonical = list(bpe.encode(document(picks)))
        matcher, at = grammar.matcher(), 0
        while at < len(canonical):
            forced = list(matcher.forced_tokens())
            assert canonical[at : at + len(forced)] == forced
            num_forced += len(forced)
            taken = forced or canonical[at : at + 1]
            assert all(matcher.consume(token) for token in taken)
            at += len(taken)
        assert matcher.is_finished()
        num_tokens += len(canonical)
    assert num_forced / num_tokens > 0.3


@settings(max_examples=60, deadline=None)
@given(expressions(), vocabularies(), st.integers(0, 2**32), st.booleans())
def test_a_forced_run_is_allowed_token_by_token(
    expression: Expression, vocabulary: Vocabulary, seed: int, is_fsm: bool
) -> None:
    grammar = Grammar.of(expression)
    dfa = build_dfa(grammar)
    if dfa.is_empty:
        return
    bound = (
        FsmGrammar(dfa, vocabulary)
        if is_fsm
        else PushdownGrammar(regular_to_lark(grammar), vocabulary)
    )
    matcher = bound.matcher()
    for token in [None, *random_walk(bound.matcher(), vocabulary, seed, max_tokens=5)]:
        assert token is None or matcher.consume(token)
        forced = matcher.forced_tokens()
        assert not (forced and matcher.is_accepting())
        for one in forced:
            assert one in allowed(matcher, vocabulary) and matcher.consume(one)
        matcher.rollback(len(forced))


def test_what_an_allowed_token_could_continue_is_held_back() -> None:
    vocabulary = vocabulary_of([*(bytes([i]) for i in range(256)), b"ab", b"bc", b'":', b'""'])
    assert fsm("ab(c|d)", vocabulary).matcher().forced_tokens() == ()  # a bc, or ab d
    assert fsm("xab(d|e)", vocabulary).matcher().forced_tokens() == (ord("x"), 256)
    assert fsm("xab", vocabulary).matcher().forced_tokens() == (ord("x"), 256)
    assert fsm('a":"[a-z]*"', vocabulary).matcher().forced_tokens() == (ord("a"), 258)
    assert fsm('a":"[a-z]+"', vocabulary).matcher().forced_tokens() == (ord("a"), 258, ord('"'))


def test_the_left_context_decides_how_forced_text_is_cut() -> None:
    tokens = [*(bytes([i]) for i in range(256)), b"ab", b"cab"]
    vocabulary = Vocabulary(tokens, encode_in_context, len(tokens))
    matcher = fsm("[cx]ab", vocabulary).matcher()
    assert matcher.consume(ord("x"))
    assert matcher.forced_tokens() == (256,)  # after x
    matcher.rollback(1)
    assert matcher.consume(ord("y")) is False and matcher.consume(ord("c"))
    assert matcher.forced_tokens() == (256,)  # c alone would be cut otherwise: ab on its own


def encode_in_context(text: str) -> list[int]:
    """The pair ab is one token, and so is cab."""
    merged = text.replace("cab", chr(257)).replace("ab", chr(256))
    return [ord(character) for character in merged]


def test_nothing_is_forced_where_the_text_may_end() -> None:
    assert fsm("a(bc)?", SINGLE_BYTES).matcher().forced_tokens() == (ord("a"),)
    matcher = fsm("a(bc)?", SINGLE_BYTES).matcher()
    assert matcher.consume(ord("a")) and matcher.forced_tokens() == ()


def test_forced_bytes_are_cut_to_whole_characters() -> None:
    assert whole_characters("a東".encode()) == "a東"
    assert whole_characters("a東".encode()[:-1]) == "a"
    assert whole_characters(b"\x9d\xb1") is None
    vocabulary = vocabulary_of([bytes([i]) for i in range(256)])
    assert fsm("a(東|柱)", vocabulary).matcher().forced_tokens() in ((ord("a"),), (ord("a"), 0xE6))


def test_a_long_forced_text_comes_in_runs() -> None:
    matcher = fsm("a{3000}", SINGLE_BYTES).matcher()
    while forced := matcher.forced_tokens():
        assert len(forced) <= 1024
        assert all(matcher.consume(token) for token in forced)
    assert matcher.is_finished()


def test_cached_runs_are_bounded_in_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jump_forward, "MAX_CACHED_BYTES", 20_000)
    forced = jump_forward.ForcedTokens(SINGLE_BYTES)
    for place in range(200):
        run = forced.after((), b"x" * 50, place, lambda rest: False)
        assert len(run) == 50 and 0 < forced.num_bytes <= 20_000
    assert forced.after((), b"x" * 50, 3, lambda rest: False) == run
