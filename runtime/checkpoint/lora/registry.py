"""The adapters that an engine serves, by name."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from ....errors import MAX_MODEL_NAME_CHARS, InvalidRequest, model_not_found
from .adapter import Adapter, ModuleShape, PrepareWeights, read_adapter

MAX_ADAPTER_NAME_CHARS = 128


class AdapterRegistry:
    """Owns the names; an adapter whose name was removed still serves the requests that have it."""

    def __init__(
        self,
        model_name: str,
        modules: Mapping[str, ModuleShape],
        *,
        max_rank: int,
        prepare: PrepareWeights,
        max_adapters: int | None = None,
    ) -> None:
        """`modules`: the linear layers of the model that take adapters; `max_adapters`: that may be
        registered at a time, None: any number."""
        self.max_rank = max_rank
        self._model_name = model_name
        self._modules = modules
        self._prepare = prepare
        self._max_adapters = max_adapters
        self._adapters: dict[str, Adapter] = {}

    @property
    def adapters(self) -> tuple[Adapter, ...]:
        """In the order of registration."""
        return tuple(self._adapters.values())

    def load(self, name: str, folder: Path) -> Adapter:
        """Read and register an adapter. Raises InvalidRequest for an invalid or taken name and if
        there is no room, ModelLoadError if it is not an adapter of this model; then nothing
        changes."""
        self.require_free(name)
        return self.add(self.read(name, folder))

    def has(self, name: str) -> bool:
        """Whether an adapter has this name."""
        return name in self._adapters

    def require_free(self, name: str) -> None:
        """Raises InvalidRequest if no adapter can be added under this name."""
        own = (self._model_name, "default")
        is_plain = name.isprintable() and name == name.strip() and "=" not in name
        fits = 0 < len(name) <= MAX_ADAPTER_NAME_CHARS
        if not (fits and is_plain) or name in own or name.startswith(f"{own[0]}:"):
            allowed = (
                f"1 to {MAX_ADAPTER_NAME_CHARS} printable characters without '=' and spaces around "
                f"them, and not {own[0]!r}, {own[0] + ':'!r} with more behind it, or 'default'"
            )
            raise InvalidRequest.of("lora_name", name[:MAX_MODEL_NAME_CHARS], allowed)
        if name in self._adapters:
            raise InvalidRequest.of("lora_name", name, "a name that is not taken; unload it first")
        if self._max_adapters is not None and len(self._adapters) >= self._max_adapters:
            raise InvalidRequest(
                f"{len(self._adapters)} adapters are loaded, as many as max_loaded_loras allows; "
                "unload one first",
                "lora_name",
            )

    def read(self, name: str, folder: Path) -> Adapter:
        """Read an adapter without registering it; any thread may call. Raises ModelLoadError."""
        return read_adapter(name, folder, self._modules, self.max_rank, self._prepare)

    def add(self, adapter: Adapter) -> Adapter:
        """Register an adapter, unless it is registered under this name; returns the registered
        one. Raises as `require_free`."""
        known = self._adapters.get(adapter.name)
        if known is not None and known.revision == adapter.revision:
            return known
        self.require_free(adapter.name)
        self._adapters[adapter.name] = adapter
        return adapter

    def unload(self, name: str) -> Adapter:
        """Remove a name. Raises ModelNotFound."""
        adapter = self.find(name)
        del self._adapters[adapter.name]
        return adapter

    def find(self, name: str) -> Adapter:
        """By its name, or "model:name". Raises ModelNotFound, which lists the registered names."""
        adapter = self._adapters.get(name.removeprefix(f"{self._model_name}:"))
        if adapter is None:
            raise model_not_found(name, self._model_name, tuple(self._adapters))
        return adapter
