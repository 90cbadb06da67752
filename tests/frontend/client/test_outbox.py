"""What a client has queued: in order, in few messages, and each byte counted until it is taken."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stemma.frontend.client import outbox as outbox_module
from stemma.frontend.client.outbox import Outbox
from stemma.frontend.protocol import wire
from stemma.frontend.protocol.link import Link

STEPS = st.lists(st.tuples(st.sampled_from("aaaafecq"), st.integers(1, 3)), max_size=40)


@given(STEPS)
def test_ops_of_each_program_leave_in_order_and_their_bytes_are_freed_when_taken(
    steps: list[tuple[str, int]],
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(outbox_module, "MESSAGE_BYTES", 50)
        outbox, link = Outbox(), Link()
        for program in (1, 2, 3):
            outbox.open(program, b"{}")
        added: dict[int, list[int]] = {1: [], 2: [], 3: []}
        forgotten = set()
        for index, (step, program) in enumerate(steps):
            if step == "a" and outbox.add(program, b"[%d]" % index):
                added[program].append(index)
            elif step == "f":
                outbox.flush(program)
            elif step == "e":
                outbox.flush(program, end=True)
            elif step == "c":
                outbox.forget(program)
                forgotten.add(program)
            elif step == "q":
                outbox.queue("cancel", {"program": program}, 10)
        outbox.flush_all()
        assert not outbox.dirty
        outbox.hand_over(link)
        sent = sent_ops(link)
        for program, ops in added.items():
            if program not in forgotten:
                assert sent.get(program, []) == ops
            else:
                assert ops[: len(sent.get(program, []))] == sent.get(program, [])
        link.acknowledge(link.num_put)
        outbox.release(link.num_acked)
        assert outbox.held_bytes == 0 and not outbox.has_queued


def sent_ops(link: Link) -> dict[int, list[int]]:
    """Of each program, and that its first message creates it."""
    sent: dict[int, list[int]] = {}
    while (parts := link.unsent()) is not None:
        link.sent()
        for item in wire.decode(parts, wire.CLIENT_OPS).header.get("programs", []):
            assert ("create" in item) == (item["program"] not in sent)
            sent.setdefault(item["program"], []).extend(op for (op,) in item["ops"])
    return sent


def test_an_op_for_a_program_that_is_not_open_is_not_taken() -> None:
    outbox = Outbox()
    outbox.open(1, b"{}")
    outbox.flush(1, end=True)
    assert not outbox.add(1, b"[]") and not outbox.add(2, b"[]") and outbox.held_bytes == 0


def test_flushing_a_program_without_ops_leaves_no_mark() -> None:
    """Else the I/O thread would look again for ever."""
    outbox = Outbox()
    outbox.open(1, b"{}")
    outbox.add(1, b"[]")
    outbox.flush(1)
    outbox.dirty[1] = outbox._programs[1]  # as a finalizer in the middle of the flush would
    outbox.flush_all()
    assert not outbox.dirty
