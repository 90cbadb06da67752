"""Keeps the items of an array unique where the grammar cannot: `uniqueItems`.

No automaton knows which of many items it has seen. A matcher wrapped around another reads the
output as JSON (`seen_items.py`), follows its path to know which arrays are meant, and removes from
each mask the tokens that

- end an item that its array has, by value: at a quote or bracket, a number at what follows it;
- lead where only such an item can follow. Where an item has few texts, those that are left are
  known. Elsewhere the inner matcher is probed, byte by byte along the items that the array has;
  away from them an item is new whatever follows. What is found holds while fewer items have come
  than there were ways out.

So is a comma after which no new item is left. An output for which nothing is left at all ends with
an error: no item is ever let through twice. It is assumed that from one index on an array's items
have the same language.
"""

from __future__ import annotations

import bisect
import functools
import heapq
import itertools
import re
from collections.abc import Iterator, Sequence
from copy import deepcopy
from typing import NamedTuple

import numpy as np

from .item_places import ItemPlaces
from .matcher import BoundGrammar, Mask, Matcher, Path
from .seen_items import DELIMITERS, Frame, ItemScan, canonical_item
from .seen_keys import BACKSLASH, KeyNotes, Keys
from .token_sets import TokenSet, byte_tokens, clear_tokens, is_set, tokens_from, tokens_of
from .unique_keys import forced_until_refused
from .vocabulary import Vocabulary

MAX_PROBES = 200  # of the inner matcher, for one mask; undecided tokens are allowed
MIN_WAYS_OUT = 4  # from here on a text is not looked at again before as many items have come
_STRING = rb'"(?:[^"\\]|\\.)*"'
_WHOLE_STRING = re.compile(_STRING, re.DOTALL)
_BLANK = re.compile(rb"[ \t\r\n]")
_ENDS_OUTSIDE = re.compile(rb'[^"]*[,\]}\s]|[^"]*%s' % _STRING, re.DOTALL)


class UniqueItems:
    """A grammar of JSON texts, without those in which an array of unique items repeats one."""

    def __init__(self, inner: BoundGrammar, vocabulary: Vocabulary, places: ItemPlaces) -> None:
        self._inner = inner
        self._vocabulary = vocabulary
        self._places = places

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
        return UniqueItemsMatcher(
            self._inner.matcher(), self._vocabulary, [ItemScan(self._places, bytearray())]
        )


