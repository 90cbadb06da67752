"""`/docs`: the endpoints as a page, made of the OpenAPI document. It runs no script and loads
nothing from elsewhere, so that the policy of the other pages holds for it."""

from __future__ import annotations

from collections.abc import Iterator
from html import escape
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import HTMLResponse

from ..generation.service import Service
from .page import CONTENT_SECURITY_POLICY

_HEADERS = {
    "Content-Security-Policy": CONTENT_SECURITY_POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
}
_METHODS = ("get", "post", "put", "patch", "delete")


def router(service: Service) -> APIRouter:
    """The routes."""
    routes = APIRouter()

    @routes.api_route("/docs", methods=["GET", "HEAD"], include_in_schema=False)
    async def docs(request: Request) -> HTMLResponse:
        return HTMLResponse(docs_page(request.app.openapi()), headers=_HEADERS)

    return routes


def docs_page(document: dict[str, Any]) -> str:
    """The page; `document`: OpenAPI's."""
    rows = "\n".join(_rows(document))
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>Stemma: endpoints</title>
<link rel="icon" href="/assets/icon.svg" type="image/svg+xml">
<link rel="stylesheet" href="/assets/tokens.css">
<link rel="stylesheet" href="/assets/docs.css">
</head>
<body>
<h1>Endpoints</h1>
<p>As <a href="/openapi.json">OpenAPI document</a>. The <a href="/">page</a> has a chat.</p>
{rows}
</body>
</html>
"""


def _rows(document: dict[str, Any]) -> Iterator[str]:
    schemas = document.get("components", {}).get("schemas", {})
    for path, operations in sorted(document["paths"].items()):
        for method in _METHODS:
            if method in operations:
                yield _endpoint(method, path, operations[method], schemas)


def _endpoint(method: str, path: str, operation: dict[str, Any], schemas: dict[str, Any]) -> str:
    head = f"<h2><code>{method.upper()} {escape(path)}</code></h2>"
    told = f"<p>{escape(operation.get('description') or operation.get('summary', ''))}</p>"
    fields = _fields(operation, schemas)
    listed = "".join(f"<li><code>{escape(name)}</code>{_note(note)}</li>" for name, note in fields)
    return head + told + (f"<ul>{listed}</ul>" if listed else "")


def _fields(operation: dict[str, Any], schemas: dict[str, Any]) -> list[tuple[str, str]]:
    """Names of what may be given, in the address or in the body, with what is to know of each."""
    given = [(each["name"], each["in"]) for each in operation.get("parameters", ())]
    content = operation.get("requestBody", {}).get("content", {})
    reference: str = content.get("application/json", {}).get("schema", {}).get("$ref", "")
    schema = schemas.get(reference.rpartition("/")[2], {})
    needed = schema.get("required", ())
    body = [(name, "required" if name in needed else "") for name in schema.get("properties", ())]
    return [*given, *body]


def _note(note: str) -> str:
    return f" ({escape(note)})" if note else ""
