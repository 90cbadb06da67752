"""Text that repeats on a connection is sent once: both sides' tables of such texts.

The client alone decides: a long text that it sends a second time gets a slot, which an `intern`
message fills on the runtime's side before any op that names the slot. An op then has the slot's
number where the text would stand: a `Text`'s text, the content of a `Chat`'s message, a
constraint's source, a prediction. Messages arrive once and in order (see `link`), so the tables
agree whatever becomes of the connection; the least recently used slots are filled anew, or emptied,
by the client's word too.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

from ...errors import InvalidProgram, ProtocolError

MIN_CHARS = 256  # guess: below, a text costs about as much as the bookkeeping
MAX_CHARS = 4 * 1024 * 1024  # of one text
MAX_TOTAL_CHARS = 16 * 1024 * 1024
MAX_SLOTS = 1024
MAX_CHAT_SLOTS = 256  # that one chat may name
MAX_CHAT_CHARS = MAX_TOTAL_CHARS // 2  # of the texts in these
MAX_SEEN = 8192  # hashes of texts that were sent once


class SentTexts:
    """The client's table. Invariant: what `runtime_has` says is in the runtime's table."""

    def __init__(self) -> None:
        self._slots: OrderedDict[str, int] = OrderedDict()  # the least recently used first
        self._free = list(range(MAX_SLOTS - 1, -1, -1))
        self._num_chars = 0
        self._seen: set[int] = set()

    def slot_of(self, text: str) -> int | None:
        """The slot of a text, None where it has none. Notes that the text was sent."""
        slot = self._slots.get(text)
        if slot is not None:
            self._slots.move_to_end(text)
        return slot

    def is_repeated(self, text: str) -> bool:
        """Whether a text without a slot is sent again and deserves one; notes that it was sent."""
        if len(text) > MAX_CHARS:
            return False
        key = hash(text)
        if key in self._seen:
            return True
        if len(self._seen) >= MAX_SEEN:
            self._seen.clear()
        self._seen.add(key)
        return False

    def has_room(self, text: str) -> bool:
        """Whether `add` would leave all other texts where they are."""
        return bool(self._free) and self._num_chars + len(text) <= MAX_TOTAL_CHARS

    def add(self, text: str) -> tuple[int, list[int]]:
        """The slot that a text gets, and the slots that are emptied for it first."""
        emptied: list[int] = []
        while not self.has_room(text):
            old, slot = self._slots.popitem(last=False)
            self._num_chars -= len(old)
            self._free.append(slot)
            emptied.append(slot)
        slot = self._free.pop()
        self._slots[text] = slot
        self._num_chars += len(text)
        return slot, emptied


class TakenTexts:
    """The runtime's table of one client. Bounded by MAX_SLOTS and MAX_TOTAL_CHARS."""

    def __init__(self) -> None:
        self._texts: dict[int, str] = {}
        self._num_chars = 0

    def change(self, header: dict[str, Any]) -> None:
        """Carry out an `intern` message. Raises ProtocolError if it breaks the bounds."""
        emptied, texts = header.get("emptied", []), header.get("texts", [])
        if not isinstance(emptied, list) or not isinstance(texts, list):
            raise ProtocolError("intern: emptied and texts must be lists")
        for slot in emptied:
            self._put(slot, "")
        for item in texts:
            if not isinstance(item, list) or len(item) != 2 or not isinstance(item[1], str):
                raise ProtocolError("intern: texts must be [slot, text] each")
            self._put(item[0], item[1])

    def _put(self, slot: object, text: str) -> None:
        if not isinstance(slot, int) or isinstance(slot, bool) or not 0 <= slot < MAX_SLOTS:
            raise ProtocolError(
                f"slot={slot!r:.200} is not allowed; allowed: an integer in [0, {MAX_SLOTS - 1}]"
            )
        num_chars = self._num_chars - len(self._texts.get(slot, "")) + len(text)
        if num_chars > MAX_TOTAL_CHARS:
            raise ProtocolError(f"intern: more than {MAX_TOTAL_CHARS} characters in all")
        self._texts[slot] = text
        self._num_chars = num_chars

    def restore(self, op: object) -> int:
        """Put the texts that an op names by their slots in their places, in place; the number of
        characters put there. Raises InvalidProgram for a slot that has none."""
        if not isinstance(op, list) or len(op) < 5:
            return 0
        if op[0] == "text" and _is_slot(op[4]):
            op[4] = self._text(op[4])
            return len(op[4])
        if op[0] == "chat" and isinstance(op[4], list):
            return sum(map(self._restore_content, op[4]))
        if op[0] == "gen" and len(op) > 5 and isinstance(op[5], dict):
            params, constraint = op[5], op[5].get("constraint")
            num_chars = self._restore_field(params, "prediction")
            if isinstance(constraint, dict):
                num_chars += self._restore_field(constraint, "source")
            return num_chars
        return 0

    def _restore_content(self, message: object) -> int:
        if not isinstance(message, list) or len(message) < 2 or not _is_slot(message[1]):
            return 0
        message[1] = self._text(message[1])
        return len(message[1])

    def _restore_field(self, values: dict[str, Any], name: str) -> int:
        if not _is_slot(values.get(name)):
            return 0
        text = values[name] = self._text(values[name])
        return len(text)

    def _text(self, slot: int) -> str:
        text = self._texts.get(slot, "")
        if not text:
            raise InvalidProgram.of("slot", slot, "one that an intern message has filled")
        return text


def _is_slot(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