class UniqueItemsMatcher:
    """A matcher that repeats no item. A token that would is neither in the mask, nor consumed, nor
    forced."""

    def __init__(self, inner: Matcher, vocabulary: Vocabulary, scans: list[ItemScan]) -> None:
        self._inner = inner
        self._vocabulary = vocabulary
        self._scans = scans  # before and after each token
        self._tokens = item_tokens(vocabulary)
        self._refused: frozenset[int] | None = None  # at this place; None: not known yet
        self._is_stuck = False
        self._num_probes = 0

    def mask(self, out: Mask) -> None:
        self._inner.mask(out)
        if self._refused is None:
            self._refused = frozenset(self._found(out))
            clear_tokens(out, self._refused)
            has_end = self._inner.is_accepting() or self._inner.error() is not None
            self._is_stuck = bool(self._refused) and not has_end and not out.any()
        else:
            clear_tokens(out, self._refused)

    def consume(self, token_id: int) -> bool:
        data = self._vocabulary.token_bytes[token_id]
        after = self._scans[-1].after(data)
        if after.repeats or (_may_repeat(after) and self._is_refused(token_id)):
            return False
        if not self._inner.consume(token_id):
            return False
        # NOTE: once more, since looking at other tokens has written to the same logs.
        self._scans.append(self._scans[-1].after(data))
        self._refused = None
        return True

    def rollback(self, num_tokens: int) -> None:
        self._inner.rollback(num_tokens)
        if num_tokens:
            del self._scans[-num_tokens:]
            self._refused, self._is_stuck = None, False

    def fork(self) -> UniqueItemsMatcher:
        # NOTE: logs serve one text only; deepcopy makes one new log of each.
        other = UniqueItemsMatcher(self._inner.fork(), self._vocabulary, deepcopy(self._scans))
        other._refused, other._is_stuck = self._refused, self._is_stuck
        return other

    def is_accepting(self) -> bool:
        return self._inner.is_accepting()

    def forced_tokens(self) -> Sequence[int]:
        """Forced tokens up to the first one that is refused."""
        return forced_until_refused(self, self._inner)

    def is_finished(self) -> bool:
        return self._inner.is_finished()

    def error(self) -> str | None:
        if self._is_stuck:
            return "uniqueItems: no item is left that the array does not have"
        return self._inner.error()

    def _is_refused(self, token_id: int) -> bool:
        if self._refused is None:
            self.mask(np.empty(self._vocabulary.num_words, np.uint32))
        return token_id in (self._refused or ())

    def _found(self, allowed: Mask) -> set[int]:
        """The tokens to remove from a mask."""
        scan = self._scans[-1]
        watched = scan.watched
        self._num_probes = 0
        if not watched:  # a token may still begin an array and repeat an item
            texts = self._vocabulary.token_bytes
            tokens = self._tokens
            arrays = tokens.arrays_in_string if scan.is_string else tokens.arrays
            return {token for token in arrays.among(allowed) if scan.after(texts[token]).repeats}
        items, looks_ahead = watched[-1].items, self._vocabulary.writes_all_bytes
        if looks_ahead and items is not None and items.count and not scan.item(watched[-1]):
            self._ways(items, b"")  # while the inner matcher is at this place
        refused: set[int] = set()
        for frame in watched:
            refused.update(self._along(scan, frame, allowed))
        refused.update(self._ending(scan, allowed, refused))
        return refused

    def _ending(self, scan: ItemScan, allowed: Mask, refused: set[int]) -> Iterator[int]:
        """Tokens that end an item and repeat it, or after which only repeated ones can follow."""
        for kind in self._kinds_of_ending(scan):
            for token in kind.among(allowed):
                if token in refused:
                    continue
                after = scan.after(self._vocabulary.token_bytes[token])
                if after.repeats or self._is_exhausted(after, token):
                    yield token

    def _kinds_of_ending(self, scan: ItemScan) -> Iterator[TokenSet]:
        """The tokens to be looked at, beside those of `_along`."""
        tokens = self._tokens
        if not scan.is_string:
            yield tokens.outside
        elif not scan.is_item_string and not scan.is_escaped:
            yield tokens.brackets_in_string
            yield tokens.spaced
        elif scan.is_escaped or BACKSLASH in scan.item(scan.frames[-1]):
            yield tokens.with_quote
        else:
            yield tokens.busy
            if len(scan.watched) > 1:
                yield tokens.ends
            if not self._has_several_left(scan, scan.frames[-1]):
                yield tokens.commas

    def _has_several_left(self, scan: ItemScan, frame: Frame) -> bool:
        """Whether another item can follow the present one, whichever this is."""
        assert frame.items is not None
        words = scan.place(frame).words_at(frame.index + 1)
        if words is not None:
            return len(list(itertools.islice(_left(words, frame.items, b""), 2))) > 1
        known = _known_ways(frame.items, b"")
        if known is None and self._vocabulary.writes_all_bytes:
            known = self._ways_behind(frame.items)
        return known is not None and known > 1

    def _ways_behind(self, items: Keys) -> int | None:
        """The ways of an item that follows the open string; None where the string cannot end."""
        steps = [self._tokens.of_byte[byte] for byte in b'",']
        num_taken = 0
        while num_taken < len(steps) and self._inner.consume(steps[num_taken]):
            num_taken += 1
        found = self._ways(items, b"") if num_taken == len(steps) else None
        self._inner.rollback(num_taken)
        return found

    def _is_exhausted(self, after: ItemScan, token: int) -> bool:
        """Whether only repeated items can follow a token that ends an item and begins the next."""
        for frame in after.watched:
            begun = after.item(frame)
            assert frame.items is not None
            is_along = frame.items.count and frame.items.have_prefix(begun)
            if is_along and not self._has_way(
                after, frame, begun, token, is_over=after.has_ended_number
            ):
                return True
        return False

    def _along(self, scan: ItemScan, frame: Frame, allowed: Mask) -> Iterator[int]:
        """Tokens that continue the present item along one that the array has."""
        assert frame.items is not None
        if not frame.items.count:
            return
        begun = scan.item(frame)
        notes = self._notes(frame.items, begun)
        if scan.is_item_string and frame is scan.frames[-1]:
            yield from (token for token in notes.closing if is_set(allowed, token))
        for token, text in list(notes.onward.items()):
            if not is_set(allowed, token):
                continue
            if not self._has_way(scan, frame, text, token):
                yield token
                continue
            since, num_ways = frame.items.current().rooms.get(text, (0, 0))
            if since + num_ways >= frame.items.count + MIN_WAYS_OUT:
                del notes.onward[token]
                heapq.heappush(notes.open_until, (since + num_ways, token, text))

    def _notes(self, items: Keys, begun: bytes) -> KeyNotes:
        """The notes of a place in an item, brought up to date."""
        log, trie = items.current(), self._vocabulary.trie
        notes = log.notes.setdefault(begun, KeyNotes())
        is_new = notes.num_keys == 0
        news = items.with_prefix(begun) if is_new else log.written[notes.num_keys : items.count]
        for text in news:
            if not text.startswith(begun):
                continue
            rest = text[len(begun) :]
            if _is_closed(text) and rest:
                notes.closing.extend(tokens_from(trie, rest))
            last = len(rest) - _is_closed(text)  # a number may go on
            for end in range(1, min(last, self._vocabulary.max_token_bytes) + 1):
                along = begun + rest[:end]
                notes.onward.update(dict.fromkeys(tokens_of(trie, rest[:end]), along))
        notes.num_keys = log.num_noted = items.count
        while notes.open_until and notes.open_until[0][0] <= items.count:
            _, token, text = heapq.heappop(notes.open_until)
            notes.onward[token] = text
        return notes

    def _has_way(
        self, scan: ItemScan, frame: Frame, begun: bytes, token: int, *, is_over: bool = False
    ) -> bool:
        """Whether an item that begins so, after a token, can be new. `scan` is of the frame;
        `is_over`: no digit can follow."""
        assert frame.items is not None
        words = scan.place(frame).words_at(frame.index)
        if words is not None:
            return next(_left(words, frame.items, begun), None) is not None
        known = _known_ways(frame.items, _place_of(begun, is_over))
        if known is not None:
            return known > 0
        if not self._vocabulary.writes_all_bytes or not self._inner.consume(token):
            return True
        has_way = self._ways(frame.items, begun, is_over=is_over) > 0
        self._inner.rollback(1)
        return has_way

    def _ways(self, items: Keys, begun: bytes, *, is_over: bool = False) -> int:
        """In how many ways an item that begins so can be new, at least; the inner matcher is at the
        end of this text. A further item takes away one of them at most."""
        place = _place_of(begun, is_over)
        known = _known_ways(items, place)
        if known is not None:
            return known
        self._num_probes += 1
        if self._num_probes > MAX_PROBES:
            return 1
        mask = np.empty(self._vocabulary.num_words, np.uint32)
        self._inner.mask(mask)
        texts = self._vocabulary.token_bytes
        following = {texts[token][0] for token in self._tokens.single.among(mask)}
        if not _is_in_string(begun):
            following.difference_update(b" \t\r\n")  # after these it is the same item
        along: set[int] = set()
        if items.have_written(begun) or _is_number_in(items, begun):
            along |= DELIMITERS
        along.update(items.bytes_after(begun))
        ends = following - along & DELIMITERS  # of one item: a way, whatever may follow it
        num_ways = len(following - along - DELIMITERS) + bool(ends)
        for byte in sorted(following & along) if num_ways < MIN_WAYS_OUT else ():
            num_ways = max(num_ways, self._ways_after(items, begun, byte))
            if num_ways >= MIN_WAYS_OUT:
                break
        if self._num_probes <= MAX_PROBES:
            items.current().set_room(place, items.count, num_ways)
        return num_ways

    def _ways_after(self, items: Keys, begun: bytes, byte: int) -> int:
        longer = begun + bytes([byte])
        is_end = not items.have_prefix(longer)  # of a number
        if is_end or (_is_closed(longer) and items.have_written(longer)):
            return 0  # here a repeated item ends
        if not self._inner.consume(self._tokens.of_byte[byte]):
            return 0
        num_ways = self._ways(items, longer)
        self._inner.rollback(1)
        return num_ways


