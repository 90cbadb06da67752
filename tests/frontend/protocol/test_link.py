"""The link: whatever happens to connections, each message is taken once and in order."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stemma.errors import ProtocolError
from stemma.frontend.protocol import wire
from stemma.frontend.protocol.link import Link


class Side:
    """One end: its link, what it has put and what it was given to carry out."""

    def __init__(self) -> None:
        self.link = Link()
        self.num_put = 0
        self.taken: list[int] = []

    def put(self) -> None:
        self.num_put += 1
        self.link.put("cancel", program=self.num_put)

    def hear(self, parts: list[bytes]) -> None:
        message = wire.decode(parts, wire.CLIENT_OPS)
        if self.link.take(message) and message.op == "cancel":
            self.taken.append(message.header["program"])


def send(sender: Side, receiver: Side, num_delivered: int) -> None:
    """Hand all unsent messages to a connection that delivers the first few of them."""
    while (parts := sender.link.unsent()) is not None:
        sender.link.sent()
        if num_delivered > 0:
            receiver.hear(parts)
        num_delivered -= 1


def reconnect(left: Side, right: Side) -> None:
    left_taken, right_taken = left.link.take_ack(), right.link.take_ack()
    left.link.resume(right_taken)
    right.link.resume(left_taken)


# (0, side, k): a side sends; its connection delivers k messages and breaks, if there were more
# (1, side, _): it acknowledges; (2, _, _): a new connection though nothing broke
EVENTS = st.lists(st.tuples(st.integers(0, 2), st.integers(0, 1), st.integers(0, 4)), max_size=30)


@settings(max_examples=150)
@given(EVENTS, st.lists(st.integers(1, 3), min_size=30, max_size=30))
def test_nothing_is_lost_or_doubled_however_connections_break(
    events: list[tuple[int, int, int]], puts: list[int]
) -> None:
    sides = Side(), Side()
    for (kind, which, num_delivered), num_put in zip(events, puts):
        sender, receiver = sides[which], sides[1 - which]
        if kind == 0:
            for _ in range(num_put):
                sender.put()
            num_unsent = sender.link.num_put - sender.link.num_sent
            send(sender, receiver, num_delivered)
            if num_delivered < num_unsent:
                reconnect(*sides)
        elif kind == 1:
            receiver.hear(wire.encode("credit", ack=sender.link.take_ack()))
        else:
            reconnect(*sides)
    reconnect(*sides)
    for sender, receiver in (sides, sides[::-1]):
        send(sender, receiver, 1000)
        sender.link.acknowledge(receiver.link.take_ack())
        assert receiver.taken == list(range(1, sender.num_put + 1))
        assert sender.link.unacked_bytes == 0 and sender.link.unsent() is None


def test_unacknowledged_bytes_are_counted() -> None:
    link = Link()
    sizes = []
    for program in (1, 10_000):
        link.put("cancel", program=program)
        sizes.append(len((link.unsent() or [b""])[0]))
        link.sent()
    assert link.unacked_bytes == sum(sizes)
    link.acknowledge(1)
    assert link.unacked_bytes == sizes[1]


def test_an_acknowledgement_is_owed_after_so_many_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "ACK_AFTER_BYTES", 80)
    sender, receiver = Side(), Side()
    sender.put()
    send(sender, receiver, 1)
    assert not receiver.link.owes_ack
    sender.put()
    send(sender, receiver, 1)
    assert receiver.link.owes_ack
    receiver.link.take_ack()
    assert not receiver.link.owes_ack


@pytest.mark.parametrize("number", [None, -1, "1", True, 1.0, 2**63])
def test_a_number_that_is_none_is_a_protocol_error(number: object) -> None:
    with pytest.raises(ProtocolError, match="n="):
        Link().take(wire.Message("cancel", {"n": number}))
    with pytest.raises(ProtocolError, match="ack="):
        Link().take(wire.Message("ping", {"ack": number}))


def test_a_gap_and_an_acknowledgement_of_the_future_are_protocol_errors() -> None:
    with pytest.raises(ProtocolError, match="message 2 came after 0"):
        Link().take(wire.Message("cancel", {"n": 2}))
    with pytest.raises(ProtocolError, match="only 0 were sent"):
        Link().resume(1)
