"""What clients may send, and what engines may do, ends no router and no neighbour's program."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import orjson
import pytest
from cluster_threads import Cluster, clustered
from malformed_clients import RawClient
from waiting import wait_until

import stemma as st
from stemma.frontend.client.backend import Backend

GEN = ["gen", 0, 0, None, "a", {"max_tokens": 3, "ignore_eos": True}]
NESTED = b"[" * 600 + b"]" * 600
Running = tuple[Cluster, Backend, RawClient]


@pytest.fixture(scope="module")
def running(checkpoint: Path) -> Iterator[Running]:
    with clustered(checkpoint) as (cluster, backend):
        served: Any = SimpleNamespace(context=cluster.context, endpoint="inproc://cluster")
        client = RawClient(served)
        client.hello()
        yield cluster, backend, client
        client.socket.close()


@st.function
def neighbour(s: st.ProgramState) -> None:
    s += "Hello " + st.gen("a", max_tokens=4, ignore_eos=True)


def is_well(running: Running) -> bool:
    """A neighbour's program runs, and no engine was lost."""
    cluster, backend, _ = running
    starts = [replica.num_starts for replica in cluster.replicas]
    return bool(neighbour.run(backend=backend)["a"]) and starts == [1, 1]


@pytest.mark.parametrize(
    ("ops", "create"),
    [
        ([["role_begin", 0, 0, None, "user"]], {"template_kwargs": {}}),
        ([GEN], {"tools": {}}), ([GEN], {"op_key": [1]}), ([GEN], {"seed": -1}),
        ([GEN], {"history": 5}), ([GEN], {"namespace": "x" * 300}), ([GEN], {"tenant": ""}),
        ([GEN], {"instance": "1"}), ([GEN], {"lora_path": 7}), ([GEN], {"response_id": []}),
        ([["gen", 0, 0, [1], "a", {}]], {}), ([[[], 0, 0, None]], {}), ([["gen", 0]], {}),
        ([["gen", True, 0, None]], {}), (5, {}), (None, {}), ([None], {}), ([GEN], None),
        ([["gen", 2**62, 0, None, "a", {}]], {}), ([["text", 0, 0, None, {}]], {}),
    ],
    ids=str,
)  # fmt: skip
def test_a_program_that_is_none_ends_alone(running: Running, ops: Any, create: Any) -> None:
    client = running[2]
    client.say_ops(1, ops, create=create)
    client.say("cancel", program=1)
    client.say("call", id="last", method="tokenize", args={"text": "a"})
    while client.hear().header.get("id") != "last":
        pass
    assert is_well(running)


@pytest.mark.parametrize(
    ("op", "header"),
    [
        ("cancel", {"program": []}), ("cancel", {}), ("call", {"id": 1, "method": [], "args": {}}),
        ("call", {"id": [], "method": "info"}), ("call", {"id": "x" * 9000, "method": "info"}),
        ("call", {"id": 1, "method": "info", "args": {"text": "x" * 3_000_000}}),
        ("call", {"id": 1, "method": "tokenize", "args": {"other": 1}}),
        ("call", {"id": 1, "method": "restart_replica", "args": {"replica": [0]}}),
        ("ops", {"programs": 5}), ("ops", {"programs": [{"program": "x"}]}),
        ("ops", {"programs": [{"program": -1, "create": {}, "ops": []}]}),
    ],
    ids=lambda value: str(value)[:60],
)  # fmt: skip
def test_a_message_that_means_nothing_changes_nothing(
    running: Running, op: str, header: Any
) -> None:
    client = running[2]
    client.say(op, **header)
    client.hear()
    assert is_well(running)


def test_a_call_that_can_be_read_and_not_passed_on_is_refused(running: Running) -> None:
    """Readers of JSON take deeper nesting than writers."""
    client = running[2]
    client.say("call", id="deep", method="tokenize", args={"text": orjson.Fragment(NESTED)})
    while (reply := client.hear().header).get("id") != "deep":
        pass
    assert not reply["ok"] and "cannot be sent" in reply["error"]
    assert is_well(running)


