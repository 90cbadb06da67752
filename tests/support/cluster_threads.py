"""A router over several whole engines, all in threads of the test's process."""

from __future__ import annotations

import random
import threading
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import zmq
from engine_thread import load
from waiting import PATIENCE_S, wait_until

from stemma.cluster.placement.spread import Spread, spread
from stemma.cluster.replica import Replica, ReplicaState
from stemma.cluster.router import Router
from stemma.cluster.scaling import Scaler, Scaling
from stemma.frontend.client.backend import Backend
from stemma.frontend.client.client import Connection
from stemma.frontend.protocol.program_log import MAX_LOST
from stemma.runtime.config import EngineConfig, Role
from stemma.runtime.gateway.gateway import Gateway

EXACT = {"dtype": "float64", "kernels": "reference", "max_model_len": 400, "speculate": "off"}


class EngineThread:
    """A `Started` engine; its `peer` too."""

    def __init__(self, config: EngineConfig, context: zmq.Context[zmq.Socket[bytes]]) -> None:
        self.keys = None
        self.endpoint = f"inproc://{uuid.uuid4()}"
        self.loaded = load(config)
        self.gateway = Gateway(self.loaded, [self.endpoint], context=context)
        self.is_killed = False
        self._thread = threading.Thread(target=self.gateway.run, daemon=True)
        self._thread.start()

    @property
    def peer(self) -> EngineThread:
        return self

    def death(self) -> str | None:
        return "the engine's thread was killed" if self.is_killed else None

    def is_stopped(self) -> bool:
        return False

    def kill(self) -> None:
        """It says no more, as a process that was killed."""
        self.gateway._host.say_farewell = lambda: None  # type: ignore[method-assign]
        self.gateway._host.send_events = lambda: None  # type: ignore[method-assign]
        self.is_killed = True
        self.gateway.stop()

    def stop(self) -> None:
        self.gateway.stop()
        self._thread.join(PATIENCE_S)
        assert not self._thread.is_alive()

    def assert_nothing_held(self) -> None:
        """No page is lost; nothing runs."""
        kv_cache = self.loaded.engine.scheduler.kv_cache
        wait_until(lambda: not self.loaded.engine.has_work)
        clients = self.gateway._host.clients.by_session
        wait_until(lambda: not any(client.programs for client in list(clients.values())))
        free = kv_cache.allocator.num_free + kv_cache.tree.num_pages
        assert free == kv_cache.num_pages, "a page was lost"


class Cluster:
    """A running router, and what a test does to it."""

    def __init__(
        self,
        checkpoint: Path,
        num_replicas: int,
        placement: str,
        scaler: Scaler | None = None,
        endpoint: str = "inproc://cluster",
        spread: Spread = spread,
        prefill_endpoints: Sequence[str] = (),
        num_prefill: int = 0,
        **options: Any,
    ) -> None:
        """`prefill_endpoints`: of all replicas, the last `num_prefill` of which compute prompts for
        the others."""
        self._endpoints, self._num_prefill = prefill_endpoints, num_prefill
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.endpoint = endpoint
        self._spread = spread
        self._config = EngineConfig(model=checkpoint, **(EXACT | options))
        self._num_replicas, self._placement, self._scaler = num_replicas, placement, scaler
        self.engines: dict[int, EngineThread] = {}
        self._begin()

    def _begin(self) -> None:
        scaling = None if self._scaler is None else Scaling(self._scaler, self._hire, None)
        replicas = [self._hire(number) for number in range(self._num_replicas)]
        self.router = Router(
            replicas, placement=self._placement, scaling=scaling, spread=self._spread
        )
        self.replicas = self.router._replicas
        self.router.start()
        self.router.listen([self.endpoint], context=self.context)
        self._thread = threading.Thread(target=self.router.run, daemon=True)
        self._thread.start()

    def _hire(self, number: int) -> Replica:
        role: Role | None = None
        if self._endpoints:
            role = "prefill" if number >= len(self._endpoints) - self._num_prefill else "decode"

        def start() -> EngineThread:
            config = self._config
            if replica.role is not None:
                others = tuple(e for n, e in enumerate(self._endpoints) if n != number)
                config = replace(
                    config,
                    role=replica.role,
                    prefill_endpoint=self._endpoints[number],
                    prefill_engines=others,
                )
            return self._start(number, config)

        replica = Replica(number, start, context=self.context, connect_s=PATIENCE_S, role=role)
        return replica

    def _start(self, number: int, config: EngineConfig) -> EngineThread:
        self.engines[number] = engine = EngineThread(config, self.context)
        return engine

    def connect(self, **options: Any) -> Backend:
        """Another client."""
        return Backend(Connection(self.endpoint, context=self.context, **options))

    def kill(self, number: int) -> None:
        """End a replica as a crash would; it is started again."""
        self.engines[number].kill()

    def restart(self, number: int) -> None:
        """Have a replica started anew as an operator does; its programs go on elsewhere."""
        before = self.engines[number]
        operator = self.connect()
        operator._channel.call("restart_replica", replica=number)
        operator.shutdown()
        wait_until(lambda: self.engines[number] is not before)

    def wait_lost(self, number: int) -> None:
        """Until the router has seen that one killed by `kill` is gone."""
        killed = self.engines[number]
        wait_until(lambda: self.engines[number] is not killed)

    def wait_ready(self) -> None:
        """Until all replicas are."""
        wait_until(lambda: all(r.state is ReplicaState.READY for r in self.replicas))

    def end_at_random(self, rng: random.Random, is_over: threading.Event) -> None:
        """One engine after the other while there is something to do, so that there always is one;
        fewer than a program may lose. Some are killed, and some told to leave."""
        wait_until(lambda: is_over.is_set() or any(r.programs for r in self.replicas))
        for _ in range(MAX_LOST - 1):
            number = rng.randrange(len(self.replicas))
            if rng.random() < 0.5:
                self.restart(number)
            else:
                self.kill(number)
                self.wait_lost(number)
            self.wait_ready()
            if is_over.wait(rng.uniform(0.0, 0.3)):
                return

    def replace_router(self) -> None:
        """End the router as a crash would, and its engines; another one takes its place."""
        host = self.router._host
        assert host is not None
        host.say_farewell = lambda: None  # type: ignore[method-assign]
        self.close()
        self._begin()

    def close(self) -> None:
        self.router.stop()
        self._thread.join(PATIENCE_S)
        assert not self._thread.is_alive()


@contextmanager
def clustered(
    checkpoint: Path, num_replicas: int = 2, placement: str = "program", **options: Any
) -> Iterator[tuple[Cluster, Backend]]:
    """Serves within the block; no page is lost on any replica that lives."""
    cluster = Cluster(checkpoint, num_replicas, placement, **options)
    backend = cluster.connect()
    try:
        yield cluster, backend
        cluster.wait_ready()
        for engine in (each for each in cluster.engines.values() if not each.is_killed):
            engine.assert_nothing_held()
    finally:
        backend.shutdown()
        cluster.close()
