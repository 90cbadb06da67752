"""Where programs run: `Engine` starts a runtime as a child process, `Runtime` joins a running one.

Both carry programs out in the runtime, over ZeroMQ. `Runtime` at an HTTP address and `OpenAI`
(`openai/backend.py`) carry them out in this process, call by call.

The engine gets a process of its own (subprocess, not multiprocessing: a script needs no main
guard), because one busy Python thread beside it would slow its decode steps many times over. The
child ends when its standard input closes, so it never outlives the parent, however that dies.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import threading
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

from ..errors import EngineError, InvalidRequest
from .channel import OwnedChannel
from .client import Connection
from .keys import client_keys

START_TIMEOUT_S = 300.0  # a large checkpoint takes a while to load
STOP_TIMEOUT_S = 5.0
LOG_TAIL_LINES = 15


class Backend:
    """What programs can run on; owns the channel that carries them out."""

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

    def shutdown(self) -> None:
        """Close the channel; programs still running on it are cancelled."""
        self.channel.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()


class Runtime(Backend):
    """A runtime that already runs, at an address as `stemma serve` prints it.

    Over ZeroMQ it carries out whole programs. Over HTTP the same programs are carried out in this
    process, call by call, with what its HTTP API knows; the rest is refused (docs/sglang.md).

    Args:
        endpoint: "ipc://PATH", "tcp://HOST:PORT" or "http://HOST:PORT".
        timeout_s: raise EngineError when nothing has answered by then.
        server_key, client_key: the runtime's public key and this client's secret one, as files
            (`stemma keygen` makes them) or as 40 characters each; needed for another host.
    """

    def __init__(
        self,
        endpoint: str,
        timeout_s: float = 10.0,
        *,
        server_key: str | Path | None = None,
        client_key: str | Path | None = None,
    ) -> None:
        if not isinstance(endpoint, str) or not endpoint.startswith(_SCHEMES):
            allowed = 'an address "ipc://...", "tcp://..." or "http://..."'
            raise InvalidRequest.of("endpoint", endpoint, allowed)
        if endpoint.startswith(("http://", "https://")):
            super().__init__(_http_channel(endpoint, timeout_s))
        else:
            keys = client_keys(endpoint, server_key, client_key)
            super().__init__(Connection(endpoint, timeout_s=timeout_s, keys=keys))

    def get_server_info(self) -> dict[str, Any]:
        """Model, limits, KV pool and counters of the runtime; over HTTP model and limit."""
        if isinstance(self.channel, Connection):
            return super().get_server_info()
        return dict(self.channel.info)


_SCHEMES = ("ipc://", "tcp://", "http://", "https://")


def _http_channel(url: str, timeout_s: float) -> OwnedChannel:
    """Raises EngineError where no `stemma serve` answers."""
    from .openai.channel import OpenAIChannel, models_of  # httpx is slow to import
    from .openai.flavors import FLAVORS
    from .openai.http_client import Endpoint

    endpoint = Endpoint(f"{url.rstrip('/').removesuffix('/v1')}/v1")
    model, *others = models_of(endpoint, timeout_s) or [{}]
    if others or model.get("owned_by") != "stemma":
        raise EngineError(f"{url} is no `stemma serve`; st.OpenAI(model, base_url=) takes it")
    info = {"max_model_len": model["max_model_len"], "url": url}
    flavor = FLAVORS["stemma"]
    return OpenAIChannel(endpoint, model["id"], flavor, has_text=True, has_chat=True, info=info)


class Engine(Backend):
    """A runtime of one's own: a child process, over ipc, ended with this object.

    Args:
        model: checkpoint folder in Hugging Face layout; None: the embedded model.
        listen: further addresses to serve others at, "ipc://PATH" or "tcp://HOST:PORT"; beyond
            this host with the options `server_key` and `client_keys`.
        options: the flags of `stemma serve` with underscores, e.g. `dtype="float32"`,
            `max_total_tokens=65536`, `page_size=16`, `max_running_requests=64`.

    Raises EngineError with the child's last words if it does not start.
    """

    def __init__(
        self, model: str | Path | None = None, *, listen: Sequence[str] = (), **options: object
    ) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="stemma-"))
        self.endpoint = f"ipc://{self._folder}/engine.ipc"
        command = [sys.executable, "-P", "-m", "stemma.runtime"]
        for endpoint in (self.endpoint, *listen):
            command += ["--endpoint", endpoint]
        command += ["--watch-stdin", *_flags({"model": model, **options})]
        self._log = self._folder / "engine.log"
        with self._log.open("wb") as log:
            self.process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=log, stderr=log, start_new_session=True
            )
        self._finalizer = weakref.finalize(self, _stop, self.process, self._folder, os.getpid())
        try:
            super().__init__(self._connect())
        except BaseException:
            self._finalizer()
            raise

    def _connect(self) -> Connection:
        process, log = self.process, self._log

        def death() -> str | None:
            if process.poll() is None:
                return None
            return f"the engine's process ended (exit code {process.returncode}){_tail(log)}"

        return Connection(self.endpoint, timeout_s=START_TIMEOUT_S, is_alive=death)

    @property
    def pid(self) -> int:
        """The child's process id."""
        return self.process.pid

    def shutdown(self) -> None:
        """End the child and remove its folder; safe to call twice."""
        super().shutdown()
        self._finalizer()


def _flags(options: dict[str, object]) -> list[str]:
    flags: list[str] = []
    for name, value in options.items():
        flag = "--" + name.replace("_", "-")
        if value is True:
            flags.append(flag)
        elif value is not None and value is not False:
            flags += [flag, str(value)]
    return flags


def _tail(log: Path) -> str:
    try:
        lines = log.read_text(errors="replace").strip().splitlines()[-LOG_TAIL_LINES:]
    except OSError:
        return ""
    return ":\n  " + "\n  ".join(lines) if lines else ""


def _stop(process: subprocess.Popen[bytes], folder: Path, owner_pid: int) -> None:
    if os.getpid() != owner_pid:
        return  # a fork of the owner ends: the engine is not its own
    if process.stdin is not None:
        process.stdin.close()
    try:
        process.wait(STOP_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    shutil.rmtree(folder, ignore_errors=True)


_default: Backend | None = None
_default_lock = threading.Lock()
_default_pid = os.getpid()


def set_default_backend(backend: Backend | None) -> None:
    """The backend of every `run` that names none; None: forget it."""
    global _default, _default_pid
    with _default_lock:
        _default, _default_pid = backend, os.getpid()


def get_default_backend() -> Backend:
    """The default backend; without one, an Engine on the embedded model is started and kept."""
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
