"""Heads that have one meaning: what a proxy and this server might read otherwise is refused.

The parser (llhttp, strict) refuses most of it: both lengths, odd chunks, folded lines, bare line
feeds, control characters. The rest is here: it would be one request for us, perhaps not for a proxy
(RFC 9112, sections 3.2, 6.1 and 11.2).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from starlette.types import Scope

from ..protocol.failures import Refusal

VERSIONS = ("1.0", "1.1")
SINGLE = (
    "authorization",
    "content-length",
    "content-type",
    "host",
    "origin",
    "x-api-key",
    "x-stemma-tenant",
)  # headers that say who asks, or for what: the first of two may not be the one a proxy looked at


def require_one_meaning(scope: Scope, headers: Mapping[str, Sequence[str]]) -> None:
    """Raises Refusal."""
    version = scope["http_version"]
    if version not in VERSIONS:
        raise _refusal(505, f"HTTP/{version} is not spoken here; HTTP/1.1 is")
    if version == "1.1" and "host" not in headers:
        raise _refusal(400, "the header host is missing")
    for name in SINGLE:
        if len(headers.get(name, ())) > 1:
            raise _refusal(400, f"the header {name} is there twice")
    encodings = headers.get("transfer-encoding", ())
    if encodings and version == "1.0":
        raise _refusal(400, "transfer-encoding is not HTTP/1.0's")
    if any(encoding.strip().lower() != "chunked" for encoding in encodings):
        raise _refusal(501, "transfer-encoding: only chunked is known here")


def _refusal(status: int, reason: str) -> Refusal:
    return Refusal(status, reason, headers={"connection": "close"})
