"""What waits for a stream's reader, and how it comes from another thread."""

from __future__ import annotations

import asyncio
import threading
from contextlib import ExitStack
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from waiting import PATIENCE_S, until

from stemma.frontend.protocol import wire
from stemma.frontend.protocol.ir import GenParams
from stemma.server.access.load import Load, Ticket
from stemma.server.generation.event_queue import EventQueue
from stemma.server.generation.generation import Generation
from stemma.server.generation.values import _all_of, _Asked
from stemma.server.protocol.caller import Caller
from stemma.server.protocol.pieces import Outcome, Piece
from stemma.server.protocol.task import Task

META = {"finish_reason": "stop"}


@given(
    events=st.lists(
        st.tuples(st.integers(0, 2), st.sampled_from(["text", "object", "take"])), max_size=40
    )
)
def test_what_waits_together_is_joined_and_nothing_is_lost_or_late(
    events: list[tuple[int, str]],
) -> None:
    async def run() -> None:
        task, outcomes = Task(["x"], GenParams(), n=3, stream=True), []
        generation = Generation(
            EventQueue(asyncio.get_running_loop()),
            task,
            Caller(),
            "id",
            outcomes.append,
            lambda used: None,
        )
        sent: dict[int, list[Any]] = {0: [], 1: [], 2: []}
        got: dict[int, list[Any]] = {0: [], 1: [], 2: []}
        ended: set[int] = set()

        def take() -> None:
            items = generation.take()
            pieces = [item for item in items if isinstance(item, Piece)]
            assert len({piece.index for piece in pieces}) == len(pieces)
            for item in items:
                assert item.index not in ended, "text after its end"
                if isinstance(item, Outcome):
                    ended.add(item.index)
                else:
                    got[item.index] += [*item.text, *(item.token_ids or ())]
            assert generation.num_waiting_bytes == 0

        for number, (index, kind) in enumerate(events):
            if kind == "take":
                take()
            elif kind == "text":
                generation._take_event(index, wire.DELTA, "ab")
                sent[index] += "ab"
            else:
                payload = {"text": "c", "token_ids": [number], "logprobs": [{"token": "c"}]}
                generation._take_event(index, wire.DELTA, payload)
                sent[index] += ["c", number]
        for index in range(3):
            generation._take_event(index, wire.VALUE, {"text": "", "meta": META})
        assert generation.is_over and [outcome.index for outcome in outcomes] == [0, 1, 2]
        take()
        for index in range(3):  # ids stand behind their text in a joined piece
            assert _split(got[index]) == _split(sent[index])

    asyncio.run(run())


def _split(items: list[Any]) -> tuple[list[str], list[int]]:
    return [i for i in items if isinstance(i, str)], [i for i in items if isinstance(i, int)]


def test_what_comes_after_the_end_is_dropped() -> None:
    async def run() -> None:
        task, outcomes = Task(["x"], GenParams(), stream=True, constraint_field="regex"), []
        generation = Generation(
            EventQueue(asyncio.get_running_loop()),
            task,
            Caller(),
            "id",
            outcomes.append,
            lambda used: None,
        )
        failure = {"message": "no", "kind": "InvalidGrammar"}
        generation._take_event(0, wire.FAILED, failure)
        generation._take_event(0, wire.DELTA, "late")
        assert generation.failure is not None and generation.failure.field == "regex"
        assert generation.take() == [] and not outcomes
        await generation.wait()  # it is over: this returns

    asyncio.run(run())


def test_a_mailbox_delivers_everything_in_order_from_many_threads() -> None:
    async def run() -> None:
        got: dict[int, list[object]] = {number: [] for number in range(4)}
        events = EventQueue(asyncio.get_running_loop())

        def post(number: int) -> None:
            for value in range(2000):
                events.post(lambda i, kind, payload: got[i].append(payload), number, "", value)

        threads = [threading.Thread(target=post, args=(number,)) for number in got]
        for thread in threads:
            thread.start()
        await until(lambda: sum(len(values) for values in got.values()) == 4 * 2000)
        assert all(values == list(range(2000)) for values in got.values())

    asyncio.run(run())


def test_a_delivery_that_fails_holds_up_no_other(caplog: pytest.LogCaptureFixture) -> None:
    async def run() -> None:
        got: list[object] = []
        events = EventQueue(asyncio.get_running_loop())
        events.post(lambda index, kind, payload: got[index].missing, 5, "value", None)
        events.post(lambda index, kind, payload: got.append(payload), 0, "value", "mine")
        await until(lambda: bool(got))
        assert got == ["mine"] and "could not be delivered" in caplog.text

    asyncio.run(run())


class SlowConnection:
    """Takes ops on other threads than the loop's only, as one without credit."""

    has_credit = False

    def __init__(self) -> None:
        self.loop_thread = threading.get_ident()
        self.open: set[int] = set()
        self.may_send = threading.Event()

    def open_program(self, sink: Any, create: dict[str, object]) -> int:
        assert threading.get_ident() != self.loop_thread, "all requests wait for this one"
        self.open.add(len(self.open) + 1)
        return len(self.open)

    def send_program(self, program: int, ops: object) -> None:
        assert self.may_send.wait(PATIENCE_S)

    def cancel_program(self, program: int) -> None:
        self.open.discard(program)


def test_values_wait_for_credit_off_the_loop_and_leave_nothing_if_their_client_goes() -> None:
    async def run() -> None:
        connection = SlowConnection()
        with ExitStack() as stack:
            asked = [
                stack.enter_context(_Asked(connection, Caller(), Ticket(Load()))) for _ in range(2)
            ]
            work = asyncio.create_task(_all_of(asked, [["op"], ["op"]]))
            await until(lambda: bool(connection.open))
            work.cancel()
        connection.may_send.set()
        await asyncio.get_running_loop().shutdown_default_executor()
        assert not connection.open

    asyncio.run(run())


def test_a_mailbox_whose_loop_has_ended_takes_what_comes_in_silence() -> None:
    async def make() -> EventQueue:
        return EventQueue(asyncio.get_running_loop())

    events = asyncio.run(make())
    events.post(lambda index, kind, payload: None, 0, "", None)
