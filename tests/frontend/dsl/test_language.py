"""What the words of the language mean: the ops that they become. No runtime is needed for that."""

from __future__ import annotations

import asyncio
import copy
import pickle
from typing import Any

import pytest
from dsl_programs import line_of, two_gens
from hypothesis import given, strategies
from recording_channel import PlayedChannel, answer_all, kinds, value

import stemma as st
from stemma.errors import InvalidProgram
from stemma.frontend.dsl.expr import GenExpr, SelectExpr
from stemma.frontend.dsl.function import open_program
from stemma.frontend.protocol import ir


def params_of(**options: Any) -> dict[str, Any]:
    expr = st.gen("x", **options)
    assert isinstance(expr, GenExpr)
    return expr.params.given()


@pytest.mark.parametrize(
    ("options", "params"),
    [
        ({"max_tokens": 5, "min_tokens": 2}, {"max_tokens": 5, "min_tokens": 2}),
        ({"n": 3}, {"n": 3}),
        ({"stop": "a"}, {"stop": ("a",)}),
        ({"stop": ["a", "b"]}, {"stop": ("a", "b")}),
        ({"stop_token_ids": [1, 2]}, {"stop_token_ids": (1, 2)}),
        ({"stop_regex": r"\d+"}, {"stop_regex": (r"\d+",)}),
        ({"stop_regex": ["a", "b"]}, {"stop_regex": ("a", "b")}),
        ({"temperature": 0.5, "top_p": 0.9}, {"temperature": 0.5, "top_p": 0.9}),
        ({"top_k": 7, "min_p": 0.1}, {"top_k": 7, "min_p": 0.1}),
        ({"top_k": -1}, {}),
        ({"frequency_penalty": 1.0}, {"frequency_penalty": 1.0}),
        ({"presence_penalty": 1.0}, {"presence_penalty": 1.0}),
        ({"ignore_eos": True}, {"ignore_eos": True}),
        ({"return_logprob": True}, {"logprobs": 0}),
        ({"return_logprob": True, "top_logprobs_num": 3}, {"logprobs": 3}),
        ({"top_logprobs_num": 3}, {"logprobs": 3}),
        ({"return_logprob": False, "top_logprobs_num": 3}, {}),
        ({"logprob_start_len": 4}, {"logprobs": 0, "logprob_start": 4}),
        ({"return_logprob": True, "logprob_start_len": -1}, {"logprobs": 0}),
        ({"logprobs": 2, "logprob_start": 0}, {"logprobs": 2, "logprob_start": 0}),
        ({"return_text_in_logprobs": True}, {}),
        (
            {"deadline": 2.5, "priority": 3, "seed": 1},
            {"deadline_s": 2.5, "priority": 3, "seed": 1},
        ),
    ],
    ids=str,
)
def test_a_gen_takes_sglangs_arguments_and_ours(
    options: dict[str, Any], params: dict[str, Any]
) -> None:
    assert params_of(**options) == params


def test_sglangs_positional_order_holds() -> None:
    expr = st.gen("x", 5, 1, 2, "stop")
    assert isinstance(expr, GenExpr) and expr.name == "x"
    assert expr.params == ir.GenParams(max_tokens=5, min_tokens=1, n=2, stop=("stop",))


def test_a_dtype_by_name_is_the_type() -> None:
    assert params_of(dtype="int") == params_of(dtype=int)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"logprobs": 2, "return_logprob": False}, "logprobs"),
        ({"logprobs": 2, "top_logprobs_num": 3}, "logprobs"),
        ({"stop_regex": "("}, "stop_regex"),
        ({"stop_regex": "a" * 5000}, "stop_regex"),
        ({"choices": ["a"], "n": 2}, "not together with choices"),
        ({"choices": ["a"], "deadline": 2.0}, "not together with choices"),
        ({"choices": ["a"], "temperature": 0.7}, "temperature"),
        ({"choices": ["a"], "regex": "a"}, "regex and choices"),
    ],
)
def test_what_would_be_dropped_in_silence_is_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidProgram, match=words):
        st.gen("x", **options)


