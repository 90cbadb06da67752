"""`stemma_replica_*`: what a router of several engines reports of each (docs/serve/metrics.md).

Names of their own, beside the sums of all: a sum over `stemma_requests_running` counts each once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from .samples import Figure, kv_states, of, stat

Report = Mapping[str, Any]  # of one replica: its place in `replicas` of the `metrics` call

STATES = ("starting", "ready", "stopped", "leaving", "lost")
ROLES = ("both", "prefill", "decode")

OF_ROUTER = (
    Figure("stemma_replica_calls_in_flight", "Calls that it has not answered.", of("num_calls")),
    Figure("stemma_replica_programs_running", "Programs that run there.", of("num_programs")),
    Figure("stemma_replica_restarts", "Times that it was started anew.",
           of("num_restarts"), "counter"),
    Figure("stemma_replica_losses", "Times that it ended, or did not answer, unasked.",
           of("num_losses"), "counter"),
    Figure("stemma_replica_programs_placed", "Programs that were given to it.",
           of("programs", "num_placed"), "counter"),
    Figure("stemma_replica_programs_moved", "Programs taken from it while it ran.",
           of("programs", "num_moved"), "counter"),
    Figure("stemma_replica_programs_lost", "Programs that it had when it ended.",
           of("programs", "num_lost"), "counter"),
    Figure("stemma_replica_programs_rehoused", "Programs that others had lost, given to it.",
           of("programs", "num_rehoused"), "counter"),
)  # fmt: skip

OF_ENGINE = (
    Figure("stemma_replica_requests_running", "In its running batch.", of("num_running")),
    Figure("stemma_replica_requests_waiting", "In its queue.", of("num_waiting")),
)

COUNTED = (
    Figure("stemma_replica_prompt_tokens", "Prompt tokens.",
           stat("num_prompt_tokens"), "counter"),
    Figure("stemma_replica_cached_prompt_tokens", "Of these: from its cache.",
           stat("num_cached_tokens"), "counter"),
    Figure("stemma_replica_computed_tokens", "Tokens that went through its model.",
           stat("num_computed_tokens"), "counter"),
    Figure("stemma_replica_generated_tokens", "Output tokens.",
           stat("num_generated_tokens"), "counter"),
)  # fmt: skip


def fleet_families(replicas: Sequence[Report]) -> Iterator[Metric]:
    """All figures of all replicas. Of one that does not answer those are missing that only its
    engine knows; its counters stay."""
    if not replicas:
        return
    yield _by(replicas, "stemma_replica_state", "1 for the state in which it is.", _state, "state")
    with_roles = [replica for replica in replicas if replica.get("role") is not None]
    if with_roles:
        yield _by(with_roles, "stemma_replica_role", "1 for the role that it has.", _role, "role")
    yield from _figures(OF_ROUTER, replicas)
    answering = [replica for replica in replicas if replica.get("total_tokens") is not None]
    yield from _figures(OF_ENGINE, answering)
    text = "Its room for KV, in tokens, by state."
    yield _by(answering, "stemma_replica_kv_tokens", text, kv_states, "state")
    yield from _figures(COUNTED, [each for each in replicas if each.get("stats") is not None])


def _figures(figures: Sequence[Figure], replicas: Sequence[Report]) -> Iterator[Metric]:
    for figure in figures:
        family = GaugeMetricFamily if figure.kind == "gauge" else CounterMetricFamily
        metric = family(figure.name, figure.text, labels=["replica"])
        for replica in replicas:
            metric.add_metric([str(replica["replica"])], figure.of(replica))
        yield metric


def _state(replica: Report) -> dict[str, float]:
    return {state: float(replica["state"] == state) for state in STATES}


def _role(replica: Report) -> dict[str, float]:
    return {role: float(replica["role"] == role) for role in ROLES}


def _by(
    replicas: Sequence[Report],
    name: str,
    text: str,
    of: Callable[[Report], Mapping[str, float]],
    label: str,
) -> Metric:
    metric = GaugeMetricFamily(name, text, labels=["replica", label])
    for replica in replicas:
        for value, number in of(replica).items():
            metric.add_metric([str(replica["replica"]), value], number)
    return metric
