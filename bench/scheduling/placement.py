"""Placement policies over many simulated engines: the real scheduler and tree of each, a modelled
device, the router's own policies.

`wall s` is the time until the last program has ended, `ratio` the one of the first policy of the
trace (round robin) through it; `program mean s` how long a program takes. Policies that end in
"a call" place each call by itself, as routers that do not know programs do: `sglang` is what
SGLang's router does by default ("cache_aware"), `ray` Ray Serve's PrefixCacheAffinityRouter. Both
know what they have sent, not what is cached. `one cache` is one engine with the KV and the speed of
all of them together: the hit rate that none can exceed. `router us/call` and `decisions/s` are CPU
time of deciding, matching texts included, and of keeping what was decided.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace

from ...cluster.placement.policies import Candidate, Newcomer, least_load, policy_of
from ...flags import count
from ...planning.fleet_simulation import FleetSimulation, Routing
from ...planning.simulated_engine import SimulatedEngine
from ...planning.simulation import DEVICES, Device
from ...planning.traces import TRACES
from ..harness.report import write_report

# As of Ray 2.50, `PrefixCacheAffinityRouter`: apart in queue lengths, and the least share matched.
_RAY_APART, _RAY_SHARE = 10, 0.1
HIT_HEAVY = ("programs", "chats", "documents", "flood", "react", "long_agents", "forks")
ROUTINGS: dict[str, Routing] = {
    "round_robin": Routing(lambda: policy_of("round_robin")),
    "least_load": Routing(lambda: policy_of("least_load")),
    "consistent_hash": Routing(lambda: policy_of("consistent_hash")),
    "prefix": Routing(lambda: policy_of("prefix")),
    "program": Routing(lambda: policy_of("program")),
    "program, moves": Routing(lambda: policy_of("program"), moves=True),
    "round_robin a call": Routing(lambda: policy_of("round_robin"), by_call=True),
    "prefix a call": Routing(lambda: policy_of("prefix"), by_call=True),
    "sglang a call": Routing(lambda: policy_of("prefix"), by_call=True, knows_caches=False),
    "ray a call": Routing(lambda: ray_prefix, by_call=True, knows_caches=False),
}


def ray_prefix(newcomer: Newcomer, candidates: Sequence[Candidate]) -> Candidate:
    """Where queues are alike the replica with the longest match, else the emptiest queue."""
    loads = [each.num_calls for each in candidates]
    if max(loads) - min(loads) > _RAY_APART:
        return least_load(newcomer, candidates)
    best = max(candidates, key=lambda each: newcomer.cached.get(each.number, 0.0))
    if newcomer.cached.get(best.number, 0.0) >= _RAY_SHARE * newcomer.num_tokens:
        return best
    return max(candidates, key=lambda each: (each.room_tokens, -each.number))


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Flags of `stemma bench placement`."""
    add = parser.add_argument
    add("--device", choices=[*DEVICES], default="cpu", help="what each engine is modelled on")
    add("--replicas", type=count, nargs="+", default=[2, 8], metavar="N")
    add("--trace", choices=[*TRACES], action="append", help="default: those that share prefixes")
    add("--policy", choices=[*ROUTINGS], action="append", help="default: all")
    add("--scale", type=float, default=1.0, help="programs of a replica")
    add("--joins-s", type=float, default=0.0, help="when the last replica begins to take programs")
    add("--seed", type=int, default=0)


def run(args: argparse.Namespace) -> int:
    """Simulate and report."""
    device = DEVICES[args.device]
    rows = [
        row
        for num_replicas in args.replicas
        for trace in args.trace or HIT_HEAVY
        for row in _rows(device, trace, num_replicas, args)
    ]
    write_report("placement", rows, args)
    return 0


def _rows(
    device: Device, trace: str, num_replicas: int, args: argparse.Namespace
) -> list[dict[str, object]]:
    load = device.loads[trace]
    device = replace(device, num_tokens=load.num_tokens or device.num_tokens)
    num_requests = max(1, int(load.num_requests * args.scale * num_replicas))
    names = args.policy or [*ROUTINGS]
    rows: list[dict[str, object]] = []
    first_s = 0.0
    for name in (*names, "one cache"):
        fleet = _fleet(device, name, num_replicas, args)
        fleet.run(TRACES[trace](args.seed, num_requests, load.rate * num_replicas))
        wall_s, ends = fleet.now_s, [job.ended_s - job.started_s for job in fleet.jobs]
        first_s = first_s or wall_s
        rows.append(
            {
                "replicas": num_replicas,
                "trace": trace,
                "policy": name,
                "wall s": wall_s,
                "ratio": first_s / wall_s,
                "program mean s": sum(ends) / len(ends),
                "program p99 s": sorted(ends)[int(0.99 * (len(ends) - 1))],
                "hit rate": fleet.hit_rate,
                "moved": fleet.num_moved,
                "router us/call": 1e6 * fleet.router_s / max(1, fleet.num_calls),
                "decisions/s": fleet.num_placed / max(1e-9, fleet.router_s),
            }
        )
    return rows


def _fleet(
    device: Device, name: str, num_replicas: int, args: argparse.Namespace
) -> FleetSimulation:
    if name != "one cache":
        routing, joins_s = ROUTINGS[name], args.joins_s
        engines = [SimulatedEngine(device)] * num_replicas
        return FleetSimulation(engines, routing, seed=args.seed, joins_s=joins_s)
    whole = replace(
        device,
        num_tokens=device.num_tokens * num_replicas,
        max_running_requests=device.max_running_requests * num_replicas,
        prefill_token_ms=device.prefill_token_ms / num_replicas,
        decode_row_ms=device.decode_row_ms / num_replicas,
        prefill_pair_ms=device.prefill_pair_ms / num_replicas,
        decode_pair_ms=device.decode_pair_ms / num_replicas,
    )
    return FleetSimulation([SimulatedEngine(whole)], ROUTINGS["round_robin"], seed=args.seed)
