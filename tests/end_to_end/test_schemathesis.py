"""Whatever the OpenAPI document allows, and more: never a 5xx, never a traceback.

The document is the server's own; schemathesis makes requests of it, fitting and unfitting ones.
"""

from __future__ import annotations

import logging
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as some
from schemathesis import GenerationMode

import stemma as st
from stemma.server.app import create_app
from stemma.server.settings import ServerSettings

NUM_EXAMPLES = 4  # of each endpoint, each way
NUM_EXAMPLES_SLOW = 100
REFUSED = (400, 401, 403, 404, 405, 408, 413, 415, 429)
MODES = pytest.mark.parametrize("mode", list(GenerationMode), ids=lambda mode: str(mode.value))
# A body that is answered, into which single fields of the generated ones are put: whole ones nearly
# always ask for what excludes each other.
ANSWERED: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "x", "max_tokens": 2},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "x"}], "max_tokens": 2},
}


@MODES
def test_no_request_is_answered_with_a_fault_of_ours(
    embedded: st.Engine, mode: GenerationMode, caplog: pytest.LogCaptureFixture
) -> None:
    try_all(embedded, mode, NUM_EXAMPLES)
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]


@pytest.mark.slow
@MODES
def test_no_request_of_many_is_answered_with_a_fault_of_ours(
    embedded: st.Engine, mode: GenerationMode, caplog: pytest.LogCaptureFixture
) -> None:
    try_all(embedded, mode, NUM_EXAMPLES_SLOW)
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]


def try_all(engine: st.Engine, mode: GenerationMode, num_examples: int) -> None:
    """So many requests of each operation that the document has."""
    plan = settings(
        max_examples=num_examples,
        deadline=None,
        derandomize=True,
        database=None,
        phases=(Phase.explicit, Phase.generate),
        suppress_health_check=list(HealthCheck),
    )
    app = create_app(engine, ServerSettings(max_tokens_limit=4, allowed_hosts=("testserver",)))
    document = schemathesis.openapi.from_asgi("/openapi.json", app)
    operations = [result.ok() for result in document.get_all_operations()]
    assert {"POST /v1/chat/completions", "POST /kv_hints"} <= {op.label for op in operations}
    num_answered = 0
    for operation in operations:
        if mode is GenerationMode.NEGATIVE and not operation.body:
            continue  # nothing unfit can be made of nothing

        @plan
        @given(operation.as_strategy(generation_mode=mode), some.data())
        def check(case: Any, data: some.DataObject) -> None:
            nonlocal num_answered
            answered = ANSWERED.get(case.path)
            if answered is not None and isinstance(case.body, dict) and case.body:
                fields = data.draw(some.lists(some.sampled_from(sorted(case.body)), max_size=3))
                if fields:
                    case.body = {**answered, **{name: case.body[name] for name in fields}}
            num_answered += is_sound(case.call())

        check()
    if mode is GenerationMode.POSITIVE:
        assert num_answered >= num_examples, "nearly all was refused: this shows little"


def is_sound(reply: Any) -> bool:
    """Whether it is an answer; what is none must be a refusal that says why."""
    if reply.status_code == 200:
        return True
    error = reply.json()["error"]
    message = error if isinstance(error, str) else error["message"]  # Ollama's is a text
    assert message and "Traceback" not in reply.text
    assert isinstance(error, str) or "type" in error  # Anthropic's too
    asked_for = reply.status_code == 503 and "deadline" in message
    assert reply.status_code in REFUSED or asked_for, reply.text
    return False
