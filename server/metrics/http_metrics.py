"""What this process counts itself: HTTP requests, and streams that ended early."""

from __future__ import annotations

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    ProcessCollector,
    disable_created_metrics,
)

SECONDS = (0.005, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 300.0)
LAGS_S = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 5.0, 30.0)
OTHER_ROUTE = "other"  # any path without a route: clients choose paths, and labels must be few


class HttpMetrics:
    """Counters of one application; `registry` holds them and the process's own."""

    def __init__(self) -> None:
        disable_created_metrics()  # type: ignore[no-untyped-call]  # a series more for each, which nobody reads
        self.registry = registry = CollectorRegistry()
        ProcessCollector(registry=registry)
        self.requests = Counter(
            "stemma_http_requests",
            "HTTP requests that were answered.",
            ("route", "method", "status"),
            registry=registry,
        )
        self.seconds = Histogram(
            "stemma_http_request_seconds",
            "From the request's head to the answer's last byte.",
            ("route",),
            buckets=SECONDS,
            registry=registry,
        )
        self.in_flight = Gauge(
            "stemma_http_requests_in_flight", "HTTP requests being answered.", registry=registry
        )
        self.loop_lag = Histogram(
            "stemma_http_loop_lag_seconds",
            "By how much the event loop was late, over time.",
            buckets=LAGS_S,
            registry=registry,
        )
        self.connections = Gauge(
            "stemma_http_connections", "Connections that are open.", registry=registry
        )
        self.dropped_connections = Counter(
            "stemma_http_dropped_connections",
            "Connections that this server closed without an answer, by reason.",
            ("reason",),
            registry=registry,
        )
        self.disconnects = Counter(
            "stemma_http_disconnects",
            "Answers that did not come to their end: the client left, or was cut off.",
            registry=registry,
        )
        self.cut_streams = Counter(
            "stemma_http_cut_streams",
            "Streams that this server gave up, by reason.",
            ("reason",),
            registry=registry,
        )
