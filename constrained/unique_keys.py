"""Keeps object keys unique where the grammar cannot.

RFC 8259, section 4, leaves a repeated key without a meaning. The grammar writes each key that a
schema lists once; for free keys no automaton knows which it has seen. A matcher wrapped around
another scans the output as JSON and removes from each mask the tokens that

- end a key which its object has: those that continue it up to its quote, a contiguous range in the
  order of tokens' bytes, and those that contain it quoted as a whole;
- lead where only such a key can follow: where keys have to match a pattern. The inner matcher is
  probed for these, byte by byte along the keys that the object has; elsewhere a key is new whatever
  follows.

Findings hold while fewer keys have come than there were ways out, so a mask costs what the keys
that came since the last visit of its place cost. It is assumed that in the course of an object its
grammar allows ever fewer keys (listed ones come in their order, then free ones).
"""

from __future__ import annotations

import functools
import heapq
import re
from collections.abc import Iterable, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from .fsm import FsmMatcher
from .matcher import BoundGrammar, Mask, Matcher, Path
from .seen_keys import BACKSLASH, QUOTE, KeyLog, KeyNotes, Keys, Scan, decoded
from .token_sets import (
    TokenSet,
    byte_tokens,
    clear_tokens,
    is_set,
    set_token,
    tokens_from,
    tokens_of,
)
from .vocabulary import Vocabulary

MAX_PROBES = 200  # of the inner matcher, for one mask; undecided tokens are allowed
DOUBLED, ESCAPING, WHOLE = range(3)  # of `KeyTokens.bringing`
MIN_WAYS_OUT = 4  # a guess: from here on a place is one of free text, not of a few listed keys
_NONE: frozenset[int] = frozenset()
_STRING = rb'"(?:[^"\\]|\\.)*"'
_OPEN_STRING = rb'(?:"(?:[^"\\]|\\.)*\\?)?'
# What may precede a key that a token begins: anything that ends with a comma.
_BEHIND = rb'(?:[^"]|%s)*,\s*%s' % (_STRING, _OPEN_STRING)
_TAIL = re.compile(rb"(?:%s|\s+%s)" % (_BEHIND, _OPEN_STRING), re.DOTALL)
_IN_STRING_TAIL = re.compile(rb'(?:[^"\\]|\\.)*"%s' % _BEHIND, re.DOTALL)
_BRACKETS = re.compile(rb"[{}\[\]:]")
_QUOTED = re.compile(rb'(?="((?:[^"\\]|\\.)*)")', re.DOTALL)


class UniqueKeys:
    """A grammar of JSON texts, without those in which a key is repeated."""

    def __init__(self, inner: BoundGrammar, vocabulary: Vocabulary, *, looks_ahead: bool) -> None:
        self._inner = inner
        self._vocabulary = vocabulary
        self._looks_ahead = looks_ahead and vocabulary.writes_all_bytes

    @property
    def path(self) -> Path:
        return self._inner.path

    @property
    def reason(self) -> str:
        return self._inner.reason

    @property
    def warnings(self) -> tuple[str, ...]:
        return self._inner.warnings

    @property
    def num_bytes(self) -> int:
        return self._inner.num_bytes

    def matcher(self) -> Matcher:
        """A matcher at the grammar's beginning."""
        return UniqueKeysMatcher(self._inner.matcher(), self._vocabulary, self._looks_ahead)


