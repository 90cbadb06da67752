"""The HTTP application: its routes, each from the room of its API, and what is around them."""

from __future__ import annotations

from fastapi import FastAPI

from .failures import add_error_handlers
from .native import cache, health, kv_hints, tokens
from .openai import chat, completions, embeddings, models
from .page import page
from .service import EngineLink, Service
from .settings import ServerSettings


def create_app(engine: EngineLink, settings: ServerSettings | None = None) -> FastAPI:
    """The application that serves `engine`'s model."""
    app = FastAPI(title="Stemma", docs_url=None, redoc_url=None)
    service = Service(engine, settings or ServerSettings())
    rooms = (health, kv_hints, cache, tokens, models, chat, completions, embeddings, page)
    for room in rooms:
        app.include_router(room.router(service))
    add_error_handlers(app)
    return app
