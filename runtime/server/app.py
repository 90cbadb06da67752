"""The HTTP application: its routes, each from the room of its API, and what is around them."""

from __future__ import annotations

from fastapi import FastAPI

from .failures import add_error_handlers
from .native import health, kv_hints, watch
from .openai import chat, completions, models
from .page import page
from .service import EngineLink, Service
from .settings import ServerSettings


def create_app(engine: EngineLink, settings: ServerSettings | None = None) -> FastAPI:
    """The application that serves `engine`'s model."""
    app = FastAPI(title="Stemma", docs_url=None, redoc_url=None)
    service = Service(engine, settings or ServerSettings())
    for room in (health, kv_hints, watch, models, chat, completions, page):
        app.include_router(room.router(service))
    add_error_handlers(app)
    return app
