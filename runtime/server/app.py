"""The HTTP application: its routes, each from the room of its API, and what is around them."""

from __future__ import annotations

from fastapi import FastAPI

from .failures import add_error_handlers
from .intake import IntakeMiddleware
from .native import health, kv_hints
from .openai import chat, completions, models
from .service import EngineLink, Service
from .settings import ServerSettings


def create_app(engine: EngineLink, settings: ServerSettings | None = None) -> FastAPI:
    """The application that serves `engine`'s model."""
    app = FastAPI(title="Stemma", docs_url=None, redoc_url=None)
    service = Service(engine, settings or ServerSettings())
    for room in (health, kv_hints, models, chat, completions):
        app.include_router(room.router(service))
    add_error_handlers(app)
    app.add_middleware(IntakeMiddleware, intake=service.intake)
    app.state.service = service
    return app
