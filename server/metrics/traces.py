"""Requests as OpenTelemetry spans: one per request, with its phases below it.

Attribute names follow OpenTelemetry's semantic conventions for HTTP and for generative AI;
attributes without such a name are `stemma.*`. Prompts and outputs are not exported.
"""

from __future__ import annotations

from ...frontend.trace.otel import provider_from_environment  # says which extra is missing

from opentelemetry.propagate import extract  # isort: skip
from opentelemetry.trace import SpanKind, Status, StatusCode, Tracer, set_span_in_context  # isort: skip

from .observed import Observer, RequestRecord

PHASES = ("queue", "prefill", "decode")
_NS = 1_000_000_000


def tracing_observer() -> Observer:
    """Exports as OTEL_EXPORTER_OTLP_ENDPOINT and the like say. Raises MissingDependency."""
    return observer_of(provider_from_environment().get_tracer("stemma"))


def observer_of(tracer: Tracer) -> Observer:
    """Makes spans with this tracer, for requests that are work."""

    def observe(record: RequestRecord) -> None:
        if record.method == "POST":
            _export(tracer, record)

    return observe


def _export(tracer: Tracer, record: RequestRecord) -> None:
    headers = {
        name.decode("latin-1"): value.decode("latin-1") for name, value in record.headers.items()
    }
    span = tracer.start_span(
        f"{record.method} {record.route}",
        context=extract(headers),
        kind=SpanKind.SERVER,
        start_time=record.started_ns,
        attributes={
            "http.request.method": record.method,
            "http.route": record.route,
            "http.response.status_code": record.status,
            "url.path": record.path,
            "stemma.request_id": record.request_id or "",
        },
    )
    if record.model is not None:
        span.set_attribute("gen_ai.response.model", record.model)
    if record.status >= 500:
        span.set_status(Status(StatusCode.ERROR))
    for outcome in record.outcomes:
        meta = outcome.meta
        below = set_span_in_context(span)
        end_ns = record.started_ns
        for phase in PHASES:
            start_ns, end_ns = end_ns, end_ns + int(_NS * meta[f"{phase}_s"])
            attributes = {"stemma.sample": outcome.index}
            child = tracer.start_span(phase, below, start_time=start_ns, attributes=attributes)
            child.end(end_ns)
    if outcomes := record.outcomes:
        metas = [outcome.meta for outcome in outcomes]
        span.set_attribute("gen_ai.usage.input_tokens", metas[0]["prompt_tokens"])
        total = sum(meta["completion_tokens"] for meta in metas)
        span.set_attribute("gen_ai.usage.output_tokens", total)
        span.set_attribute("gen_ai.response.finish_reasons", [m["finish_reason"] for m in metas])
        span.set_attribute("stemma.cached_tokens", metas[0]["cached_tokens"])
        for name in ("drafted_tokens", "accepted_tokens"):
            span.set_attribute(f"stemma.{name}", sum(meta.get(name, 0) for meta in metas))
    span.end(record.started_ns + int(_NS * record.duration_s))
