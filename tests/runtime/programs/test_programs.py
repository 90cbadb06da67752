"""Program sessions driven by hand: a fake queue says what each call generates."""

from __future__ import annotations

import itertools
import sys
from array import array
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fakes import FakeQueue
from hypothesis import given, settings
from hypothesis import strategies as st
from program_harness import (
    Op,
    ProgramHarness,
    end,
    fork,
    gen,
    join,
    role,
    role_end,
    select,
    text,
    var,
)

from stemma.errors import PromptTooLong
from stemma.frontend.protocol import ir, wire
from stemma.frontend.protocol.chat_message import Message
from stemma.runtime.programs import context as context_module
from stemma.runtime.programs import session as session_module
from stemma.runtime.programs.context import AssistantTurnCache, Defaults, ProgramContext
from stemma.runtime.schedule.plan import RowResult
from stemma.runtime.schedule.request import Request
from stemma.runtime.tokenizer.chat_template import ChatTemplate
from stemma.runtime.tokenizer.tokenizer import Tokenizer

# --- text, gen, var -------------------------------------------------------------------------------


@settings(max_examples=60)
@given(cuts=st.lists(st.integers(0, 12), max_size=5), parts=st.integers(1, 3))
def test_a_text_segment_is_the_same_however_it_was_cut(
    byte_tokenizer: Tokenizer, fallback_template: ChatTemplate, cuts: list[int], parts: int
) -> None:
    """One tokenization a segment, also when its pieces came in several messages."""
    whole = "naïve text 😀"
    places = [0, *sorted(c for c in cuts if c <= len(whole)), len(whole)]
    encoded: list[str] = []

    class Recording(Tokenizer):
        def __init__(self) -> None:
            self.__dict__.update(byte_tokenizer.__dict__)

        def encode_array(self, text: str, max_tokens: int = sys.maxsize) -> array[int]:
            encoded.append(text)
            return super().encode_array(text, max_tokens)

    queue = FakeQueue()
    harness = ProgramHarness(
        ProgramContext(
            Recording(), 260, fallback_template, Defaults(), queue, lambda: 1, AssistantTurnCache()
        )
    )
    ops = harness.ops(0, *(text(whole[a:b]) for a, b in itertools.pairwise(places)), gen())
    for i in range(parts):
        harness.send(*ops[i * len(ops) // parts : (i + 1) * len(ops) // parts])
    assert encoded == [whole]
    assert harness.prompts == [whole]


def test_a_gen_continues_its_branch_and_the_next_one_continues_both(
    harness: ProgramHarness,
) -> None:
    harness.on(0, text("a"), gen("x"), text("b"), gen("y"), end=True)
    assert harness.prompts == ["a"]
    harness.generate("XX")
    assert harness.prompts == ["aXXb"] and not harness.is_done
    harness.generate("Y")
    assert harness.values == {(0, 1): "XX", (0, 3): "Y"} and harness.is_done


def test_generated_ids_are_never_tokenized_again(harness: ProgramHarness) -> None:
    harness.on(0, text("a"), gen(), gen(), end=True)
    ids = [200, 201, 202]  # no text has these ids: they are parts of characters
    assert isinstance(harness.queue, FakeQueue)
    harness.queue.generate(harness.queue.open[0], ids)
    harness.session.advance()
    assert list(harness.queue.open[0].prompt) == [ord("a"), *ids]


def test_a_stop_string_leaves_what_survives_before_it_as_a_new_segment(
    harness: ProgramHarness,
) -> None:
    harness.on(0, text("a"), gen("x", stop=("cd",)), text("!"), gen("y"), end=True)
    harness.generate("bcde")
    assert harness.values[0, 1] == "b" and harness.prompts == ["ab!"]
    payload = harness.events.of(wire.VALUE)[0][2]
    assert payload["meta"]["matched_stop"] == "cd"
    assert payload["meta"]["finish_reason"] == "stop"


def test_a_var_is_appended_as_soon_as_its_value_is_there(harness: ProgramHarness) -> None:
    ops = harness.ops(0, text("q"), gen("x"), fork(1))
    ops += harness.ops(1, text(" so "), var(0, 1), gen("y"))
    harness.send(*ops, end=True)
    harness.generate("X")
    assert harness.prompts == ["qX so X"]
    harness.generate("Y")
    assert harness.values == {(0, 1): "X", (1, 1): "X", (1, 2): "Y"} and harness.is_done


def test_a_var_of_another_branch_is_waited_for(harness: ProgramHarness) -> None:
    ops = harness.ops(0, text("q"), fork(1, 2))
    ops += harness.ops(1, var(2, 0), gen("late"))
    ops += harness.ops(2, gen("early"))
    harness.send(*ops, end=True)
    assert harness.prompts == ["q"]
    harness.generate("E")
    assert harness.prompts == ["qE"]
    harness.generate("L")
    assert harness.is_done and not harness.failures


def test_an_empty_prompt_is_an_error_unless_the_model_has_a_bos(harness: ProgramHarness) -> None:
    harness.on(0, gen(), end=True)
    assert "the prompt is empty" in harness.failures[0] and harness.is_done


def test_token_ids_are_taken_as_they_are_or_refused(context: ProgramContext) -> None:
    harness = ProgramHarness(context)
    harness.on(0, lambda b, s: ir.Tokens(b, s, None, (200, 65)), gen(), end=True)
    assert isinstance(harness.queue, FakeQueue)
    assert list(harness.queue.open[0].prompt) == [200, 65]
    assert harness.events.of(wire.MARK)[0][2]["text"].endswith("A")
    other = ProgramHarness(context)
    other.on(0, lambda b, s: ir.Tokens(b, s, None, (260,)), end=True)
    assert "token_ids=260 is not allowed; allowed: an integer in [0, 259]" in other.failures[0]


def test_streaming_deltas_add_up_to_the_value(context: ProgramContext) -> None:
    harness = ProgramHarness(context, stream=True)
    harness.on(0, text("a"), gen("x", stop=("é!",)), end=True)
    harness.generate("naïve é e é! and more")
    deltas = [payload for _, _, payload in harness.events.of(wire.DELTA)]
    assert "".join(deltas) == harness.values[0, 1] == "naïve é e "
    assert len(deltas) > 5


def test_a_value_has_its_counts(harness: ProgramHarness) -> None:
    harness.on(0, text("abc"), gen("x", logprobs=0), end=True)
    harness.generate("hi")
    meta = harness.events.of(wire.VALUE)[0][2]["meta"]
    assert (meta["prompt_tokens"], meta["completion_tokens"]) == (3, 2)
    assert [entry["token"] for entry in meta["logprobs"]] == ["h", "i"]
    assert {"cached_tokens", "queue_s", "time_to_first_token_s", "latency_s"} <= set(meta)


# --- select ---------------------------------------------------------------------------------------


def test_a_select_scores_every_choice_behind_the_same_prompt(harness: ProgramHarness) -> None:
    harness.on(0, text("q:"), select("ab", "c"), text("."), gen(), end=True)
    assert isinstance(harness.queue, FakeQueue)
    first, second = harness.queue.open
    assert [harness.prompts[0], harness.prompts[1]] == ["q:a", "q:"]
    for request in (first, second):
        assert request.scoring is not None and request.scoring.start == 1
    assert first.scoring is not None and first.scoring.targets == tuple(b"ab")
    harness.queue.score(first, [-1.0, -1.0])
    harness.queue.score(second, [-1.5])
    harness.session.advance()
    assert harness.values[0, 1] == "ab" and harness.prompts == ["q:ab."]


def test_the_unconditional_method_also_scores_without_context(harness: ProgramHarness) -> None:
    harness.on(0, text("q:"), select("a", "b", method=ir.CHOICES_METHODS[2]), end=True)
    assert isinstance(harness.queue, FakeQueue)
    assert [len(request.prompt) for request in harness.queue.open] == [2, 2, 1, 1]
    for request, score in zip(list(harness.queue.open), (-2.0, -1.0, -9.0, -1.0)):
        harness.queue.score(request, [score])
    harness.session.advance()
    assert harness.values[0, 1] == "a" and harness.is_done


@pytest.mark.parametrize("op", [["select", 0, 1, None], ["tokens", 0, 1, None]])
def test_a_select_without_choices_fails_and_no_tokens_append_nothing(
    harness: ProgramHarness, op: list[Any]
) -> None:
    harness.send(*harness.ops(0, text("a")), ir.op_from_wire(op), end=True)
    assert harness.is_done
    assert [*harness.failures.values()] == (
        ["choices=[] is not allowed; allowed: at least one text"] if op[0] == "select" else []
    )


def test_a_select_that_fails_stops_its_other_requests(harness: ProgramHarness) -> None:
    harness.on(0, text("q:"), select("a", "b", "c"), end=True)
    assert isinstance(harness.queue, FakeQueue)
    harness.queue.fail(harness.queue.open[1], "boom")
    harness.session.advance()
    assert harness.failures == {0: "boom"} and harness.is_done
    assert not harness.queue.open and len(harness.queue.aborted) == 2


def test_a_select_of_which_one_choice_does_not_fit_leaves_nothing_behind(
    harness: ProgramHarness,
) -> None:
    def refuse(request: Request) -> None:
        if len(request.prompt) > 3:
            raise PromptTooLong("too long")

    assert isinstance(harness.queue, FakeQueue)
    harness.queue.refuse = refuse
    harness.on(0, text("q:"), select("a", "bbbbb"), end=True)
    assert harness.failures == {0: "too long"} and not harness.queue.open and harness.is_done


# --- forks and joins ------------------------------------------------------------------------------


def forked(harness: ProgramHarness, mode: str) -> None:
    ops = harness.ops(0, text("root "), fork(1, 2), join(1, 2, mode=mode), gen("end"))
    for child in (1, 2):
        ops += harness.ops(child, text(f"<{child}"), gen(f"v{child}"), text(">"), end())
    harness.send(*ops, end=True)
    assert harness.prompts == ["root <1", "root <2"]
    harness.generate("two", index=1)  # the order of finishing must not matter
    assert harness.prompts == ["root <1"]
    harness.generate("one")


def test_gather_appends_nothing_to_the_parent(harness: ProgramHarness) -> None:
    forked(harness, "gather_variable")
    assert harness.prompts == ["root "]


def test_concatenate_appends_what_each_child_added_in_order(harness: ProgramHarness) -> None:
    forked(harness, "concate_and_append")
    assert harness.prompts == ["root <1one><2two>"]
    (payload,) = [p for b, s, p in harness.events.of(wire.VALUE) if (b, s) == (0, 2)]
    assert payload["text"] == "<1one><2two>"


def test_forks_of_one_gen_differ_in_seed_and_repeated_runs_do_not(context: ProgramContext) -> None:
    def seeds() -> list[int]:
        harness = ProgramHarness(context, seed=5)
        ops = harness.ops(0, text("q"), fork(1, 2), gen())
        for child in (1, 2):
            ops += harness.ops(child, gen(), gen())
        harness.send(*ops, end=True)
        assert isinstance(harness.queue, FakeQueue)
        found = [request.sampling.seed for request in harness.queue.open]
        while harness.queue.open:
            harness.generate("z")
        return found + [request.sampling.seed for request in harness.queue.submitted[-2:]]

    first = seeds()
    assert len(set(first)) == 5 and seeds() == first


def test_a_seed_given_to_the_gen_is_used_as_it_is(harness: ProgramHarness) -> None:
    harness.on(0, text("q"), gen(seed=77))
    assert isinstance(harness.queue, FakeQueue)
    assert harness.queue.open[0].sampling.seed == 77


# --- several samples ------------------------------------------------------------------------------


def test_samples_are_requests_of_one_prompt_and_the_branch_goes_on_with_the_first(
    context: ProgramContext,
) -> None:
    harness = ProgramHarness(context, stream=True)
    harness.on(0, text("q"), gen("x", n=3, stop=("!",)), text("."), gen("y"), end=True)
    assert harness.prompts == ["q"] * 3
    harness.generate("third", index=2)  # the order of finishing must not matter
    harness.generate("sec!ond", index=1)
    assert harness.prompts == ["q"] and not harness.values
    harness.generate("first!")
    assert harness.values == {(0, 1): ["first", "sec", "third"]} and harness.prompts == ["qfirst."]
    ((_, _, payload),) = harness.events.of(wire.VALUE)
    assert payload["text"] == "first"
    assert [meta["matched_stop"] for meta in payload["meta"][:2]] == ["!", "!"]
    assert [meta["completion_tokens"] for meta in payload["meta"]] == [6, 4, 5]
    deltas = [payload for _, _, payload in harness.events.of(wire.DELTA)]
    assert "".join(deltas) == "first", "only what the branch goes on with is streamed"


def test_a_var_of_samples_is_the_first_one(harness: ProgramHarness) -> None:
    ops = harness.ops(0, text("q"), gen("x", n=2), fork(1))
    ops += harness.ops(1, text(" "), var(0, 1), gen("y"))
    harness.send(*ops, end=True)
    harness.generate("A")
    harness.generate("B")
    assert harness.prompts == ["qA A"]


def test_the_first_sample_draws_as_a_single_one_and_the_others_by_their_index(
    context: ProgramContext,
) -> None:
    def seeds(**params: Any) -> list[int]:
        harness = ProgramHarness(context, seed=5)
        assert isinstance(harness.queue, FakeQueue)
        harness.queue.open.clear()
        harness.on(0, text("q"), gen(**params), end=True)
        return [request.sampling.seed for request in harness.queue.open]

    for fixed in ({}, {"seed": 77}):
        three, five = seeds(n=3, **fixed), seeds(n=5, **fixed)
        assert five[:3] == three and three[:1] == seeds(**fixed) == seeds(n=1, **fixed)
        assert len(set(five)) == 5


@pytest.mark.parametrize("num_before", [0, 1, 2])
def test_a_failed_sample_stops_the_others(harness: ProgramHarness, num_before: int) -> None:
    harness.on(0, text("q"), gen("x", n=3), end=True)
    assert isinstance(harness.queue, FakeQueue)
    for _ in range(num_before):
        harness.generate("fine")
    harness.queue.fail(harness.queue.open[0], "boom")
    harness.session.advance()
    assert harness.failures == {0: "boom"} and harness.is_done and not harness.values
    assert not harness.queue.open and len(harness.queue.aborted) == 2 - num_before


def test_a_cancelled_program_stops_all_samples(harness: ProgramHarness) -> None:
    harness.on(0, text("q"), gen("x", n=3))
    harness.session.cancel()
    assert isinstance(harness.queue, FakeQueue)
    assert len(harness.queue.aborted) == 3 and not harness.values and not harness.failures


def test_no_stop_string_is_seen_in_the_first_min_tokens(harness: ProgramHarness) -> None:
    harness.on(0, text("q"), gen("x", min_tokens=3, stop=("b",)), end=True)
    harness.generate("abbcba")
    assert harness.values == {(0, 1): "abbc"}


def test_a_bias_beyond_the_vocabulary_fails_its_op_alone(harness: ProgramHarness) -> None:
    bias = ((3, 1.0), (260, 1.0))
    harness.on(0, text("q"), gen("x", logit_bias=bias), end=True)
    assert "logit_bias=260 is not allowed; allowed: token ids in [0, 259]" in harness.failures[0]
    assert harness.is_done and not harness.prompts


def test_what_a_gen_leaves_open_is_the_models_choice(context: ProgramContext) -> None:
    defaults = Defaults(ir.Sampling(min_p=0.05, repetition_penalty=1.1))
    left, given = (
        defaults.sampling(params, seed=0)
        for params in (ir.GenParams(), ir.GenParams(min_p=0.0, repetition_penalty=1.0))
    )
    assert (left.min_p, left.repetition_penalty) == (0.05, 1.1)
    assert (given.min_p, given.repetition_penalty) == (0.0, 1.0)


# --- roles and replays ----------------------------------------------------------------------------


def test_roles_append_the_templates_marks(harness: ProgramHarness) -> None:
    harness.on(0, role("user"), text("Hi"), role_end(), role("assistant"), gen(), role_end())
    assert harness.prompts == ["<bos>USER: Hi\nASSISTANT: "]
    harness.generate("Ho")
    marks = [payload["text"] for _, _, payload in harness.events.of(wire.MARK)]
    assert marks == ["<bos>USER: ", "\n", "ASSISTANT: ", "\n"]


def chat_of(harness: ProgramHarness, num_messages: int) -> list[ir.Op]:
    turns = [op for i in range(num_messages) for op in (role("user"), text(f"{i};"), role_end())]
    return harness.ops(0, *turns, role("assistant"), gen())


def test_a_long_chat_takes_turns_with_the_engines_other_work(
    context: ProgramContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = ProgramHarness(context)
    whole.send(*chat_of(whole, 20))
    monkeypatch.setattr(session_module, "MAX_MARKS_A_TURN", 16)
    harness = ProgramHarness(context)
    harness.send(*chat_of(harness, 20), end=True)
    num_turns = 1
    while harness.num_asked_turns:
        assert len(harness.prompts) == 1, "only the chat that had no limit has come so far"
        harness.num_asked_turns = 0
        harness.session.advance()
        num_turns += 1
    assert num_turns == 3  # for 41 delimiters
    assert isinstance(harness.queue, FakeQueue)
    first, second = harness.queue.open
    assert list(first.prompt) == list(second.prompt) and not harness.is_done
    harness.generate("b", 1)
    assert harness.is_done and not harness.failures


def test_a_chat_that_is_cancelled_between_two_turns_is_over(
    harness: ProgramHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session_module, "MAX_MARKS_A_TURN", 16)
    harness.send(*chat_of(harness, 20), end=True)
    harness.session.cancel()
    for _ in range(3):
        harness.session.advance()
    assert isinstance(harness.queue, FakeQueue)
    assert harness.queue.ended == [harness.session.record] and not harness.queue.open


def chat(*messages: tuple[str, str]) -> Op:
    said = tuple(Message(*message) for message in messages)
    return lambda branch, seq: ir.Chat(branch, seq, None, said)


def test_an_assistant_turn_sent_back_as_text_gets_the_ids_it_was_generated_with(
    context: ProgramContext,
) -> None:
    ids = [200, 201]  # bytes that are no text: encode() can never give these
    first = ProgramHarness(context)
    first.on(0, chat(("user", "Hi")), gen())
    assert isinstance(first.queue, FakeQueue)
    before = list(first.queue.open[0].prompt)
    first.queue.generate(first.queue.open[0], ids)
    first.session.advance()
    said = first.values[0, 1]
    for answer, is_known in ((said, True), (said + "!", False)):
        again = ProgramHarness(context)
        again.on(0, chat(("user", "Hi"), ("assistant", answer), ("user", "And?")), gen())
        prompt = list(again.queue.open[-1].prompt)
        assert (prompt[: len(before) + 2] == before + ids) == is_known
    other = replace(context, assistant_turns=AssistantTurnCache())
    again = ProgramHarness(other)
    again.on(0, chat(("user", "Hi"), ("assistant", said), ("user", "And?")), gen())
    assert ids[0] not in again.queue.open[-1].prompt


def test_what_is_known_of_turns_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(context_module, "MAX_TURN_TOKENS", 10)
    monkeypatch.setattr(context_module, "MAX_ANSWERS", 2)
    turns = AssistantTurnCache()
    for number in range(5):
        turns.remember("", b"%d" % number, "a", array("i", [number] * 4))
    known = [turns.find("", b"%d" % number, "a.", ["."]) is not None for number in range(5)]
    assert known == [False, False, False, True, True]
    assert turns.find("other", b"4", "a.", ["."]) is None
    assert turns.find("", b"4", "ab.", ["."]) is None, "not what was generated"
    for answer in ("ab", "abc"):
        turns.remember("", b"4", answer, array("i", [1]))
    assert turns.find("", b"4", "ab.", ["."]) == ("ab", array("i", [1]))
    assert turns.find("", b"4", "abc.", ["."]) is None, "the third answer to one prompt"


# --- gens that are to end now ---------------------------------------------------------------------


def test_gens_that_are_to_end_now_end_with_what_they_have(harness: ProgramHarness) -> None:
    harness.on(0, text("a"), fork(1, 2), end=False)
    harness.on(1, gen(), text("b"), gen("y"))
    harness.on(2, gen(n=2), end=True)
    harness.on(0, end=True)
    queue = harness.queue
    assert isinstance(queue, FakeQueue)
    first = queue.open[0]
    for token_id in b"hi":
        first.append_token(token_id)
        first.listener.on_token(first, RowResult(token_id=token_id))
    harness.session.end_gens()
    harness.session.advance()
    assert harness.is_done and not harness.failures
    assert harness.values == {(1, 0): "hi", (1, 2): "", (2, 0): ["", ""]}
    metas = [payload["meta"] for _, _, payload in harness.events.of(wire.VALUE)]
    flat = [m for meta in metas for m in (meta if isinstance(meta, list) else [meta])]
    assert {meta["finish_reason"] for meta in flat} == {"abort"}


def test_a_gen_that_has_ended_is_not_ended_again(harness: ProgramHarness) -> None:
    harness.on(0, text("a"), gen(), end=True)
    harness.generate("whole")
    harness.session.end_gens()
    harness.session.advance()
    assert harness.is_done and harness.values == {(0, 1): "whole"}


# --- messages of programs under a SentencePiece tokenizer -----------------------------------------


def test_a_messages_content_goes_on_what_the_template_has_written(
    context: ProgramContext, tmp_path: Path
) -> None:
    """No blank is put before its first word: the template writes none."""
    from chats import TEMPLATES, make_tokenizer

    num_tokens = make_tokenizer(tmp_path, "metaspace_always")
    (tmp_path / "chat_template.jinja").write_text(TEMPLATES["internlm"])
    tokenizer = Tokenizer(tmp_path, num_tokens)
    template = ChatTemplate(tmp_path, tokenizer)
    world = replace(context, tokenizer=tokenizer, template=template, vocab_size=num_tokens)
    program, whole = ProgramHarness(world), ProgramHarness(world)
    program.on(0, role("user"), text("do it"), role_end(), role("assistant"), gen())
    prompt = list(program.queue.open[-1].prompt)
    whole.on(0, chat(("user", "do it")), gen())
    shown = [tokenizer.decode(ids, skip_special=False)
             for ids in (prompt, whole.queue.open[-1].prompt)]  # fmt: skip
    assert shown[0] == shown[1] and "user\ndo it<" in shown[0]
