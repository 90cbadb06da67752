"""The text with which a program begins, as the router learns to know it."""

from __future__ import annotations

from typing import Any

from stemma.cluster.prompt_text import MarkMemory, Opening


def opened(memory: MarkMemory, *messages: list[str]) -> Opening:
    opening = Opening({}, memory)
    opening.take([["chat", 0, 0, None, list(messages)]])
    return opening


def test_marks_of_a_whole_chat_are_learnt_from_another_one() -> None:
    memory = MarkMemory()
    first = opened(memory, ["system", "Be brief."], ["user", "Hi"])
    assert b"Be brief." in first.text and b"<s>" not in first.text
    first.note_mark(0, {"text": "<s>Be brief.</s><u>Hi</u><a>"})
    second = opened(memory, ["system", "Be long."], ["user", "What?"])
    assert second.text == b"<s>Be long.</s><u>What?</u><a>"


def test_a_content_that_the_template_changes_spoils_no_mark() -> None:
    memory = MarkMemory()
    opened(memory, ["user", "a"], ["assistant", " b "]).note_mark(0, {"text": "<u>a</u><a>b</a>"})
    assert opened(memory, ["user", "x"], ["assistant", "y"]).text.startswith(b"<u>x\0")


def test_what_is_no_chat_is_no_text() -> None:
    memory = MarkMemory()
    hostile: list[Any] = [5, [], ["user"], [None, None], ["user", {"a": 1}]]
    opening = Opening({}, memory)
    opening.take([["chat", 0, 0, None, hostile], ["chat", 0, 1, None], ["chat", 0, 2, None, "x"]])
    opening.note_mark(0, {"text": "abc"})
    opening.note_mark(0, None)
    assert isinstance(opening.text, bytes)
