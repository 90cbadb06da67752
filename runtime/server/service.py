"""What the routes have in common: the engine behind them, and how this server is set up."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any, Protocol

from starlette.exceptions import HTTPException

from ...errors import EngineError
from ...frontend.client import Connection
from .intake import Intake
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
    created_s: int = field(default_factory=lambda: int(time.time()))

    @property
    def info(self) -> dict[str, Any]:
        """What the engine said of itself when it was connected. Raises EngineError."""
        return self.engine.connection.info

    @property
    def model(self) -> str:
        """The name of the model that is served. Raises EngineError."""
        return str(self.info["model"])

    def require_open(self) -> None:
        """Raises EngineError where no work is taken."""
        if not self.intake.is_open:
            raise EngineError("the server is being stopped")
        _ = self.engine.connection

    def require_model(self, name: str | None) -> None:
        """Raises HTTPException for another model's name."""
        if name not in (None, "", "default", self.model):
            raise HTTPException(404, f"model {name!r} does not exist; this is {self.model!r}")
