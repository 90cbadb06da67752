"""Events that wait: nothing of them is lost or reordered, and streamed text does not pile up."""

from __future__ import annotations

from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stemma.frontend.protocol import wire
from stemma.runtime.sessions import event_outbox
from stemma.runtime.sessions.event_outbox import EventOutbox

ITEMS = st.lists(
    st.tuples(
        st.integers(1, 2), st.integers(0, 2), st.integers(0, 1),
        st.sampled_from([wire.DELTA, wire.DELTA, wire.VALUE]),
        st.text("ab", min_size=1, max_size=3), st.booleans(),
    ),
    max_size=40,
)  # fmt: skip


def decoded(events: list[bytes]) -> list[list[Any]]:
    return [orjson.loads(event) for event in events]


@given(ITEMS)
def test_each_branch_gets_all_its_text_in_order(
    items: list[tuple[int, int, int, str, str, bool]],
) -> None:
    outbox, sent = EventOutbox(), list[list[Any]]()
    for program, branch, seq, kind, text, takes in items:
        outbox.append(program, branch, seq, kind, text)
        if takes:
            sent += decoded(outbox.take(40))
    while outbox:
        sent += decoded(outbox.take(40))
    assert outbox.num_bytes == 0 and not outbox._growing
    for key in {item[:2] for item in items}:
        wanted = [(seq, kind, text) for *k, seq, kind, text, _ in items if tuple(k) == key]
        got = [(seq, kind, text) for *k, seq, kind, text in sent if tuple(k) == key]
        assert flat(got) == flat(wanted)


def flat(events: list[tuple[int, str, str]]) -> list[tuple[int, str, str]]:
    """Deltas letter by letter."""
    return [
        (seq, kind, piece)
        for seq, kind, text in events
        for piece in (text if kind == wire.DELTA else [text])
    ]


def test_streamed_text_is_one_event_while_it_waits() -> None:
    outbox = EventOutbox()
    for _ in range(1000):
        outbox.append(1, 0, 2, wire.DELTA, "ab")
        outbox.append(1, 1, 0, wire.DELTA, "c")
    assert outbox.num_bytes < 3000 + 200
    assert decoded(outbox.take(10**6)) == [
        [1, 0, 2, wire.DELTA, "ab" * 1000],
        [1, 1, 0, wire.DELTA, "c" * 1000],
    ]


def test_messages_keep_to_their_size_and_a_large_event_goes_alone() -> None:
    outbox = EventOutbox()
    for size in (10, 500, 10, 10):
        outbox.append(1, 0, 0, wire.VALUE, "x" * size)
    assert [len(outbox.take(100)) for _ in range(3)] == [1, 1, 2]


def test_a_result_that_no_message_can_carry_fails_its_op(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(event_outbox.wire, "MAX_FRAME_BYTES", 2000)
    outbox = EventOutbox()
    outbox.append(1, 2, 3, wire.VALUE, "x" * 2000)
    outbox.append(1, 2, 4, wire.VALUE, "\ud800")
    large, broken = decoded(outbox.take(10**6))
    assert large[:4] == [1, 2, 3, wire.FAILED] and "at most 2000" in large[4]["message"]
    assert broken[:4] == [1, 2, 4, wire.FAILED] and "cannot be sent" in broken[4]["message"]
