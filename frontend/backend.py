"""Where programs run: `Engine` starts a child process, `Runtime` connects to a running one.

Both run programs in the runtime, over ZeroMQ. `Runtime` at an HTTP address and `OpenAI`
(`openai/backend.py`) run them in this process, call by call.

The engine gets its own process (`engine_process.py`), because one busy Python thread beside it
would slow its decode steps many times over.
"""

from __future__ import annotations

import asyncio
import logging
import os
import threading
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Unpack

from ..errors import EngineError, InvalidRequest, ModelLoadError
from .client.backend import Backend
from .client.channel import OwnedChannel
from .client.client import Connection
from .client.engine_options import EngineOptions, options_of
from .client.engine_process import EngineProcess, start_timeout_s
from .client.transport import SessionLost
from .native.backend import NativeBackend
from .protocol.keys import client_keys
from .protocol.wire import RUNTIME_TIMEOUT_S
from .trace.notebook import RadixTree

log = logging.getLogger(__name__)


class _Connected(NativeBackend):
    """A backend over ZeroMQ."""

    def tree(self, replica: int | None = None) -> RadixTree:
        return RadixTree(super().tree(replica))


class Runtime(_Connected):
    """A runtime that already runs, at an address as `stemma serve` prints it; or, as in SGLang,
    with `model_path` one of its own.

    Over ZeroMQ it runs whole programs. When the runtime ends and another one with the same model
    answers there within `timeout_s`, they go on from where they are. Else what runs raises
    EngineError; the next run connects anew, whenever the runtime is back. Over HTTP the same
    programs run in this process, call by call, as far as its HTTP API supports them; the rest is
    refused (docs/use/sglang.md).

    Args:
        endpoint: "ipc://PATH", "tcp://HOST:PORT" or "http://HOST:PORT".
        timeout_s: raise EngineError if there is no response by then, each time it connects.
        server_key, client_key: the runtime's public key and this client's secret one, as files
            (`stemma keygen` makes them) or as 40 characters each; needed for another host.
        tenant: the tenant that this client's work counts for (`--tenant-weights`); None: its own.
            Over ZeroMQ only.
        model_path: start an engine on this model, as `Engine` does, and end it with this object; in
            place of an endpoint.
        options: with `model_path`, those of `Engine`.
    """

    _engine: Engine | None = None  # its own

    def __init__(
        self,
        endpoint: str | None = None,
        timeout_s: float = 10.0,
        *,
        server_key: str | Path | None = None,
        client_key: str | Path | None = None,
        tenant: str | None = None,
        model_path: str | Path | None = None,
        **options: Any,
    ) -> None:
        others = {"server_key": server_key, "client_key": client_key, "tenant": tenant}
        if model_path is not None:
            self._start({"endpoint": endpoint, **others}, model_path, options)
            return
        for name, value in options.items():
            raise InvalidRequest.of(name, value, "only together with model_path")
        if not isinstance(endpoint, str) or not endpoint.startswith(_SCHEMES):
            allowed = 'an address "ipc://...", "tcp://..." or "http://..."'
            raise InvalidRequest.of("endpoint", endpoint, allowed)
        if endpoint.startswith(("http://", "https://")):
            super().__init__(_http_channel(endpoint, timeout_s))
        else:
            keys = client_keys(endpoint, server_key, client_key)
            self._connect = partial(
                Connection,
                endpoint,
                timeout_s=timeout_s,
                keys=keys,
                tenant=tenant,
                outlives_runtime=True,
            )
            super().__init__(self._connect())

    def _start(
        self, others: Mapping[str, object], model_path: str | Path, options: dict[str, Any]
    ) -> None:
        for name, value in others.items():
            if value is not None:
                allowed = "left out: model_path starts an engine of its own"
                raise InvalidRequest.of(name, value, allowed)
        self._engine = engine = Engine(model_path, **options)
        super().__init__(engine.channel)

    def _reopened(self) -> OwnedChannel:
        return self._connect() if self._engine is None else self._engine.channel

    def shutdown(self) -> None:
        """Close the channel, and end the engine that `model_path` has started."""
        super().shutdown()
        if self._engine is not None:
            self._engine.shutdown()

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