def test_the_same_arguments_share_their_params_and_like_ones_do_not() -> None:
    first, again, other = st.gen("x", max_tokens=1), st.gen("y", max_tokens=1), st.gen("x", True)
    assert isinstance(first, GenExpr) and isinstance(again, GenExpr) and isinstance(other, GenExpr)
    assert first.params is again.params and (first.name, again.name) == ("x", "y")
    assert other.params.max_tokens is True, "1 and True are one key of a dict"
    with pytest.raises(TypeError, match="max_token"):
        st.gen("x", max_token=1)  # type: ignore[call-arg]


@pytest.mark.parametrize("method", [st.token_length_normalized, "greedy_token_selection", None])
def test_select_takes_a_method_by_its_name(method: Any) -> None:
    expr = st.select("x", ["a", "b"], 0.0, choices_method=method)
    assert expr == SelectExpr("x", ("a", "b"), method or "token_length_normalized")


# --- settings, names, lines -----------------------------------------------------------------------


def test_defaults_of_a_run_reach_every_gen_also_of_forks_and_bound_programs() -> None:
    @st.function
    def program(s: st.ProgramState, word: str) -> None:
        s += word + st.gen("a") + st.gen("b", temperature=0.5)
        s.fork(1)[0].append(st.gen("c"))

    channel = PlayedChannel()
    options: dict[str, Any] = {"max_new_tokens": 9, "n": 2, "stop_regex": "z", "temperature": 1.0}
    program.bind(word="w").run(backend=channel.backend, **options, return_logprob=True)
    gens = [op.params for op in channel.ops[1] if isinstance(op, ir.Gen)]
    base = ir.GenParams(max_tokens=9, n=2, stop_regex=("z",), temperature=1.0, logprobs=0)
    assert gens == [base, ir.GenParams(temperature=0.5).with_defaults(base), base]


def test_a_parameter_of_the_function_wins_over_an_option_of_the_run() -> None:
    @st.function
    def program(s: st.ProgramState, n: int) -> int:
        s += st.gen("x")
        return n

    channel = PlayedChannel()
    assert program.run(n=3, backend=channel.backend).ret_value == 3
    assert channel.ops[1][0].params == ir.GenParams()  # type: ignore[attr-defined]


def test_unnamed_gens_do_not_collide() -> None:
    @st.function
    def program(s: st.ProgramState) -> None:
        s += "a" + st.gen() + "b" + st.gen()

    state = program.run(backend=PlayedChannel().backend)
    assert state.text() == "a<>b<>" and state.names() == []


def test_ops_carry_the_line_that_wrote_them() -> None:
    def helper(s: st.ProgramState) -> None:
        s += "in a helper"  # the helper

    @st.function
    def program(s: st.ProgramState) -> None:
        for _ in range(2):
            s += "first"  # the first line
        helper(s)
        forks = s.fork(2)  # the fork
        forks += st.gen("x")  # the gens
        with s.user():  # the role
            s += "hi"  # the message
        st.tool(len)(s, "")  # the tool

    channel = PlayedChannel()
    program.run(backend=channel.backend)
    names = [
        "first line",
        "first line",
        "helper",
        "fork",
        "gens",
        "gens",
        "role",
        "message",
        "role",
    ]
    wanted = [line_of(__file__, f"the {name}") for name in [*names, "tool"]]
    assert [str(op.source).rpartition("/")[2] for op in channel.ops[1]] == wanted


# --- scopes, forks --------------------------------------------------------------------------------


def test_what_a_var_scope_appends_is_also_a_value() -> None:
    @st.function
    def program(s: st.ProgramState) -> None:
        s += "before "
        with s.var_scope("part"):
            s += "x" + st.gen("y") + "z"
        with s.user(), s.var_scope("said"):
            s += s.var("part")
        with pytest.raises(RuntimeError), s.var_scope("never"):
            raise RuntimeError

    channel = PlayedChannel()
    state = program.run(backend=channel.backend)
    assert state["part"] == "x<y>z" and state["said"] == "x(var)z"
    assert list(state.text_iter("part")) == ["x", "<y>", "z"]
    assert "never" not in state and state.text().startswith("before x<y>z[user]")
    (var,) = [op for op in channel.ops[1] if isinstance(op, ir.Var)]
    assert (var.of_branch, var.of_seq) == (0, 2)


