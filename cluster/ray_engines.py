"""Replicas on a Ray cluster: Ray finds a node for each and says when it has ended.

Ray is the control plane alone. An actor of a node starts the engine's process there and says where
it listens; from then on the router talks to it over ZeroMQ, as to any other. Keys are made anew for
each engine, so no port is open without one. The only file that imports ray.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import ray
import ray.exceptions
import zmq

from ..errors import EngineError, InvalidRequest
from ..frontend.client.engine_process import EngineProcess, start_timeout_s
from ..frontend.client.temporary_folder import TemporaryFolder
from ..frontend.protocol.keys import ClientKeys, read_public, write_pair
from ..runtime.config import EngineConfig, options_of
from .replica import Replica
from .settings import ClusterSettings

log = logging.getLogger(__name__)

ASK_S = 0.5  # from one question to Ray whether an engine runs to the next
REACH_S = 10.0  # for a head node to take a connection
STOP_S = 10.0  # that an engine is given to end
_NO_ANSWER = (ray.exceptions.RayError, OSError)


class EngineHost:
    """The actor: it has one engine as a child process, on its node."""

    def __init__(self, model: str | None, options: dict[str, Any], router_key: bytes) -> None:
        """`router_key`: the public key of the one who may connect."""
        self._folder = TemporaryFolder()
        path = self._folder.path
        write_pair(path, path, "server")
        router = path / "router.key"
        router.write_text(f'metadata\ncurve\n    public-key = "{router_key.decode()}"\n')
        host = ray.util.get_node_ip_address()
        self._address = f"tcp://{host}:{_free_port(host)}", read_public("key", path / "server.key")
        keys = {"server_key": str(path / "server.key_secret"), "client_keys": str(router)}
        self._engine = EngineProcess(model, listen=(self._address[0],), options=options | keys)

    def address(self) -> tuple[str, bytes]:
        """Where it listens, and its public key."""
        return self._address

    def wait(self) -> str:
        """Wait until it has ended; returns why."""
        self._engine.wait()
        return self._engine.peer.death() or "it has ended"

    def stop(self) -> None:
        """End it."""
        self._engine.stop()
        self._folder.remove()


class RayEngine:
    """A `Started` engine, and the `PeerProcess` that Ray tells of."""

    def __init__(self, actor: Any, own_keys: tuple[bytes, bytes]) -> None:
        """`own_keys`: the router's, public and secret."""
        self._actor = actor
        self._own_keys = own_keys
        self._address = actor.address.remote()
        self._end = actor.wait.remote()
        self._death: str | None = None
        self._next_look_s = 0.0
        self._endpoint: str | None = None
        self._server_key = b""

    @property
    def endpoint(self) -> str | None:
        """None until Ray has found a node for it."""
        if self._endpoint is None and self._death is None:
            found = self._answer(self._address)
            if found is not None:
                self._endpoint, self._server_key = found
        return self._endpoint

    @property
    def keys(self) -> ClientKeys:
        """The router's own, and the engine's."""
        return ClientKeys(self._server_key, *self._own_keys)

    @property
    def peer(self) -> RayEngine:
        """Itself."""
        return self

    def death(self) -> str | None:
        """Why it has ended, as far as Ray knows; None while it runs."""
        now_s = time.monotonic()
        if self._death is None and now_s >= self._next_look_s:
            self._next_look_s = now_s + ASK_S
            ended = self._answer(self._end)
            self._death = self._death if ended is None else str(ended)
        return self._death

    def _answer(self, ref: Any) -> Any:
        """The actor's, None until it has come. Where Ray has none to give, the engine is lost."""
        try:
            return ray.get(ref) if ray.wait([ref], timeout=0)[0] else None
        except _NO_ANSWER as error:
            self._death = _in_short(error)
            return None

    def is_stopped(self) -> bool:
        """Nobody says so of a process of another machine."""
        return False

    def kill(self) -> None:
        """End it with its actor, at once."""
        try:
            ray.kill(self._actor)
        except _NO_ANSWER as error:
            log.warning("an engine could not be ended: %s", _in_short(error))

    def stop(self) -> None:
        """End it, and then its actor."""
        with contextlib.suppress(*_NO_ANSWER):  # it has ended, or is ended now
            ray.get(self._actor.stop.remote(), timeout=STOP_S)
        self.kill()


def hire_on_ray(
    config: EngineConfig, settings: ClusterSettings, context: zmq.Context[zmq.Socket[bytes]]
) -> Callable[[int], Replica]:
    """Makes the replica of a number, not started yet; joins the cluster, or starts one where
    `settings.ray` is "auto" and none runs. Raises EngineError where there is none."""
    _join(str(settings.ray))
    options = options_of(config)
    model = options.pop("model", None)
    num_cpus = settings.ray_cpus or float(config.num_threads or 1)
    options.setdefault("num_threads", max(1, int(num_cpus)))
    is_on_gpu = config.device != "cpu"
    num_gpus = float(is_on_gpu) if settings.ray_gpus is None else settings.ray_gpus
    actor = ray.remote(EngineHost).options(
        num_cpus=num_cpus, num_gpus=num_gpus, max_restarts=0, max_concurrency=3
    )
    own_keys = zmq.curve_keypair()

    def start() -> RayEngine:
        try:
            return RayEngine(actor.remote(model, options, own_keys[0]), own_keys)
        except _NO_ANSWER as error:
            raise EngineError(f"Ray starts none: {_in_short(error)}") from error

    replica = partial(Replica, context=context, connect_s=start_timeout_s(model))
    return lambda number: replica(number, start)


def _join(address: str) -> None:
    if address != "auto":
        _reach(address)  # Ray itself would ask for minutes
    join = partial(ray.init, namespace="stemma", log_to_driver=False, logging_level=logging.ERROR)
    try:
        join(address=address)
    except ConnectionError as error:
        if address != "auto":
            raise EngineError(f"no Ray cluster at ray={address!r}: {_in_short(error)}") from error
        log.warning("no Ray cluster runs here: one is started, of this machine alone")
        join(address="local", include_dashboard=False)
    except _NO_ANSWER as error:
        raise EngineError(f"no Ray cluster at ray={address!r}: {_in_short(error)}") from error


def _reach(address: str) -> None:
    host, _, port = address.rpartition(":")
    if not (host and port.isdecimal()) or "://" in address:
        raise InvalidRequest.of("ray", address, '"auto" or HOST:PORT of the head node')
    try:
        socket.create_connection((host, int(port)), timeout=REACH_S).close()
    except OSError as error:
        raise EngineError(f"no Ray cluster at ray={address!r}: {error}") from error


def _in_short(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).strip()}"[:500]


def _free_port(host: str) -> int:
    """One that nobody has now; who loses the race for it ends, and is started anew."""
    with socket.create_server((host, 0)) as server:
        return int(server.getsockname()[1])
