"""What generated schemas are made of: names, patterns and formats, each with texts that match."""

from __future__ import annotations

import random
from collections.abc import Mapping

NOUNS = """
account action address agent alert amount api app area asset author backup balance bucket build
cache callback card category channel city client cluster code color command comment company
config contact container content context count country cpu currency customer data date deadline
description destination device digest directory discount document domain driver duration email
endpoint engine entry environment error event expiry feature field file filter flag folder
format gateway group handler hash header height host icon id image index input instance
interval invoice item job key kind label language latitude layer length level license limit
link list locale location lock log logo longitude mail manager member memory message method
metric mode model module mount name namespace network node note number object offset operator
option order origin output owner package page parameter parent partition password path payment
permission phone plan platform plugin pod policy pool port position prefix price priority
process product profile project property protocol provider proxy quantity query queue range
rate reason record redirect region registry release repository request resource response result
retry role route rule runtime scale schedule schema scope score script secret section selector
sender server service session severity shape sidecar size snapshot source spec stage start
state status step storage store strategy street style subject subnet summary tag target task
team template tenant term test theme threshold timeout timestamp title token topic total trace
track trigger type unit update url usage user value variable vendor version view volume wait
weight width window worker workflow workspace zone
""".split()  # noqa: SIM905
VERBS = ("add", "cancel", "create", "delete", "fetch", "find", "get", "list", "move", "plan",
         "search", "send", "set", "start", "stop", "translate", "update", "validate")  # fmt: skip
WORDS = ("the", "of", "and", "a", "to", "in", "is", "for", "with", "on", "that", "by", "this")
PATTERNS: Mapping[str, tuple[str, ...]] = {
    "^[a-z0-9]([-a-z0-9]*[a-z0-9])?$": ("web", "my-app-2", "a"),
    "^[A-Za-z_][A-Za-z0-9_]*$": ("value", "_private", "Name2"),
    r"^\d{4}-\d{2}-\d{2}$": ("2024-05-17", "1999-12-31"),
    "^[A-Z]{2}$": ("DE", "US"),
    "^[A-Z]{3}$": ("EUR", "USD"),
    "^#[0-9a-fA-F]{6}$": ("#00ff9A", "#123456"),
    "^(0|[1-9]\\d*)\\.(0|[1-9]\\d*)\\.(0|[1-9]\\d*)(-[0-9A-Za-z-.]+)?$": ("1.0.2", "0.9.0-rc.1"),
    "^[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}$": (
        "01234567-89ab-cdef-0123-456789abcdef",
    ),
    "^https?://": ("https://example.com/a?b=c", "http://localhost"),
    "^arn:aws:[a-z0-9-]+:[a-z0-9-]*:[0-9]{12}:.+$": ("arn:aws:sns:eu-west-1:123456789012:topic",),
    "^[^@]+@[^@]+\\.[a-z]{2,}$": ("jo@example.org",),
    "^\\+?[0-9 ()-]{7,20}$": ("+49 30 123456", "5551234567"),
    "^[a-z]+/[a-z0-9.+-]+$": ("text/html", "application/ld+json"),
    "^(\\d+)(ms|s|m|h)$": ("30s", "250ms"),
    "^[-_.0-9A-Za-z]{1,64}$": ("build_01", "x"),
    "^([01]\\d|2[0-3]):[0-5]\\d$": ("08:30", "23:59"),
    "\\S": ("some text", "x"),
    "^[a-f0-9]{40}$": ("0123456789abcdef0123456789abcdef01234567",),
    "^/": ("/var/log", "/"),
    "^(true|false|\\$\\{.+\\})$": ("true", "${flag}"),
}
KEY_PATTERNS: Mapping[str, tuple[str, ...]] = {
    "^x-": ("x-origin", "x-note"),
    "^[a-zA-Z0-9_-]+$": ("alpha", "beta_2", "Gamma-3"),
    "^[a-z][a-z0-9_]*$": ("first", "second_2"),
    "^.*$": ("anything", "any thing"),
    "^[A-Z_]+$": ("PATH", "HOME_DIR"),
    "^\\d+$": ("1", "404"),
}
FORMATS: Mapping[str, tuple[str, ...]] = {
    "date-time": ("2024-05-17T09:30:00Z", "1999-12-31T23:59:59.5+01:00"),
    "date": ("2024-05-17",),
    "email": ("jo.doe@example.org",),
    "uri": ("https://example.com/path?q=1",),
    "uuid": ("01234567-89ab-cdef-0123-456789abcdef",),
    "ipv4": ("192.168.0.1",),
    "hostname": ("db-1.example.net",),
}
IGNORED_FORMATS = ("int32", "int64", "double", "float", "password", "byte")


def name(rng: random.Random) -> str:
    """A property's name in one of the usual spellings."""
    words = rng.choices(NOUNS, k=rng.choice((1, 1, 2, 2, 3)))
    style = rng.randrange(4)
    if style == 0:
        return "_".join(words)
    if style == 1:
        return "-".join(words)
    return words[0] + "".join(word.capitalize() for word in words[1:])


def names(rng: random.Random, count: int) -> list[str]:
    """`count` different ones."""
    found: dict[str, None] = {}
    while len(found) < count:
        found[name(rng)] = None
    return list(found)


def sentence(rng: random.Random, num_words: int) -> str:
    """Prose of that many words."""
    return " ".join(rng.choice(NOUNS if rng.random() < 0.6 else WORDS) for _ in range(num_words))


def constants(rng: random.Random, count: int) -> list[str]:
    """Different values of an enum."""
    found: dict[str, None] = {}
    while len(found) < count:
        word = name(rng)
        found[rng.choice((word, word.upper().replace("-", "_"), f"{word}.{len(found)}"))] = None
    return list(found)
