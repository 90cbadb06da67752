"""Names of an engine's options: those of the flags, and an answer at once to all others."""

from __future__ import annotations

import argparse
from dataclasses import fields
from typing import Any

import pytest

import stemma as st
from stemma.frontend.client import engine_options, engine_process
from stemma.frontend.client.engine_options import EngineOptions
from stemma.runtime.config import EngineConfig
from stemma.runtime.sessions.listener import add_client_flags


def test_the_options_are_the_flags_of_the_engines_process() -> None:
    parser = argparse.ArgumentParser()
    add_client_flags(parser)
    client_flags = set(vars(parser.parse_args([])))
    names = {field.name for field in fields(EngineConfig)} | client_flags | {"log_level"}
    assert set(EngineOptions.__annotations__) | {"model"} == names


def test_other_engines_names_lead_to_options() -> None:
    names = {*EngineOptions.__annotations__, "model", "listen"}
    assert set(engine_options._SAME.values()) <= names
    assert not names & {*engine_options._SAME, *engine_options._OTHERWISE}


@pytest.mark.parametrize(
    ("options", "answer"),
    [
        ({"model_name_or_path": "x"}, r"'model_name_or_path': did you mean 'model'\?"),
        ({"mem_fraction_static": 0.8}, r"did you mean 'mem_fraction'\?"),
        ({"model_path": "x", "model": "y"}, "model_path='x' is not allowed"),
        ({"max_total_token": 64}, r"'max_total_token': did you mean 'max_total_tokens'\?"),
        ({"gpu_memory_utilization": 0.9}, r"did you mean 'mem_fraction'\?"),
        ({"Dtype": "float32"}, r"did you mean 'dtype'\?"),
        ({"speculative_num_draft_tokens": 4}, r"did you mean 'speculative_num_tokens'\?"),
        ({"num_speculative_tokens": 4}, r"did you mean 'speculative_num_tokens'\?"),
        ({"speculative_config": {}}, "draft_model and speculate"),
        ({"speculative_draft_model_path": "x"}, r"did you mean 'draft_model'\?"),
        ({"tensor_parallel_size": 2}, r"did you mean 'tp_size'\?"),
        ({"dp_size": 2}, "'dp_size': an engine is one replica"),
        ({"port": 8000}, "an option of `stemma serve`"),
        ({"zzzz": 1}, r"docs/serve/flags\.md"),
    ],
    ids=str,
)
def test_a_name_that_is_no_option_is_answered_before_a_process_is_started(
    monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], answer: str
) -> None:
    def started(*_: object, **__: object) -> None:
        raise AssertionError("a process was started")

    monkeypatch.setattr(engine_process.subprocess, "Popen", started)
    with pytest.raises(st.InvalidRequest, match=answer) as caught:
        st.Engine(**options)
    assert caught.value.field == next(iter(options))
