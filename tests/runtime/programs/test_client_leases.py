"""Hints inside programs: on what prefix they act, when, and that they change no text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from program_harness import ProgramHarness, gen, hint, resume, role, text, tokens

from stemma.frontend.protocol import ir
from stemma.runtime.checkpoint.lora.adapter import Adapter
from stemma.runtime.checkpoint.lora.registry import AdapterRegistry
from stemma.runtime.programs.client_leases import MAX_ASKED, Action, AskedHint
from stemma.runtime.programs.context import ProgramContext
from stemma.runtime.programs.preparation import Preparation
from stemma.runtime.schedule.cache.hint_actions import Outcome
from stemma.runtime.tokenizer.transcript import Transcript


@dataclass
class FakeStated:
    """Has the prefixes that were computed; remembers what was asked of them."""

    computed: list[bytes] = field(default_factory=list)
    asked: list[tuple[str, bytes]] = field(default_factory=list)
    namespaces: list[str] = field(default_factory=list)  # in which it was asked

    def carry_out(
        self, action: Action, token_ids: Sequence[int], *, namespace: str, account: str
    ) -> Outcome:
        prefix = bytes(list(token_ids))
        if not prefix or not any(whole.startswith(prefix) for whole in self.computed):
            return Outcome("missing", "nothing of this prefix is cached")
        self.asked.append((action.action, prefix))
        self.namespaces.append(namespace)
        return Outcome("accepted", "", len(prefix))


@pytest.fixture
def stated() -> FakeStated:
    return FakeStated()


@pytest.fixture
def hinted(harness: ProgramHarness, stated: FakeStated) -> ProgramHarness:
    harness.session._stated = stated  # type: ignore[assignment]
    return harness


def outcome(harness: ProgramHarness, seq: int) -> Any:
    return harness.values[0, seq]["outcome"]


def test_a_pin_before_the_first_call_is_carried_out_after_it(
    hinted: ProgramHarness, stated: FakeStated
) -> None:
    hinted.on(0, text("system"), hint("pin", ttl_ms=5), text(" question"), gen())
    assert outcome(hinted, 1) == "deferred" and not stated.asked
    stated.computed.append(b"system question")
    hinted.generate("!")
    assert stated.asked == [("pin", b"system")], "not the question behind it"


def test_hints_cost_no_encoding_each(hinted: ProgramHarness, stated: FakeStated) -> None:
    """Each one counts within a segment that is encoded a second time at most."""
    tokenizer = hinted.context.tokenizer
    with patch.object(tokenizer, "encode_array", wraps=tokenizer.encode_array) as encode:
        hinted.on(0, text("aé"), hint("pin"), text("b"), hint("pin"), text("c"), hint("pin"), gen())
    assert [call.args[0] for call in encode.call_args_list] == ["aébc"]
    stated.computed.append("aébc".encode())
    hinted.generate("!")
    assert stated.asked == [("pin", prefix.encode()) for prefix in ("aé", "aéb", "aébc")]


def test_of_a_branchs_hints_that_wait_the_newest_are_kept(
    hinted: ProgramHarness, stated: FakeStated
) -> None:
    for _ in range(MAX_ASKED + 3):
        hinted.on(0, text("a"), hint("pin"))
    hinted.on(0, gen())
    stated.computed.append(b"a" * (MAX_ASKED + 3))
    hinted.generate("!")
    assert [len(prefix) for _, prefix in stated.asked] == list(range(4, MAX_ASKED + 4))


def test_a_hint_on_text_that_failed_is_not_carried_out_on_other_text(
    hinted: ProgramHarness, stated: FakeStated
) -> None:
    hinted.session._context = replace(hinted.context, max_text_chars=5)
    hinted.on(0, text("too long"), hint("pin"), gen())
    assert "prompt is too long" in hinted.failures[0]
    hinted.on(0, resume(), text("other"), gen())
    stated.computed.append(b"other")
    hinted.generate("!")
    assert not stated.asked


def test_a_hint_on_a_message_that_was_dropped_is_not_carried_out_on_another(
    hinted: ProgramHarness, stated: FakeStated
) -> None:
    hinted.on(0, text("before"), hint("pin"), role("user"), text("much to drop"), hint("pin"))
    hinted.on(0, tokens(9999))
    assert "token_ids" in hinted.failures[0]
    hinted.on(0, resume(drops_message=True), text(" and behind" * 20), gen())
    stated.computed.append(b"before" + b" and behind" * 20)
    hinted.generate("!")
    assert stated.asked == [("pin", b"before")]


def test_hints_of_a_text_count_as_more_of_it_to_tokenize(context: ProgramContext) -> None:
    pending = (ir.Text(0, 0, None, "abc"), ir.Text(0, 2, None, "d"))
    action, op = Action("pin"), ir.Gen(0, 3, None, "x", ir.GenParams())

    def num_chars(*asked: AskedHint) -> int:
        transcript = Transcript(context.tokenizer, context.template)
        return Preparation(context, "", transcript, pending, asked, op).num_chars

    assert num_chars() == num_chars(AskedHint(action, 7)) == 4
    assert num_chars(AskedHint(action, None, 1)) == 8


def test_a_hint_splits_no_text_segment(hinted: ProgramHarness) -> None:
    encoded: list[str] = []
    tokenizer = hinted.context.tokenizer
    plain = tokenizer.encode_array
    tokenizer.encode_array = lambda text, *most: encoded.append(text) or plain(text, *most)  # type: ignore[method-assign, func-returns-value]
    try:
        hinted.on(0, text("ab"), hint("demote"), text("cd"), gen())
    finally:
        del tokenizer.encode_array
    assert encoded == ["abcd"]


def test_a_hint_behind_a_call_acts_at_once(hinted: ProgramHarness, stated: FakeStated) -> None:
    hinted.on(0, text("a"), gen())
    stated.computed.append(b"aX")
    hinted.generate("X")
    hinted.on(0, hint("retain"), hint("demote"))
    assert stated.asked == [("retain", b"aX"), ("demote", b"aX")]


def test_a_hint_acts_where_the_branchs_last_call_has_its_kv(
    context: ProgramContext, stated: FakeStated
) -> None:
    adapters = AdapterRegistry("model", {}, max_rank=1, prepare=list)
    adapters._adapters["a"] = adapter = Adapter("a", Path("a"), "1", 1, None)
    harness = ProgramHarness(replace(context, adapters=adapters))
    harness.session._stated = stated  # type: ignore[assignment]
    harness.on(0, text("a"), hint("pin"), gen(lora_path="a"))
    stated.computed.append(b"aX")
    harness.generate("X")
    harness.on(0, hint("retain"), gen())
    harness.generate("Y")
    stated.computed.append(b"aXY")
    harness.on(0, hint("demote"))
    assert stated.namespaces == [adapter.namespace(""), adapter.namespace(""), ""]


def test_what_cannot_wait_is_missing(hinted: ProgramHarness) -> None:
    hinted.on(0, text("a"), hint("demote"), hint("prefetch"))
    assert [outcome(hinted, seq) for seq in (1, 2)] == ["missing", "missing"]


def test_without_leases_a_hint_is_rejected_and_the_program_goes_on(harness: ProgramHarness) -> None:
    harness.on(0, text("a"), hint("pin"), gen())
    assert outcome(harness, 1) == "rejected" and harness.prompts == ["a"]


def test_every_action_is_known_to_the_session() -> None:
    assert set(ir.HINT_ACTIONS) == {"pin", "retain", "demote", "prefetch", "share"}
