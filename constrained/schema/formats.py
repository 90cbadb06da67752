"""String formats as regular languages: what `format` asserts.

Sources: RFC 3339 (dates and times, appendix A: durations), RFC 5321 (e-mail), RFC 1123 (host
names), RFC 3986 and 3987 (URIs, IRIs, IP addresses), RFC 4122 (UUIDs), RFC 6901 (JSON pointers),
RFC 6570 (URI templates), RFC 5890 to 5893 (internationalised host names), ECMA-262 (regexes).

Where a format is no regular language, or is read differently by its readers, a part of it is
generated whose strings all readers accept.
"""

from __future__ import annotations

from ..grammar import Expression
from ..regular.regex_parser import parse_regex

_OCTET = r"(?:25[0-5]|2[0-4][0-9]|1[0-9][0-9]|[1-9]?[0-9])"
_IPV4 = rf"{_OCTET}(?:\.{_OCTET}){{3}}"
_H16 = r"[0-9A-Fa-f]{1,4}"
_LS32 = rf"(?:{_H16}:{_H16}|{_IPV4})"
_IPV6 = "|".join(
    [
        rf"(?:{_H16}:){{6}}{_LS32}",
        rf"::(?:{_H16}:){{5}}{_LS32}",
        *(
            rf"(?:(?:{_H16}:){{0,{before}}}{_H16})?::(?:{_H16}:){{{4 - before}}}{_LS32}"
            for before in range(5)
        ),
        rf"(?:(?:{_H16}:){{0,5}}{_H16})?::{_H16}",
        rf"(?:(?:{_H16}:){{0,6}}{_H16})?::",
    ]
)

# years from 0001 on: RFC 3339 has a year 0000, but few readers do (Python's does not)
_YEAR = r"(?:[0-9]{3}[1-9]|[0-9]{2}[1-9]0|[0-9][1-9]00|[1-9]000)"
_LEAP = (
    r"(?:[0-9]{2}(?:0[48]|[2468][048]|[13579][26])"
    r"|(?:0[48]|[2468][048]|[13579][26])00)"
)
_ANY_LEAP = r"(?:[0-9]{2}(?:0[48]|[2468][048]|[13579][26])|(?:[02468][048]|[13579][26])00)"


def _date(year: str, leap_year: str) -> str:
    return (
        rf"(?:{year}-(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])"
        r"|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)"
        r"|02-(?:0[1-9]|1[0-9]|2[0-8]))"
        rf"|{leap_year}-02-29)"
    )


_DATE = _date(_YEAR, _LEAP)
_ANY_DATE = _date("[0-9]{4}", _ANY_LEAP)
_CLOCK = r"(?:[01][0-9]|2[0-3]):[0-5][0-9]"
_OFFSET = rf"(?:[Zz]|[+-]{_CLOCK})"


def _leap_seconds() -> str:
    """The last second of a day in UTC, as clocks of whole and half hours show it."""
    by_clock: dict[int, list[str]] = {23 * 60 + 59: ["[Zz]"]}
    for offset in range(0, 24 * 60, 30):
        shown = f"{offset // 60:02}:{offset % 60:02}"
        by_clock.setdefault((23 * 60 + 59 + offset) % 1440, []).append(rf"\+{shown}")
        by_clock.setdefault((23 * 60 + 59 - offset) % 1440, []).append(f"-{shown}")
    return "|".join(
        rf"{clock // 60:02}:{clock % 60:02}:60(?:\.[0-9]+)?(?:{'|'.join(offsets)})"
        for clock, offsets in by_clock.items()
    )


_TIME = rf"(?:{_CLOCK}:[0-5][0-9](?:\.[0-9]+)?{_OFFSET}|{_leap_seconds()})"
_ANY_TIME = rf"{_CLOCK}:(?:[0-5][0-9]|60)(?:\.[0-9]+)?{_OFFSET}"
_DURATION_TIME = r"T(?:[0-9]+H(?:[0-9]+M(?:[0-9]+S)?)?|[0-9]+M(?:[0-9]+S)?|[0-9]+S)"
_DURATION_DATE = r"(?:[0-9]+Y(?:[0-9]+M(?:[0-9]+D)?)?|[0-9]+M(?:[0-9]+D)?|[0-9]+D)"
_DURATION = rf"P(?:{_DURATION_DATE}(?:{_DURATION_TIME})?|{_DURATION_TIME}|[0-9]+W)"


def _label(most: int) -> str:
    """A label of a host name, without `--` after two characters (reserved, as for punycode)."""
    c, x = "[A-Za-z0-9]", "[A-Za-z0-9-]"
    return rf"(?:{c}(?:{x}{{0,2}}{c})?|{c}{x}(?:{c}{x}|-{c}){x}{{0,{most - 5}}}{c})"


