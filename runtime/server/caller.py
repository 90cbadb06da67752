"""Who sends a request: on whose account it runs, and which KV it may share."""

from __future__ import annotations

import secrets
from dataclasses import dataclass, field

from fastapi import Request

from ...errors import InvalidRequest
from ...frontend import wire

TENANT_HEADER = "x-stemma-tenant"


def new_request_id() -> str:
    """Of a request that brings none."""
    return f"req-{secrets.token_hex(12)}"


@dataclass(frozen=True, slots=True)
class Caller:
    """`tenant`: whose share of the engine its requests use, None: the server's; `namespace`: KV is
    shared within it only; `request_id`: by which logs and errors name the request."""

    tenant: str | None = None
    namespace: str = ""
    request_id: str = field(default_factory=new_request_id)


def caller_of(request: Request) -> Caller:
    """Raises InvalidRequest."""
    tenant = request.headers.get(TENANT_HEADER) or None
    if tenant is not None and len(tenant) > wire.MAX_TENANT_CHARS:
        allowed = f"at most {wire.MAX_TENANT_CHARS} characters"
        raise InvalidRequest.of(TENANT_HEADER, f"{tenant[:20]}...", allowed)
    request.state.caller = caller = Caller(tenant)
    return caller
