"""Sets of code points against Python's own knowledge of Unicode."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stemma.constrained.regular import charsets, unicode_classes
from stemma.constrained.regular.charsets import ALL, Ranges
from stemma.constrained.regular.letter_case import ignoring_case

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


def test_general_categories_are_those_of_unicodedata() -> None:
    """All code points: whole planes are taken for unassigned without a look at them."""
    expected: dict[str, list[tuple[int, int]]] = {}
    for code in charsets.code_points(ALL):
        expected.setdefault(unicodedata.category(chr(code)), []).append((code, code))
    assert len(expected) == 29  # of 30: surrogates are in no set
    for name, codes in expected.items():
        assert unicode_classes.property_set(name) == charsets.normalized(codes), name


@pytest.mark.parametrize(
    ("found", "pattern"),
    [
        (unicode_classes.python_word, r"\w+"),
        (unicode_classes.python_space, r"\s+"),
        (unicode_classes.python_digits, r"\d+"),
    ],
)
def test_classes_are_those_of_pythons_re(found: Callable[[], Ranges], pattern: str) -> None:
    everything = "".join(map(chr, range(0x110000)))
    spans = (match.span() for match in re.finditer(pattern, everything))
    assert found() == charsets.normalized((first, end - 1) for first, end in spans)


@pytest.mark.parametrize(("name", "has"), [("Lower", str.islower), ("Upper", str.isupper)])
def test_letters_of_a_case_are_those_of_python(name: str, has: Callable[[str], bool]) -> None:
    codes = [code for code in charsets.code_points(ALL) if has(chr(code))]
    assert unicode_classes.property_set(name) == charsets.normalized((c, c) for c in codes)


def test_what_cannot_have_case_folds_to_itself_and_nothing_folds_to_it() -> None:
    case = unicode_classes.may_have_case()
    without = charsets.difference(ALL, case)
    assert all(chr(code).casefold() == chr(code).lower() == chr(code)
               for code in charsets.code_points(without))  # fmt: skip
    folded = {chr(code).casefold() for code in charsets.code_points(case)}
    assert not folded & set(map(chr, charsets.code_points(without)))


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
    found = ignoring_case(charsets.of_text(character))
    for other in (chr(code), *"kKsSßéÉσςΣ\u212a\u017f\u1e9e"):
        expected = re.fullmatch(re.escape(character), other, re.IGNORECASE) is not None
        assert charsets.contains(found, ord(other)) == expected
