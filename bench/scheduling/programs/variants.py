"""Ways to run the engine that the benchmark holds against each other."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ....errors import InvalidRequest
from ....runtime.config import EngineConfig

BASE = "program"
HOST = "program, host tier"
VLLM = "vllm"
POLICIES = ("fcfs", "lpm", "dfs-weight")
MIXED_BATCH = 8  # requests: see docs/measure/programs.md


@dataclass(frozen=True, slots=True)
class Variant:
    """The engine with certain options."""

    name: str
    options: Mapping[str, object]

    def reason_against(self) -> str | None:
        """Why this engine does not support it, or None."""
        try:
            EngineConfig(**self.options)  # type: ignore[arg-type]
        except InvalidRequest as error:
            return str(error)
        return None


def react_variants(working_set: int) -> list[Variant]:
    """The policy for programs with leases, without and with a host tier that holds everything; the
    other policies without leases."""
    own: dict[str, object] = {"schedule_policy": "program"}
    return [
        Variant(BASE, own),
        Variant(HOST, {**own, "host_kv_tokens": working_set}),
        *(Variant(p, {"schedule_policy": p, "disable_leases": True}) for p in POLICIES),
    ]


def mixed_variants() -> list[Variant]:
    """The policy for programs and first come, first served."""
    return [
        Variant(name, {"schedule_policy": name, "max_running_requests": MIXED_BATCH})
        for name in (BASE, "fcfs")
    ]
