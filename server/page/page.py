"""The page's files: `/` and `/assets/...`, read from the package.

A fixed table maps paths to files: a path not in it does not exist, so none leads outside. The page
needs no key, since it holds no data; its API calls do.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.resources import files
from importlib.resources.abc import Traversable

from fastapi import APIRouter, Request
from fastapi.responses import Response
from starlette.exceptions import HTTPException

from ..generation.service import Service

# Only files from here, nothing inline; `data:` is for the icons in stylesheets.
CONTENT_SECURITY_POLICY = (
    "default-src 'self'; img-src 'self' data:; object-src 'none'; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'"
)
MEDIA_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
INDEX = "index.html"


def router(service: Service) -> APIRouter:
    """The routes."""
    routes = APIRouter()
    table = dict(_assets(files(__package__) / "assets"))

    @routes.api_route("/", methods=["GET", "HEAD"], include_in_schema=False)
    async def index(request: Request) -> Response:
        return table[INDEX].response(request)

    @routes.api_route("/assets/{path:path}", methods=["GET", "HEAD"], include_in_schema=False)
    async def asset(path: str, request: Request) -> Response:
        if path not in table:
            raise HTTPException(404, "the page has no such file")
        return table[path].response(request)

    return routes


@dataclass(slots=True)
class Asset:
    """A file of the page; read on first use, then cached."""

    source: Traversable
    media_type: str
    content: bytes = b""
    etag: str = ""

    def response(self, request: Request) -> Response:
        """The file, or 304 where the browser has it already."""
        if not self.etag:
            self.content = self.source.read_bytes()
            self.etag = f'"{hashlib.sha256(self.content).hexdigest()[:32]}"'
        headers = {
            "ETag": self.etag,
            "Cache-Control": "no-cache",  # cached, and revalidated by its ETag before each use
            "Content-Security-Policy": CONTENT_SECURITY_POLICY,
            "X-Content-Type-Options": "nosniff",
            "Referrer-Policy": "no-referrer",
        }
        known = request.headers.get("if-none-match", "")
        if self.etag in (tag.strip().removeprefix("W/") for tag in known.split(",")):
            return Response(status_code=304, headers=headers)
        return Response(self.content, headers=headers, media_type=self.media_type)


def _assets(folder: Traversable, prefix: str = "") -> Iterator[tuple[str, Asset]]:
    for entry in folder.iterdir():
        if entry.is_dir():
            yield from _assets(entry, f"{prefix}{entry.name}/")
        elif (suffix := "." + entry.name.rpartition(".")[2]) in MEDIA_TYPES:
            yield f"{prefix}{entry.name}", Asset(entry, MEDIA_TYPES[suffix])
