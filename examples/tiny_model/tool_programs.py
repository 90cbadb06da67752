"""The held-out conversations with tools, as a client of `stemma serve` has them.

Each assistant message is asked for with `tool_choice` "auto" over /v1/chat/completions, behind the
expected messages before it, and judged alone: its calls by name and arguments, or its text.
"""

import json
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from fastapi.testclient import TestClient
from programs import Outcome
from samples import Sample

import stemma as st
from stemma.server.app import create_app

NUM_CLIENTS = 16  # guess: enough to fill the batches of a CPU
URL = "/v1/chat/completions"


def run_tools(samples: Sequence[Sample], engine: st.Engine) -> list[Outcome]:
    """All samples; `written` and `expected` have an entry for each assistant message."""
    outcomes: list[Outcome] = []
    app = create_app(engine)
    with TestClient(app, base_url="http://localhost") as client:
        with ThreadPoolExecutor(NUM_CLIENTS) as threads:
            for outcome in threads.map(lambda sample: _outcome(sample, client), samples):
                outcomes.append(outcome)
                if len(outcomes) % 100 == 0:
                    print(f"tools {len(outcomes)}/{len(samples)}", file=sys.stderr)
    return outcomes


def parts(outcomes: Sequence[Outcome], are_calls: bool) -> list[Outcome]:
    """Of the outcomes only the messages that should be calls, or only the others."""
    found = []
    for outcome in outcomes:
        pairs = [
            pair
            for pair in zip(outcome.written, outcome.expected, strict=True)
            if pair[1].startswith("[{") == are_calls
        ]
        if pairs:
            found.append(Outcome(outcome.sample, *map(list, zip(*pairs, strict=True))))
    return found


def _outcome(sample: Sample, client: TestClient) -> Outcome:
    written, expected = [], []
    for index, message in enumerate(sample.dialogue):
        if message["role"] == "assistant":
            fields = {"messages": sample.dialogue[:index], "tools": sample.tools}
            reply = client.post(URL, json={"model": "default", "temperature": 0, **fields})
            reply.raise_for_status()
            written.append(_shown(reply.json()["choices"][0]["message"]))
            expected.append(_shown(message))
    return Outcome(sample, written, expected)


def _shown(message: dict[str, Any]) -> str:
    """The text, or behind it the calls as JSON in which the order of arguments does not count."""
    functions = [call["function"] for call in message.get("tool_calls") or ()]
    calls = [{"name": f["name"], "arguments": _value(f["arguments"])} for f in functions]
    text = message["content"] or ""
    return text + json.dumps(calls, sort_keys=True) if calls else text


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text
