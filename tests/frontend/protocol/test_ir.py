"""Ops on the wire: what is written is read back, and nothing senseless is read."""

from __future__ import annotations

from dataclasses import fields
from typing import Any, get_args

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stemma.errors import InvalidProgram, InvalidRequest
from stemma.frontend.protocol import ir, wire
from stemma.frontend.protocol.chat_message import Message
from stemma.frontend.protocol.constraint import Constraint, ConstraintKind
from stemma.frontend.protocol.kv_policy import snapkv, streaming
from stemma.runtime.schedule.sampling_params import SamplingParams

TEXT = st.text(max_size=20)
INT = st.integers(0, 2**31 - 1)
SOURCE = st.none() | TEXT
PARAMS = st.builds(
    ir.GenParams,
    max_tokens=st.none() | INT,
    temperature=st.none() | st.floats(0, 2),
    top_p=st.none() | st.floats(0, 1),
    top_k=st.none() | INT,
    seed=st.none() | st.integers(0, 2**63 - 1),
    stop=st.none() | st.lists(TEXT, max_size=3).map(tuple),
    stop_token_ids=st.none() | st.lists(INT, max_size=3).map(tuple),
    ignore_eos=st.none() | st.booleans(),
    logprobs=st.none() | INT,
    priority=st.none() | st.integers(-1000, 1000),
    logit_bias=st.none() | st.lists(st.tuples(INT, st.floats(-9, 9)), max_size=3).map(tuple),
    n=st.none() | INT,
    constraint=st.none()
    | st.builds(
        Constraint,
        st.sampled_from(get_args(ConstraintKind)),
        TEXT,
        st.sampled_from(["compact", "flexible"]),
        st.sampled_from(["schema", "any"]),
        st.booleans(),
    ),
    jump_forward=st.none() | st.booleans(),
    stop_regex=st.none() | st.lists(TEXT, max_size=3).map(tuple),
    deadline_s=st.none() | st.floats(0, 9),
    logprob_start=st.none() | INT,
)
CHILDREN = st.lists(INT, min_size=1, max_size=4).map(tuple)
IMAGES = st.lists(TEXT, max_size=3).map(lambda urls: tuple((0, url) for url in urls))
MESSAGES = st.builds(Message, TEXT, TEXT, st.none() | TEXT, st.just(()), IMAGES) | st.lists(
    TEXT, min_size=1
).filter(any).map(lambda texts: Message("user", "".join(texts), None, tuple(map(len, texts))))
OPS = st.one_of(
    st.builds(ir.Text, INT, INT, SOURCE, TEXT),
    st.builds(ir.Chat, INT, INT, SOURCE, st.lists(MESSAGES, min_size=1, max_size=4).map(tuple)),
    st.builds(ir.Tokens, INT, INT, SOURCE, CHILDREN),
    st.builds(ir.Gen, INT, INT, SOURCE, TEXT, PARAMS),
    st.builds(
        ir.Select, INT, INT, SOURCE, TEXT,
        st.lists(st.text(min_size=1), min_size=1, max_size=4).map(tuple),
        st.sampled_from(ir.CHOICES_METHODS),
    ),
    st.builds(
        ir.Select, INT, INT, SOURCE, TEXT, st.just(()), st.sampled_from(ir.CHOICES_METHODS),
        st.lists(CHILDREN, min_size=1, max_size=3).map(tuple),
    ),
    st.builds(ir.Embed, INT, INT, SOURCE, TEXT, st.sampled_from(ir.POOLINGS), st.booleans()),
    st.builds(ir.RoleBegin, INT, INT, SOURCE, TEXT),
    st.builds(ir.RoleEnd, INT, INT, SOURCE),
    st.builds(ir.RoleEnd, INT, INT, SOURCE, st.none() | st.text(max_size=20)),
    st.builds(ir.Tools, INT, INT, SOURCE, st.text(max_size=20)),
    st.builds(ir.Image, INT, INT, SOURCE, st.text(max_size=20)),
    st.builds(ir.Fork, INT, INT, SOURCE, CHILDREN),
    st.builds(
        ir.Join, INT, INT, SOURCE, CHILDREN, st.sampled_from(ir.JOIN_MODES),
        st.none() | st.integers(1, 65_536),
    ),
    st.builds(ir.Pause, INT, INT, SOURCE, st.none() | st.floats(0, ir.MAX_PAUSE_S), TEXT),
    st.builds(
        ir.Hint, INT, INT, SOURCE, st.sampled_from(ir.HINT_ACTIONS),
        st.none() | st.integers(1, 2**31 - 1), st.none() | st.integers(0, 100),
        st.none() | st.sampled_from(ir.TIERS),
    ),
    st.builds(
        ir.Compress, INT, INT, SOURCE, st.sampled_from([snapkv(0.25), snapkv(9), streaming(64)])
    ),
    st.builds(ir.Background, INT, INT, SOURCE, st.booleans()),
    st.builds(ir.Drop, INT, INT, SOURCE),
    st.builds(ir.Resume, INT, INT, SOURCE, st.booleans()),
    st.builds(ir.Var, INT, INT, SOURCE, INT, INT),
    st.builds(ir.End, INT, INT, SOURCE),
)  # fmt: skip


