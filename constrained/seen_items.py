"""Scans an output as JSON: which arrays of unique items are open, and the items of each so far.

As with keys (`seen_keys.py`) the items of an array are a log that grows at one end and serves all
positions of one text, and so does the text itself: a position is a prefix of each. Reading on from
an earlier position drops what came after it. Blanks between tokens are left out of both: what may
follow is the same with them, but for the digits of a number.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, replace
from decimal import Decimal, DecimalException
from math import isinf
from typing import Any

from .item_places import NOWHERE, ROOT, ItemPlace, ItemPlaces
from .seen_keys import BACKSLASH, QUOTE, KeyLog, Keys

DELIMITERS = frozenset(b",]} \t\n\r")
_IN_STRING = re.compile(rb'["\\]')
_OUTSIDE = re.compile(rb'["{}\[\],\s]')


def canonical_item(text: str | bytes) -> str:
    """A JSON value as one text for all that JSON Schema calls equal: 1.0 and 1, a string however it
    is escaped, an object in any order. Raises ValueError for what is not JSON."""
    return _canonical(json.loads(text, parse_int=_Number, parse_float=_Number))


class _Number(str):
    """A number as it is written."""

    __slots__ = ()


def _canonical(value: Any) -> str:
    if isinstance(value, _Number):
        return _number(value)
    if isinstance(value, list):
        return f"[{','.join(map(_canonical, value))}]"
    if isinstance(value, dict):
        members = (f"{json.dumps(key)}:{_canonical(value[key])}" for key in sorted(value))
        return "{" + ",".join(members) + "}"
    return json.dumps(value)


def _number(text: str) -> str:
    """Integers are exact, however large; a fraction is as a reader of doubles has it, and so is a
    number with an exponent that is too large for one."""
    if not text.lstrip("-").isdigit() and isinf(as_read := float(text)):
        return str(as_read)
    try:
        value = Decimal(text)
    except DecimalException:  # a small number, with an exponent of many digits
        return "0"
    places = value.as_tuple().exponent
    if isinstance(places, int) and places < 0 and any(value.as_tuple().digits[places:]):
        as_double = Decimal(float(text))
        value = as_double if as_double.is_finite() else value
    sign, digits, exponent = value.as_tuple()
    shown = "".join(map(str, digits)).lstrip("0")
    short = shown.rstrip("0")
    assert isinstance(exponent, int), text
    return f"{'-' * sign}{short}e{exponent + len(shown) - len(short)}" if short else "0"


@dataclass(frozen=True, slots=True)
class Frame:
    """An open array or object. `begin`: where in the text the present item begins, of an array of
    unique items; `items`: those before it."""

    place: int
    is_object: bool
    index: int = 0
    begin: int = -1
    items: Keys | None = None
    key: str | None = None


@dataclass(frozen=True, slots=True)
class ItemScan:
    """The position at the end of a JSON text so far."""

    places: ItemPlaces
    tape: bytearray  # the text since the first array of unique items was opened, without blanks
    length: int = 0  # of the tape, here
    frames: tuple[Frame, ...] = ()
    is_string: bool = False
    is_escaped: bool = False
    key: bytes | None = None  # what an open key has so far
    awaits_key: bool = False
    is_blank: bool = False  # the last byte, outside of a string
    repeats: bool = False  # an item has been repeated

    @property
    def has_ended_number(self) -> bool:
        """Whether a number came last, and a blank after it."""
        return self.is_blank and self.tape[self.length - 1 : self.length].isdigit()

    @property
    def watched(self) -> list[Frame]:
        """The open arrays of unique items, the outermost first."""
        return [frame for frame in self.frames if frame.items is not None]

    @property
    def is_item_string(self) -> bool:
        """Whether a string is open that is itself an item to be unique."""
        is_value = self.is_string and self.key is None
        return is_value and bool(self.frames) and self.frames[-1].items is not None

    def item(self, frame: Frame) -> bytes:
        """The present item of an array of unique items."""
        return bytes(self.tape[frame.begin : self.length])

    def place(self, frame: Frame) -> ItemPlace:
        """What holds for an open array or object."""
        return self.places[frame.place]

    def after(self, data: bytes) -> ItemScan:
        """The scan after more bytes."""
        cursor = _Cursor(self)
        cursor.read(data)
        return cursor.scan()


class _Cursor:
    """A scan that is being read on."""

    def __init__(self, scan: ItemScan) -> None:
        self.places = scan.places
        self.tape = scan.tape
        del self.tape[scan.length :]
        self.frames = list(scan.frames)
        self.is_string, self.is_escaped = scan.is_string, scan.is_escaped
        self.key = None if scan.key is None else bytearray(scan.key)
        self.awaits_key, self.repeats = scan.awaits_key, scan.repeats
        self.is_blank = scan.is_blank
        self.num_watched = sum(frame.items is not None for frame in self.frames)

    def scan(self) -> ItemScan:
        return ItemScan(
            self.places,
            self.tape,
            len(self.tape),
            tuple(self.frames),
            self.is_string,
            self.is_escaped,
            None if self.key is None else bytes(self.key),
            self.awaits_key,
            self.is_blank,
            self.repeats,
        )

    def read(self, data: bytes) -> None:
        at = 0
        while at < len(data):
            if self.is_escaped:
                self.is_escaped = False
                self._take(data[at : at + 1])
                at += 1
                continue
            special = (_IN_STRING if self.is_string else _OUTSIDE).search(data, at)
            end = special.start() if special else len(data)
            self._take(data[at:end])
            if special:
                self._special(data[end])
            at = end + 1

    def _take(self, data: bytes) -> None:
        self.is_blank = self.is_blank and not data
        if self.num_watched:
            self.tape += data
        if self.key is not None:
            self.key += data

    def _special(self, byte: int) -> None:
        if self.is_string:
            self._in_string(byte)
        elif byte == QUOTE:
            self._take(b'"')
            self.is_string = True
            if self.awaits_key:
                self.key = bytearray()
        elif byte in b"{[":
            self._open(byte)
        elif byte in b"]}":
            self._close(byte)
        elif byte == ord(","):
            self._next()
        else:
            self._end_item(at_blank=True)
            self.is_blank = True

    def _in_string(self, byte: int) -> None:
        if byte == BACKSLASH:
            self.is_escaped = True
            self._take(b"\\")
            return
        self.is_string = False
        if self.key is None:
            self._take(b'"')
            self._end_item()
            return
        if self.frames and self.frames[-1].place != NOWHERE:
            self.frames[-1] = replace(self.frames[-1], key=_decoded(bytes(self.key)))
        self.key, self.awaits_key = None, False
        self._take(b'"')

    def _open(self, byte: int) -> None:
        is_object = byte == ord("{")
        place = self._place_below()
        self._take(bytes([byte]))
        frame = Frame(place, is_object)
        if not is_object and self.places[place].is_unique:
            frame = Frame(place, False, begin=len(self.tape), items=Keys(KeyLog(), 0))
            self.num_watched += 1
        self.frames.append(frame)
        self.awaits_key = is_object

    def _place_below(self) -> int:
        if not self.frames:
            return ROOT
        frame = self.frames[-1]
        place = self.places[frame.place]
        if frame.is_object:
            return place.keys.get(frame.key or "", place.others)
        return place.item(frame.index)

    def _close(self, byte: int) -> None:
        if not self.frames:  # no JSON: the grammar refuses it
            return
        self._end_item()
        self.num_watched -= self.frames.pop().items is not None
        self.awaits_key = False
        self._take(bytes([byte]))
        self._end_item()

    def _next(self) -> None:
        if not self.frames:
            return
        frame = self.frames[-1]
        items = frame.items
        if items is not None:
            text = self._item(frame)
            item = _item(text)
            if item in items:
                self.repeats = True
            else:
                written = text
                if text[:1] == b'"' and BACKSLASH in text:  # in the spelling that a grammar writes
                    written = _respelled(text)
                items = items.added(item, written)
        self._take(b",")
        self.frames[-1] = replace(frame, index=frame.index + 1, begin=len(self.tape), items=items)
        self.awaits_key = frame.is_object

    def _end_item(self, *, at_blank: bool = False) -> None:
        """Look whether the item that ends here has come before."""
        frame = self.frames[-1] if self.frames else None
        if frame is None or frame.items is None or not frame.items.count:
            return
        text = self._item(frame)
        if text and not (at_blank and text[:1] in b'"{['):  # those have been looked at
            self.repeats |= _item(text) in frame.items

    def _item(self, frame: Frame) -> bytes:
        return bytes(self.tape[frame.begin :])


def _item(text: bytes) -> str:
    try:
        return canonical_item(text)
    except ValueError:  # no JSON, which the grammar refuses
        return text.decode("latin-1")


def _respelled(text: bytes) -> bytes:
    try:
        return json.dumps(json.loads(text), ensure_ascii=False).encode("utf-8", "surrogatepass")
    except ValueError:
        return text


def _decoded(string: bytes) -> str:
    try:
        decoded: str = json.loads(b'"' + string + b'"')
    except ValueError:
        return string.decode("utf-8", "replace")
    return decoded