# at most 253 characters: 3 labels of 63, or 8 of 30
_LONG, _SHORT = _label(63), _label(30)
_HOSTNAME = rf"(?:{_LONG}(?:\.{_LONG}){{0,2}}|{_SHORT}(?:\.{_SHORT}){{3,7}})"
_ANY_LABEL = r"[A-Za-z0-9](?:[A-Za-z0-9-]{0,61}[A-Za-z0-9])?"
_ANY_HOSTNAME = rf"{_ANY_LABEL}(?:\.{_ANY_LABEL})*"
_ATEXT = r"[A-Za-z0-9!#$%&'*+/=?^_`{|}~-]"
_QCONTENT = r"(?:[ !#-\[\]-~]|\\[ -~])"
_LOCAL = rf'(?:{_ATEXT}+(?:\.{_ATEXT}+)*|"{_QCONTENT}*")'
_DOMAIN = r"[A-Za-z0-9](?:-*[A-Za-z0-9])*(?:\.[A-Za-z0-9](?:-*[A-Za-z0-9])*)*"
_EMAIL = rf"{_LOCAL}@(?:{_DOMAIN}|\[(?:{_IPV4}|IPv6:(?:{_IPV6}))\])"
_UTF8_TEXT = r"[A-Za-z0-9!#$%&'*+/=?^_`{|}~\u0080-\U0010ffff-]"
_UTF8_ALNUM = r"[A-Za-z0-9\u0080-\U0010ffff]"
_UTF8_LABEL = rf"{_UTF8_ALNUM}(?:-*{_UTF8_ALNUM})*"
_UTF8_QUOTED = r'"(?:[ !#-\[\]-~\u0080-\U0010ffff]|\\[ -~])*"'
_IDN_EMAIL = (
    rf"(?:{_UTF8_TEXT}+(?:\.{_UTF8_TEXT}+)*|{_UTF8_QUOTED})@{_UTF8_LABEL}(?:\.{_UTF8_LABEL})*"
)

_ENCODED = "%[0-9A-Fa-f]{2}"
_UNRESERVED = r"A-Za-z0-9._~-"
_UCS = r"\u00a0-\ud7ff\uf900-\ufdcf\ufdf0-\uffef" + "".join(
    rf"\U000{plane:x}{'1000' if plane == 14 else '0000'}-\U000{plane:x}fffd"
    for plane in range(1, 15)
)
_PRIVATE = r"\ue000-\uf8ff\U000f0000-\U000ffffd\U00100000-\U0010fffd"


def _uri(extra: str, private: str, is_reference: bool) -> str:
    """RFC 3986, appendix A; `extra` are the characters that RFC 3987 adds."""
    unreserved = extra + _UNRESERVED
    pchar = rf"(?:[!$&'()*+,;=:@{unreserved}]|{_ENCODED})"
    segment_without_colon = rf"(?:[!$&'()*+,;=@{unreserved}]|{_ENCODED})+"
    userinfo = rf"(?:[!$&'()*+,;=:{unreserved}]|{_ENCODED})*"
    name = rf"(?:[!$&'()*+,;={unreserved}]|{_ENCODED})*"
    literal = rf"\[(?:{_IPV6}|[Vv][0-9A-Fa-f]+\.[!$&'()*+,;=:{_UNRESERVED}]+)\]"
    authority = rf"(?:{userinfo}@)?(?:{literal}|{name})(?::[0-9]*)?"
    rooted = rf"/(?:{pchar}+(?:/{pchar}*)*)?"
    hierarchy = rf"(?://{authority}(?:/{pchar}*)*|{rooted}|{pchar}+(?:/{pchar}*)*)?"
    relative = rf"(?://{authority}(?:/{pchar}*)*|{rooted}|{segment_without_colon}(?:/{pchar}*)*)?"
    query = rf"(?:\?(?:{pchar}|[/?{private}])*)?(?:#(?:{pchar}|[/?])*)?"
    absolute = rf"[A-Za-z][A-Za-z0-9+.-]*:{hierarchy}{query}"
    return rf"(?:{absolute}|{relative}{query})" if is_reference else absolute


_VARIABLE = rf"(?:[A-Za-z0-9_]|{_ENCODED})(?:\.?(?:[A-Za-z0-9_]|{_ENCODED}))*"
_VARSPEC = rf"{_VARIABLE}(?::[1-9][0-9]{{0,3}}|\*)?"
_URI_TEMPLATE = (
    rf"(?:[!#$&-;=?-\[\]_a-z~{_UCS}{_PRIVATE}]|{_ENCODED}"
    rf"|\{{[+#./;?&=,!@|]?{_VARSPEC}(?:,{_VARSPEC})*\}})*"
)
_POINTER = r"(?:/(?:[^~/]|~[01])*)*"

