"""What `stemma serve` serves where it is given several models."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from ..errors import StemmaError
from ..server.models.model_engines import ModelEngines
from ..server.models.model_slot import ModelSlot
from ..server.settings import ServerSettings
from .model_specs import endpoints_beside, model_specs
from .named_models import NamedModel

if TYPE_CHECKING:
    from fastapi import FastAPI


class SeveralModels:
    """Their engines, the first of which is started with the server."""

    def __init__(
        self,
        args: argparse.Namespace,
        models: Sequence[NamedModel],
        settings: ServerSettings,
        endpoint: str,
    ) -> None:
        """Raises InvalidRequest."""
        endpoints = endpoints_beside(endpoint, len(models))
        specs, self._num_bytes = model_specs(args, models, settings, endpoints)
        self.endpoint = endpoint
        self._settings = settings
        slots = [ModelSlot(spec, settings.engine_timeout_s) for spec in specs]
        self.engine = ModelEngines(slots)

    def app(self) -> FastAPI:
        """The application. Hub ids are fetched here; what is wrong with the files of a model but
        the first is told on standard error, and later to each request that names it."""
        from ..server.models.app import create_models_app

        for slot in self.engine.slots[1:]:
            _look_ahead(slot)
        return create_models_app(self.engine, self._settings, self._num_bytes)

    def lines(self) -> list[str]:
        """What is served."""
        first, *others = self.engine.slots
        info = first.describe()
        return [
            f"{first.name} ({info['dtype']}, context {info['max_model_len']})",
            *(f"{slot.name} (on demand), programs {slot.spec.endpoint}" for slot in others),
        ]


def _look_ahead(slot: ModelSlot) -> None:
    try:
        slot.note(slot.spec.prepare())
    except StemmaError as error:
        print(f"stemma serve: model {slot.name!r}: {error}", file=sys.stderr, flush=True)
