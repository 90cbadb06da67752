"""Formats of strings: texts that are in each, and texts that are not."""

from __future__ import annotations

import functools
import random
import re

import numpy as np
import pytest

from stemma.constrained.grammar import Grammar
from stemma.constrained.regular.build import build_dfa
from stemma.constrained.regular.dfa import DEAD, Dfa
from stemma.constrained.regular.membership import matches
from stemma.constrained.schema.formats import FORMATS, format_expression

CASES = {
    "date": ("2024-02-29 2000-02-29 2023-12-31 0001-01-01 1000-01-01 0400-02-29 0004-02-29 "
             "9990-10-10",
             "2023-02-29 1900-02-29 2023-04-31 2023-13-01 2023-1-1 2023-00-10 0000-01-01 "
             "0000-02-29 0100-02-29"),
    "time": ("23:59:59Z 00:00:00.123+23:59 12:00:00z 23:59:60Z 22:59:60-01:00 05:29:60+05:30",
             "24:00:00Z 12:00:00 12:60:00Z 12:00:60Z 22:59:60Z 23:59:60+01:00 12:00:00+24:00"),
    "date-time": ("2024-02-29T10:00:00Z 1985-04-12t23:20:50.52-08:00 1990-12-31T23:59:60Z",
                  "2024-02-30T10:00:00Z 2024-01-01 2024-01-01T10:00:00 2024-01-01T10:00Z "
                  "0000-01-01T10:00:00Z"),
    "duration": ("P1Y P1Y2M3D P2W PT1H2M PT5S P1DT12H", "P 1Y PT P1S P1Y2D P1W2D PT1H3S P-1D"),
    "email": ('a@b.c first.last+x@sub.example.com "a@b"@x.org a@[127.0.0.1] a@[IPv6:::1]',
              "a @b a@ .a@b.c a..b@c.d a@-b.c a.@b.c a@[1.2.3]"),
    "idn-email": ("δ@παράδειγμα.gr a@b.c", "δ a@ .a@b"),
    "hostname": ("a example.com a-b.c1 " + "a" * 63 + " " + ".".join("abcdefgh"),
                 "-a a- a..b a_b xn--x 1--x- " + "a" * 64 + " " + ".".join(["a" * 63] * 4)),
    "idn-hostname": ("example.com bücher.example 실례.테스트 例え.jp пример.com ab-c.日本語",
                     "-a a- a..b a_b ab--c.é é. " + "é" * 20),
    "regex": (r"^[a-z]+$ ([abc])+\s{2,3}$ a|b|(?:cd?)*? [^\]A-F0-9-]{1,} \d+(?=x)\b .",
              r"^(abc] ( ) a) *a a** [b-a] \a \ a{2,1} [a (?<n>a)"),
    "ipv4": ("0.0.0.0 255.249.199.99", "256.0.0.1 1.2.3 01.2.3.4 1.2.3.4.5"),
    "ipv6": (":: ::1 1:: 1:2:3:4:5:6:7:8 1::8 ::ffff:1.2.3.4 1:2:3:4:5:6:1.2.3.4 1:2:3:4:5:6:7::",
             "1 : ::: 1::2::3 1:2:3:4:5:6:7 1:2:3:4:5:6:7:8:9 12345:: ::1.2.3 fe80::1%eth0"),
    "uuid": ("2EB8AA08-aa98-11ea-B4AA-73B441D16380", "2eb8aa08aa9811eab4aa73b441d16380 2eb8-1"),
    "uri": ("http://a.b/c?d=e#f urn:x:y mailto:a@b.c http://[::1]:80/ a:",
            "//a.b /c a http://a\\b http://[::1 :a http://a/%zz a://\\"),
    "uri-reference": ("http://a //a/b /c d?e #f", "a\\b 1:a %0"),
    "iri": ("http://ƒøø.ßår/?∂éœ=πîx#πîüx", "/abc \\\\x ƒøø"),
    "iri-reference": ("/ƒøø #ƒräg //a", "\\x #a\\b"),
    "uri-template": ("http://x/{a} {+a,b*} {?q:3} a'b", "{ {a }a{ {a:0} <x>"),
    "json-pointer": ("/a~0b~1/ / /a//b", "a ~ /~ /~2 #/a"),
    "relative-json-pointer": ("0 1/a 10# 0/a~1b", "01 -1 a 0## 1a /a"),
}  # fmt: skip


def test_every_format_has_cases() -> None:
    assert set(CASES) == set(FORMATS)


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("is_whole", [False, True])
def test_a_format_is_told_from_near_misses(name: str, is_whole: bool) -> None:
    language = format_expression(name, is_whole)
    assert language is not None
    inside, outside = CASES[name]
    for text in inside.split(" "):
        assert matches(language, text), text
    for text in () if is_whole else outside.split(" "):
        assert not matches(language, text), text


def test_generated_names_and_regexes_are_what_their_readers_take() -> None:
    """Random ones, read by the `idna` package and by Python's `re`."""
    idna = pytest.importorskip("idna")
    rng = random.Random(3)
    for _ in range(150):
        name = random_text("idn-hostname", rng)
        assert idna.encode(name), name
    for _ in range(300):
        regex = random_text("regex", rng)
        try:
            re.compile(regex)
        except re.error as error:
            pytest.fail(f"{regex!r}: {error}")


@functools.cache
def format_dfa(name: str) -> Dfa:
    expression = format_expression(name)
    assert expression is not None
    return build_dfa(Grammar.of(expression))


def random_text(name: str, rng: random.Random) -> str:
    """A random walk of the format's automaton that ends where it may, after a while."""
    dfa = format_dfa(name)
    state, text = dfa.start, bytearray()
    while not dfa.accepting[state] or (len(text) < 30 and rng.random() < 0.9):
        following = [c for c, to in enumerate(dfa.transitions[state]) if to != DEAD]
        if not following or len(text) > 200:
            break
        byte = rng.choice(np.flatnonzero(dfa.class_of == rng.choice(following)).tolist())
        text.append(byte)
        state = dfa.step(state, byte)
    return text.decode() if dfa.accepting[state] else random_text(name, rng)


@pytest.mark.parametrize("text", ["xn--x", "12:00:60Z", "0000-02-29"])
def test_negated_a_format_leaves_out_what_it_does_not_generate(text: str) -> None:
    names = [name for name in ("hostname", "time", "date") if matches_format(name, text)]
    assert names, text


def matches_format(name: str, text: str) -> bool:
    language = format_expression(name, is_whole=True)
    return language is not None and matches(language, text)