class Engine(_Connected):
    """A private runtime: a child process, over ipc, ended with this object.

    When the process dies, what runs raises EngineError with its last output; the next run starts
    another one with the same options, without the cache and the adapters loaded meanwhile.

    Args:
        model: folder in Hugging Face layout, .gguf file, or id of a model on the Hugging Face hub
            as in "NAME/MODEL" or "NAME/MODEL@REVISION"; None: the embedded model.
        model_path: SGLang's name for `model`.
        listen: one or several further addresses at which to serve other clients, "ipc://PATH" or
            "tcp://HOST:PORT"; beyond this host only with the options `server_key` and
            `client_keys`.
        options: the flags of `stemma serve` with underscores, e.g. `dtype="float32"`,
            `max_total_tokens=65536`, `page_size=16`, `max_running_requests=64`. Of other engines'
            options those are accepted whose value says what holds here anyhow, as `pp_size=1`.

    Raises InvalidRequest for a name that is no option, before anything is started, and EngineError
    with the child's last output if it does not start: ModelLoadError where it is for its model.
    """

    def __init__(
        self,
        model: str | Path | None = None,
        *,
        model_path: str | Path | None = None,
        listen: str | Sequence[str] = (),
        **options: Unpack[EngineOptions],
    ) -> None:
        known = options_of(options)
        if model is not None and model_path is not None:
            raise InvalidRequest.of("model_path", model_path, "left out where model is given")
        model = model_path if model is None else model
        listen = (listen,) if isinstance(listen, str) else listen
        self._start = partial(EngineProcess, model, listen=listen, options=known)
        self._start_timeout_s = start_timeout_s(model)
        super().__init__(self._started())

    def _started(self) -> Connection:
        """The connection to a new process."""
        self._process = self._start()
        try:
            connection = self._connected(self._start_timeout_s)
        except BaseException as error:
            self._process.stop()
            if not isinstance(error, SessionLost):
                raise
            kind = ModelLoadError if self._process.has_no_model else EngineError
            raise kind(str(error)) from None
        if (slow_path := connection.info.get("slow_path")) is not None:
            log.warning("%s", slow_path)
        return connection

    def _connected(self, timeout_s: float) -> Connection:
        return Connection(self.endpoint, timeout_s=timeout_s, process=self._process.peer)

    def _reopened(self) -> OwnedChannel:
        death = self._process.peer.death()
        if death is None:
            return self._connected(RUNTIME_TIMEOUT_S)
        log.warning("%s; another one is started", death)
        self._process.stop()
        return self._started()

    @property
    def endpoint(self) -> str:
        """The address of the child, another one for each."""
        return self._process.endpoint

    @property
    def pid(self) -> int:
        """The child's process id."""
        return self._process.pid

    def shutdown(self) -> None:
        """End the child and remove its folder; safe to call twice."""
        super().shutdown()
        self._process.stop()


_default: Backend | None = None
_is_own = False  # whether it was started here, as nobody had set one
_default_lock = threading.Lock()


def set_default_backend(backend: Backend | None) -> None:
    """Set the backend of every `run` that names none; None: clear it."""
    global _default, _is_own
    with _default_lock:
        _default, _is_own = backend, False


def get_default_backend() -> Backend:
    """The default backend; where none was set, starts an Engine on the embedded model and keeps it.

    After `os.fork()` the child still has the one that was set, whose use raises EngineError: no
    other model answers in its place. Where none was set, it starts an Engine of its own."""
    global _default, _is_own
    with _default_lock:
        if _default is None:
            _default, _is_own = Engine(), True
        return _default


def chosen_backend() -> Backend | None:
    """The default backend, where there is one already."""
    return _default


async def await_backend(backend: object) -> None:
    """Do on a thread what a run on this backend, or on the default one, would keep an event loop
    waiting for: start an engine, open a lost connection anew. Raises EngineError."""
    if backend is None and (backend := _default) is None:
        backend = await asyncio.to_thread(get_default_backend)
    if isinstance(backend, Backend) and not backend.is_open:
        await asyncio.to_thread(backend.reopen)


def _begin_in_child() -> None:
    """After a fork: an engine that was started here is the parent's; the lock may be held there."""
    global _default, _is_own, _default_lock
    _default_lock = threading.Lock()
    if _is_own:
        _default, _is_own = None, False


os.register_at_fork(after_in_child=_begin_in_child)


def flush_cache(backend: Backend | None = None) -> int:
    """Drop all cached KV that nothing uses; returns the number of tokens freed."""
    return (backend or get_default_backend()).flush_cache()


def get_server_info(backend: Backend | None = None) -> dict[str, Any]:
    """Model, limits, KV pool and counters of the runtime."""
    return (backend or get_default_backend()).get_server_info()
