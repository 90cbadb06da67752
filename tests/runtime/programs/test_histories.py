"""Whose earlier texts may serve a call: never those of another key, namespace or adapter."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from fakes import FakeQueue
from program_harness import ProgramHarness, fork, gen, text

from stemma.runtime.programs.context import ProgramContext
from stemma.runtime.schedule.request import Request


@pytest.fixture
def context(context: ProgramContext) -> ProgramContext:
    adapters: Any = SimpleNamespace(
        find=lambda name: SimpleNamespace(namespace=lambda own: f"{own}#lora:{name}")
    )
    return replace(context, adapters=adapters)


def request_of(context: ProgramContext, lora_path: str | None = None, **options: Any) -> Request:
    queue = FakeQueue()
    harness = ProgramHarness(replace(context, queue=queue), **options)
    harness.on(0, text("Q"), gen("x", "here.py:3", lora_path=lora_path))
    (request,) = queue.open
    return request


def test_one_name_is_another_history_for_each_account_namespace_and_adapter(
    context: ProgramContext,
) -> None:
    for name in ("", "chat-1"):
        apart = [
            request_of(context, history=name, account="alice"),
            request_of(context, history=name, account="bob"),
            request_of(context, history=name, account="alice", namespace="n"),
            request_of(context, history=name, account="alice", lora_path="a"),
            request_of(context, history=name, account="alice", lora_path="b"),
            request_of(context, history=name, account="alice", namespace="n", lora_path="a"),
        ]
        assert len({request.history for request in apart}) == len(apart)


def test_calls_of_one_account_share_a_history_by_its_name(context: ProgramContext) -> None:
    first, again, default, other = (
        request_of(context, history=name, account="alice", seed=seed).history
        for seed, name in enumerate(["chat-1", "chat-1", "", "chat-2"])
    )
    assert first == again and len({first, default, other}) == 3


def test_an_op_is_known_by_its_line_and_name_wherever_its_branch_is(
    context: ProgramContext,
) -> None:
    queue = FakeQueue()
    harness = ProgramHarness(replace(context, queue=queue), op_key="of the request")
    harness.on(0, text("Q"), fork(1, 2, 3, 4))
    for branch, op in enumerate(
        [gen("a", "f.py:1"), gen("a", "f.py:1"), gen("b", "f.py:1"), gen("a", "f.py:2")], start=1
    ):
        harness.on(branch, op)
    first, again, named, elsewhere = (request.op_key for request in queue.open)
    assert first == again and len({first, named, elsewhere}) == 3


def test_calls_without_a_line_are_alike_by_what_their_client_says(context: ProgramContext) -> None:
    for op_key in (None, "digest"):
        queue = FakeQueue()
        harness = ProgramHarness(replace(context, queue=queue), op_key=op_key)
        harness.on(0, text("Q"), gen("completion"))
        assert [request.op_key for request in queue.open] == [op_key]
