"""`/metrics`, the request log and traces, over the application on a real engine."""

from __future__ import annotations

import io
import json
import logging
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from engine_thread import engine_in_thread
from fastapi.testclient import TestClient
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from prometheus_client.openmetrics import parser as openmetrics
from prometheus_client.parser import text_string_to_metric_families

import stemma
import stemma as st
from stemma.errors import EngineError
from stemma.server.app import create_app
from stemma.server.metrics.compat import compat_families
from stemma.server.metrics.engine_metrics import engine_families
from stemma.server.metrics.observed import RequestRecord
from stemma.server.metrics.request_log import configure_logging, log_request
from stemma.server.metrics.traces import observer_of
from stemma.server.protocol.pieces import Outcome
from stemma.server.settings import ServerSettings

DASHBOARD = Path(stemma.__file__).parent / "docs" / "grafana" / "stemma.json"
BASE = "http://127.0.0.1"
BODY = {"prompt": "one two three", "max_tokens": 6, "ignore_eos": True}


@pytest.fixture(scope="module")
def client(embedded: st.Engine) -> Iterator[TestClient]:
    with TestClient(
        create_app(embedded, ServerSettings(metrics_compat=True)), base_url=BASE
    ) as client:
        yield client


def read(client: TestClient) -> dict[str, float]:
    """Samples by name and labels."""
    families = text_string_to_metric_families(client.get("/metrics").text)
    return {
        f"{sample.name}{json.dumps(sample.labels, sort_keys=True)}": sample.value
        for family in families
        for sample in family.samples
    }


def value(samples: dict[str, float], name: str, **labels: str) -> float:
    """The sum over samples of that name that have these labels."""
    return sum(
        number
        for key, number in samples.items()
        if key.partition("{")[0] == name
        and labels.items() <= json.loads(key[key.index("{") :]).items()
    )


def test_a_request_moves_what_it_should_and_nothing_else(client: TestClient) -> None:
    before = read(client)
    client.post("/v1/completions", json=BODY).raise_for_status()
    client.post("/v1/completions", json={**BODY, "temperature": -1})
    client.get("/no/such/path")
    after = read(client)

    def moved(name: str, **labels: str) -> float:
        return value(after, name, **labels) - value(before, name, **labels)

    assert moved("stemma_generated_tokens_total") == 6
    assert moved("stemma_requests_total", finish_reason="length") == 1
    assert moved("stemma_requests_total", finish_reason="stop") == 0
    assert moved("stemma_request_output_tokens_sum") == 6
    assert moved("stemma_inter_token_seconds_count") == 5
    assert moved("stemma_time_to_first_token_seconds_count") == 1
    route = "/v1/completions"
    assert moved("stemma_http_requests_total", route=route, status="200") == 1
    assert moved("stemma_http_requests_total", route=route, status="400") == 1
    assert moved("stemma_http_requests_total", route="other", status="404") == 1
    assert moved("stemma_http_disconnects_total") == 0
    assert value(after, "stemma_engine_up") == 1


def test_the_pool_is_the_sum_of_its_states(client: TestClient, embedded: st.Engine) -> None:
    samples = read(client)
    assert value(samples, "stemma_kv_tokens") == embedded.get_server_info()["total_tokens"]


def test_other_engines_names_carry_the_same_figures(client: TestClient) -> None:
    client.post("/v1/completions", json=BODY).raise_for_status()
    samples = read(client)
    for theirs, ours in (
        ("sglang:generation_tokens_total", "stemma_generated_tokens_total"),
        ("vllm:generation_tokens_total", "stemma_generated_tokens_total"),
        ("vllm:prompt_tokens_total", "stemma_prompt_tokens_total"),
        ("vllm:prefix_cache_hits_total", "stemma_cached_prompt_tokens_total"),
        ("sglang:e2e_request_latency_seconds_sum", "stemma_request_latency_seconds_sum"),
        ("vllm:e2e_request_latency_seconds_count", "stemma_request_latency_seconds_count"),
        ("vllm:request_success_total", "stemma_requests_total"),
    ):
        assert value(samples, theirs) == value(samples, ours) > 0, theirs


def test_drafts_are_counted_under_our_names_and_vllms(embedded: st.Engine) -> None:
    counts = {"num_drafts": 2, "num_draft_tokens": 14, "num_accepted_tokens": 11}
    info = embedded.connection.call("metrics")
    assert counts.keys() <= info["stats"].keys()
    info = {**info, "stats": {**info["stats"], **counts}, "output_tokens_per_s": 0.0}
    own = {"drafted_tokens": 9, "accepted_tokens": 7}
    info["speculation"] = {"sources": {"own": own, "op": {"drafted_tokens": 5, **own}}}
    ours = {m.name: m.samples[0].value for m in engine_families(info)}
    theirs = {m.name: m.samples[0].value for m in compat_families(info)}
    assert ours["stemma_drafts"] == theirs["vllm:spec_decode_num_drafts"] == 2
    assert ours["stemma_draft_tokens"] == theirs["vllm:spec_decode_num_draft_tokens"] == 14
    assert ours["stemma_accepted_tokens"] == theirs["vllm:spec_decode_num_accepted_tokens"] == 11
    assert ours["stemma_source_drafted_tokens"] == 9
    assert ours["stemma_source_accepted_tokens"] == 7


def test_without_asking_there_are_only_our_names(embedded: st.Engine) -> None:
    with TestClient(create_app(embedded), base_url=BASE) as plain:
        assert not re.search(r"^(vllm|sglang):", plain.get("/metrics").text, re.MULTILINE)