def test_forks_take_an_expression_a_list_or_a_function_and_slices() -> None:
    @st.function
    def program(s: st.ProgramState) -> list[str]:
        forks = s.fork(3)
        forks += "a"
        forks += ["0", st.gen("x"), None]
        forks += lambda index: str(index)
        forks[1:] += "!"
        forks[0] += "?"
        with pytest.raises(InvalidProgram, match="one item for each of 3"):
            forks += ["too", "few"]
        return [fork.text() for fork in forks]

    state = program.run(backend=PlayedChannel().backend)
    assert state.ret_value == ["a00?", "a<x>1!", "a2!"]


@pytest.mark.parametrize("offsets", [[1, 2], [0, 5]])
def test_offsets_of_positions_are_refused_where_sglang_ignores_them(offsets: list[int]) -> None:
    state = played_state()
    state.fork(2, position_ids_offset=[0, 0])
    with pytest.raises(InvalidProgram, match="position_ids_offset"):
        state.fork(2, offsets)


def played_state(channel: PlayedChannel | None = None) -> st.ProgramState:
    return open_program((channel or PlayedChannel()).backend)


class Agent:
    def __init__(self, task: str) -> None:
        self.task = task

    @st.function
    def answer(self, s: st.ProgramState, question: str) -> str:
        s += self.task + question + st.gen("x")
        return self.task

    @st.function
    async def answer_async(self, s: st.ProgramState, question: str) -> str:
        s += self.task + question + st.gen("x")
        return self.task

    @staticmethod
    @st.function
    def plain(s: st.ProgramState, question: str) -> None:
        s += question

    elsewhere = two_gens

    @st.function
    def stateless(self) -> None: ...


class Poet(Agent):
    @st.function
    def answer(self, s: st.ProgramState, question: str) -> str:
        s += "in verse: "
        Agent.answer(self, s, question)
        return str(super().answer(s, question))


@pytest.mark.parametrize("name", ["answer", "answer_async"])
def test_a_method_is_a_program_of_its_instance(name: str) -> None:
    options: dict[str, Any] = {"backend": PlayedChannel().backend}
    method = getattr(Agent("task: "), name)
    assert method.parameters == ("question",)
    state = method.run("why?", **options)
    assert state.text() == "task: why?<x>" and state.ret_value == "task: "
    (state,) = method.run_batch([{"question": "how?"}], **options)
    assert state.text() == "task: how?<x>"
    assert "".join(method.stream("who?", **options).text_iter()) == "task: who?<x>"
    assert asyncio.run(method.arun("who?", **options))["x"] == "<x>"
    assert [r["x"] for r in method.stream_batch(iter([["when?"]]), **options)] == ["<x>"]
    assert method.bind(question="where?").run(**options).text() == "task: where?<x>"
    again: Agent = pickle.loads(pickle.dumps(Agent("again: ")))
    assert getattr(again, name).run("?", **options).text() == "again: ?<x>"


def test_methods_call_one_another_in_one_program_and_other_attributes_bind_nothing() -> None:
    backend = PlayedChannel().backend
    state = Poet("task: ").answer.run("?", backend=backend)
    assert state.text() == "in verse: " + 2 * "task: ?<x>"
    assert Agent("").plain.run("text", backend=backend).text() == "text"
    assert Agent("").elsewhere.run("?", backend=backend)["second"] == "<second>"
    with pytest.raises(InvalidProgram, match="first parameter, behind self, or @staticmethod"):
        _ = Agent("").stateless


def test_a_copy_used_as_a_block_is_joined_at_its_end() -> None:
    @st.function
    def program(s: st.ProgramState) -> None:
        with s.copy() as side:
            side += st.gen("thought")
        with pytest.raises(InvalidProgram, match="was joined"):
            side += "more"

    assert program.run(backend=PlayedChannel().backend)["thought"] == ["<thought>"]


