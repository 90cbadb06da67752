"""Named sets of code points: the meaning of \\d, \\w, \\s and \\p{..}.

General categories come from `unicodedata`, and so does what follows from them: Unicode's version is
that of the running Python. It lacks scripts: `scripts.py` has the common ones. Sets are computed on
first use, all of them in 0.1 s of CPU time; `prepare` does so ahead.
"""

from __future__ import annotations

import functools
import itertools
import unicodedata
from collections.abc import Callable, Mapping

from .charsets import (
    ALL,
    Ranges,
    code_points,
    complement,
    difference,
    normalized,
    of_text,
    union,
)
from .scripts import SCRIPTS

ASCII_DIGITS: Ranges = ((0x30, 0x39),)
ASCII_WORD: Ranges = ((0x30, 0x39), (0x41, 0x5A), (0x5F, 0x5F), (0x61, 0x7A))
ASCII_SPACE: Ranges = ((0x09, 0x0D), (0x20, 0x20))
LINE_TERMINATORS: Ranges = of_text("\n\r\u2028\u2029")  # ECMA-262, section 12.3
# ECMA-262, sections 12.2 and 12.3: white space and line terminators.
ECMA_SPACE: Ranges = union(
    ((0x09, 0x0D), (0x2000, 0x200A)), of_text(" \xa0\u1680\u2028\u2029\u202f\u205f\u3000\ufeff")
)
WHITE_SPACE: Ranges = union(
    ((0x09, 0x0D), (0x2000, 0x200A)), of_text(" \x85\xa0\u1680\u2028\u2029\u202f\u205f\u3000")
)

_CATEGORY_NAMES = {
    "Letter": "L", "Cased_Letter": "LC", "Uppercase_Letter": "Lu", "Lowercase_Letter": "Ll",
    "Titlecase_Letter": "Lt", "Modifier_Letter": "Lm", "Other_Letter": "Lo", "Mark": "M",
    "Combining_Mark": "M", "Nonspacing_Mark": "Mn", "Spacing_Mark": "Mc", "Enclosing_Mark": "Me",
    "Number": "N", "Decimal_Number": "Nd", "digit": "Nd", "Letter_Number": "Nl",
    "Other_Number": "No", "Punctuation": "P", "punct": "P", "Connector_Punctuation": "Pc",
    "Dash_Punctuation": "Pd", "Open_Punctuation": "Ps", "Close_Punctuation": "Pe",
    "Initial_Punctuation": "Pi", "Final_Punctuation": "Pf", "Other_Punctuation": "Po",
    "Symbol": "S", "Math_Symbol": "Sm", "Currency_Symbol": "Sc", "Modifier_Symbol": "Sk",
    "Other_Symbol": "So", "Separator": "Z", "Space_Separator": "Zs", "Line_Separator": "Zl",
    "Paragraph_Separator": "Zp", "Other": "C", "Control": "Cc", "cntrl": "Cc", "Format": "Cf",
    "Private_Use": "Co", "Unassigned": "Cn",
}  # fmt: skip
_CASED = ("Lu", "Ll", "Lt")
# All that is assigned: planes 0 to 3 and the tags (up to Unicode 17; a test looks at all of them).
_ALLOCATED = (range(0x40000), range(0xE0000, 0xE1000))
_PRIVATE_PLANES: Ranges = ((0xF0000, 0xFFFFD), (0x100000, 0x10FFFD))


def prepare() -> None:
    """Compute now what would delay the first grammar that uses it."""
    for name in ("Lower", "Upper"):
        property_set(name)
    python_word()
    python_space()


def python_digits() -> Ranges:
    """The meaning of \\d in Python's `re`."""
    return _of_category("Nd")


@functools.cache
def python_word() -> Ranges:
    """The meaning of \\w in Python's `re`: `str.isalnum`, and the underscore."""
    return union(_of_category("L"), _of_category("N"), of_text("_"))


@functools.cache
def python_space() -> Ranges:
    """The meaning of \\s in Python's `re`: `str.isspace`."""
    return union(_of_category("Z"), ((0x09, 0x0D), (0x1C, 0x1F)), of_text("\x85"))


@functools.cache
def property_set(text: str) -> Ranges | None:
    """The set of a \\p{text}, as ECMA-262 names properties; None where it is unknown."""
    name, _, value = text.partition("=")
    if value:
        if name in ("Script", "sc"):
            return SCRIPTS.get(value)
        return _category(value) if name in ("General_Category", "gc") else None
    found = _category(name)
    if found is None and name in _BINARY_PROPERTIES:
        found = _BINARY_PROPERTIES[name]()
    return found


