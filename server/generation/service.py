"""What the routes share: the engine behind them, and this server's settings."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from ...errors import MAX_MODEL_NAME_CHARS, EngineError, InvalidRequest, model_not_found
from ...frontend.cascade.cascade import Cascade
from ...frontend.client.client import Connection
from ..access.drain import DrainState
from ..access.request_body import LEAST_DEFAULT_BYTES, BodyLimit, default_max_bytes
from ..metrics.http_metrics import HttpMetrics
from ..settings import ServerSettings
from .active_requests import ActiveRequests
from .image_sources import ImageSources
from .model_text import ModelText
from .response_store import ResponseStore

IMAGES_DEFAULT_BYTES = 24 * 10**6  # of a body where the model reads images


class EngineLink(Protocol):
    """An engine as routes see it; it may die and be restarted."""

    @property
    def connection(self) -> Connection:
        """The connection to the running engine. Raises EngineError where none runs."""


@dataclass(frozen=True, slots=True)
class Served:
    """The model or adapter that a request names."""

    name: str  # its name in responses
    lora_path: str | None  # the adapter's name, which the engine may not know; None: the base model


@dataclass(slots=True)
class Service:
    """Lifetime: the application's."""

    engine: EngineLink
    settings: ServerSettings
    drain_state: DrainState = field(default_factory=DrainState)
    metrics: HttpMetrics = field(default_factory=HttpMetrics)
    created_s: int = field(default_factory=lambda: int(time.time()))
    describe: Callable[[], dict[str, Any]] | None = None  # for an engine that need not be loaded
    cascade: Cascade | None = None  # whose models answer; `engine` is then the largest one's
    text: ModelText = field(init=False)
    running: ActiveRequests = field(init=False)  # running requests of this application's clients
    responses: ResponseStore = field(init=False)
    images: ImageSources = field(init=False)

    def __post_init__(self) -> None:
        self.text = ModelText(lambda: self.info)
        self.running = ActiveRequests(self.settings, self._note_cut)
        self.responses = ResponseStore(self.settings.responses_ttl_s)
        self.images = ImageSources(self.settings)

    @property
    def info(self) -> dict[str, Any]:
        """The engine's description of itself, sent on connecting. Raises EngineError."""
        return self.engine.connection.info if self.describe is None else self.describe()

    def beside(
        self,
        engine: EngineLink,
        describe: Callable[[], dict[str, Any]],
        cascade: Cascade | None = None,
    ) -> Service:
        """Of another model, or a cascade, of the same server, whose counters, running requests and
        kept responses it shares."""
        other = replace(self, engine=engine, describe=describe, cascade=cascade)
        other.running, other.responses = self.running, self.responses
        return other

    @property
    def has_replicas(self) -> bool:
        """Whether there is a router, of any number of engines. Raises EngineError."""
        return "num_replicas" in self.info

    @property
    def model(self) -> str:
        """The name of the served model. Raises EngineError."""
        return str(self.info["model"])

    @property
    def max_running(self) -> int:
        """Samples that the engine runs at once. Raises EngineError."""
        return int(self.info["max_running_requests"])

    @property
    def body_limit(self) -> BodyLimit:
        """Of a request; what a context can hold, unless it was set."""
        try:
            max_model_len = self.info["max_model_len"]
        except EngineError:  # none runs, so no request needs more than the least
            max_model_len = None
        if self.settings.max_body_mb is not None:
            return BodyLimit(int(self.settings.max_body_mb * 1e6), max_model_len)
        default = LEAST_DEFAULT_BYTES if max_model_len is None else default_max_bytes(max_model_len)
        if max_model_len is not None and self.info.get("reads_images"):
            default = max(default, IMAGES_DEFAULT_BYTES)
        return BodyLimit(default, max_model_len)

    def require_open(self) -> None:
        """Raises Refusal or EngineError where no work is accepted."""
        self.drain_state.require_open()
        _ = self.engine.connection

    @property
    def has_lora(self) -> bool:
        """Whether the engine serves adapters. Raises EngineError."""
        return bool(self.info["has_lora"])

    def served(self, name: str | None, lora_path: str | None = None) -> Served:
        """The model by its name, "default" or none, or an adapter as "model:adapter" or by its own
        name alone. Raises InvalidRequest for two adapters at once, and ModelNotFound where no
        adapters are served (otherwise the engine raises it)."""
        model = self.model
        if lora_path and not self.has_lora:
            allowed = "left out: no adapters are served (--enable-lora)"
            raise InvalidRequest.of("lora_path", lora_path[:MAX_MODEL_NAME_CHARS], allowed)
        if not name or name in ("default", model):
            return Served(model, lora_path or None)
        if not self.has_lora:
            raise model_not_found(name, model, ())
        adapter = name.removeprefix(f"{model}:") or name  # "model:" names no adapter
        if lora_path and lora_path != adapter:
            allowed = f"left out, or the adapter that model={name[:MAX_MODEL_NAME_CHARS]!r} names"
            raise InvalidRequest.of("lora_path", lora_path[:MAX_MODEL_NAME_CHARS], allowed)
        return Served(name, adapter)

    async def adapters(self) -> list[dict[str, Any]]:
        """The adapters that the engine knows, each with `name`, `path` and more; empty where it
        serves none. Raises EngineError."""
        if not self.has_lora:
            return []
        found: list[dict[str, Any]] = await self.engine.connection.acall("lora_adapters")
        return found

    async def require_model(self, name: str | None) -> None:
        """Raises ModelNotFound for a name that is neither the model nor an adapter."""
        adapter = self.served(name).lora_path
        if adapter is not None:
            known = tuple(str(told["name"]) for told in await self.adapters())
            if adapter not in known:
                raise model_not_found(str(name), self.model, known)

    def _note_cut(self, reason: str) -> None:
        self.metrics.cut_streams.labels(reason).inc()
