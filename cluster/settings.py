"""How many engines there are, where they run, and who decides which one a program runs on."""

from __future__ import annotations

from dataclasses import dataclass

from ..errors import InvalidRequest
from ..flags import flag, integer, misfits, number
from ..frontend.protocol.keys import ClientKeys, client_keys
from .placement.policies import DEFAULT_PLACEMENT, PLACEMENTS

MAX_REPLICAS = 256


@dataclass(frozen=True, slots=True)
class ClusterSettings:
    """Of one router. Raises InvalidRequest for values out of range."""

    replicas: int = flag(
        1, "engines of this machine, behind one address; they share its cores and memory",
        integer(1, MAX_REPLICAS), heading="Many engines", metavar="N",
    )  # fmt: skip
    prefill_replicas: int | None = flag(
        None, "of --replicas: so many compute long prompts for the others, which run the programs; "
        "0: none yet, as roles can be changed (default: no replica has a role)",
        integer(0, MAX_REPLICAS - 1), metavar="N",
    )  # fmt: skip
    max_replicas: int | None = flag(
        None, "so many while there is enough to do for them, --replicas at least",
        integer(1, MAX_REPLICAS), metavar="N",
    )  # fmt: skip
    target_calls: float | None = flag(
        None, "with --max-replicas: calls that a replica is to have in flight (default: half of "
        "--max-running-requests)", number(0.1, 1e6),
    )  # fmt: skip
    scale_up_s: float = flag(
        30.0, "with --max-replicas: another one once it was wanted for so long",
        number(0.0, 86_400.0), metavar="SECONDS",
    )  # fmt: skip
    scale_down_s: float = flag(
        600.0, "with --max-replicas: one fewer once it was not wanted for so long",
        number(0.0, 86_400.0), metavar="SECONDS",
    )  # fmt: skip
    placement: str = flag(DEFAULT_PLACEMENT, "which engine a program runs on", choices=PLACEMENTS)
    engines: tuple[str, ...] = flag(
        (), "instead: engines that run already, each at tcp://HOST:PORT or ipc://PATH",
        action="extend", nargs="+", metavar="ADDRESS",
    )  # fmt: skip
    engines_server_key: str | None = flag(
        None, "with --engines tcp://...: their public key, of all of them", metavar="FILE"
    )
    engines_client_key: str | None = flag(
        None, "with --engines tcp://...: the secret key with which they know this router",
        metavar="FILE",
    )  # fmt: skip
    ray: str | None = flag(
        None, 'not on this machine but on the Ray cluster at this address; "auto": on the one that '
        "runs here, else a new one", heading="Many engines: Ray", metavar="ADDRESS",
    )  # fmt: skip
    ray_cpus: float | None = flag(
        None, "cores of a replica, as many as it has threads (default: --num-threads, else 1)",
        number(0.1, 4096.0),
    )  # fmt: skip
    ray_gpus: float | None = flag(
        None, "GPUs of a replica (default: 1 where --device is one)",
        number(0.0, 64.0),
    )  # fmt: skip

    def __post_init__(self) -> None:
        """Check each value."""
        for misfit in misfits(self):
            raise InvalidRequest.of(*misfit)
        if self.most < self.replicas:
            raise InvalidRequest.of(
                "max_replicas", self.most, f"--replicas ({self.replicas}) or more"
            )
        if self.prefill_replicas is not None:
            self._check_prefill_replicas(self.prefill_replicas)
        if self.engines and self.most > 1:
            name = "replicas" if self.replicas > 1 else "max_replicas"
            raise InvalidRequest.of(name, self.most, "1 with engines that run already")
        if self.engines and self.ray is not None:
            raise InvalidRequest.of("ray", self.ray, "none with engines that run already")
        if len(set(self.engines)) < len(self.engines):
            raise InvalidRequest.of("engines", list(self.engines), "each address once")
        for endpoint in self.engines:
            if not endpoint.startswith(("tcp://", "ipc://")):
                allowed = "addresses as tcp://HOST:PORT or ipc://PATH"
                raise InvalidRequest.of("engines", endpoint, allowed)
            self.keys_for(endpoint)

    def _check_prefill_replicas(self, number: int) -> None:
        """Raises InvalidRequest."""
        if self.max_replicas is not None or self.engines or self.ray is not None:
            allowed = "none with max_replicas, engines or ray: engines of this machine have roles"
            raise InvalidRequest.of("prefill_replicas", number, allowed)
        if number >= self.replicas:
            allowed = f"fewer than --replicas ({self.replicas}): some run the programs"
            raise InvalidRequest.of("prefill_replicas", number, allowed)

    @property
    def most(self) -> int:
        """Replicas that there ever are."""
        return self.replicas if self.max_replicas is None else self.max_replicas

    @property
    def is_many(self) -> bool:
        """Whether there is a router at all."""
        return self.most > 1 or bool(self.engines) or self.ray is not None

    def keys_for(self, endpoint: str) -> ClientKeys | None:
        """To connect to an engine. Raises InvalidRequest for keys that are missing or none."""
        server, client = self.engines_server_key, self.engines_client_key
        if endpoint.startswith("ipc://"):
            server = client = None
        try:
            return client_keys(endpoint, server, client)
        except InvalidRequest as error:
            raise InvalidRequest(
                f"{error} (--engines-server-key, --engines-client-key)", "engines"
            ) from error
