"""Any frames at all: the gateway lives on, its memory stays bounded, a running program unharmed."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import orjson
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from malformed_clients import RawClient, Served

import stemma
from stemma.frontend.protocol import wire

MAX_GROWTH_BYTES = 400 * 1024 * 1024  # of the process: a frame of 16 MiB is a heap of objects

INTS = st.integers(-2, 4) | st.sampled_from([2**31, 2**53, 2**62])
VALUES = st.recursive(
    st.none() | st.booleans() | INTS | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=10,
)
OPS: list[list[Any]] = [
    ["text", 0, 0, "f.py:1", "hello"], ["gen", 0, 1, None, "x", {"max_tokens": 2}],
    ["select", 0, 2, None, "y", ["a", "b"], "token_length_normalized"],
    ["role_begin", 0, 0, None, "user"], ["fork", 0, 0, None, [1, 2]],
    ["join", 0, 1, None, [1, 2], "gather_variable", None], ["var", 0, 0, None, 1, 2],
    ["tokens", 0, 0, None, [1, 2, 3]], ["end", 0, 0, None],
]  # fmt: skip
MESSAGES: list[dict[str, Any]] = [
    {"op": "hello", "client": "x", "ack": 0},
    {"op": "ops", "ack": 0, "programs": [{"program": 1, "create": {"seed": 1}, "ops": OPS[:2]}]},
    {"op": "ops", "ack": 0, "programs": [
        {"program": 2, "create": {"tools": "[]"}, "ops": OPS, "end": True},
        {"program": 3, "create": {}, "ops": [["text", 0, 0, None, 0]], "end": True}]},
    {"op": "intern", "ack": 0, "texts": [[0, "abc"]], "emptied": [1]},
    {"op": "cancel", "ack": 0, "program": 1},
    {"op": "call", "ack": 0, "id": 1, "method": "tokenize", "args": {"text": "a"}},
    {"op": "credit", "ack": 0}, {"op": "ping", "ack": 0}, {"op": "bye"},
]  # fmt: skip


@st.composite
def mutated(draw: st.DrawFn) -> bytes:
    """A valid message, numbered as if it came first, with some of its values replaced or cut."""
    header = {"v": wire.VERSION, "n": draw(INTS), **draw(st.sampled_from(MESSAGES))}
    header = orjson.loads(orjson.dumps(header))
    for _ in range(draw(st.integers(0, 3))):
        place, path = header, [header]
        while isinstance(place, dict | list) and place and draw(st.booleans()):
            keys = list(place) if isinstance(place, dict) else range(len(place))
            place = place[draw(st.sampled_from(keys))]  # type: ignore[index]
            path.append(place)
        parent = path[-1] if isinstance(path[-1], dict | list) else path[-2]
        if parent:
            keys = list(parent) if isinstance(parent, dict) else range(len(parent))
            parent[draw(st.sampled_from(keys))] = draw(VALUES)  # type: ignore[index]
    header["unknown"] = draw(VALUES)
    encoded = b"{"
    with contextlib.suppress(TypeError):  # an integer that JSON's readers do not take
        encoded = orjson.dumps(header)
    return encoded[: draw(st.sampled_from([len(encoded)] * 4 + [len(encoded) // 2, 5]))]


FRAMES = st.lists(mutated() | st.binary(max_size=40), min_size=1, max_size=3)


@pytest.fixture(scope="module")
def served(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    served = Served(checkpoint, tmp_path_factory.mktemp("fuzz"))
    yield served
    served.stop()
    torch.set_num_threads(num_threads)


@pytest.fixture(scope="module")
def healthy(served: Served) -> Iterator[stemma.Runtime]:
    with stemma.Runtime(served.endpoint) as backend:
        yield backend


@stemma.function
def program(s: stemma.ProgramState) -> None:
    s += "hello" + stemma.gen("x", max_tokens=40, temperature=0, ignore_eos=True)


def assert_alive(raw_client: RawClient) -> None:
    """A session of its own answers a stranger who behaves from now on."""
    again = RawClient(raw_client.served)
    again.hello()
    again.say("call", id="last", method="tokenize", args={"text": "a"})
    assert again.hear().header["result"] == [97]
    again.say("bye")
    again.socket.close()


@pytest.fixture(scope="module")
def expected(healthy: stemma.Runtime) -> str:
    """What the program yields when nobody disturbs it."""
    return program.run(backend=healthy).text()


@settings(max_examples=25, deadline=None)
@given(messages=st.lists(FRAMES, min_size=1, max_size=6))
def test_any_frames_leave_the_gateway_and_others_unharmed(
    served: Served, healthy: stemma.Runtime, expected: str, messages: list[list[bytes]]
) -> None:
    state = program.stream(backend=healthy)
    raw_client = RawClient(served)
    raw_client.say("hello")
    for frames in messages:
        raw_client.send(*frames)
    assert_alive(raw_client)
    raw_client.socket.close()
    assert "".join(state.text_iter()) == expected
    assert served.thread.is_alive()


def test_what_a_running_program_yields_is_the_same_beside_garbage(
    served: Served, healthy: stemma.Runtime, expected: str
) -> None:
    raw_client = RawClient(served)
    state = program.stream(backend=healthy)
    for index in range(300):
        raw_client.send(bytes([index % 256]) * 50, b"x" * 1000)
    assert "".join(state.text_iter()) == expected
    raw_client.socket.close()


@pytest.mark.parametrize(
    "frame",
    [
        b"[" * 10_000_000,
        b'{"v":2,"op":"hello","a":' + b"[" * 1000 + b"]" * 1000 + b"}",
        b'{"v":2,"n":1,"op":"ops","programs":[' + b"[]," * 900_000 + b"[]]}",
        b'{"v":2,"n":1,"op":"ops","programs":[{"program":1,"create":{},"ops":['
        + b'["fork",0,0,null,[1]],' * 60_000
        + b"[]]}]}",
        b'{"v":2,"n":1,"op":"ops","programs":[' + b'{"ops":[1,1]},' * 40_000 + b"{}]}",
        b"[]" * 4_000_000,
        b'{"v":2,"n":1,"op":"ops","programs":[{"program":1,"create":{},"ops":[["fork",0,0,null,'
        b"[" + b"1," * 2_000_000 + b"1]]]}]}",
    ],
    ids=["deep", "nested", "programs", "ops", "many", "brackets", "children"],
)
def test_huge_counts_and_depths_take_bounded_memory(
    served: Served, healthy: stemma.Runtime, frame: bytes
) -> None:
    before = healthy.get_server_info()["peak_rss_bytes"]
    raw_client = RawClient(served)
    raw_client.say("hello")
    for _ in range(3):
        raw_client.send(frame)
    assert_alive(raw_client)
    raw_client.socket.close()
    assert healthy.get_server_info()["peak_rss_bytes"] - before < MAX_GROWTH_BYTES


def test_a_frame_beyond_the_limit_closes_only_its_connection(
    served: Served, healthy: stemma.Runtime
) -> None:
    raw_client = RawClient(served)
    raw_client.send(b"x" * (wire.MAX_FRAME_BYTES + 1))
    assert program.run(backend=healthy)["x"]
    raw_client.socket.close()


def test_an_older_version_is_told_which_is_spoken(served: Served) -> None:
    raw_client = RawClient(served)
    raw_client.send(orjson.dumps({"v": 1, "op": "hello"}))
    header = raw_client.hear().header
    assert header["message"] == "protocol version 1; this side speaks 2"
    assert header["supported"] == [2]
    raw_client.socket.close()
