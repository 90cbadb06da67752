"""The HTTP application: the routes of every API, and the middleware around them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from fastapi import FastAPI
from starlette.middleware.cors import CORSMiddleware

from .access.api_keys import KeyRing
from .access.drain import DrainMiddleware
from .access.middleware import EXPOSED_HEADERS, AccessMiddleware
from .access.request_body import BodyLimit
from .api import metrics
from .api.anthropic import messages
from .api.llamacpp import embedding as llamacpp_embedding
from .api.llamacpp import generation as llamacpp_generation
from .api.llamacpp import props as llamacpp_props
from .api.native import (
    abort,
    cache,
    classify,
    generate,
    health,
    kv_hints,
    load,
    lora,
    rerank,
    score,
    tokens,
    watch,
)
from .api.ollama import embed as ollama_embed
from .api.ollama import generation as ollama_generation
from .api.ollama import models as ollama_models
from .api.openai import chat, completions, embeddings, models
from .api.openapi import document_errors
from .api.responses import routes as responses
from .generation.service import EngineLink, Service
from .metrics.observed import Observed, Observer
from .metrics.request_log import log_request
from .page import docs_page, page
from .protocol.failures import add_error_handlers
from .protocol.json_route import JsonRoute, body_threads
from .settings import ServerSettings

ROOMS = (
    completions,  # what is asked most often comes first: routes are tried in this order
    chat,
    messages,
    responses,
    generate,
    health,
    metrics,
    abort,
    score,
    rerank,
    classify,
    load,
    kv_hints,
    lora,
    cache,
    tokens,
    watch,
    models,
    embeddings,
    ollama_generation,
    ollama_embed,
    ollama_models,
    llamacpp_generation,
    llamacpp_embedding,
    llamacpp_props,
    docs_page,
    page,
)  # each with its `router`


def create_app(engine: EngineLink, settings: ServerSettings | None = None) -> FastAPI:
    """The application that serves `engine`'s model. Raises InvalidRequest for keys that cannot be
    used."""
    service = Service(engine, settings or ServerSettings())
    app = routes_app(service)
    add_middleware(app, service, lambda: service.body_limit)
    return app


def routes_app(service: Service) -> FastAPI:
    """The routes of one model and their errors, with nothing around them."""
    app = FastAPI(title="Stemma", docs_url=None, redoc_url=None)
    for room in ROOMS:
        app.include_router(room.router(service))
    add_error_handlers(app)
    document_errors(app, has_keys=service.settings.has_keys)
    app.state.service = service
    app.state.strict_fields = service.settings.strict_fields
    app.state.body_threads = body_threads()
    return app


def body_routes(service: Service) -> dict[str, JsonRoute]:
    """The routes to which a JSON body is posted, by path."""
    routes = (route for room in ROOMS for route in room.router(service).routes)
    return {
        route.path: route
        for route in routes
        if isinstance(route, JsonRoute) and route.body_field is not None
    }


def add_middleware(app: FastAPI, service: Service, body_limit: Callable[[], BodyLimit]) -> None:
    """What is around the routes of a server; `service` has its settings and counters. Raises
    InvalidRequest for keys that cannot be used."""
    settings = service.settings
    keys = KeyRing(settings.api_key, None if settings.api_keys is None else Path(settings.api_keys))
    app.add_middleware(DrainMiddleware, drain=service.drain_state)
    app.add_middleware(AccessMiddleware, settings=settings, keys=keys, body_limit=body_limit)
    if settings.cors_origins:  # outside the access middleware: its refusals can be read too
        app.add_middleware(
            CORSMiddleware,
            allow_origins=settings.cors_origins,
            allow_methods=("GET", "POST", "DELETE"),
            allow_headers=("*",),
            expose_headers=EXPOSED_HEADERS,
        )
    app.add_middleware(Observed, metrics=service.metrics, observers=_observers(settings))


def _observers(settings: ServerSettings) -> list[Observer]:
    """The observers that receive every request's record."""
    if not settings.otlp_traces:
        return [log_request]
    from .metrics.traces import tracing_observer  # needs an extra

    return [log_request, tracing_observer()]