@settings(max_examples=120)
@given(OPS)
def test_every_op_survives_the_wire(op: ir.Op) -> None:
    assert ir.op_from_wire(orjson.loads(wire.encode_op(op.to_wire()))) == op


def test_every_kind_of_op_is_in_the_round_trip() -> None:
    kinds = {cls.kind for cls in ir.Op.__subclasses__()}
    assert kinds == {
        "text", "tokens", "chat", "gen", "select", "embed", "role_begin", "role_end", "tools",
        "image", "fork", "join", "var", "pause", "hint", "compress", "background", "drop", "resume",
        "end",
    }  # fmt: skip


@pytest.mark.parametrize(
    "message",
    [["user"], ["user", 5], ["user", "a", {}], ["user", "a", "{}", [2]], ["user", "a", None, [-1]],
     ["user", "a", "x" * (ir.MAX_FIELDS_CHARS + 1)], ["user", "a", None, [1], 5],
         ["user", "a", None, [1], [[2, "u"]]],
         ["user", "a", None, None, [[1, "u"]]],
         ["user", "a", None, [1], [[1, "u"], [0, "u"]]],
         ["user", "a", None, [1], [["0", "u"]]], ["user", "a", None, [1], [[0]]], "user"],
    ids=str,
)  # fmt: skip
def test_what_is_no_message_of_a_chat_is_refused(message: object) -> None:
    with pytest.raises(InvalidProgram, match=r"messages|content|fields|parts|images"):
        ir.op_from_wire(["chat", 0, 0, None, [["user", "a"], message]])
    with pytest.raises(InvalidProgram, match="messages"):
        ir.op_from_wire(["chat", 0, 0, None, []])


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | TEXT,
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=12,
)
KINDS = st.sampled_from([cls.kind for cls in ir.Op.__subclasses__()])
ALMOST = st.tuples(KINDS | JSON, INT | JSON, INT | JSON, SOURCE | JSON).flatmap(
    lambda head: st.lists(
        JSON | INT | st.dictionaries(st.sampled_from([f.name for f in fields(ir.GenParams)]), JSON),
        max_size=4,
    ).map(lambda rest: [*head, *rest])
)


@settings(max_examples=200)
@given(JSON | ALMOST)
def test_any_other_json_is_an_invalid_program_and_no_other_error(item: object) -> None:
    try:
        op = ir.op_from_wire(item)
    except InvalidProgram:
        return
    assert isinstance(op, ir.Op)


