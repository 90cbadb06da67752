"""The HTTP side on an existing engine, with settings of the test's choice."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import uvicorn

from stemma.server.app import create_app
from stemma.server.generation.service import EngineLink
from stemma.server.protocol.connections import HttpProtocol
from stemma.server.settings import ServerSettings


@contextmanager
def http_server(engine: EngineLink, **settings: Any) -> Iterator[str]:
    """Serves it within the block; yields its address."""
    app = create_app(engine, ServerSettings(**settings))
    config = uvicorn.Config(app, "127.0.0.1", 0, http=HttpProtocol, log_level="warning")
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    try:
        while not server.started:
            assert thread.is_alive(), "the server has not started"
            time.sleep(0.01)
        port = server.servers[0].sockets[0].getsockname()[1]
        yield f"http://127.0.0.1:{port}"
    finally:
        server.should_exit = True
        thread.join(10)


@contextmanager
def http_client(engine: EngineLink, key: str | None = None, **settings: Any) -> Iterator[Any]:
    """A client of such a server."""
    headers = {} if key is None else {"authorization": f"Bearer {key}"}
    with http_server(engine, **settings) as url:
        with httpx.Client(base_url=url, headers=headers, timeout=30) as client:
            yield client
