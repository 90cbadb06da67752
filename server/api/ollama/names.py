"""Model names with Ollama's tag: `name:latest` is `name`."""

from __future__ import annotations

from ...generation.service import Served, Service

_TAG = ":latest"


def served_as(service: Service, name: str | None) -> Served:
    """The model or adapter of this name. Raises ModelNotFound."""
    return service.served(untagged(name))


def untagged(name: str | None) -> str | None:
    """As the engine knows it."""
    return None if name is None else name.removesuffix(_TAG)


def tagged(name: str) -> str:
    """As Ollama lists it."""
    return name if ":" in name else name + _TAG
