"""Which paths are open to which callers."""

from __future__ import annotations

from enum import Enum

# What a probe or a load balancer asks; they only show that the server is there.
PROBES = frozenset(
    {"/health", "/health_generate", "/live", "/ping", "/ready", "/v1/health", "/version"}
)
_PAGE = frozenset({"/", "/docs", "/favicon.ico"})  # hold no data; API calls need a key
_PAGE_FILES = "/assets/"
# What shows or changes data of others: every namespace's texts, counters and KV.
_OF_ALL = frozenset(
    {
        "/flush_cache",
        "/get_load",
        "/get_server_info",
        "/load",
        "/load_lora_adapter",
        "/metrics",
        "/models/load",
        "/models/unload",
        "/restart_replica",
        "/server_info",
        "/set_role",
        "/slots",
        "/tree",
        "/unload_lora_adapter",
        "/v1/load_lora_adapter",
        "/v1/unload_lora_adapter",
        "/watch",
    }
)


class RouteAccess(Enum):
    """Who may pass where keys are required."""

    OPEN = "open"  # anybody, to read
    KEY = "key"  # any key
    ADMIN = "admin"  # under --isolate-cache a key with is_admin, else any


def door_of(method: str, path: str, *, is_metrics_open: bool) -> RouteAccess:
    """The access a path needs; any path not listed needs a key."""
    if method in ("GET", "HEAD"):
        if path in PROBES or path in _PAGE or path.startswith(_PAGE_FILES):
            return RouteAccess.OPEN
        if path == "/metrics" and is_metrics_open:
            return RouteAccess.OPEN
    if path.rstrip("/") in _OF_ALL:
        return RouteAccess.ADMIN
    return RouteAccess.KEY
