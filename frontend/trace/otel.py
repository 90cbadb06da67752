"""Programs as OpenTelemetry traces: a span per program, below it its branches and their calls.

Attribute names are those of OpenTelemetry's semantic conventions for generative AI (`gen_ai.*`) and
for source code (`code.*`); attributes without such a name are `stemma.*`. Texts of prompts and
outputs are not exported. Spans are made after a program has ended, with the original times, on a
separate thread: the program never waits for an exporter.
"""

from __future__ import annotations

import logging
import os
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from ...errors import MissingDependency

try:
    from opentelemetry import context, trace
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor
    from opentelemetry.trace import SpanKind, Status, StatusCode
except ImportError as error:
    package = "opentelemetry-sdk and opentelemetry-exporter-otlp-proto-http"
    raise MissingDependency(package, "otel", "exporting spans") from error

from ..protocol import ir
from .recording import record_of
from .records import CallRecord, LaneRecord, PauseRecord, ProgramRecord

if TYPE_CHECKING:
    from ..client.program import Program

log = logging.getLogger("stemma.trace")

_REQUEST_ATTRIBUTES = {
    "max_tokens": "gen_ai.request.max_tokens",
    "temperature": "gen_ai.request.temperature",
    "top_p": "gen_ai.request.top_p",
    "top_k": "gen_ai.request.top_k",
    "frequency_penalty": "gen_ai.request.frequency_penalty",
    "presence_penalty": "gen_ai.request.presence_penalty",
    "stop": "gen_ai.request.stop_sequences",
    "seed": "gen_ai.request.seed",
    "n": "gen_ai.request.choice.count",
}


def provider_from_environment() -> TracerProvider:
    """Exports as OTEL_EXPORTER_OTLP_ENDPOINT and related variables say. Where the process has set
    up its own tracer provider, spans go to that one."""
    provider = trace.get_tracer_provider()
    if not isinstance(provider, TracerProvider):
        name = os.environ.get("OTEL_SERVICE_NAME", "stemma")
        provider = TracerProvider(resource=Resource.create({"service.name": name}))
        provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    return provider


def exporter_from_environment() -> SpanExporter:
    """Exports programs to the provider of `provider_from_environment`."""
    return SpanExporter(provider_from_environment())


class SpanExporter:
    """An observer that makes a trace of every program that ends."""

    def __init__(self, provider: TracerProvider) -> None:
        self._provider = provider
        self._tracer = provider.get_tracer("stemma")
        self._lock = threading.Lock()
        self._parents: dict[int, context.Context] = {}  # by id(program), while it runs
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="stemma-spans")

    def program_started(self, program: Program) -> None:
        """Its span goes below the span that is open here and now, if any."""
        with self._lock:
            self._parents[id(program)] = context.get_current()

    def program_ended(self, program: Program) -> None:
        """Make its spans soon."""
        with self._lock:
            parent = self._parents.pop(id(program), None)
        try:
            done = self._worker.submit(export_program, self._tracer, program, parent)
        except RuntimeError:  # the interpreter ends while a program still runs
            return
        done.add_done_callback(_log_failure)

    def flush(self) -> None:
        """Wait until all ended programs were passed to the provider and exported."""
        self._worker.submit(lambda: None).result()
        self._provider.force_flush()


def export_program(
    tracer: trace.Tracer, program: Program, parent: context.Context | None = None
) -> None:
    """Make the spans of one program, below `parent` if that has a span."""
    record = record_of(program, 0, program.started_s)
    _ProgramSpans(tracer, program, record).make(parent)


def _log_failure(done: Future[None]) -> None:
    error = done.exception()
    if error is not None:
        log.warning("a program's spans could not be made: %r", error)