class UniqueKeysMatcher:
    """A matcher that repeats no key, as long as anything else is allowed.

    A token that would repeat one is neither in the mask, nor consumed, nor forced.
    """

    def __init__(self, inner: Matcher, vocabulary: Vocabulary, looks_ahead: bool) -> None:
        self._inner = inner
        self._vocabulary = vocabulary
        self._looks_ahead = looks_ahead
        self._tokens = key_tokens(vocabulary)
        self._scans = [Scan()]
        self._refused: frozenset[int] | None = None  # at this place; None: not known yet
        self._num_probes = 0
        # Objects without keys that a token may contain as a whole.
        self._plain_at: tuple[Keys | None, ...] | None = None
        self._checked = _Checked((), np.zeros(vocabulary.num_words, np.uint32))

    def mask(self, out: Mask) -> None:
        self._inner.mask(out)
        if self._refused is None:
            self._refused = self._without_dead_ends(out)
        clear_tokens(out, self._refused)

    def consume(self, token_id: int) -> bool:
        before, data = self._scans[-1], self._vocabulary.token_bytes[token_id]
        after = before.after(data)
        if self._is_refused(token_id, after):
            return False
        if not self._inner.consume(token_id):
            return False
        if after.objects is not before.objects:
            # NOTE: once more, since looking at other tokens may have written to the same log.
            after = before.after(data)
        self._scans.append(_unmarked(after))
        self._refused = None
        return True

    def rollback(self, num_tokens: int) -> None:
        self._inner.rollback(num_tokens)
        if num_tokens:
            del self._scans[-num_tokens:]
            self._refused = None

    def fork(self) -> UniqueKeysMatcher:
        other = UniqueKeysMatcher(self._inner.fork(), self._vocabulary, self._looks_ahead)
        # NOTE: a log of keys serves one text only; deepcopy makes one new log of each.
        other._scans, other._refused = deepcopy(self._scans), self._refused
        return other

    def is_accepting(self) -> bool:
        return self._inner.is_accepting()

    def forced_tokens(self) -> Sequence[int]:
        """Forced tokens up to the first one that is refused."""
        return forced_until_refused(self, self._inner)

    def is_finished(self) -> bool:
        return self._inner.is_finished()

    def error(self) -> str | None:
        return self._inner.error()

    def _is_refused(self, token: int, after: Scan) -> bool:
        """`mask` decides; it is computed only where the token may repeat a key."""
        if self._refused is None:
            keys = after.key_place
            leads_on = (
                self._looks_ahead
                and keys is not None
                and keys.count
                and keys.have_prefix(after.string or b"")
            )
            if not after.repeats and not leads_on:
                return False
            self.mask(np.empty(self._vocabulary.num_words, np.uint32))
        return token in (self._refused or ())

    def _without_dead_ends(self, allowed: Mask) -> frozenset[int]:
        """The tokens to remove from a mask; none where nothing else would be left."""
        self._num_probes = 0
        scan = self._scans[-1]
        keys = scan.key_place
        if self._needs_care(scan) or self._is_suspect(scan, allowed):
            refused = self._with_care(scan, allowed)
        elif keys is None or not keys.count or not keys.have_prefix(scan.string or b""):
            return _NONE
        else:
            refused = frozenset(self._notes(keys, scan.string).closing)
        if not refused or np.count_nonzero(allowed) > len(refused) or self._inner.is_accepting():
            return refused  # each word of the mask has a token: one at least is left
        left = allowed.copy()
        clear_tokens(left, refused)
        return refused if left.any() else _NONE

    def _needs_care(self, scan: Scan) -> bool:
        """Whether more is to be asked than which tokens end a seen key, and `_suspects`."""
        keys = scan.key_place
        if keys is not None and keys.count and self._looks_ahead:
            return True
        if scan.is_in_key and scan.string is not None and BACKSLASH in scan.string:
            return True
        if scan.objects is not self._plain_at:
            contents = self._tokens.contents
            for keys in scan.objects:
                if keys is not None and keys.count and not contents.isdisjoint(keys.log.keys):
                    return True  # a token may contain such a key
            self._plain_at = scan.objects
        return False

    def _is_suspect(self, scan: Scan, allowed: Mask) -> bool:
        """Whether a token is allowed that brings a key itself, and may repeat it or one that it
        ends; or one after which a key may be due or begun, and that is not known to be harmless."""
        tokens = self._tokens
        bringing, harmless = DOUBLED, None
        if scan.is_in_key:
            bringing = WHOLE if scan.string in tokens.beginnings else ESCAPING
        elif self._looks_ahead:
            harmless = self._checked_at(scan)
        suspects = tokens.at(scan).suspects if self._looks_ahead else tokens.bringing
        return suspects[bringing].any_among(allowed, harmless)

    def _checked_at(self, scan: Scan) -> Mask:
        if self._checked.objects is not scan.objects:
            keys = scan.objects[-1] if scan.objects else None
            if scan.objects and (keys is None or not keys.count):
                checked = self._tokens.simple.copy()  # no key is due, or any is new
            else:
                checked = np.zeros(self._vocabulary.num_words, np.uint32)
            self._checked = _Checked(scan.objects, checked)
        return self._checked.tokens

    def _with_care(self, scan: Scan, allowed: Mask) -> frozenset[int]:
        tokens = self._tokens.at(scan)
        refused = set(self._repeating(scan, tokens.whole, allowed))
        if scan.key_place is not None:
            refused.update(self._along_keys(scan, scan.key_place, allowed))
        if self._looks_ahead:
            refused.update(self._towards_keys(scan, tokens.tails, allowed))
        return frozenset(refused)

    def _repeating(self, scan: Scan, whole: TokenSet, allowed: Mask) -> Iterable[int]:
        """Tokens that contain a key as a whole, and the few that end a key in another spelling."""
        tokens = self._tokens
        seen = [
            keys
            for keys in scan.objects
            if keys is not None and keys.count and not tokens.contents.isdisjoint(keys.log.keys)
        ]
        for token in (whole if seen or scan.is_in_key else tokens.doubled).among(allowed):
            quoted = tokens.quoted[token]
            is_seen = any(key in keys for key in quoted for keys in seen)
            is_doubled = len(set(quoted)) < len(quoted) or self._ends_a_twin(scan, token, quoted)
            if (is_seen or is_doubled) and self._repeats(scan, token):
                yield token
        if scan.is_in_key and scan.string is not None and BACKSLASH in scan.string:
            for token in tokens.with_quote.among(allowed):
                if self._repeats(scan, token):
                    yield token

    def _ends_a_twin(self, scan: Scan, token: int, quoted: list[str]) -> bool:
        """Whether a token may end the open key and then contain it as a whole."""
        if not scan.is_in_key or scan.string is None:
            return False
        begun, quote, _ = self._vocabulary.token_bytes[token].partition(b'"')
        written = scan.string + begun
        return bool(quote) and (
            BACKSLASH in written or written.decode("utf-8", "replace") in quoted
        )

    def _repeats(self, scan: Scan, token: int) -> bool:
        return scan.after(self._vocabulary.token_bytes[token]).repeats

    def _along_keys(self, scan: Scan, keys: Keys, allowed: Mask) -> Iterable[int]:
        """Tokens that continue the open key, or begin one, along a seen key."""
        if not keys.count or not keys.have_prefix(scan.string or b""):
            return
        notes = self._notes(keys, scan.string)
        yield from notes.closing
        if not self._looks_ahead:
            return
        for token, text in list(notes.onward.items()):
            if not is_set(allowed, token):
                continue
            num_ways = self._ways_out(keys, text, token)
            if num_ways == 0:
                yield token
            elif num_ways >= MIN_WAYS_OUT and text:
                del notes.onward[token]
                heapq.heappush(notes.open_until, (keys.count + num_ways, token, text))

    def _notes(self, keys: Keys, string: bytes | None) -> KeyNotes:
        """The notes of a place in a key, brought up to date."""
        log = keys.current()
        notes = log.notes.setdefault(string, KeyNotes())
        trie, begun = self._vocabulary.trie, string or b""
        is_new = notes.num_keys == 0
        news = keys.with_prefix(begun) if is_new else log.written[notes.num_keys : keys.count]
        for written in news:
            if not written.startswith(begun):
                continue
            rest = written[len(begun) :] if string is not None else b'"' + written
            notes.closing.extend(tokens_from(trie, rest))
            if not self._looks_ahead:
                continue
            for end in range(1, min(len(rest), self._vocabulary.max_token_bytes + 1)):
                text = begun + rest[:end] if string is not None else rest[1:end]
                notes.onward.update(dict.fromkeys(tokens_of(trie, rest[:end]), text))
        notes.num_keys = log.num_noted = keys.count
        while notes.open_until and notes.open_until[0][0] <= keys.count:
            _, token, text = heapq.heappop(notes.open_until)
            notes.onward[token] = text
        return notes

    def _towards_keys(self, scan: Scan, tails: TokenSet, allowed: Mask) -> Iterable[int]:
        """Tokens after which a next key is due or begun."""
        checked = self._checked_at(scan)
        own = scan.objects[-1] if scan.objects else None
        is_plain = not (scan.is_in_key or scan.is_escaped or scan.awaits_key)
        for token in tails.among(allowed, checked):
            if is_set(checked, token):
                continue
            simple = self._tokens.simple_tails.get(token) if is_plain and own else None
            if simple and own and not own.have_prefix(simple):
                set_token(checked, token)
                continue
            data = self._vocabulary.token_bytes[token]
            after = scan.after(data)
            keys, text = after.key_place, after.string or b""
            is_comma = scan.string is None and not text and data.lstrip()[:1] == b","
            if is_comma and not self._tokens.closing.among(allowed):
                continue  # a key is required, even if none can come
            if (
                keys is not None
                and keys.count
                and keys.have_prefix(text)
                and self._ways_out(keys, text, token, after.string is None) == 0
            ):
                yield token
            elif simple == b"":
                np.bitwise_or(checked, self._tokens.simple_ends, out=checked)
            elif not scan.is_in_key and token not in self._tokens.doubled:
                set_token(checked, token)

    def _ways_out(self, keys: Keys, text: bytes, token: int, awaits_quote: bool = False) -> int:
        """A lower bound of the ways in which a key that begins so can be new after a token."""
        log = keys.current()
        known = log.rooms.get(text)
        if known is not None:
            since, num_ways = known
            if num_ways == 0:
                return 0
            if keys.count < since + num_ways and (text or keys.count == since):
                return since + num_ways - keys.count
        steps = [token, self._tokens.of_byte[QUOTE]] if awaits_quote else [token]
        num_taken = 0
        while num_taken < len(steps) and self._inner.consume(steps[num_taken]):
            num_taken += 1
        num_ways = self._ways_from(keys, log, text) if num_taken == len(steps) else 1
        self._inner.rollback(num_taken)
        return num_ways

    def _ways_from(self, keys: Keys, log: KeyLog, text: bytes) -> int:
        """The same, where the inner matcher is at the end of the text."""
        self._num_probes += 1
        if self._num_probes > MAX_PROBES:
            return 1
        following = self._next_bytes()
        along = [byte for byte in keys.bytes_after(text) if following >> byte & 1]
        num_ways = following.bit_count() - len(along)
        if not num_ways:
            num_ways = int(any(self._is_open(keys, log, text, byte) for byte in along))
        if num_ways == 0 or num_ways >= MIN_WAYS_OUT or not text:
            log.set_room(text, keys.count, num_ways)
        return num_ways

    def _next_bytes(self) -> int:
        """The bytes that may follow: bit i is byte i."""
        if isinstance(self._inner, FsmMatcher):
            return self._inner.next_bytes()
        mask = np.empty(self._vocabulary.num_words, np.uint32)
        self._inner.mask(mask)
        texts = self._vocabulary.token_bytes
        return sum(1 << texts[token][0] for token in self._tokens.single.among(mask))

    def _is_open(self, keys: Keys, log: KeyLog, text: bytes, byte: int) -> bool:
        """Whether a new key can begin with a text and a byte."""
        longer = text + bytes([byte])
        if byte == QUOTE and keys.have_written(longer):
            return False
        known = log.rooms.get(longer)
        if known is not None and known[1] == 0:
            return False
        if not self._inner.consume(self._tokens.of_byte[byte]):
            return True
        is_open = self._ways_from(keys, log, longer) > 0
        self._inner.rollback(1)
        return is_open


