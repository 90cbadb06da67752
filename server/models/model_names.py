"""Which model a request means by a name: its own, with Ollama's tag, or an adapter's."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from ...errors import (
    MAX_MODEL_NAME_CHARS,
    EngineError,
    InvalidRequest,
    ModelNotFound,
    model_not_found,
)
from ..generation.service import Service
from .allowed_names import DEFAULT, TAG
from .model_slot import ModelSlot


class ModelNames:
    """The names of a server's models."""

    def __init__(self, services: Mapping[ModelSlot, Service], cascades: Iterable[str]) -> None:
        """`cascades`: names beside the models', which errors tell of."""
        self._services = services
        self._cascades = tuple(cascades)
        self._by_name = {slot.name: slot for slot in services}
        self.first = next(iter(services))

    async def find(self, name: object) -> ModelSlot:
        """No name, "" and "default" mean the first model. Raises InvalidRequest for what is no
        text, ModelNotFound."""
        if name is None or name in ("", DEFAULT):
            return self.first
        if not isinstance(name, str):
            raise InvalidRequest.of("model", name, f"one of {list(self._by_name)}")
        for spelling in (name, name.removesuffix(TAG)):
            if spelling in self._by_name:
                return self._by_name[spelling]
        if name in self._cascades:
            raise InvalidRequest.of("model", name, f"a single model here: {list(self._by_name)}")
        slot = self._owner_of(name) or await self._loaded_with(name)
        if slot is None:
            raise self.unknown(name)
        return slot

    def unknown(self, name: str) -> ModelNotFound:
        """The error for a name that nothing has."""
        if len(self._by_name) == 1:
            return model_not_found(name, self.first.name, ())
        shown, known = (
            name[:MAX_MODEL_NAME_CHARS],
            ", ".join(map(repr, (*self._by_name, *self._cascades))),
        )
        return ModelNotFound(f"model {shown!r} does not exist; there are {known}", "model")

    def _owner_of(self, name: str) -> ModelSlot | None:
        """The model of "model:adapter", if it serves adapters."""
        owners = [own for own in self._by_name if name.startswith(f"{own}:")]
        if not owners:
            return None
        slot = self._by_name[max(owners, key=len)]
        return slot if self._services[slot].has_lora else None

    async def _loaded_with(self, adapter: str) -> ModelSlot | None:
        """The first loaded model that has an adapter of this name."""
        for slot, service in self._services.items():
            if slot.is_running and service.has_lora:
                try:
                    if any(told["name"] == adapter for told in await service.adapters()):
                        return slot
                except EngineError:  # it has just died, or is being unloaded
                    continue
        return None