@pytest.mark.parametrize(
    ("item", "message"),
    [
        (["text", 0, 0], "kind in"),
        ([["text"], 0, 0, None], "kind in"),
        ([{}, 0, 0, None], "kind in"),
        (["text", -1, 0, None, "a"], r"branch=-1 .* integer in \[0, "),
        (["text", True, 0, None, "a"], "branch=True"),
        (["text", 0, 0, None, "a", False, 1], "text takes"),
        (["gen", 0, 0, None, "x" * 1025, {}], "at most 1024 characters"),
        (["gen", 0, 0, None, "x", {"temprature": 1}], "temprature=1 .* one of"),
        (["gen", 0, 0, None, "x", {"temperature": None}], "temperature=None"),
        (["gen", 0, 0, None, "x", []], "an object"),
        (["select", 0, 0, None, "x", []], "a list of 1 to 1024"),
        (["select", 0, 0, None, "x", ["a", ""]], "non-empty strings"),
        (["select", 0, 0, None, "x", ["a"], "best"], "method='best' .* one of"),
        (["join", 0, 0, None, [1], "merge"], "mode='merge' .* one of"),
        (["fork", 0, 0, None, []], "children"),
        (["tokens", 0, 0, None, [1.5]], "token_ids"),
        (["join", 0, 0, None, [1], "gather_variable", 0], r"num_needed=0 .* in \[1, 65536\]"),
        (["pause", 0, 0, None, -1.0], r"expected_s=-1.0 .* in \[0, 86400\]"),
        (["hint", 0, 0, None, "keep"], "action='keep' .* one of"),
        (["hint", 0, 0, None, "retain", None, 101], r"priority=101 .* in \[0, 100\]"),
        (["hint", 0, 0, None, "demote", None, None, "tape"], "tier='tape' .* one of"),
    ],
)
def test_the_message_names_the_field_and_what_it_may_be(item: object, message: str) -> None:
    with pytest.raises(InvalidProgram, match=message):
        ir.op_from_wire(item)


@pytest.mark.parametrize("depth", [990, 1000, 1015])
def test_lists_nested_as_deep_as_json_can_be_are_no_other_error(depth: int) -> None:
    nested = orjson.loads(b"[" * depth + b"]" * depth)
    for item in ([nested, 0, 0, None], ["gen", 0, 0, None, "x", {"stopp": nested}]):
        with pytest.raises(InvalidProgram):
            ir.op_from_wire(item)
    for field in ("stop", "logit_bias"):
        op = ir.op_from_wire(["gen", 0, 0, None, "x", {field: nested}])
        assert isinstance(op, ir.Gen)
        with pytest.raises(InvalidRequest):
            SamplingParams(**{field: getattr(op.params, field)})


def test_a_source_line_is_shortened_and_never_an_error() -> None:
    assert ir.op_from_wire(["end", 0, 0, 7]).source is None
    source = ir.op_from_wire(["end", 0, 0, "x" * 10_000]).source
    assert source is not None and len(source) == ir.MAX_SOURCE_CHARS


def test_what_a_gen_leaves_open_is_taken_from_the_defaults() -> None:
    params = ir.GenParams(max_tokens=5, stop=("a",))
    merged = params.with_defaults(ir.GenParams(max_tokens=9, temperature=0.5, stop=("b",)))
    assert merged == ir.GenParams(max_tokens=5, temperature=0.5, stop=("a",))
    assert params.with_defaults(ir.GenParams()) is params


def test_every_gen_parameter_survives_the_wire() -> None:
    params = ir.GenParams(
        max_tokens=5,
        stop=("a", "b"),
        stop_token_ids=(1, 2),
        min_p=0.1,
        frequency_penalty=0.5,
        presence_penalty=-0.5,
        repetition_penalty=1.2,
        logit_bias=ir.logit_bias_of({5: -100, "7": 2.5}),
        min_tokens=2,
        n=3,
    )
    assert params.logit_bias == ((5, -100), (7, 2.5))
    on_the_wire = orjson.loads(orjson.dumps(ir.Gen(0, 0, None, "x", params).to_wire()))
    assert ir.op_from_wire(on_the_wire) == ir.Gen(0, 0, None, "x", params)


@pytest.mark.parametrize("bias", [{"x": 1.0}, {None: 1.0}, [5], 7])
def test_a_bias_by_anything_but_token_ids_is_refused(bias: Any) -> None:
    with pytest.raises(InvalidProgram, match="logit_bias="):
        ir.logit_bias_of(bias)
