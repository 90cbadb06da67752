"""Where programs run: `Engine` starts a child process, `Runtime` connects to a running one.

Both run programs in the runtime, over ZeroMQ. `Runtime` at an HTTP address and `OpenAI`
(`openai/backend.py`) run them in this process, call by call.

The engine gets its own process (`engine_process.py`), because one busy Python thread beside it
would slow its decode steps many times over.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..errors import EngineError, InvalidRequest
from .client.backend import Backend
from .client.channel import OwnedChannel
from .client.client import Connection
from .client.engine_process import EngineProcess, start_timeout_s
from .protocol.keys import client_keys


class Runtime(Backend):
    """A runtime that already runs, at an address as `stemma serve` prints it.

    Over ZeroMQ it runs whole programs. Over HTTP the same programs run in this process, call by
    call, as far as its HTTP API supports them; the rest is refused (docs/use/sglang.md).

    Args:
        endpoint: "ipc://PATH", "tcp://HOST:PORT" or "http://HOST:PORT".
        timeout_s: raise EngineError if there is no response by then.
        server_key, client_key: the runtime's public key and this client's secret one, as files
            (`stemma keygen` makes them) or as 40 characters each; needed for another host.
        tenant: the tenant that this client's work counts for (`--tenant-weights`); None: its own.
            Over ZeroMQ only.
    """

    def __init__(
        self,
        endpoint: str,
        timeout_s: float = 10.0,
        *,
        server_key: str | Path | None = None,
        client_key: str | Path | None = None,
        tenant: str | None = None,
    ) -> None:
        if not isinstance(endpoint, str) or not endpoint.startswith(_SCHEMES):
            allowed = 'an address "ipc://...", "tcp://..." or "http://..."'
            raise InvalidRequest.of("endpoint", endpoint, allowed)
        if endpoint.startswith(("http://", "https://")):
            super().__init__(_http_channel(endpoint, timeout_s))
        else:
            keys = client_keys(endpoint, server_key, client_key)
            channel = Connection(endpoint, timeout_s=timeout_s, keys=keys, tenant=tenant)
            super().__init__(channel)

    def get_server_info(self) -> dict[str, Any]:
        """Model, limits, KV pool and counters of the runtime; over HTTP only model and limit."""
        if isinstance(self.channel, Connection):
            return super().get_server_info()
        return dict(self.channel.info)


_SCHEMES = ("ipc://", "tcp://", "http://", "https://")


def _http_channel(url: str, timeout_s: float) -> OwnedChannel:
    """Raises EngineError where no `stemma serve` responds."""
    from .openai.channel import OpenAIChannel, models_of  # httpx is slow to import
    from .openai.flavors import FLAVORS
    from .openai.http_client import Endpoint

    endpoint = Endpoint(f"{url.rstrip('/').removesuffix('/v1')}/v1")
    model, *others = models_of(endpoint, timeout_s) or [{}]
    others = [other for other in others if other.get("parent") != model.get("id")]  # no adapters
    if others or model.get("owned_by") != "stemma":
        raise EngineError(f"{url} is no `stemma serve`; st.OpenAI(model, base_url=) takes it")
    info = {"max_model_len": model["max_model_len"], "url": url}
    flavor = FLAVORS["stemma"]
    return OpenAIChannel(endpoint, model["id"], flavor, has_text=True, has_chat=True, info=info)


class Engine(Backend):
    """A private runtime: a child process, over ipc, ended with this object.

    Args:
        model: folder in Hugging Face layout, .gguf file, or id of a model on the Hugging Face hub
            as in "NAME/MODEL" or "NAME/MODEL@REVISION"; None: the embedded model.
        listen: further addresses at which to serve other clients, "ipc://PATH" or
        "tcp://HOST:PORT";
            beyond this host only with the options `server_key` and `client_keys`.
        options: the flags of `stemma serve` with underscores, e.g. `dtype="float32"`,
            `max_total_tokens=65536`, `page_size=16`, `max_running_requests=64`.

    Raises EngineError with the child's last output if it does not start.
    """

    def __init__(
        self, model: str | Path | None = None, *, listen: Sequence[str] = (), **options: object
    ) -> None:
        self._process = EngineProcess(model, listen=listen, options=options)
        self.endpoint = self._process.endpoint
        try:
            connection = Connection(
                self.endpoint, timeout_s=start_timeout_s(model), is_alive=self._process.death
            )
        except BaseException:
            self._process.stop()
            raise
        super().__init__(connection)

    @property
    def pid(self) -> int:
        """The child's process id."""
        return self._process.pid

    def shutdown(self) -> None:
        """End the child and remove its folder; safe to call twice."""
        super().shutdown()
        self._process.stop()


_default: Backend | None = None
_default_lock = threading.Lock()
_default_pid = os.getpid()


def set_default_backend(backend: Backend | None) -> None:
    """Set the backend of every `run` that names none; None: clear it."""
    global _default, _default_pid
    with _default_lock:
        _default, _default_pid = backend, os.getpid()


def get_default_backend() -> Backend:
    """The default backend; without one, starts an Engine on the embedded model and keeps it."""
    global _default, _default_pid
    with _default_lock:
        if _default is None or _default_pid != os.getpid():
            _default, _default_pid = Engine(), os.getpid()
        return _default


def flush_cache(backend: Backend | None = None) -> int:
    """Drop all cached KV that nothing uses; returns the number of tokens freed."""
    return (backend or get_default_backend()).flush_cache()


def get_server_info(backend: Backend | None = None) -> dict[str, Any]:
    """Model, limits, KV pool and counters of the runtime."""
    return (backend or get_default_backend()).get_server_info()
