"""The sender of a request: its tenant, and which KV it may share."""

from __future__ import annotations

import hashlib
import re
import secrets
from dataclasses import dataclass, field, replace
from typing import Self

from fastapi import Request

from ...errors import InvalidRequest
from ...frontend.protocol import wire

ANSWER_HEADERS = "stemma.headers"  # in a request's scope: extra headers of its response
CALLER = "stemma.caller"  # in a request's scope: where the access middleware stores it
TENANT_HEADER = "x-stemma-tenant"
_REQUEST_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")


def new_request_id() -> str:
    """An id for a request that brings none."""
    return f"req-{secrets.token_hex(12)}"


def request_id_of(given: str | None) -> str:
    """The client's own id, where it is safe in logs and headers, else a new one."""
    if given is not None and _REQUEST_ID.fullmatch(given):
        return given
    return new_request_id()


@dataclass(frozen=True, slots=True)
class Caller:
    """`tenant`: whose share of the engine its requests use, None: the server's; `namespace`: KV is
    shared within it only; `request_id`: names the request in logs and errors; `is_admin`: may see
    and change what belongs to others."""

    tenant: str | None = None
    namespace: str = ""
    request_id: str = field(default_factory=new_request_id)
    is_admin: bool = True

    def salted(self, salt: str | None) -> Self:
        """The same caller in the part of its namespace shared only by those who know `salt`; the
        salt's digest replaces it, so that no view of the cache shows it."""
        if not salt:
            return self
        return replace(self, namespace=f"{self.namespace}#{digest_of(salt)}")


def digest_of(text: str) -> str:
    """Names a text of any length without showing it."""
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()


def caller_of(request: Request) -> Caller:
    """The caller that the access middleware admitted."""
    caller = request.scope[CALLER]
    assert isinstance(caller, Caller)
    return caller


def named_tenant(name: str | None) -> str | None:
    """The tenant that a client names itself, which is trusted where there are no keys. Raises
    InvalidRequest."""
    if name is not None and len(name) > wire.MAX_TENANT_CHARS:
        allowed = f"at most {wire.MAX_TENANT_CHARS} characters"
        raise InvalidRequest.of(TENANT_HEADER, f"{name[:20]}...", allowed)
    return name or None