class _ProgramSpans:
    """Makes the spans of one program: parents first, with their original end times."""

    def __init__(self, tracer: trace.Tracer, program: Program, record: ProgramRecord) -> None:
        self._tracer = tracer
        self._program = program
        self._record = record
        self._model = program.model
        self._gens = {
            (op.branch, op.seq): op.params for _, op in program.log if isinstance(op, ir.Gen)
        }

    def make(self, parent: context.Context | None) -> None:
        record = self._record
        attributes: dict[str, Any] = {
            "gen_ai.operation.name": "invoke_workflow",
            "gen_ai.provider.name": "stemma",
            "gen_ai.workflow.name": record.name,
            "gen_ai.request.model": self._model,
            "stemma.critical_path_s": record.critical_s,
        }
        root = self._begin(f"program {record.name}", record.start_s, attributes, parent)
        of_branch: dict[int, trace.Span] = {}
        for lane in record.lanes:
            above = root if lane.parent is None else of_branch[lane.parent]
            of_branch[lane.branch] = self._branch(lane, above)
        for call in record.calls:
            if call.start_s is not None or call.error is not None:
                self._call(call, of_branch[call.branch])
        for pause in record.pauses:
            self._pause(pause, of_branch[pause.branch])
        for lane in record.lanes:
            of_branch[lane.branch].end(self._clock(lane.end_s))
        if record.error is not None:
            _fail(root, record.error, record.error_kind)
        root.end(self._clock(record.end_s))

    def _branch(self, lane: LaneRecord, above: trace.Span) -> trace.Span:
        attributes = {"stemma.branch": lane.path}
        return self._begin(f"branch {lane.path}", lane.start_s, attributes, _below(above))

    def _call(self, call: CallRecord, branch: trace.Span) -> None:
        start = self._record.start_s if call.start_s is None else call.start_s
        end = start if call.end_s is None else call.end_s
        attributes = self._call_attributes(call)
        name = f"{attributes['gen_ai.operation.name']} {self._model}"
        span = self._begin(name, start, attributes, _below(branch), SpanKind.CLIENT)
        if call.error is not None:
            _fail(span, call.error, call.error_kind)
        span.end(self._clock(end))

    def _pause(self, pause: PauseRecord, branch: trace.Span) -> None:
        attributes = {"stemma.pause.expected_s": pause.expected_s, **_code(pause.source)}
        span = self._begin(
            f"pause {pause.label}".strip(), pause.start_s, attributes, _below(branch)
        )
        span.end(self._clock(pause.end_s))

    def _call_attributes(self, call: CallRecord) -> dict[str, Any]:
        is_gen = call.kind == "gen"
        attributes: dict[str, Any] = {
            "gen_ai.operation.name": "text_completion" if is_gen else "select",
            "gen_ai.provider.name": "stemma",
            "gen_ai.request.model": self._model,
            "gen_ai.usage.input_tokens": call.prompt_tokens,
            "gen_ai.usage.output_tokens": call.generated_tokens,
            "gen_ai.usage.cache_read.input_tokens": call.cached_tokens,
            "gen_ai.response.finish_reasons": [call.finish_reason] if call.finish_reason else None,
            "stemma.call.name": call.name or None,
            "stemma.branch": call.path,
            "stemma.queue_s": call.queue_s,
            "stemma.prefill_s": call.prefill_s,
            "stemma.decode_s": call.decode_s,
            "stemma.forced_tokens": call.forced_tokens,
            "stemma.drafted_tokens": call.drafted_tokens,
            "stemma.accepted_tokens": call.accepted_tokens,
            "stemma.host_tokens": call.host_tokens,
            "stemma.disk_tokens": call.disk_tokens,
            "stemma.evicted_tokens": sum(call.evicted.values()),
            "stemma.preemptions": call.preemptions,
            "stemma.is_critical": call.is_critical,
            **_code(call.source),
        }
        params = self._gens.get((call.branch, call.seq))
        for name, value in ({} if params is None else params.given()).items():
            if name in _REQUEST_ATTRIBUTES:
                attributes[_REQUEST_ATTRIBUTES[name]] = value
        return attributes

    def _begin(
        self,
        name: str,
        start_s: float,
        attributes: dict[str, Any],
        parent: context.Context | None,
        kind: SpanKind = SpanKind.INTERNAL,
    ) -> trace.Span:
        known = {key: value for key, value in attributes.items() if value is not None}
        return self._tracer.start_span(
            name,
            context=parent,
            kind=kind,
            attributes=known,
            start_time=self._clock(start_s),
        )

    def _clock(self, at_s: float) -> int:
        """Nanoseconds of the wall clock at a record's time."""
        return self._program.started_ns + round((at_s - self._record.start_s) * 1e9)


def _below(span: trace.Span) -> context.Context:
    return trace.set_span_in_context(span)


def _fail(span: trace.Span, message: str, kind: str | None) -> None:
    span.set_status(Status(StatusCode.ERROR, message))
    span.set_attribute("error.type", kind or "_OTHER")


def _code(source: str | None) -> dict[str, Any]:
    if source is None:
        return {}
    path, _, line = source.rpartition(":")
    number = int(line) if line.isdigit() else None
    return {"code.file.path": path, "code.line.number": number}
