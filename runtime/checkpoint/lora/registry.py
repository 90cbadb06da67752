"""The adapters that an engine serves, by name."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from ....errors import MAX_MODEL_NAME_CHARS, InvalidRequest, model_not_found
from .adapter import Adapter, ModuleShape, PrepareWeights, read_adapter

MAX_ADAPTER_NAME_CHARS = 128


class AdapterRegistry:
    """Owns the names; an adapter whose name is gone goes on to serve the requests that have it."""

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
        known at a time, None: any number."""
        self.max_rank = max_rank
        self._model_name = model_name
        self._modules = modules
        self._prepare = prepare
        self._max_adapters = max_adapters
        self._adapters: dict[str, Adapter] = {}

    @property
    def adapters(self) -> tuple[Adapter, ...]:
        """In the order in which they came."""
        return tuple(self._adapters.values())

    def load(self, name: str, folder: Path) -> Adapter:
        """Read an adapter and make it known. Raises InvalidRequest for a name that is none or taken
        and where there is no room, ModelLoadError for what is no adapter of this model; nothing
        changes then."""
        self.require_free(name)
        return self.add(self.read(name, folder))

    def has(self, name: str) -> bool:
        """Whether an adapter has this name."""
        return name in self._adapters

    def require_free(self, name: str) -> None:
        """Raises InvalidRequest where no adapter can be added under this name."""
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
        """An adapter that is not known yet; any thread's to call. Raises ModelLoadError."""
        return read_adapter(name, folder, self._modules, self.max_rank, self._prepare)

    def add(self, adapter: Adapter) -> Adapter:
        """Make an adapter known, unless it is already by this name; the one that is known then.
        Raises as `require_free`."""
        known = self._adapters.get(adapter.name)
        if known is not None and known.revision == adapter.revision:
            return known
        self.require_free(adapter.name)
        self._adapters[adapter.name] = adapter
        return adapter

    def unload(self, name: str) -> Adapter:
        """Forget a name. Raises ModelNotFound."""
        adapter = self.find(name)
        del self._adapters[adapter.name]
        return adapter

    def find(self, name: str) -> Adapter:
        """By its name, or "model:name". Raises ModelNotFound, which lists what there is."""
        adapter = self._adapters.get(name.removeprefix(f"{self._model_name}:"))
        if adapter is None:
            raise model_not_found(name, self._model_name, tuple(self._adapters))
        return adapter