def test_a_join_of_the_first_k_gathers_those_that_counted() -> None:
    def answer(op: ir.Op) -> Any:
        if isinstance(op, ir.Join):
            return value([0, 2])
        if isinstance(op, ir.Gen) and op.branch == 2:
            return "failed", {"message": "stopped", "kind": "InvalidRequest", "op": "x"}
        return answer_all(op)

    @st.function
    def program(s: st.ProgramState) -> None:
        forks = s.fork(3)
        forks += lambda i: st.gen("x") + str(i)
        for index, fork in enumerate(forks):
            fork["i"] = index
        forks.join(st.first(2))

    channel = PlayedChannel(answer)
    state = program.run(backend=channel.backend)
    assert state["i"] == [0, 2] and state["x"] == ["<x>", "<x>"]
    assert len(state.get_meta_info("x")) == 2
    with pytest.raises(InvalidProgram, match="gathered by a join"):
        list(state.text_iter("x"))
    (join,) = [op for op in channel.ops[1] if isinstance(op, ir.Join)]
    assert join.num_needed == 2
    for k in (0, True, 1.5):
        with pytest.raises(InvalidProgram, match="num_needed"):
            st.first(k)  # type: ignore[arg-type]
    with pytest.raises(InvalidProgram, match="at most 2"):
        played_state().fork(2).join(st.first(3))


def test_a_handled_error_of_a_join_is_not_raised_again_for_its_branches() -> None:
    def answer(op: ir.Op) -> Any:
        if isinstance(op, ir.Gen | ir.Join):
            return "failed", {"message": "no", "kind": "InvalidRequest", "op": op.kind}
        return answer_all(op)

    @st.function
    def program(s: st.ProgramState) -> None:
        forks = s.fork(2)
        forks += st.gen("x")
        forks.join()
        with pytest.raises(st.ProgramError):
            s.sync()

    program.run(backend=PlayedChannel(answer).backend)


# --- dropped branches -----------------------------------------------------------------------------


def test_a_fork_that_nobody_can_read_is_dropped_with_the_next_op() -> None:
    channel = PlayedChannel()
    state = played_state(channel)
    forks = state.fork(3)
    forks += st.gen("x")
    forks[2].fork(1)[0].append("deeper")
    kept = forks[1]
    del forks
    state += "next"
    gens = ["gen@1", "gen@2", "gen@3"]
    deeper = ["fork@3", "text@4"]
    *before, _, _, _, last = kinds(channel.ops[1])
    assert [*before, last] == ["fork", *gens, *deeper, "text"]
    drops = [op for op in channel.ops[1] if isinstance(op, ir.Drop)]
    assert {(op.branch, op.seq) for op in drops} == {(4, 1), (1, 1), (3, 2)}
    assert kept["x"] == "<x>"


def test_a_wait_also_tells_of_dropped_forks() -> None:
    channel = PlayedChannel()
    state = played_state(channel)
    state += st.gen("x")
    state.fork(1)
    assert state["x"] and kinds(channel.ops[1])[-1] == "drop@1"


def test_joined_forks_forks_of_a_returning_function_and_lent_ones_are_not_dropped() -> None:
    @st.function
    def program(s: st.ProgramState) -> Any:
        s.fork(2).join()
        var = s.copy().append(st.gen("x")).var("x")
        hint = s.copy().pin()
        s += var
        side = s.copy()
        side += st.gen("last")
        return hint

    channel = PlayedChannel()
    assert program.run(backend=channel.backend).ret_value.outcome["outcome"] == "accepted"
    assert not [op for op in channel.ops[1] if isinstance(op, ir.Drop) and op.branch in (1, 2, 4)]
    assert not [op for op in channel.ops[1] if isinstance(op, ir.Drop) and op.branch == 5]


def test_an_error_in_a_dropped_fork_is_nobodys() -> None:
    def answer(op: ir.Op) -> Any:
        if isinstance(op, ir.Gen):
            return "failed", {"message": "no", "kind": "InvalidRequest", "op": "x"}
        return answer_all(op)

    @st.function
    def program(s: st.ProgramState) -> None:
        s.copy().append(st.gen("x"))
        s += "on"

    program.run(backend=PlayedChannel(answer).backend)