class _Checked(NamedTuple):
    """Tokens outside of keys after which a new key can come, while the objects are these."""

    objects: tuple[Keys | None, ...]
    tokens: Mask


class TokensAt(NamedTuple):
    """Tokens to check in some place of a text."""

    whole: TokenSet  # with keys in quotes, any of which may repeat one
    tails: TokenSet  # after which a key may be due or begun
    suspects: tuple[TokenSet, ...]  # the latter, with each of `bringing`


@dataclass(frozen=True, slots=True, eq=False)
class KeyTokens:
    """The roles of a vocabulary's tokens with regard to keys."""

    of_byte: list[int]  # [256]: the token that writes it alone, or -1
    single: TokenSet  # tokens of `of_byte`
    with_quote: TokenSet
    closing: TokenSet  # a token that begins with the end of an object
    quoted: dict[int, list[str]]  # the quoted contents of a token
    contents: frozenset[str]  # of all tokens
    whole: TokenSet  # tokens with some
    beginnings: frozenset[bytes]  # of contents
    doubled: TokenSet  # with the same content twice
    # Which bring a key that may be repeated: DOUBLED; ESCAPING, in a key: also those with a
    # backslash before their first quote; WHOLE, in a key as their contents begin: all with some.
    bringing: tuple[TokenSet, ...]
    simple_tails: dict[int, bytes]  # of a key, after a comma and no other structure
    simple: Mask  # the tokens with these
    simple_ends: Mask  # those whose tails are empty
    places: dict[tuple[bool, bool, bool], TokensAt]

    def at(self, scan: Scan) -> TokensAt:
        return self.places[scan.string is not None, scan.is_escaped, _has_keys(scan)]


