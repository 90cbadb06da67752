"""The HTTP application: its routes, each from the room of its API, and what is around them."""

from __future__ import annotations

from fastapi import FastAPI

from .failures import add_error_handlers
from .metrics import routes as metrics
from .metrics.observed import Observed, Observer
from .metrics.request_log import log_request
from .native import cache, generate, health, kv_hints, score, tokens
from .openai import chat, completions, embeddings, models
from .page import page
from .service import EngineLink, Service
from .settings import ServerSettings


def create_app(engine: EngineLink, settings: ServerSettings | None = None) -> FastAPI:
    """The application that serves `engine`'s model."""
    app = FastAPI(title="Stemma", docs_url=None, redoc_url=None)
    service = Service(engine, settings or ServerSettings())
    own = (health, metrics, generate, score, kv_hints, cache, tokens)
    for room in (*own, models, chat, completions, embeddings, page):
        app.include_router(room.router(service))
    add_error_handlers(app)
    app.add_middleware(Observed, metrics=service.metrics, observers=_observers(service.settings))
    return app


def _observers(settings: ServerSettings) -> list[Observer]:
    """Who is told of every request."""
    if not settings.otlp_traces:
        return [log_request]
    from .metrics.traces import tracing_observer  # needs an extra

    return [log_request, tracing_observer()]
