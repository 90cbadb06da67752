"""What a task asks of the engine: what makes its calls alike, and what takes long to send."""

from __future__ import annotations

import pytest

from stemma.frontend.protocol.chat_message import Message
from stemma.frontend.protocol.constraint import Constraint
from stemma.frontend.protocol.ir import GenParams
from stemma.server.protocol import task as task_module
from stemma.server.protocol.caller import digest_of
from stemma.server.protocol.task import LARGE, Task

LONG = Constraint("regex", "a" * LARGE)


def test_what_all_prompts_have_is_digested_once(monkeypatch: pytest.MonkeyPatch) -> None:
    digested: list[str] = []

    def digest(text: str) -> str:
        digested.append(text)
        return digest_of(text)

    monkeypatch.setattr(task_module, "digest_of", digest)
    task = Task(["b"] * 100 + [[1, 2]], GenParams(constraint=LONG))
    keys = task.op_keys
    assert len(keys) == 101 and len(set(keys)) == 2  # of texts, and of token ids
    assert len(digested) == 2


def test_op_keys_differ_where_the_form_does_and_are_none_without_one() -> None:
    forms = [
        GenParams(),
        GenParams(constraint=Constraint("regex", "a")),
        GenParams(constraint=LONG),
    ]
    keys = Task(["b", "b", "b"], GenParams(), each_params=forms).op_keys
    assert keys[0] is None and len(set(keys)) == 3
    assert Task(["c"], forms[1]).op_keys == [keys[1]]


@pytest.mark.parametrize(
    "task",
    [
        Task(["b"], GenParams(constraint=LONG)),
        Task(["b", "b"], GenParams(), each_params=[GenParams(), GenParams(constraint=LONG)]),
        Task(["b"], GenParams(prediction="a" * LARGE)),
        Task([[Message("user", "b")]], GenParams(), tools="a" * LARGE),
        Task(["a" * LARGE, "b"], GenParams()),
    ],
    ids=["form", "one of the forms", "prediction", "tools", "prompt"],
)
def test_a_task_is_large_with_any_long_part(task: Task) -> None:
    assert task.is_large
    assert not Task(task.prompts[-1:], GenParams()).is_large


def test_a_beam_search_counts_as_many_rows_as_it_has_hypotheses() -> None:
    task = Task(["a", "b"], GenParams(n=3, beam=8), n=3)
    assert (task.num_samples, task.num_rows) == (6, 16)
    assert Task(["a", "b"], GenParams(), n=3).num_rows == 6
