"""Automata and masks against two libraries of others: interegular and outlines-core.

Regexes are in the part of Python's dialect that all sides read alike:

- backslash-d, -w and -s are of ASCII in interegular, so ours has `(?a)` beside it. They are of
  another version of Unicode in outlines-core, which also counts marks as letters of words: there
  they are spelled out. `.` is all but a newline everywhere.
- A bracket that begins a class is escaped: interegular takes it for the class's end.
- Anchors: interegular refuses `^` and `$`, outlines-core `^`; a whole text is meant without them.
- The flag i is left out: interegular takes `str.upper` and `lower`, which miss the Kelvin sign
  beside k.
- outlines-core stops at the first alternative that matches, as a search does (`a|ab` never writes
  "ab"). A newline at the end, which nothing else in these regexes matches, keeps all of them
  alive; there it allows the newline where ours may end.
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Iterator
from typing import cast

import interegular
import numpy as np
import numpy.typing as npt
import outlines_core
import pytest
from grammars import ids_of, vocabulary_of
from hypothesis import given, settings
from hypothesis import strategies as st
from interegular.fsm import FSM

from stemma.constrained.compiler import compile_grammar
from stemma.constrained.fsm import FsmGrammar
from stemma.constrained.grammar import Grammar
from stemma.constrained.regular.build import build_dfa
from stemma.constrained.regular.dfa import DEAD, Dfa
from stemma.constrained.regular.regex_parser import parse_regex
from stemma.constrained.spec import GrammarSpec

# Both sides read these alike: no \d, \w, \s, anchors, flags.
REGEXES = [
    r"[0-9]{4}-(0[1-9]|1[0-2])-(0[1-9]|[12][0-9]|3[01])",
    r"([01][0-9]|2[0-3]):[0-5][0-9](:[0-5][0-9](\.[0-9]{1,6})?)?(Z|[+-][0-9]{2}:[0-9]{2})?",
    r"[A-Za-z0-9._%+-]+@([A-Za-z0-9-]+\.)+[A-Za-z]{2,6}",
    r"https?://[a-z0-9.-]+(:[0-9]{1,5})?(/[a-z0-9._~%-]*)*(\?[a-z0-9=&]*)?(#[a-z0-9]*)?",
    r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?",
    r"[+-]?[0-9]{1,3}(,[0-9]{3})*",
    r'"([^"\\\x00-\x1f\x7f]|\\["\\/bfnrt]|\\u[0-9a-fA-F]{4})*"',
    r'"[^"\\\n]{0,5}"',
    r'\{"name":"[a-z]{1,8}","age":(0|[1-9][0-9]{0,2}),"tags":\[("[a-z]+"(,"[a-z]+"){0,2})?\]\}',
    r"red|green|blue|greenish|gre|re",
    r'"(low|medium|high)"|null',
    r"[0-9a-f]{8}-[0-9a-f]{4}-[1-5][0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}",
    r"(25[0-5]|2[0-4][0-9]|1?[0-9]{1,2})(\.(25[0-5]|2[0-4][0-9]|1?[0-9]{1,2})){3}",
    r"#([0-9A-Fa-f]{3}){1,2}",
    r"((a|b)((c|d)(e|f)?)*){1,3}",
    r"(((a{2}){2}|b){2}|c)+",
    r"(a|b)*a(a|b){4}",
    r"(a|ab)(c|bcd)(d*)",
    r"[a-cx-z]?[^a-z\n]{2,3}",
    r"[\]a-]{1,2}[^\]a\n]",
    r"naïve|東京(都|タワー)?|😀+|[à-ü]{1,2}|[ぁ-ん]{2}",
    r".{2}é|..😀.?",
    r"(yes|no)(, (yes|no)){0,3}\.",
    r"(|a)(|b)(|c)",
    r"(?:)",
]  # fmt: skip
NAMED_CLASSES = [
    r"\d{3}-\d{4}", r"\w+\s?=\s?\w+", r"[\w.-]+@\w+", r"\D\d|\W\w|\S\s", r"[^\d\s]{2}",
    r"\t\x41\.\\\-",
]  # fmt: skip


# -- languages, against interegular


@functools.cache
def utf8_of_all() -> npt.NDArray[np.int16]:
    """[num scalars, 4]: the bytes of every Unicode character; 256 where it has fewer."""
    scalars = np.r_[0:0xD800, 0xE000:0x110000]
    data = np.frombuffer("".join(map(chr, scalars)).encode(), np.uint8)
    lengths = np.searchsorted([0x80, 0x800, 0x10000], scalars, side="right") + 1
    table = np.full((len(scalars), 4), 256, np.int16)
    table[np.arange(4) < lengths[:, None]] = data
    return table


def representatives(dfa: Dfa, fsm: FSM) -> list[str]:
    """One of every set of characters that neither automaton tells apart in any state."""
    classes = np.append(dfa.class_of.astype(np.int64), 256)[utf8_of_all()]
    keys: npt.NDArray[np.int64] = classes @ np.array([512**i for i in range(4)])
    listed = [c for c in fsm.alphabet if isinstance(c, str)]
    keys[[index_of(c) for c in listed]] = -1 - np.arange(len(listed))
    starts = np.flatnonzero(np.diff(keys, prepend=0))  # equal ones mostly lie side by side
    first = starts[np.unique(keys[starts], return_index=True)[1]]
    return [chr(i if i < 0xD800 else i + 0x800) for i in first.tolist()]


def index_of(character: str) -> int:
    """Its row of `utf8_of_all`."""
    return ord(character) if character < "\ud800" else ord(character) - 0x800


def difference(dfa: Dfa, fsm: FSM) -> str | None:
    """A shortest text that one automaton takes and the other does not: their product, walked."""
    characters = representatives(dfa, fsm)
    symbols = [fsm.alphabet[c] for c in characters]
    data = [c.encode() for c in characters]
    rows = cast(dict[int, dict[int, int]], fsm.map)
    nowhere = -1  # where a transition of theirs is missing
    begin: tuple[int, int] = (dfa.start, fsm.initial)
    text_of = {begin: ""}
    queue = deque([begin])
    while queue:
        ours, theirs = pair = queue.popleft()
        if bool(dfa.accepting[ours]) != (theirs in fsm.finals):
            return text_of[pair]
        row = rows.get(theirs, {})
        for character, symbol, encoded in zip(characters, symbols, data):
            after = (dfa.walk(ours, encoded), row.get(symbol, nowhere))
            if after not in text_of and after != (DEAD, nowhere):
                text_of[after] = text_of[pair] + character
                queue.append(after)
    return None


def dfa_of(pattern: str) -> Dfa:
    return build_dfa(Grammar.of(parse_regex("(?a)" + pattern, dialect="python", anchored=True)))


def fsm_of(pattern: str) -> FSM:
    return interegular.parse_pattern(pattern).to_fsm()


@pytest.mark.parametrize("pattern", REGEXES + NAMED_CLASSES)
def test_automata_take_what_interegular_takes(pattern: str) -> None:
    assert difference(dfa_of(pattern), fsm_of(pattern)) is None


ATOMS = [
    "a",
    "b",
    "ab",
    "é",
    "😀",
    ".",
    "[ab]",
    "[^a\\n]",
    "[b-d]",
    "[^b-é\\n]",
    "[0-9]",
    "\\.",
    "",
]
COUNTS = ["?", "*", "+", "{2}", "{1,2}", "{0,2}", "{2,}", "*?", "{0}"]


def _wider(inner: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    few = st.lists(inner, min_size=2, max_size=3)
    return st.one_of(
        few.map("".join),
        few.map("|".join).map("({})".format),
        st.builds("(?:{}){}".format, inner, st.sampled_from(COUNTS)),
    )


regexes = st.recursive(st.sampled_from(ATOMS), _wider, max_leaves=12)


@settings(max_examples=100)
@given(regexes)
def test_random_automata_take_what_interegular_takes(pattern: str) -> None:
    assert difference(dfa_of(pattern), fsm_of(pattern)) is None


# -- masks, against outlines-core

END = ord("\n")  # a token's id, and the byte that it writes
EOS = 1000
TEXTS = (
    'ab ba aa aab abc bc cd .. 00 01 12 2024 1.5 -- -0 e+ 0x // .com @a ": "," ":" {" [" ]}',
    r"\" \u \n true null red green re blue gre enish high low name http https :// yes no,",
    "é éa aé naï ïve à あん 東 東京 京都 タ 😀 😀😀",
)
TOKENS = [
    *(bytes([i]) for i in range(256)),
    *(text.encode() for line in TEXTS for text in line.split()),
    b"\xa9a", b"\xc3\xa9\xe6", b"\x9d\xb1", b"\xf0\x9f", b"\x98\x80a", b"\xe6\x9d", b"\xb1\xe4\xba",
    b"\x80\x80", b"a", b"ab",  # pieces of characters; two that write what others do
]  # fmt: skip
VOCABULARY = vocabulary_of(TOKENS)


@functools.cache
def their_vocabulary() -> outlines_core.Vocabulary:
    ids: dict[bytes, list[int]] = {}
    for i, data in enumerate(TOKENS):
        ids.setdefault(data, []).append(i)
    return outlines_core.Vocabulary(EOS, ids)


def compared_masks(pattern: str) -> Iterator[tuple[list[int], set[int], set[int]]]:
    """For every pair of states that tokens lead to: the tokens, ours and theirs allowed after
    them; ours with END where the text may end."""
    ours = compile_grammar(GrammarSpec("regex", pattern)).bind(VOCABULARY)
    assert isinstance(ours, FsmGrammar)
    theirs = outlines_core.Index(f"(?:{pattern})\\n", their_vocabulary())
    begin = (ours.dfa.start, theirs.get_initial_state())
    path_to: dict[tuple[int, int], list[int]] = {begin: []}
    queue = deque([begin])
    mask = np.empty(VOCABULARY.num_words, np.uint32)
    while queue:
        state, their_state = pair = queue.popleft()
        ours.mask(state, mask)
        allowed = ids_of(mask) | ({END} if ours.is_accepting(state) else set())
        yield path_to[pair], allowed, set(theirs.get_allowed_tokens(their_state))
        for token in allowed - {END}:
            after = (
                ours.step(state, TOKENS[token]),
                theirs.get_next_state(their_state, token),
            )
            if after not in path_to:
                path_to[after] = [*path_to[pair], token]
                queue.append(after)


def check_masks(pattern: str) -> None:
    for path, ours, theirs in compared_masks(pattern):
        assert ours == theirs, [TOKENS[i] for i in path]


@pytest.mark.parametrize("pattern", REGEXES)
def test_masks_allow_what_outlines_core_allows(pattern: str) -> None:
    check_masks(pattern)


@settings(max_examples=300)
@given(regexes)
def test_random_masks_allow_what_outlines_core_allows(pattern: str) -> None:
    check_masks(pattern)