# Letters that a label may hold on its own: valid by RFC 5892 as they are, composed, from left to
# right. Of Latin, Greek, Cyrillic, Hiragana, Katakana, Han and Hangul.
_IDN_LETTER = (
    r"a-z0-9\u00df-\u00f6\u00f8-\u00ff\u03ac-\u03c1\u03c3-\u03ce\u0430-\u045f"
    r"\u3041-\u3096\u30a1-\u30fa\u30fc\u4e00-\u9fa5\uac00-\ud7a3"
)
# 10 letters and 9 hyphens: in punycode at most 63
_IDN_LABEL = rf"(?:{_SHORT}|[{_IDN_LETTER}](?:-?[{_IDN_LETTER}]){{0,9}})"
_IDN_HOSTNAME = rf"(?:{_HOSTNAME}|{_IDN_LABEL}(?:\.{_IDN_LABEL}){{0,3}})"
_ANY_IDN_HOSTNAME = r"[^ \t\r\n@/:?#]+"


def _regex(depth: int) -> str:
    """Regexes that ECMA-262 and Python's `re` both take, with groups nested so deep."""
    plain = r"[^\\^$.|?*+()\[\]{}]"
    escape = r"\\[dDwWsStnrfv^$\\.*+?()\[\]{}|/]"
    ranges = "0-[0-9]|1-[1-9]|a-[a-z]|A-[A-Z]"
    in_class = r"[^\\^\[\]&|~-]"
    members = rf"(?:{ranges}|{in_class}|{escape})+-?"
    atom = rf"(?:{plain}|{escape}|\.|\[\^?(?:{members})\])"
    look = r"[\^$]|\\[bB]"
    if depth:
        inner = _regex(depth - 1)
        atom = rf"(?:{atom}|\((?:\?:)?(?:{inner})\))"
        look = rf"(?:{look}|\(\?[=!](?:{inner})\))"
    count = "|".join(rf"{least},[{least}-9]" for least in range(4))
    times = rf"(?:[*+?]|\{{(?:[0-9]{{1,3}},?|{count}|[0-9],[1-9][0-9]{{1,2}})\}})\??"
    branch = rf"(?:{atom}(?:{times})?|{look})*"
    return rf"{branch}(?:\|{branch})*"


_REGEXES = {
    "date": _DATE,
    "time": _TIME,
    "date-time": rf"{_DATE}[Tt]{_TIME}",
    "duration": _DURATION,
    "email": _EMAIL,
    "idn-email": _IDN_EMAIL,
    "hostname": _HOSTNAME,
    "idn-hostname": _IDN_HOSTNAME,
    "regex": _regex(depth=1),
    "ipv4": _IPV4,
    "ipv6": _IPV6,
    "uuid": r"[0-9A-Fa-f]{8}-(?:[0-9A-Fa-f]{4}-){3}[0-9A-Fa-f]{12}",
    "uri": _uri("", "", False),
    "uri-reference": _uri("", "", True),
    "iri": _uri(_UCS, _PRIVATE, False),
    "iri-reference": _uri(_UCS, _PRIVATE, True),
    "uri-template": _URI_TEMPLATE,
    "json-pointer": _POINTER,
    "relative-json-pointer": rf"(?:0|[1-9][0-9]*)(?:#|{_POINTER})",
}

# What a negated format excludes, and a lenient one allows, where only a part of the format is
# generated.
_WHOLE = {
    "date": _ANY_DATE,
    "time": _ANY_TIME,
    "date-time": rf"{_ANY_DATE}[Tt]{_ANY_TIME}",
    "hostname": _ANY_HOSTNAME,
    "idn-hostname": _ANY_IDN_HOSTNAME,
    "regex": r"(?![*+?)])(?:[^\\]|\\(?:.|\n))*",
}

BASE64 = parse_regex(
    r"(?:[A-Za-z0-9+/]{4})*(?:[A-Za-z0-9+/]{2}==|[A-Za-z0-9+/]{3}=)?",
    dialect="python",
    anchored=True,
)
FORMATS = tuple(_REGEXES)
PARTIAL = tuple(_WHOLE)


def format_expression(name: str, is_whole: bool = False) -> Expression | None:
    """The strings of a standard format; None for unknown names.

    Those in PARTIAL leave out rare ones (see the comments above); with `is_whole` none are missing,
    but some are there that are not of the format.
    """
    regex = _WHOLE.get(name) if is_whole else None
    regex = regex or _REGEXES.get(name)
    return None if regex is None else parse_regex(regex, dialect="python", anchored=True)
