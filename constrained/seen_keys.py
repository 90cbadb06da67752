"""Scans an output as JSON: which objects are open, and the keys that each has so far."""

from __future__ import annotations

import bisect
import itertools
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field

QUOTE, BACKSLASH = 0x22, 0x5C
_IN_STRING = re.compile(rb'["\\]')
_STRUCTURE = re.compile(rb'["{}\[\],]')


@dataclass(slots=True, eq=False)
class KeyLog:
    """The keys of one object in the order in which they came.

    A log serves all positions of a text, each of which identifies its keys by their number. It
    grows at one end: a key added to an earlier position drops the keys after that.
    """

    keys: dict[str, int] = field(default_factory=dict)  # to its index in `written`
    written: list[bytes] = field(default_factory=list)  # as JSON, with the quote at the end
    ordered: list[bytes] = field(default_factory=list)  # the same, ascending
    # By the text of a begun key: ways out of the seen keys, and how many keys there were then.
    rooms: dict[bytes, tuple[int, int]] = field(default_factory=dict)
    changes: list[tuple[int, bytes, tuple[int, int] | None]] = field(default_factory=list)
    notes: dict[object, KeyNotes] = field(default_factory=dict)
    num_noted: int = 0  # most keys that a note covers

    def cut(self, num_keys: int) -> None:
        """Drop the keys after the first `num_keys`, and what is known from them."""
        while len(self.written) > num_keys:
            self.keys.popitem()
            del self.ordered[bisect.bisect_left(self.ordered, self.written.pop())]
        while self.changes and self.changes[-1][0] > num_keys:
            _, text, before = self.changes.pop()
            if before is None:
                del self.rooms[text]
            else:
                self.rooms[text] = before
        if self.num_noted > num_keys:
            self.notes = {at: note for at, note in self.notes.items() if note.num_keys <= num_keys}
            self.num_noted = num_keys

    def set_room(self, text: bytes, num_keys: int, num_ways: int) -> None:
        """Record how many ways out there are after a text."""
        self.changes.append((num_keys, text, self.rooms.get(text)))
        self.rooms[text] = (num_keys, num_ways)


@dataclass(slots=True, eq=False)
class KeyNotes:
    """What is known at one position of a key, from the first keys of its object."""

    num_keys: int = 0
    closing: list[int] = field(default_factory=list)  # tokens that would repeat a key
    onward: dict[int, bytes] = field(default_factory=dict)  # towards a key: token -> text after it
    # Towards texts that stay open up to a number of keys: that number, token, text. A heap.
    open_until: list[tuple[int, int, bytes]] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Keys:
    """The first keys of a log."""

    log: KeyLog
    count: int

    def __contains__(self, key: str) -> bool:
        return self.log.keys.get(key, self.count) < self.count

    def plus(self, key: str) -> Keys:
        """These keys and a new one."""
        return self.added(key, written_key(key))

    def added(self, key: str, written: bytes) -> Keys:
        """The same, with a key's text."""
        log = self.log
        if len(log.written) > self.count:
            log.cut(self.count)
        log.keys[key] = self.count
        log.written.append(written)
        bisect.insort(log.ordered, written)
        return Keys(log, self.count + 1)

    def current(self) -> KeyLog:
        """The log cut to these keys."""
        if len(self.log.written) > self.count:
            self.log.cut(self.count)
        return self.log

    def have_written(self, text: bytes) -> bool:
        """Whether this text is one of them, as JSON."""
        ordered = self.current().ordered
        at = bisect.bisect_left(ordered, text)
        return at < len(ordered) and ordered[at] == text

    def have_prefix(self, text: bytes) -> bool:
        """Whether any begins so, as JSON."""
        ordered = self.current().ordered
        at = bisect.bisect_left(ordered, text)
        return at < len(ordered) and ordered[at].startswith(text)

    def with_prefix(self, text: bytes) -> list[bytes]:
        """Those that begin so, as JSON."""
        ordered = self.current().ordered
        at = bisect.bisect_left(ordered, text)
        begun = itertools.takewhile(
            lambda key: key.startswith(text), itertools.islice(ordered, at, None)
        )
        return list(begun)

    def bytes_after(self, text: bytes) -> Iterator[int]:
        """The bytes that follow a text in those keys that begin with it and are longer."""
        ordered = self.current().ordered
        at = bisect.bisect_right(ordered, text)
        while at < len(ordered) and ordered[at].startswith(text):
            byte = ordered[at][len(text)]
            yield byte
            at = bisect.bisect_left(ordered, text + bytes([byte + 1]), at)


