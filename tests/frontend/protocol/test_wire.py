"""Frames: what is encoded is decoded, limits hold, garbage is a ProtocolError and nothing else."""

from __future__ import annotations

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stemma.errors import InvalidProgram, ProtocolError
from stemma.frontend.protocol import wire

ALL_OPS = wire.CLIENT_OPS | wire.RUNTIME_OPS
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.text(max_size=10),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)
NAMES = st.text(min_size=1).filter(lambda name: name not in ("v", "op", "buffers"))


@settings(max_examples=80)
@given(
    st.sampled_from(sorted(ALL_OPS)),
    st.dictionaries(NAMES, VALUES, max_size=4),
    st.lists(st.binary(max_size=20), max_size=wire.MAX_BUFFERS),
)
def test_a_message_survives_the_wire(
    op: str, header: dict[str, object], buffers: list[bytes]
) -> None:
    message = wire.decode(wire.encode(op, buffers, **header), ALL_OPS)
    assert message.op == op and message.buffers == tuple(buffers)
    assert message.header == {"v": wire.VERSION, "op": op, **header}


HEADERS = st.one_of(
    st.binary(max_size=60),
    VALUES.map(orjson.dumps),
    st.fixed_dictionaries(
        {}, optional={"v": st.just(2) | VALUES, "op": st.sampled_from(sorted(ALL_OPS)) | VALUES}
    ).map(orjson.dumps),
)


@settings(max_examples=200)
@given(st.lists(HEADERS | st.binary(max_size=8), max_size=20))
def test_any_frames_give_a_message_or_a_protocol_error(parts: list[bytes]) -> None:
    try:
        message = wire.decode(parts, wire.CLIENT_OPS)
    except ProtocolError:
        return
    assert message.op in wire.CLIENT_OPS


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ([], "empty"),
        ([b""], "not JSON"),
        ([b"\xff"], "not JSON"),
        ([b"[" * 2000], "not JSON"),
        ([b"[]"], "a list, not an object"),
        ([b'{"op": "ping"}'], "protocol version None; this side speaks 2"),
        ([b'{"v": 1, "op": "ping"}'], "protocol version 1; this side speaks 2"),
        ([b'{"v": 2, "op": "dance"}'], "unknown op 'dance'; known:"),
        ([b'{"v": 2, "op": ["ping"]}'], "unknown op"),
        ([b'{"v": 2, "op": "events"}'], "unknown op 'events'"),
        ([b"[" * 2_000_000], "2000000 brackets; at most"),
        ([b'{"v": 2, "op": "ping"}'] * 18, "18 parts; at most 17"),
    ],
)
def test_the_error_says_what_is_wrong(parts: list[bytes], message: str) -> None:
    with pytest.raises(ProtocolError, match=message):
        wire.decode(parts, wire.CLIENT_OPS)


def test_frames_beyond_the_limit_are_refused_both_ways(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "MAX_FRAME_BYTES", 100)
    with pytest.raises(ProtocolError, match="at most 100"):
        wire.encode("ping", [b"x" * 101])
    with pytest.raises(ProtocolError, match="at most 100"):
        wire.decode([b'{"v": 2, "op": "ping"}', b"x" * 101], wire.CLIENT_OPS)


def test_what_is_no_json_cannot_be_encoded() -> None:
    with pytest.raises(ProtocolError, match="cannot be encoded"):
        wire.encode("ping", text="\ud800")
    with pytest.raises(InvalidProgram, match="text: cannot be sent"):
        wire.encode_op(["text", 0, 0, None, "\ud800"])
    with pytest.raises(InvalidProgram, match="at most"):
        wire.encode_op(["text", 0, 0, None, "x" * wire.MAX_FRAME_BYTES])
    with pytest.raises(InvalidProgram, match="brackets cannot be sent"):
        wire.encode_op(["text", 0, 0, None, "[" * wire.MAX_BRACKETS])


def test_a_list_of_encoded_programs_is_decoded_as_it_was() -> None:
    op = wire.encode_op(["text", 0, 0, None, "é"])
    create = wire.encode_create({"seed": 3})
    programs = [
        wire.encode_program(1, [op, op], create, end=True),
        wire.encode_program(2, [], None, end=False),
    ]
    parts = wire.encode_list("ops", "programs", programs, n=5, ack=4)
    message = wire.decode(parts, wire.CLIENT_OPS)
    assert message.num_bytes == len(parts[0])
    text = ["text", 0, 0, None, "é"]
    assert message.header == {
        "v": wire.VERSION, "op": "ops", "n": 5, "ack": 4,
        "programs": [
            {"program": 1, "create": {"seed": 3}, "ops": [text, text], "end": True},
            {"program": 2, "ops": []},
        ],
    }  # fmt: skip


def test_options_of_a_program_that_cannot_be_sent_are_refused() -> None:
    with pytest.raises(InvalidProgram, match="cannot be sent"):
        wire.encode_create({"tools": object()})
    with pytest.raises(InvalidProgram, match=f"at most {wire.MAX_CREATE_BYTES}"):
        wire.encode_create({"tools": "x" * wire.MAX_CREATE_BYTES})