# --- tools, pauses, hints -------------------------------------------------------------------------


def test_neither_a_state_nor_its_backend_can_be_pickled_or_copied() -> None:
    backend = PlayedChannel().backend
    state = open_program(backend)
    for make in (pickle.dumps, copy.copy, copy.deepcopy):
        with pytest.raises(TypeError, match=r"a state cannot be pickled, .* state\.text\(\)"):
            make(state)
        with pytest.raises(TypeError, match=r"a backend cannot be pickled .* st\.Runtime"):
            make(backend)


def test_a_tool_runs_inside_a_pause_that_is_sent_at_once() -> None:
    seen: list[tuple[list[str], int]] = []
    channel = PlayedChannel()

    @st.tool(expected_s=2)
    def search(query: str, limit: int = 1) -> list[str]:
        """Finds."""
        seen.append((kinds(channel.ops[1]), channel.num_flushes[1]))
        return [query] * limit

    @st.function
    def program(s: st.ProgramState) -> Any:
        s += "before"
        return search(s, "q", limit=2)

    assert program.run(backend=channel.backend).ret_value == ["q", "q"]
    assert seen == [(["text", "pause"], 1)] and search("plain") == ["plain"]
    pause = channel.ops[1][1]
    assert isinstance(pause, ir.Pause) and (pause.expected_s, pause.label) == (2.0, "search")
    assert (search.__name__, search.__doc__) == ("search", "Finds.")


def test_what_a_tool_raises_reaches_the_author_unchanged() -> None:
    error = LookupError("the tool's own")

    @st.tool
    def fails() -> None:
        raise error

    @st.function
    def program(s: st.ProgramState) -> str:
        with pytest.raises(LookupError) as caught:
            s.call(fails)
        assert caught.value is error
        return "handled"

    assert program.run(backend=PlayedChannel().backend).ret_value == "handled"


def test_an_async_tool_of_a_plain_function_is_run_to_its_end() -> None:
    @st.tool
    async def search(query: str) -> str:
        return query.upper()

    @st.function
    def program(s: st.ProgramState) -> Any:
        return search(s, "q") + s.call(str.lower, "Q")

    assert program.run(backend=PlayedChannel().backend).ret_value == "Qq"


@pytest.mark.parametrize("seconds", [-1, "2", True, float("nan"), 1e9])
def test_a_pause_takes_seconds(seconds: Any) -> None:
    with pytest.raises(InvalidProgram, match="expected_s"):
        played_state().pause(seconds)


def test_hints_say_what_came_of_them() -> None:
    channel = PlayedChannel()
    state = played_state(channel)
    state += "text"
    hints = [state.pin(2), state.retain(7, 0.5), state.demote("disk"), state.prefetch()]
    assert [hint.outcome["num_tokens"] for hint in [*hints, state.share()]] == [3] * 5
    given = [(op.action, op.ttl_ms, op.priority, op.tier) for op in channel.ops[1][1:]]  # type: ignore[attr-defined]
    assert given == [
        ("pin", 2000, None, None),
        ("retain", 500, 7, None),
        ("demote", None, None, "disk"),
        ("prefetch", None, None, "device"),
        ("share", None, None, None),
    ]
    assert state.text() == "text"
    for call in (
        lambda: state.pin(0),
        lambda: state.retain(101),
        lambda: state.demote("device"),
        lambda: state.prefetch("disk"),  # what it is moved from
    ):
        with pytest.raises(InvalidProgram):
            call()


# --- what is refused, what is passed on -----------------------------------------------------------


def test_images_are_refused_by_a_text_model_and_videos_always() -> None:
    state = played_state()
    with pytest.raises(InvalidProgram, match="model played: it reads only text"):
        state += st.user(st.image("cat.png"))
    with pytest.raises(InvalidProgram, match="video"):
        st.video("cat.mp4", 8)
    with pytest.raises(InvalidProgram, match="name of its own"):
        st.separate_reasoning(st.gen("x"), "deepseek-r1")


