"""Interned texts: the runtime reads what the author wrote, and both tables stay within bounds."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stemma.errors import InvalidProgram, ProtocolError
from stemma.frontend.protocol import interning
from stemma.frontend.protocol.interning import SentTexts, TakenTexts

TEXTS = [letter * size for letter in "abcdefg" for size in (20, 55)]


@settings(max_examples=150)
@given(st.lists(st.sampled_from(TEXTS), max_size=60))
def test_both_tables_agree_through_evictions(texts: list[str]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interning, "MAX_SLOTS", 4)
        patch.setattr(interning, "MAX_TOTAL_CHARS", 150)
        patch.setattr(interning, "MAX_CHARS", 60)
        patch.setattr(interning, "MAX_SEEN", 6)
        sent, taken = SentTexts(), TakenTexts()
        for text in texts:
            slot = sent.slot_of(text)
            if slot is None and sent.is_repeated(text):
                slot, emptied = sent.add(text)
                taken.change({"emptied": emptied, "texts": [[slot, text]]})
            op = ["text", 0, 0, None, text if slot is None else slot]
            assert taken.restore(op) == (0 if slot is None else len(text))
            assert op[4] == text
            assert taken._num_chars == sum(map(len, taken._texts.values())) <= 150


def test_a_text_gets_a_slot_when_it_comes_a_second_time() -> None:
    texts = SentTexts()
    assert texts.slot_of("a" * 300) is None and not texts.is_repeated("a" * 300)
    assert texts.is_repeated("a" * 300) and not texts.is_repeated("b" * 300)
    slot, emptied = texts.add("a" * 300)
    assert texts.slot_of("a" * 300) == slot and emptied == []
    assert not texts.is_repeated("a" * (interning.MAX_CHARS + 1))
    assert not texts.is_repeated("a" * (interning.MAX_CHARS + 1)), "too long to keep"


def test_a_constraints_source_is_restored_too() -> None:
    texts = TakenTexts()
    texts.change({"texts": [[3, "{}"]]})
    op: list[Any] = ["gen", 0, 0, None, "x", {"constraint": {"kind": "json_schema", "source": 3}}]
    texts.restore(op)
    assert op[5]["constraint"]["source"] == "{}"
    op = ["gen", 0, 0, None, "x", {"prediction": 3, "constraint": {"kind": "regex", "source": 3}}]
    assert texts.restore(op) == 4
    assert op[5] == {"prediction": "{}", "constraint": {"kind": "regex", "source": "{}"}}


@pytest.mark.parametrize("slot", [-1, 5, interning.MAX_SLOTS, 10**30])
def test_a_slot_that_nothing_has_filled_is_the_programs_error(slot: int) -> None:
    with pytest.raises(InvalidProgram, match="slot="):
        TakenTexts().restore(["text", 0, 0, None, slot])


@pytest.mark.parametrize(
    "header",
    [
        {"texts": "a"}, {"texts": [["a", 1]]}, {"texts": [[0, 1]]}, {"texts": [[0]]},
        {"texts": [[True, "a"]]}, {"texts": [[-1, "a"]]}, {"texts": [[interning.MAX_SLOTS, "a"]]},
        {"emptied": 3}, {"emptied": [None]}, {"emptied": [[]]},
    ],
    ids=str,
)  # fmt: skip
def test_a_message_that_breaks_the_bounds_is_a_protocol_error(header: dict[str, Any]) -> None:
    with pytest.raises(ProtocolError):
        TakenTexts().change(header)


def test_a_client_cannot_fill_the_table_beyond_its_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interning, "MAX_TOTAL_CHARS", 100)
    texts = TakenTexts()
    texts.change({"texts": [[0, "a" * 60]]})
    with pytest.raises(ProtocolError, match="more than 100 characters"):
        texts.change({"texts": [[1, "b" * 60]]})
    texts.change({"emptied": [0], "texts": [[1, "b" * 60]]})


@given(st.recursive(st.none() | st.integers() | st.text(), lambda x: st.lists(x) | st.dictionaries(
    st.sampled_from(["constraint", "source", "prediction"]), x), max_leaves=8))  # fmt: skip
def test_any_op_is_restored_or_refused(op: Any) -> None:
    for item in (op, ["text", 0, 0, None, op], ["gen", 0, 0, None, "x", op]):
        with contextlib.suppress(InvalidProgram):
            TakenTexts().restore(item)


def test_contents_of_a_chat_are_put_in_their_places() -> None:
    taken = TakenTexts()
    taken.change({"texts": [[3, "long"]]})
    op: list[object] = ["chat", 0, 0, None, [["user", 3], ["user", "b"], ["tool", 3, "{}"], [], 5]]
    assert taken.restore(op) == 8
    assert op[4] == [["user", "long"], ["user", "b"], ["tool", "long", "{}"], [], 5]
    with pytest.raises(InvalidProgram, match="slot=4"):
        taken.restore(["chat", 0, 0, None, [["user", 4]]])