def test_names_of_many_programs_take_no_memory_once_they_have_ended(running: Running) -> None:
    cluster, _, client = running
    nameless = ["gen", 0, 0, None, "a", {"max_tokens": 1}]
    for number in range(300, 330):
        client.say_ops(number, [nameless], create={"namespace": f"n{number}"}, end=True)
    ended: list[str] = []
    while ended.count("done") < 30:
        ended += [event[3] for event in client.hear().header.get("events", [])]
    assert cluster.router._prefixes._on_the_way.num_nodes == 0


def test_one_bad_program_of_a_message_harms_no_other(running: Running) -> None:
    bad = {"program": 50, "ops": [GEN], "create": {"tenant": ""}, "end": True}
    text, gen = ["text", 0, 0, None, "Hi"], ["gen", 0, 1, *GEN[3:]]
    good = {"program": 51, "ops": [text, gen], "create": {}, "end": True}
    running[2].say("ops", programs=[bad, good])
    ended: dict[int, list[str]] = {50: [], 51: []}
    while not all("done" in kinds for kinds in ended.values()):
        for program, _, _, kind, _ in running[2].hear().header.get("events", []):
            if program in ended:
                ended[program].append(kind)
    assert ended == {50: ["failed", "done"], 51: ["value", "done"]}


def test_programs_with_much_to_tell_are_moved(checkpoint: Path) -> None:
    """More than a message may hold, together."""
    tools = '[{"type": "function", "function": {"name": "f", "description": "%s"}}]' % (
        "x" * 900_000
    )

    with clustered(checkpoint) as (cluster, backend):
        connection: Any = backend._channel
        sinks = [_Sink() for _ in range(30)]
        for sink in sinks:
            number = connection.open_program(sink, {"tools": tools})
            for op in (st_text(0, "Hi "), st_gen(1)):
                connection.send_op(number, op)
            connection.flush(number)
            sink.number = number
        wait_until(lambda: all("value" in sink.kinds for sink in sinks))
        for number in (0, 1):
            cluster.kill(number)
            wait_until(lambda: cluster.replicas[number].num_starts == 2)  # noqa: B023
            cluster.wait_ready()
        for sink in sinks:
            connection.send_op(sink.number, st_gen(2))
            connection.flush(sink.number, end=True)
        wait_until(lambda: all("done" in sink.kinds for sink in sinks))
        assert all(sink.kinds.count("value") == 2 for sink in sinks)


class _Sink:
    def __init__(self) -> None:
        self.kinds: list[str] = []
        self.number = 0

    def handle_event(self, branch: int, seq: int, kind: str, payload: Any) -> None:
        self.kinds.append(kind)

    def handle_disconnect(self, error: Exception) -> None:
        self.kinds.append("lost")


def st_text(seq: int, text: str) -> Any:
    from stemma.frontend.protocol.ir import Text

    return Text(0, seq, None, text)


def st_gen(seq: int) -> Any:
    from stemma.frontend.protocol.ir import Gen, GenParams

    return Gen(0, seq, None, f"g{seq}", GenParams(max_tokens=2, ignore_eos=True))


def test_nothing_is_left_of_programs_that_have_ended(running: Running) -> None:
    cluster, _, client = running
    for number in range(100, 130):
        client.say_ops(number, [["text", 0, 0, None, "x" * 1000]], create={"tools": "y" * 2**20})
        client.say_ops(number + 100, [["text", 0, 0, None, "z"], GEN], create={})
        client.say("cancel", program=number + 100)
    assert is_well(running)
    wait_until(lambda: not any(replica.programs for replica in cluster.replicas))
    router = cluster.router
    assert router._prefixes._on_the_way.num_bytes == 0 and not router._homes.homeless
    for replica in cluster.replicas:
        assert not replica.outbox._programs and replica.load.num_calls == 0
