"""The base class of everything that can run programs."""

from __future__ import annotations

import threading
from concurrent.futures import Future
from pathlib import Path
from typing import Any, NoReturn, Self

from ...errors import EngineError, InvalidRequest
from .channel import OwnedChannel
from .client import Connection


class Backend:
    """Runs programs; owns the channel that carries them out."""

    def __init__(self, channel: OwnedChannel) -> None:
        self._channel = channel
        self._channel_lock = threading.Lock()
        self._attempt: Future[OwnedChannel] | None = None  # to open a lost one anew, under way
        self._is_shut_down = False

    @property
    def channel(self) -> OwnedChannel:
        """What carries programs out. A connection that was lost is opened anew, however long ago
        that was. Raises EngineError where it cannot be."""
        return self._channel if self.is_open else self.reopen()

    @property
    def is_open(self) -> bool:
        """Whether `channel` is there at once."""
        return _loss_of(self._channel) is None

    def reopen(self) -> OwnedChannel:
        """Open a lost channel anew; threads that ask meanwhile share what comes of it. Raises
        EngineError."""
        with self._channel_lock:
            if (loss := _loss_of(self._channel)) is None:  # opened by another thread since
                return self._channel
            attempt, is_first = self._attempt, self._attempt is None
            if attempt is None:
                attempt = self._attempt = Future()
        if is_first:
            self._carry_out(attempt)
        error = attempt.exception()
        if isinstance(error, EngineError):
            raise EngineError(f"{error}; the last connection: {loss}") from error
        return attempt.result()

    def _carry_out(self, attempt: Future[OwnedChannel]) -> None:
        """Whatever happens, the attempt has an outcome then."""
        try:
            channel = self._reopened()
        except BaseException as error:
            self._attempt = None
            if isinstance(error, Exception):
                attempt.set_exception(error)
                return
            attempt.set_exception(EngineError("the attempt to connect was interrupted"))
            raise
        with self._channel_lock:
            self._channel, self._attempt = channel, None
        if self._is_shut_down:  # meanwhile
            self.shutdown()
        attempt.set_result(channel)

    def _reopened(self) -> OwnedChannel:
        """A channel in place of a lost one. Raises EngineError."""
        return self._channel

    @property
    def connection(self) -> Connection:
        """The channel, where it is a connection to a runtime over ZeroMQ. Raises InvalidRequest."""
        channel = self.channel
        if not isinstance(channel, Connection):
            raise InvalidRequest(
                f"{channel.info['model']!r} is reached over HTTP; its radix tree, cache and "
                "counters only through a runtime over ZeroMQ, see st.Engine and st.Runtime"
            )
        return channel

    def get_server_info(self) -> dict[str, Any]:
        """Model, limits, KV pool and counters of the runtime."""
        return dict(self.connection.call("info"))

    def tree(self, replica: int | None = None) -> dict[str, Any]:
        """The radix tree as plain data, see `stemma.radix.render`; of several engines all of it,
        with who has what, or that of one `replica`. Raises InvalidRequest where there is none."""
        args = {} if replica is None else {"replica": replica}
        return dict(self.connection.call("tree", **args))

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
        """Close the channel; programs still running on it are cancelled. One that is being opened
        anew is closed when it is there."""
        with self._channel_lock:
            self._is_shut_down = True
            channel = self._channel
        channel.close()

    def __reduce__(self) -> NoReturn:
        """Neither `pickle` nor `copy` makes another one."""
        raise TypeError(
            "a backend cannot be pickled or copied: its connection is this process's. Another "
            "process opens its own, as in st.Runtime(engine.endpoint)"
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()


def _loss_of(channel: OwnedChannel) -> EngineError | None:
    """Why a connection ended though nobody closed it; None where it did not."""
    return channel.loss if isinstance(channel, Connection) else None