@functools.lru_cache(maxsize=8)
def key_tokens(vocabulary: Vocabulary) -> KeyTokens:
    """Computed once per vocabulary, which takes as long as building its trie."""
    texts = vocabulary.token_bytes
    of_byte = byte_tokens(vocabulary)
    with_quote = [i for i in vocabulary.written_ids if b'"' in texts[i]]
    with_comma = [i for i in vocabulary.written_ids if b"," in texts[i]]
    quoted = {i: found for i in with_quote if (found := _quoted(texts[i]))}
    doubled = [i for i, found in quoted.items() if len(set(found)) < len(found)]
    tails = {
        (False, False): [i for i in {*with_comma, *with_quote} if _TAIL.fullmatch(texts[i])],
        (True, False): [i for i in with_comma if _IN_STRING_TAIL.fullmatch(texts[i])],
        (True, True): with_comma,
    }

    escaping = {*doubled, *(i for i in quoted if b"\\" in texts[i].partition(b'"')[0])}
    bringing = (set(doubled), escaping, set(quoted))

    def tokens_at(whole: Iterable[int], ids: Iterable[int]) -> TokensAt:
        found = set(ids)
        suspects = tuple(TokenSet(found | more) for more in bringing)
        return TokensAt(TokenSet(whole), TokenSet(found), suspects)

    places = {}
    for place, ids in tails.items():
        places[*place, True] = tokens_at(quoted, ids)
        is_in_string = place[0]  # of a first key, perhaps, that a token ends and repeats
        places[*place, False] = tokens_at(
            quoted if is_in_string else doubled, (i for i in ids if i in quoted)
        )
    simple_tails = {
        i: texts[i].rpartition(b",")[2].lstrip()[1:]
        for i in {*tails[False, False], *tails[True, False]}
        if texts[i].count(b",") == 1 and not _BRACKETS.search(texts[i]) and i not in doubled
    }
    return KeyTokens(
        of_byte=of_byte,
        single=TokenSet(token for token in of_byte if token >= 0),
        with_quote=TokenSet(with_quote),
        closing=TokenSet(i for i in vocabulary.written_ids if texts[i].lstrip()[:1] == b"}"),
        quoted=quoted,
        contents=frozenset(content for found in quoted.values() for content in found),
        whole=TokenSet(quoted),
        beginnings=frozenset(
            content.encode()[:end]
            for found in quoted.values()
            for content in found
            for end in range(len(content.encode()) + 1)
        ),
        doubled=TokenSet(doubled),
        bringing=tuple(map(TokenSet, bringing)),
        simple_tails=simple_tails,
        simple=vocabulary.mask_of([*simple_tails]),
        simple_ends=vocabulary.mask_of([i for i, tail in simple_tails.items() if not tail]),
        places=places,
    )


def _quoted(data: bytes) -> list[str]:
    found = []
    for string in _QUOTED.findall(data):
        try:
            found.append(decoded(string))
        except ValueError:  # cut within a character or an escape
            continue
    return found


def _has_keys(scan: Scan) -> bool:
    for keys in scan.objects:  # noqa: SIM110 (at every place: a generator takes twice as long)
        if keys is not None and keys.count:
            return True
    return False


def _unmarked(scan: Scan) -> Scan:
    """The scan without the mark of a repeated key that was let through."""
    return replace(scan, repeats=False) if scan.repeats else scan


def forced_until_refused(matcher: Matcher, inner: Matcher) -> Sequence[int]:
    """What `inner` forces, up to the first token that the matcher around it refuses."""
    forced = inner.forced_tokens()
    num_allowed = 0
    while num_allowed < len(forced) and matcher.consume(forced[num_allowed]):
        num_allowed += 1
    matcher.rollback(num_allowed)
    return forced[:num_allowed]