def test_speculative_tokens_reach_the_channel_and_bound_programs_keep_them() -> None:
    @st.function(num_api_spec_tokens=64)
    def program(s: st.ProgramState, word: str) -> None:
        s += word

    channel = PlayedChannel()
    program.bind(word="w").run(backend=channel.backend)
    assert channel.creates[1]["num_api_spec_tokens"] == 64


def test_a_function_runs_inside_a_program_given_its_state_in_any_form() -> None:
    @st.function
    def inner(s: st.ProgramState, word: str, end: str = ".") -> str:
        s += word + end
        return word

    @st.function
    def outer(s: st.ProgramState) -> list[str]:
        return [inner(s, "a"), inner(s=s, word="b"), inner.bind(end="!")(s, "c")]

    state = outer.run(backend=PlayedChannel().backend)
    assert (state.text(), state.ret_value) == ("a.b.c!", ["a", "b", "c"])


def test_the_constant_prefix_is_what_every_run_begins_with() -> None:
    @st.function
    def program(s: st.ProgramState, city: str, days: int) -> None:
        s += st.system("Be brief.")
        with s.user():
            s += f"Tell me about {city} in {days} days."
        s += st.gen("x")

    @st.function
    def branching(s: st.ProgramState, word: str) -> None:
        s += "Say: " + word
        if len(word) > 3:
            s += "never reached"

    @st.function
    async def waiting(s: st.ProgramState) -> None:
        s += "a" + st.gen("x")
        await s.aget("x")

    prefixes = {program: ["Be brief.", "Tell me about "], branching: ["Say: "], waiting: ["a"]}
    for fn, texts in prefixes.items():
        channel = PlayedChannel(meta_of_prefix)
        assert fn.cache(channel.backend) == 7
        assert [op.text for op in channel.ops[1] if isinstance(op, ir.Text)] == texts
        assert kinds(channel.ops[1])[-1] == "gen"

    @st.function
    def nothing(s: st.ProgramState, word: str) -> None:
        s += word

    assert nothing.cache(PlayedChannel().backend) == 0


def meta_of_prefix(op: ir.Op) -> Any:
    return value("x", meta={"prompt_tokens": 7}) if isinstance(op, ir.Gen) else answer_all(op)


@given(
    strategies.lists(
        strategies.sampled_from(["text", "gen", "fork", "scope", "end", "drop"]), max_size=30
    )
)
def test_branches_have_their_texts_and_scopes_whatever_the_order_of_ops(steps: list[str]) -> None:
    """Against a plain model: each branch is a string, each scope a part of one."""
    channel = PlayedChannel()
    branches: list[tuple[st.ProgramState, str]] = [(played_state(channel), "")]
    scopes: list[tuple[Any, int, int]] = []  # open: its block, branch and start in the text
    closed: list[tuple[int, str, str]] = []  # branch, name, text
    for number, step in enumerate(steps):
        index = number % len(branches)
        state, text = branches[index]
        if step == "text":
            state += f"{number};"
            branches[index] = (state, f"{text}{number};")
        elif step == "gen":
            state += st.gen(f"g{number}")
            branches[index] = (state, f"{text}<g{number}>")
        elif step == "fork":
            branches.append((state.fork(1)[0], text))
        elif step == "drop":
            state.fork(2)
        elif step == "scope":
            scope = state.var_scope(f"s{number}")
            scope.__enter__()
            scopes.append((scope, index, len(text)))
        elif scopes:
            scope, of, start = scopes.pop()
            scope.__exit__(None, None, None)
            closed.append((of, scope._name, branches[of][1][start:]))
    assert [state.text() for state, _ in branches] == [text for _, text in branches]
    for of, name, text in closed:
        assert branches[of][0][name] == text
    seqs: dict[int, int] = {}
    for op in channel.ops[1]:
        assert op.seq == seqs.get(op.branch, 0), "a gap in a branch's log"
        seqs[op.branch] = op.seq + 1
