"""The base class of everything that can run programs."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Self

from ...errors import InvalidRequest
from .channel import OwnedChannel
from .client import Connection


class Backend:
    """Runs programs; owns the channel that carries them out."""

    def __init__(self, channel: OwnedChannel) -> None:
        self.channel = channel

    @property
    def connection(self) -> Connection:
        """The channel, where it is a connection to a runtime over ZeroMQ. Raises InvalidRequest."""
        if not isinstance(self.channel, Connection):
            raise InvalidRequest(
                f"{self.channel.info['model']!r} is reached over HTTP; its radix tree, cache and "
                "counters only through a runtime over ZeroMQ, see st.Engine and st.Runtime"
            )
        return self.channel

    def get_server_info(self) -> dict[str, Any]:
        """Model, limits, KV pool and counters of the runtime."""
        return dict(self.connection.call("info"))

    def tree(self) -> dict[str, Any]:
        """The radix tree as plain data, see `stemma.radix.render`."""
        return dict(self.connection.call("tree"))

    def flush_cache(self) -> int:
        """Drop all cached KV that nothing uses; returns the number of tokens freed."""
        return int(self.connection.call("flush_cache"))

    def load_lora_adapter(self, name: str, path: str | Path) -> None:
        """Serve the adapter in a folder on the runtime's host under this name; returns once it is
        loaded, after others being loaded. Raises InvalidRequest, and ModelLoadError where the
        folder is not an adapter of its model."""
        args = {"lora_name": name, "lora_path": str(path)}
        self.connection.call("load_lora_adapter", None, **args)

    def unload_lora_adapter(self, name: str) -> None:
        """Stop serving it; requests that use it complete. Raises ModelNotFound."""
        self.connection.call("unload_lora_adapter", lora_name=name)

    def shutdown(self) -> None:
        """Close the channel; programs still running on it are cancelled."""
        self.channel.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()