class ItemTokens(NamedTuple):
    """The roles of a vocabulary's tokens with regard to items. "In a string": the token ends it."""

    of_byte: list[int]  # [256]: the token that writes it alone, or -1
    single: TokenSet  # tokens of `of_byte`
    outside: TokenSet  # that may end an item when no string is open
    with_quote: TokenSet
    commas: TokenSet  # in a string: it is followed by commas and blanks alone
    ends: TokenSet  # by brackets, too
    busy: TokenSet  # by more, or it contains an escape
    brackets_in_string: TokenSet  # in a string: brackets are among what follows
    spaced: TokenSet  # in a string: it is followed by a blank somewhere
    arrays: TokenSet  # that may begin an array and repeat an item
    arrays_in_string: TokenSet


@functools.lru_cache(maxsize=8)
def item_tokens(vocabulary: Vocabulary) -> ItemTokens:
    """Computed once per vocabulary."""
    texts, written = vocabulary.token_bytes, vocabulary.written_ids
    of_byte = byte_tokens(vocabulary)
    with_quote = [i for i in written if b'"' in texts[i]]
    behind = {i: texts[i].partition(b'"')[2] for i in with_quote}
    is_busy = {
        i: b"\\" in texts[i] or bool(rest.strip(b",]} \t\r\n")) for i, rest in behind.items()
    }
    has_bracket = {i: b"]" in rest or b"}" in rest for i, rest in behind.items()}
    return ItemTokens(
        of_byte=of_byte,
        single=TokenSet(token for token in of_byte if token >= 0),
        outside=TokenSet(i for i in written if _ENDS_OUTSIDE.match(texts[i])),
        with_quote=TokenSet(with_quote),
        commas=TokenSet(
            i for i in with_quote if b"," in behind[i] and not (is_busy[i] or has_bracket[i])
        ),
        ends=TokenSet(i for i in with_quote if has_bracket[i] and not is_busy[i]),
        busy=TokenSet(i for i in with_quote if is_busy[i]),
        brackets_in_string=TokenSet(
            i for i in with_quote if has_bracket[i] or (b"[" in behind[i] and b"," in behind[i])
        ),
        spaced=TokenSet(i for i in with_quote if _BLANK.search(behind[i])),
        arrays=TokenSet(i for i in written if b"[" in texts[i] and b"," in texts[i]),
        arrays_in_string=TokenSet(i for i in with_quote if b"[" in behind[i] and b"," in behind[i]),
    )


