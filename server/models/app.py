"""The HTTP application of a server with several models: what is told of all of them, and below it
the application of each."""

from __future__ import annotations

from collections.abc import Mapping

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse

from ..access.request_body import BodyLimit
from ..api.metrics import metrics_routes
from ..app import add_middleware, routes_app
from ..generation.service import Service
from ..protocol.failures import add_error_handlers, failure_of
from ..protocol.json_route import body_threads
from ..settings import ServerSettings
from . import model_lists
from .cascades import ServedCascade, cascades_of
from .dispatch import Dispatcher, JointApp
from .model_control import control_routes, health_of_all
from .model_engines import ModelEngines
from .model_metrics import families_of
from .model_names import ModelNames
from .model_pool import ModelPool, PoolLimits
from .model_slot import ModelSlot


def create_models_app(
    engines: ModelEngines, settings: ServerSettings, max_bytes: int | None
) -> FastAPI:
    """`max_bytes`: of memory for all models that are loaded at a time. Raises InvalidRequest for
    keys that cannot be used."""
    services = _services(engines, settings)
    first = next(iter(services.values()))
    limits = PoolLimits(
        settings.models_max or len(services),
        max_bytes,
        settings.model_load_timeout_s,
        settings.drain_s,
    )
    pool = ModelPool(engines.slots, limits, first.drain_state)
    engines.on_drain = pool.tell
    cascades = cascades_of(settings, {slot.name: slot for slot in services})
    names = ModelNames(services, cascades)
    app = FastAPI(title="Stemma", docs_url=None, redoc_url=None, openapi_url=None)
    app.include_router(model_lists.router(names, services, cascades))
    app.include_router(control_routes(pool, names))
    app.include_router(health_of_all(engines, services))
    app.include_router(metrics_routes(first, families_of(services, cascades)))
    apps = {slot: _model_app(service) for slot, service in services.items()}
    joint = {name: _joint(served, services) for name, served in cascades.items()}
    app.mount("", Dispatcher(pool, names, services, apps, joint))
    add_error_handlers(app)
    app.state.service = first
    app.state.strict_fields = settings.strict_fields
    app.state.body_threads = body_threads()
    add_middleware(app, first, lambda: _largest(services))
    return app


def _services(engines: ModelEngines, settings: ServerSettings) -> Mapping[ModelSlot, Service]:
    slot, *others = engines.slots
    first = Service(slot, settings, describe=slot.describe)
    return {slot: first} | {other: first.beside(other, other.describe) for other in others}


def _joint(served: ServedCascade, services: Mapping[ModelSlot, Service]) -> JointApp:
    service = served.service(services[served.slots[-1]])
    return JointApp(served, service, _model_app(service))


def _model_app(service: Service) -> FastAPI:
    """Without middleware of its own; the server's sees to keys, limits, counts and the log."""
    app = routes_app(service)

    async def on_unforeseen(request: Request, error: Exception) -> JSONResponse:
        return failure_of(error).response(request.scope)  # and the middleware logs it

    app.add_exception_handler(Exception, on_unforeseen)
    return app


def _largest(services: Mapping[ModelSlot, Service]) -> BodyLimit:
    """Of the models' limits: which one it is for is known from the body."""
    limits = [service.body_limit for service in services.values()]
    return max(limits, key=lambda limit: limit.num_bytes)
