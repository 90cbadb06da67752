"""Small vocabularies, random expressions and JSON grammars, and a slow reference for masks."""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np
from hypothesis import strategies as st

from stemma.constrained.grammar import (
    And,
    Chars,
    Concat,
    Expression,
    Grammar,
    Literal,
    Not,
    Ref,
    Repeat,
    alt,
    concat,
    optional,
    repeat,
)
from stemma.constrained.matcher import Mask, Matcher
from stemma.constrained.regular.dfa import DEAD, Dfa
from stemma.constrained.vocabulary import Vocabulary

ALPHABET = 'ab"\\:{é東\n'
ANY = Chars(((0, 0xD7FF), (0xE000, 0x10FFFF)))
PLAIN = Chars(((0x20, 0x21), (0x23, 0x5B), (0x5D, 0xD7FF), (0xE000, 0x10FFFF)))
DIGIT = Chars(((0x30, 0x39),))
STRING = concat(Literal('"'), repeat(alt(PLAIN, Literal('\\"'), Literal("\\n")), 0), Literal('"'))
NUMBER = concat(optional(Literal("-")), alt(Literal("0"), repeat(DIGIT, 1)))


def greedy_encode(token_bytes: Sequence[bytes | None], text: str) -> list[int]:
    """The longest token at every position, the lowest id among equal ones."""
    ids: dict[bytes, int] = {}
    for token, data in reversed(list(enumerate(token_bytes))):
        if data:
            ids[data] = token
    longest = max(map(len, ids))
    data, at, encoded = text.encode(), 0, []
    while at < len(data):
        end = next(e for e in range(min(len(data), at + longest), at, -1) if data[at:e] in ids)
        encoded.append(ids[data[at:end]])
        at = end
    return encoded


def vocabulary_of(tokens: Sequence[bytes | None], padding: int = 0) -> Vocabulary:
    return Vocabulary(
        tokens, lambda text: greedy_encode(tokens, text), len(tokens) + padding, 64 * 1024
    )


SINGLE_BYTES = vocabulary_of([bytes([i]) for i in range(256)])


@st.composite
def vocabularies(draw: st.DrawFn) -> Vocabulary:
    """All single bytes and some longer tokens: pieces of characters, doubles, ids that write
    nothing."""
    pieces = st.sampled_from([*(c.encode() for c in ALPHABET), b"\xe6", b"\x9d\xb1", b"aab", b'":'])
    long = draw(st.lists(st.lists(pieces, min_size=1, max_size=5).map(b"".join), max_size=40))
    tokens = [*(bytes([i]) for i in range(256)), *long, None, b"", *long[:3]]
    draw(st.randoms(use_true_random=False)).shuffle(tokens)
    return vocabulary_of(tokens, draw(st.integers(0, 40)))


def expressions() -> st.SearchStrategy[Expression]:
    """Regular expressions over a few characters."""
    characters = st.sampled_from(ALPHABET)
    leaves = st.one_of(
        st.text(ALPHABET, max_size=3).map(Literal),
        characters.map(lambda c: Chars(((ord(c), ord(c)),))),
        st.sampled_from([ANY, PLAIN, DIGIT, Chars(((0x80, 0xD7FF), (0xE000, 0xFFFF)))]),
    )

    def combined(parts: st.SearchStrategy[Expression]) -> st.SearchStrategy[Expression]:
        few = st.lists(parts, min_size=2, max_size=3)
        bounds = st.tuples(st.integers(0, 2), st.none() | st.integers(2, 4))
        return st.one_of(
            few.map(lambda p: Concat(tuple(p))),
            few.map(lambda p: alt(*p)),
            st.builds(lambda p, b: Repeat(p, *b), parts, bounds),
            st.tuples(parts, parts).map(lambda p: And((p[0], Not(p[1])))),
        )

    return st.recursive(leaves, combined, max_leaves=8)


def json_grammars() -> st.SearchStrategy[Grammar]:
    """Grammars of JSON texts, without recursion, with rules and with blanks here and there."""
    blank = repeat(Chars(((0x0A, 0x0A), (0x20, 0x20))), 0, 3)
    leaves = st.sampled_from(
        [
            STRING, NUMBER, Literal("true"), alt(Literal('"a"'), Literal('"ab"'), Literal("1")),
            concat(Literal('"'), repeat(PLAIN, 1, 3), Literal('"')),
            And((STRING, Not(concat(Literal('"a'), repeat(PLAIN, 0), Literal('"'))))),
            Ref("shared"),
        ]
    )  # fmt: skip

    def combined(parts: st.SearchStrategy[Expression]) -> st.SearchStrategy[Expression]:
        few = st.lists(parts, min_size=1, max_size=3)
        return st.one_of(few.map(_object), few.map(_array), few.map(lambda p: alt(*p)))

    def _object(values: list[Expression]) -> Expression:
        members = [concat(Literal(f'"{"ab"[i % 2]}{i}":'), blank, v) for i, v in enumerate(values)]
        more = [optional(concat(Literal(","), member)) for member in members[1:]]
        return concat(Literal("{"), members[0], *more, blank, Literal("}"))

    def _array(values: list[Expression]) -> Expression:
        value = alt(*values)
        items = concat(value, repeat(concat(blank, Literal(","), blank, value), 0, 3))
        return concat(Literal("["), optional(items), Literal("]"))

    rules = {"shared": concat(Literal('{"k":"'), repeat(PLAIN, 0), Literal('"}'))}
    return st.recursive(leaves, combined, max_leaves=5).map(
        lambda root: Grammar({"root": root, **rules})
    )


def ids_of(mask: Mask) -> set[int]:
    return set(np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist())


def allowed(matcher: Matcher, vocabulary: Vocabulary) -> set[int]:
    out = np.full(vocabulary.num_words, 0xFFFFFFFF, np.uint32)
    matcher.mask(out)
    return ids_of(out)


def alive_tokens(dfa: Dfa, state: int, vocabulary: Vocabulary) -> set[int]:
    """The allowed tokens, tested token by token, byte by byte."""
    return {
        token
        for token, data in enumerate(vocabulary.token_bytes)
        if data and dfa.walk(state, data) != DEAD
    }


def random_walk(
    matcher: Matcher, vocabulary: Vocabulary, seed: int, max_tokens: int = 12
) -> list[int]:
    """Tokens of a random walk through the matcher, picked from its masks."""
    picks = random.Random(seed)
    taken: list[int] = []
    while len(taken) < max_tokens and not matcher.is_finished():
        choices = sorted(allowed(matcher, vocabulary))
        if not choices:  # what could follow matches nothing, which a parser need not see
            assert matcher.is_accepting(), "it leads nowhere"
            break
        token = picks.choice(choices)
        assert matcher.consume(token)
        taken.append(token)
    return taken


def written(vocabulary: Vocabulary, tokens: Sequence[int]) -> bytes:
    return b"".join(vocabulary.token_bytes[token] for token in tokens)
