"""The HTTP side on an existing engine, with settings of the test's choice."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import uvicorn
from waiting import PATIENCE_S, wait_until

from stemma.server.app import create_app
from stemma.server.generation.service import EngineLink
from stemma.server.http_server import uvicorn_config
from stemma.server.settings import ServerSettings


@contextmanager
def http_server(engine: EngineLink, **settings: Any) -> Iterator[str]:
    """Serves it within the block; yields its address."""
    app = create_app(engine, ServerSettings(**settings))
    server = uvicorn.Server(uvicorn_config(app, app.state.service))
    server.config.port = 0
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    try:
        wait_until(lambda: server.started or not thread.is_alive())
        assert server.started
        port = server.servers[0].sockets[0].getsockname()[1]
        yield f"http://127.0.0.1:{port}"
    finally:
        server.should_exit = True
        thread.join(PATIENCE_S)


@contextmanager
def http_client(engine: EngineLink, key: str | None = None, **settings: Any) -> Iterator[Any]:
    """A client of such a server."""
    headers = {} if key is None else {"authorization": f"Bearer {key}"}
    with http_server(engine, **settings) as url:
        with httpx.Client(base_url=url, headers=headers, timeout=PATIENCE_S) as client:
            yield client
