"""Spans: true times, parents, the conventions' attributes; over the SDK and over OTLP/HTTP."""

from __future__ import annotations

import http.server
import logging
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from scripted_channel import ScriptedChannel, open_scripted

import stemma as st
from stemma.frontend.protocol import ir
from stemma.frontend.trace import observer

pytest.importorskip("opentelemetry.sdk.trace")
pytest.importorskip("opentelemetry.exporter.otlp.proto.http")

from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode

from stemma.frontend.trace.otel import SpanExporter

HERE = Path(__file__).name
METAS = {
    "plan": {
        "start_s": 0.0,
        "queue_s": 0.1,
        "prefill_s": 0.2,
        "decode_s": 0.7,
        "latency_s": 1.0,
        "prompt_tokens": 50,
        "cached_tokens": 20,
        "completion_tokens": 5,
        "finish_reason": "stop",
    }
}


@pytest.fixture
def memory() -> Iterator[tuple[SpanExporter, InMemorySpanExporter]]:
    spans, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(spans))
    exporter = SpanExporter(provider)
    observer.add_observer(exporter)
    yield exporter, spans
    observer.remove_observer(exporter)


def spans_of(memory: tuple[SpanExporter, InMemorySpanExporter]) -> dict[str, Any]:
    exporter, spans = memory
    exporter.flush()
    return {span.name: span for span in spans.get_finished_spans()}


def run_planner(channel: ScriptedChannel) -> st.ProgramState:
    s = open_scripted(channel, "planner")
    forks = s.fork(1)
    forks[0].append("Plan: " + st.gen("plan", max_tokens=9, temperature=0.5, stop="."))
    forks.join()
    s._program.send(ir.Pause(0, 2, "f.py:3", 0.1, "search"))
    s.end()
    return s


def test_a_program_is_a_trace_of_branches_and_calls(memory: Any) -> None:
    run_planner(ScriptedChannel(METAS))
    spans = spans_of(memory)
    assert set(spans) == {
        "program planner",
        "branch main",
        "branch main.0",
        "text_completion scripted",
        "pause search",
    }

    def parent(name: str) -> str | None:
        above = spans[name].parent
        ids = {span.context.span_id: n for n, span in spans.items()}
        return None if above is None else ids[above.span_id]

    assert parent("text_completion scripted") == "branch main.0"
    assert parent("branch main.0") == parent("pause search") == "branch main"
    assert parent("branch main") == "program planner" and parent("program planner") is None
    assert len({span.context.trace_id for span in spans.values()}) == 1


def test_a_call_has_its_true_times_and_the_conventions_attributes(memory: Any) -> None:
    s = run_planner(ScriptedChannel(METAS))
    span = spans_of(memory)["text_completion scripted"]
    (record,) = s.report().calls
    assert span.start_time == s._program.started_ns + round(record.start_s * 1e9)
    assert span.end_time - span.start_time == 1_000_000_000
    assert (
        dict(span.attributes).items()
        >= {
            "gen_ai.operation.name": "text_completion",
            "gen_ai.provider.name": "stemma",
            "gen_ai.request.model": "scripted",
            "gen_ai.request.max_tokens": 9,
            "gen_ai.request.temperature": 0.5,
            "gen_ai.request.stop_sequences": (".",),
            "gen_ai.usage.input_tokens": 50,
            "gen_ai.usage.output_tokens": 5,
            "gen_ai.usage.cache_read.input_tokens": 20,
            "gen_ai.response.finish_reasons": ("stop",),
            "stemma.call.name": "plan",
            "stemma.prefill_s": 0.2,
        }.items()
    )
    assert span.attributes["code.file.path"].endswith(HERE)
    assert span.attributes["code.line.number"] > 0


def test_a_failure_marks_its_call_and_the_program(memory: Any) -> None:
    run_planner(ScriptedChannel(METAS, failing=("plan",)))
    spans = spans_of(memory)
    for name in ("text_completion scripted", "program planner"):
        assert spans[name].status.status_code is StatusCode.ERROR
        assert spans[name].attributes["error.type"] == "EngineError"
    assert spans["branch main"].status.status_code is StatusCode.UNSET


def test_a_program_goes_below_the_span_that_is_open_where_it_starts(memory: Any) -> None:
    tracer = memory[0]._provider.get_tracer("app")
    with tracer.start_as_current_span("request") as request:
        run_planner(ScriptedChannel(METAS))
    span = spans_of(memory)["program planner"]
    assert span.parent.span_id == request.get_span_context().span_id


class Sink(http.server.BaseHTTPRequestHandler):
    """Takes OTLP over HTTP."""

    bodies: list[tuple[str, bytes]]

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.bodies.append((self.path, body))
        self.send_response(200)
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        pass


def test_the_standard_variable_alone_exports_over_http(tmp_path: Path) -> None:
    """In a process of its own, which ends right after its program: nothing may be lost."""
    handler = type("Handler", (Sink,), {"bodies": []})
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        code = (
            "from scripted_channel import ScriptedChannel, open_scripted\n"
            "import stemma as st\n"
            "s = open_scripted(ScriptedChannel({'x': {'prompt_tokens': 7}}), 'exported')\n"
            "s += st.gen('x')\n"
            "s.end()\n"
        )
        environment = {
            **os.environ,
            "OTEL_EXPORTER_OTLP_ENDPOINT": f"http://127.0.0.1:{server.server_port}",
            "PYTHONPATH": str(Path(__file__).parents[2] / "support"),
        }
        done = subprocess.run(
            [sys.executable, "-c", code], env=environment, capture_output=True, timeout=120
        )
        server.shutdown()
    assert done.returncode == 0 and not done.stderr, done.stderr.decode()
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

    ((path, body),) = handler.bodies
    assert path == "/v1/traces"
    (resource,) = ExportTraceServiceRequest.FromString(body).resource_spans
    names = {span.name for scope in resource.scope_spans for span in scope.spans}
    assert names == {"program exported", "branch main", "text_completion scripted"}
    assert any(a.key == "service.name" and a.value.string_value == "stemma"
               for a in resource.resource.attributes)  # fmt: skip


def test_a_missing_package_warns_once_and_names_the_extra(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr(observer, "_is_environment_read", False)
    monkeypatch.delitem(sys.modules, "stemma.frontend.trace.otel")
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            open_scripted(ScriptedChannel()).end()
    (record,) = [r for r in caplog.records if "otel" in r.message]
    assert "pip install 'stemma-lm[otel]'" in record.message


ENDPOINT = {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:9"}


@pytest.mark.parametrize("variables", [{}, {**ENDPOINT, "OTEL_SDK_DISABLED": "true"}])
def test_without_an_endpoint_or_disabled_nothing_watches(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str]
) -> None:
    for name in observer.OTLP_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(observer, "_is_environment_read", False)
    before = observer._observers
    open_scripted(ScriptedChannel()).end()
    assert observer._observers == before and observer._is_environment_read