def _may_repeat(after: ItemScan) -> bool:
    """Whether a token after which the scan is this may lead to nothing but repeated items."""
    return any(
        frame.items is not None
        and frame.items.count > 0
        and frame.items.have_prefix(after.item(frame))
        for frame in after.watched
    )


def _known_ways(items: Keys, begun: bytes) -> int | None:
    """What is known already of the ways in which an item that begins so can be new."""
    known = items.current().rooms.get(begun)
    if known is None:
        return None
    since, num_ways = known
    if num_ways == 0:
        return 0
    left = since + num_ways - items.count
    return left if left > 0 else None


def _place_of(begun: bytes, is_over: bool) -> bytes:
    """What decides which texts may follow."""
    return begun + b" " * is_over


def _is_number_in(items: Keys, text: bytes) -> bool:
    """Whether the items have this number, however it is spelled."""
    if not text[-1:].isdigit() or text[:1] in b'"[{':
        return False
    return canonical_item(text) in items


def _is_in_string(begun: bytes) -> bool:
    """Whether a string is open at the end of this text."""
    return b'"' in _WHOLE_STRING.sub(b"", begun)


def _left(words: tuple[str, ...], items: Keys, begun: bytes) -> Iterator[bytes]:
    """The texts that begin so, ascending, and that no item so far equals."""
    texts, canonical = _sorted(words)
    at = bisect.bisect_left(texts, begun)
    while at < len(texts) and texts[at].startswith(begun):
        if canonical[at] not in items:
            yield texts[at]
        at += 1


@functools.lru_cache(maxsize=1024)
def _sorted(words: tuple[str, ...]) -> tuple[list[bytes], list[str]]:
    texts = sorted(word.encode() for word in words)
    return texts, [canonical_item(text) for text in texts]


def _is_closed(text: bytes) -> bool:
    """Whether an item ends with its text, whatever follows: not so a number."""
    return text[-1:] in (b'"', b"]", b"}")