def _category(name: str) -> Ranges | None:
    short = _CATEGORY_NAMES.get(name, name)
    if short == "LC":
        return union(*map(_of_category, _CASED))
    return _of_category(short) if short in _CATEGORY_NAMES.values() else None


@functools.cache
def _of_category(prefix: str) -> Ranges:
    found = [ranges for name, ranges in _categories().items() if name.startswith(prefix)]
    return union(*found)


@functools.cache
def _categories() -> Mapping[str, Ranges]:
    """Every two-letter general category."""
    found: dict[str, list[tuple[int, int]]] = {"Co": list(_PRIVATE_PLANES)}
    for codes in _ALLOCATED:
        first = codes.start
        for name, run in itertools.groupby(map(unicodedata.category, map(chr, codes))):
            end = first + sum(1 for _ in run)
            found.setdefault(name, []).append((first, end - 1))
            first = end
    del found["Cn"]
    sets = {name: normalized(ranges) for name, ranges in found.items()}
    return {**sets, "Cn": complement(union(*sets.values()))}


@functools.cache
def may_have_case() -> Ranges:
    """Letters, marks, numbers and symbols; of the letters that have no case forms (Lo, most of
    all) only the two that are lower case all the same."""
    candidates = union(*map(_of_category, "LMNS"))
    return union(difference(candidates, _of_category("Lo")), of_text("\xaa\xba"))


def _where(predicate: Callable[[str], bool]) -> Ranges:
    codes = code_points(may_have_case())
    return normalized((code, code) for code in codes if predicate(chr(code)))


# Unicode 15.0, emoji-data.txt; `unicodedata` lacks them.
_EMOJI_COMPONENT = "23 2A 30-39 200D 20E3 FE0F 1F1E6-1F1FF 1F3FB-1F3FF 1F9B0-1F9B3 E0020-E007F"
_EXTENDED_PICTOGRAPHIC = (
    "A9 AE 203C 2049 2122 2139 2194-2199 21A9-21AA 231A-231B 2328 2388 23CF 23E9-23F3 23F8-23FA "
    "24C2 25AA-25AB 25B6 25C0 25FB-25FE 2600-2605 2607-2612 2614-2685 2690-2705 2708-2712 2714 "
    "2716 271D 2721 2728 2733-2734 2744 2747 274C 274E 2753-2755 2757 2763-2767 2795-2797 27A1 "
    "27B0 27BF 2934-2935 2B05-2B07 2B1B-2B1C 2B50 2B55 3030 303D 3297 3299 1F000-1F0FF "
    "1F10D-1F10F 1F12F 1F16C-1F171 1F17E-1F17F 1F18E 1F191-1F19A 1F1AD-1F1E5 1F201-1F20F 1F21A "
    "1F22F 1F232-1F23A 1F23C-1F23F 1F249-1F3FA 1F400-1F53D 1F546-1F64F 1F680-1F6FF 1F774-1F77F "
    "1F7D5-1F7FF 1F80C-1F80F 1F848-1F84F 1F85A-1F85F 1F888-1F88F 1F8AE-1F8FF 1F90C-1F93A "
    "1F93C-1F945 1F947-1FAFF 1FC00-1FFFD"
)


def _of_table(table: str) -> Ranges:
    pairs = ((part + "-" + part).split("-")[:2] for part in table.split())
    return normalized((int(low, 16), int(high, 16)) for low, high in pairs)


_BINARY_PROPERTIES: Mapping[str, Callable[[], Ranges]] = {
    "Any": lambda: ALL,
    "Assigned": lambda: complement(_of_category("Cn")),
    "ASCII": lambda: ((0, 0x7F),),
    "ASCII_Hex_Digit": lambda: of_text("0123456789abcdefABCDEF"),
    "AHex": lambda: of_text("0123456789abcdefABCDEF"),
    "Emoji_Component": lambda: _of_table(_EMOJI_COMPONENT),
    "EComp": lambda: _of_table(_EMOJI_COMPONENT),
    "Extended_Pictographic": lambda: _of_table(_EXTENDED_PICTOGRAPHIC),
    "ExtPict": lambda: _of_table(_EXTENDED_PICTOGRAPHIC),
    "White_Space": lambda: WHITE_SPACE,
    "space": lambda: WHITE_SPACE,
    "Lowercase": lambda: _where(str.islower),
    "Lower": lambda: _where(str.islower),
    "Uppercase": lambda: _where(str.isupper),
    "Upper": lambda: _where(str.isupper),
}
