"""Sets of code points against Python's own knowledge of Unicode."""

from __future__ import annotations

import itertools
import re
import unicodedata

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stemma.constrained.regular import charsets, unicode_classes
from stemma.constrained.regular.charsets import ALL, Ranges

SCALARS = st.integers(0, 0xD7FF) | st.integers(0xE000, 0x10FFFF)
EDGES = st.sampled_from([0, 0x7F, 0x80, 0x7FF, 0x800, 0xD7FF, 0xE000, 0xFFFF, 0x10000, 0x10FFFF])
POINTS = SCALARS | EDGES
SETS = st.lists(st.tuples(POINTS, POINTS).map(sorted).map(tuple), max_size=5).map(
    charsets.normalized
)


@given(SETS, SETS, POINTS)
def test_set_algebra_is_that_of_membership(a: Ranges, b: Ranges, code: int) -> None:
    in_a, in_b = charsets.contains(a, code), charsets.contains(b, code)
    assert charsets.contains(charsets.union(a, b), code) == (in_a or in_b)
    assert charsets.contains(charsets.intersection(a, b), code) == (in_a and in_b)
    assert charsets.contains(charsets.difference(a, b), code) == (in_a and not in_b)
    assert charsets.contains(charsets.complement(a), code) == (not in_a)
    assert charsets.complement(charsets.complement(a)) == a


@given(SETS, POINTS)
def test_byte_sequences_accept_exactly_the_encodings_of_the_set(ranges: Ranges, code: int) -> None:
    encoded = chr(code).encode()
    accepted = [
        len(sequence) == len(encoded)
        and all(low <= byte <= high for (low, high), byte in zip(sequence, encoded))
        for sequence in charsets.utf8_sequences(ranges)
    ]
    assert sum(accepted) == charsets.contains(ranges, code)


@given(SETS)
def test_byte_sequences_hold_as_many_texts_as_the_set(ranges: Ranges) -> None:
    """With the test above: no sequence accepts anything that is no encoding."""
    sizes = 0
    for sequence in charsets.utf8_sequences(ranges):
        product = 1
        for low, high in sequence:
            product *= high - low + 1
        sizes += product
    assert sizes == sum(high - low + 1 for low, high in ranges)


def test_surrogates_are_in_no_set() -> None:
    assert charsets.normalized([(0, 0x10FFFF)]) == ALL
    assert charsets.normalized([(0xD800, 0xDFFF)]) == ()


@pytest.mark.parametrize("name", ["L", "Lu", "Nd", "P", "Cn", "Zs"])
def test_general_categories_are_those_of_unicodedata(name: str) -> None:
    found = unicode_classes.property_set(name)
    assert found is not None
    sample = itertools.chain(range(0x600), range(0xFF00, 0x10200), range(0x10FFF0, 0x110000))
    for code in sample:
        if not 0xD800 <= code <= 0xDFFF:
            expected = unicodedata.category(chr(code)).startswith(name)
            assert charsets.contains(found, code) == expected, hex(code)


@pytest.mark.parametrize(
    "name, member, other",
    [
        ("Letter", "é", "1"),
        ("digit", "٣", "x"),
        ("Script=Greek", "λ", "l"),
        ("sc=Hani", "漢", "か"),
        ("General_Category=Lu", "É", "é"),
        ("ASCII", "\x7f", "\x80"),
        ("White_Space", "\x85", "\ufeff"),
        ("Uppercase", "Ⓐ", "ⓐ"),
        ("LC", "ǅ", "ª"),
    ],
)
def test_properties_hold_what_unicode_says(name: str, member: str, other: str) -> None:
    found = unicode_classes.property_set(name)
    assert found is not None
    assert charsets.contains(found, ord(member)) and not charsets.contains(found, ord(other))


def test_unknown_properties_are_unknown() -> None:
    for name in ("", "Foo", "Script=Foo", "foo=Lu", "lu"):
        assert unicode_classes.property_set(name) is None


@settings(max_examples=30, deadline=None)
@given(st.text("abkKsSßéÉσςΣ1\u212a\u017f\u1e9e", min_size=1, max_size=1), SCALARS)
def test_case_is_ignored_as_simple_folding_does(character: str, code: int) -> None:
    found = charsets.ignoring_case(charsets.of_text(character))
    for other in (chr(code), *"kKsSßéÉσςΣ\u212a\u017f\u1e9e"):
        expected = re.fullmatch(re.escape(character), other, re.IGNORECASE) is not None
        assert charsets.contains(found, ord(other)) == expected