@dataclass(frozen=True, slots=True)
class Scan:
    """The lexical position at the end of a JSON text so far."""

    objects: tuple[Keys | None, ...] = ()  # keys of each open object; None: an array
    awaits_key: bool = False
    string: bytes | None = None  # the written part of the open key, after its quote; of a value b""
    is_escaped: bool = False  # the next character of the string
    repeats: bool = False  # a key has been repeated

    @property
    def is_in_key(self) -> bool:
        """Whether a key is open."""
        return self.string is not None and self.awaits_key

    @property
    def key_place(self) -> Keys | None:
        """The keys of the object in which a key is open or comes next."""
        return self.objects[-1] if self.awaits_key and self.objects else None

    def after(self, data: bytes) -> Scan:
        """The scan after more bytes."""
        scan, at = self, 0
        while at < len(data):
            if scan.is_escaped:
                scan, at = scan._extended(data[at : at + 1]), at + 1
                continue
            special = (_STRUCTURE if scan.string is None else _IN_STRING).search(data, at)
            end = special.start() if special else len(data)
            if scan.string is not None and end > at:
                scan = scan._extended(data[at:end])
            if special:
                is_outside = scan.string is None
                scan = scan._outside(data[end]) if is_outside else scan._inside(data[end])
            at = end + 1
        return scan

    def _extended(self, data: bytes) -> Scan:
        assert self.string is not None
        if not self.awaits_key and not self.is_escaped:
            return self
        string = self.string + data if self.awaits_key else b""
        return Scan(self.objects, self.awaits_key, string, False, self.repeats)

    def _inside(self, byte: int) -> Scan:
        assert self.string is not None
        if byte == BACKSLASH:
            string = self.string + b"\\" if self.awaits_key else b""
            return Scan(self.objects, self.awaits_key, string, True, self.repeats)
        keys = self.key_place
        if keys is None:
            return Scan(self.objects, False, None, False, self.repeats)
        key = decoded(self.string)
        if key in keys:
            return Scan(self.objects, repeats=True)
        return Scan((*self.objects[:-1], keys.plus(key)), repeats=self.repeats)

    def _outside(self, byte: int) -> Scan:
        if byte == QUOTE:
            return Scan(self.objects, self.awaits_key, b"", False, self.repeats)
        if byte in b"{[":
            keys = Keys(KeyLog(), 0) if byte == ord("{") else None
            return Scan((*self.objects, keys), byte == ord("{"), None, False, self.repeats)
        if byte in b"}]":
            return Scan(self.objects[:-1], False, None, False, self.repeats)
        is_key_next = bool(self.objects) and self.objects[-1] is not None
        return Scan(self.objects, is_key_next, None, False, self.repeats)


def written_key(key: str) -> bytes:
    """As JSON, without the opening quote."""
    return json.dumps(key, ensure_ascii=False)[1:].encode("utf-8", "surrogatepass")


def decoded(string: bytes) -> str:
    """The text of a string's body, which is asked of tokens that no grammar has seen yet, too.
    Raises ValueError where it ends within an escape."""
    if BACKSLASH not in string:
        return string.decode(errors="replace")
    text: str = json.loads((b'"' + string + b'"').decode(errors="replace"))
    return text
