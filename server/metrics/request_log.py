"""The request log: a line per request, as text for people or as JSON for machines."""

from __future__ import annotations

import logging
from datetime import UTC, datetime
from typing import Any

import orjson

from ..settings import LogFormat
from .observed import RequestRecord

# Polled all the time.
QUIET_ROUTES = frozenset({"/health", "/health_generate", "/ready", "/live", "/ping", "/metrics"})

log = logging.getLogger("stemma.requests")


def configure_logging(level: str, layout: LogFormat) -> None:
    """Set up this process's log, on standard error; `level` is a name of `logging`'s."""
    handler = logging.StreamHandler()
    handler.setFormatter(_JsonFormatter() if layout == "json" else _TextFormatter())
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    logging.getLogger("httpx").setLevel(logging.WARNING)


def log_request(record: RequestRecord) -> None:
    """Log at level INFO; successful probes only at DEBUG."""
    is_quiet = record.route in QUIET_ROUTES and record.status < 400
    level = logging.DEBUG if is_quiet else logging.INFO
    if log.isEnabledFor(level):
        fields = request_fields(record)
        log.log(level, "%s", _as_text(fields), extra={"fields": fields})


def request_fields(record: RequestRecord) -> dict[str, Any]:
    """The logged fields of a request; never a prompt, an output or a key."""
    caller = record.caller
    fields: dict[str, Any] = {
        "request_id": record.request_id,
        "method": record.method,
        "path": record.path,
        "status": record.status,
        "duration_ms": round(1000 * record.duration_s, 3),
        "client": record.client,
        "tenant": None if caller is None else caller.tenant,
        "model": record.model,
        "disconnected": True if not record.is_complete else None,
    }
    if outcomes := record.outcomes:
        metas = [outcome.meta for outcome in outcomes]
        fields["prompt_tokens"] = metas[0]["prompt_tokens"]
        fields["cached_tokens"] = metas[0]["cached_tokens"]
        fields["completion_tokens"] = sum(meta["completion_tokens"] for meta in metas)
        fields["finish_reason"] = metas[0]["finish_reason"]
        fields["queue_ms"] = round(1000 * metas[0]["queue_s"], 3)
        fields["first_token_ms"] = round(1000 * metas[0]["time_to_first_token_s"], 3)
    return {name: value for name, value in fields.items() if value is not None}


def _as_text(fields: dict[str, Any]) -> str:
    shown = dict(fields)
    head = f"{shown.pop('method')} {_one_line(shown.pop('path'))} {shown.pop('status')}"
    return " ".join([head, *(f"{name}={_one_line(value)}" for name, value in shown.items())])


def _one_line(value: object) -> str:
    """A client's text must not look like a log line of ours."""
    text = str(value)
    return text if text.isprintable() else repr(text)


class _TextFormatter(logging.Formatter):
    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(name)s: %(message)s")


class _JsonFormatter(logging.Formatter):
    """One object a line: time, level, logger and message, or a request's own fields."""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
        }
        fields = getattr(record, "fields", None)
        line.update(fields if fields is not None else {"message": record.getMessage()})
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return orjson.dumps(line, default=str).decode()
