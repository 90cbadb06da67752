"""What the routes have in common: the engine behind them, and how this server is set up."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any, Protocol

from ...frontend.client import Connection
from .failures import INVALID, Refusal
from .generation.running import Running
from .intake import Intake
from .metrics.http_metrics import HttpMetrics
from .model_text import ModelText
from .settings import ServerSettings


class EngineLink(Protocol):
    """An engine as routes see it; it may die and be there anew later."""

    @property
    def connection(self) -> Connection:
        """To the engine that runs now. Raises EngineError where none does."""


@dataclass(slots=True)
class Service:
    """Lifetime: the application's."""

    engine: EngineLink
    settings: ServerSettings
    intake: Intake = field(default_factory=Intake)
    metrics: HttpMetrics = field(default_factory=HttpMetrics)
    created_s: int = field(default_factory=lambda: int(time.time()))
    text: ModelText = field(init=False)
    running: Running = field(init=False)  # what the engine works on for this application's clients

    def __post_init__(self) -> None:
        self.text = ModelText(lambda: self.info)
        self.running = Running(self.settings, self._note_cut)

    @property
    def info(self) -> dict[str, Any]:
        """What the engine said of itself when it was connected. Raises EngineError."""
        return self.engine.connection.info

    @property
    def model(self) -> str:
        """The name of the model that is served. Raises EngineError."""
        return str(self.info["model"])

    @property
    def max_running(self) -> int:
        """Samples that the engine runs at once. Raises EngineError."""
        return int(self.info["max_running_requests"])

    def require_open(self) -> None:
        """Raises Refusal or EngineError where no work is taken."""
        self.intake.require_open()
        _ = self.engine.connection

    def require_model(self, name: str | None) -> None:
        """Raises Refusal for another model's name."""
        if name and name not in ("default", self.model):
            message = f"model {name[:256]!r} does not exist; this is {self.model!r}"
            raise Refusal(404, message, kind=INVALID, code="model_not_found", field="model")

    def _note_cut(self, reason: str) -> None:
        self.metrics.cut_streams.labels(reason).inc()
