"""Which connection goes for another: the one that is awaited longest, of who has the most."""

from __future__ import annotations

from dataclasses import dataclass, field

from hypothesis import given
from hypothesis import strategies as some

from stemma.server.protocol import connection_table
from stemma.server.protocol.connection_table import NUM_SPARE, ConnectionTable, most_connections


@dataclass(eq=False)
class Connection:
    peer: str = "a"
    is_dropped: bool = field(default=False)

    def drop(self) -> None:
        self.is_dropped = True


def full(num: int, *, peer: str = "a") -> tuple[ConnectionTable, list[Connection], list[str]]:
    reasons: list[str] = []
    table, connections = (
        ConnectionTable(num, reasons.append),
        [Connection(peer) for _ in range(num)],
    )
    for connection in connections:
        assert not table.enter(connection)
    return table, connections, reasons


def test_the_one_that_is_awaited_longest_goes_for_a_new_one() -> None:
    table, (first, second, third), reasons = full(3)
    table.be_busy(first)
    table.await_client(second)  # it has just had an answer
    assert not table.enter(Connection())
    assert third.is_dropped and not first.is_dropped and not second.is_dropped
    assert reasons == ["full"] and table.num_connections == 3


def test_who_has_many_gives_one_up_before_who_has_few() -> None:
    table, many, _ = full(4, peer="many")
    few = Connection("few")
    table.enter(few)
    for _ in range(20):
        table.enter(Connection("many"))
    assert all(connection.is_dropped for connection in many) and not few.is_dropped


def test_where_all_are_busy_spare_ones_are_let_in_and_no_more() -> None:
    table, connections, reasons = full(2)
    for connection in connections:
        table.be_busy(connection)
    spare = [Connection() for _ in range(NUM_SPARE)]
    for connection in spare:
        assert table.enter(connection)
        table.be_busy(connection)
    last = Connection()
    table.enter(last)
    assert last.is_dropped and reasons == ["full"]
    assert not any(connection.is_dropped for connection in (*connections, *spare))


def test_a_silent_spare_one_makes_way() -> None:
    table, (busy,), _ = full(1)
    table.be_busy(busy)
    silent, probe = Connection(), Connection()
    assert table.enter(silent)
    table.enter(probe)
    assert silent.is_dropped and not probe.is_dropped


@given(
    some.lists(
        some.tuples(some.sampled_from(["enter", "busy", "await", "leave"]), some.integers(0, 40))
    )
)
def test_there_are_never_more_than_may_be(steps: list[tuple[str, int]]) -> None:
    table, members = (
        ConnectionTable(5, lambda reason: None),
        [Connection("ab"[i % 2]) for i in range(41)],
    )
    inside: set[int] = set()
    for step, number in steps:
        member = members[number]
        if step == "enter" and number not in inside and not member.is_dropped:
            table.enter(member)
            inside.add(number)
        elif step == "leave":
            table.leave(member)
            inside.discard(number)
        elif step == "busy":
            table.be_busy(member)
        else:
            table.await_client(member)
        inside -= {i for i in inside if members[i].is_dropped}
        assert table.num_connections == len(inside) <= 5 + NUM_SPARE
        awaited = list(table._awaited.values())
        assert all(awaited) and {c for each in awaited for c in each} <= {
            members[i] for i in inside
        }


def test_the_limit_of_open_files_leaves_room_for_all_that_is_accepted_at_once() -> None:
    for files in (128, 256, 1024, 4096, 65_536, 1 << 20):
        most = most_connections(files)
        backlog = connection_table.backlog_of(files)
        assert most + NUM_SPARE + backlog + connection_table.OWN_FILES <= files