def test_openmetrics_is_spoken_to_who_asks(client: TestClient) -> None:
    headers = {"accept": "application/openmetrics-text; version=1.0.0"}
    text = client.get("/metrics", headers=headers).text
    assert list(openmetrics.text_string_to_metric_families(text))


def test_every_name_of_the_dashboard_is_there(embedded: st.Engine) -> None:
    with engine_in_thread(max_total_tokens=4096, host_kv_tokens=4096) as engine:
        with TestClient(create_app(engine), base_url=BASE) as client:
            client.get("/v1/models")
            families = text_string_to_metric_families(client.get("/metrics").text)
            names = {sample.name for family in families for sample in family.samples}
            known = names | {"stemma_http_cut_streams_total"}  # it has no series before its first
    names_of_it = r"\b((?:stemma|process)_(?!replica_)[a-z0-9_]+)"  # test_fleet_shown has those
    asked = set(re.findall(names_of_it, DASHBOARD.read_text()))
    assert asked and asked <= known, asked - known
    assert not any(name.startswith("stemma_replica_") for name in names)


def test_the_dashboard_says_where_there_is_one_engine_why_its_row_is_empty() -> None:
    board = json.loads(DASHBOARD.read_text())
    ids = [panel["id"] for panel in board["panels"]]
    assert len(set(ids)) == len(ids)
    titles = [panel["title"] for panel in board["panels"]]
    of_fleet = board["panels"][titles.index("Replicas") + 1 :]
    assert of_fleet
    for panel in board["panels"]:
        asks_fleet = "stemma_replica_" in json.dumps(panel.get("targets", ()))
        assert asks_fleet == (panel in of_fleet), panel["title"]
        if asks_fleet:
            assert "one engine" in panel["fieldConfig"]["defaults"]["noValue"]


def test_metrics_answer_while_the_engine_is_away() -> None:
    class Away:
        @property
        def connection(self) -> Any:
            raise EngineError("it is being restarted")

    with TestClient(create_app(Away()), base_url=BASE) as client:
        samples = read(client)
    assert value(samples, "stemma_engine_up") == 0


@pytest.fixture
def json_log() -> Iterator[Callable[[], list[dict[str, Any]]]]:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    configure_logging("info", "json")
    stream = io.StringIO()
    root.handlers[0].setStream(stream)  # type: ignore[attr-defined]
    yield lambda: [json.loads(line) for line in stream.getvalue().splitlines()]
    root.handlers[:] = handlers
    root.setLevel(level)


def test_a_line_a_request_with_what_it_cost_and_without_its_text(
    client: TestClient, json_log: Callable[[], list[dict[str, Any]]]
) -> None:
    for stream in (False, True):
        client.post("/v1/completions", json={**BODY, "stream": stream}).raise_for_status()
    client.get("/health")
    lines = [line for line in json_log() if line["logger"] == "stemma.requests"]
    assert len(lines) == 2  # a probe that answers well is no news
    for line in lines:
        assert line["path"] == "/v1/completions" and line["status"] == 200
        assert line["completion_tokens"] == 6 and line["finish_reason"] == "length"
        assert line["request_id"] and line["duration_ms"] > 0
        assert "two" not in json.dumps(line)


def test_a_path_cannot_forge_a_line(json_log: Callable[[], list[dict[str, Any]]]) -> None:
    record = record_of_request(path="/x\n{}", route="other", status=404, state={"model": "tiny"})
    log_request(record)
    (line,) = json_log()
    assert line["path"] == "/x\n{}" and line["model"] == "tiny"


def record_of_request(**values: Any) -> RequestRecord:
    given = {
        "method": "POST", "path": "/v1/completions", "route": "/v1/completions", "client": None,
        "headers": {}, "started_ns": 1_000, "duration_s": 2.0, "status": 200, "is_complete": True,
    }  # fmt: skip
    return RequestRecord(**{**given, **values})


def test_a_trace_has_the_callers_parent_and_the_phases() -> None:
    memory, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(memory))
    parent = b"00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    meta = {
        "queue_s": 0.5, "prefill_s": 0.25, "decode_s": 1.0, "prompt_tokens": 9, "cached_tokens": 3,
        "completion_tokens": 4, "finish_reason": "stop",
    }  # fmt: skip
    state = {"outcomes": [Outcome(0, "secret", meta)]}
    observer_of(provider.get_tracer("test"))(
        record_of_request(headers={b"traceparent": parent}, state=state)
    )
    spans = {span.name: span for span in memory.get_finished_spans()}
    request = spans["POST /v1/completions"]
    assert f"{request.context.trace_id:032x}" == "0af7651916cd43dd8448eb211c80319c"
    assert request.attributes is not None
    assert request.attributes["gen_ai.usage.output_tokens"] == 4
    assert request.end_time - request.start_time == 2_000_000_000  # type: ignore[operator]
    lengths = {
        name: spans[name].end_time - spans[name].start_time
        for name in ("queue", "prefill", "decode")
    }  # type: ignore[operator]
    assert lengths == {"queue": 500_000_000, "prefill": 250_000_000, "decode": 1_000_000_000}
    assert "secret" not in str([dict(span.attributes or {}) for span in spans.values()])


def test_metrics_over_a_real_socket(served: Any) -> None:
    text = httpx.get(f"{served.url}/metrics").text
    assert "stemma_engine_up 1.0" in text
