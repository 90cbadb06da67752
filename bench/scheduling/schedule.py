"""Scheduling policies on seeded traces: the real scheduler and tree, a modelled device.

Prints for each trace and policy what callers see (time to first token, time a token, goodput under
an objective), what the cache gave against one that never evicts, and what the planner cost. With
--chunking: the decoders' inter-token latency while a long prompt arrives among them. Deterministic
for a seed, but for the host's microseconds (CPU time).
"""

from __future__ import annotations

import argparse
from array import array
from collections.abc import Iterable
from dataclasses import replace
from itertools import pairwise

from ...errors import InvalidRequest
from ...flags import count
from ...planning.simulation import DEVICES, CallRecord, Device, Simulation
from ...planning.traces import TRACES, Call, Start, single
from ..harness.report import percentile, write_report

POLICIES = (
    "fcfs",
    "lpm",
    "lpm without aging",
    "dfs-weight",
    "priority",
    "sjf",
    "program",
    "program with leases",
)
NO_AGING = " without aging"
WITH_LEASES = " with leases"  # and given each call's program
UNLIMITED = 1 << 20
CHUNK_BUDGETS = (UNLIMITED, 2048, 512, 128, 64, 32)
PROMPT_TOKENS = 4096
DECODER_TOKENS = 512


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Flags of `stemma bench schedule`."""
    parser.add_argument("--device", choices=[*DEVICES], default="h200", help="what is modelled")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--scale", type=float, default=1.0, help="length of the traces")
    parser.add_argument("--page-size", type=count, default=1, metavar="N")
    parser.add_argument("--trace", choices=[*TRACES], action="append", help="default: all")
    parser.add_argument("--policy", choices=POLICIES, action="append", help="default: all")
    parser.add_argument("--chunking", action="store_true", help="the rows on chunked prefill")


def run(args: argparse.Namespace) -> int:
    """Simulate and report."""
    if args.scale <= 0:
        raise InvalidRequest.of("scale", args.scale, "a number above 0")
    device = DEVICES[args.device]
    if args.chunking:
        write_report("schedule-chunking", chunking_rows(device), args)
        return 0
    rows = [
        row_of(device, trace, policy, args.seed, args.scale, args.page_size)
        for trace in args.trace or TRACES
        for policy in args.policy or POLICIES
    ]
    write_report("schedule", rows, args)
    return 0


def row_of(
    device: Device, trace: str, policy: str, seed: int, scale: float, page_size: int
) -> dict[str, object]:
    """One policy on one trace."""
    load = device.loads[trace]
    if load.num_tokens is not None:
        device = replace(device, num_tokens=load.num_tokens)
    has_leases = policy.endswith(WITH_LEASES)
    simulation = Simulation(
        device,
        policy=policy.removesuffix(NO_AGING).removesuffix(WITH_LEASES),
        max_overtakes=None if policy.endswith(NO_AGING) else 128,
        page_size=page_size,
        seed=seed,
        has_programs=has_leases,
        has_leases=has_leases,
    )
    simulation.run(TRACES[trace](seed, max(1, int(load.num_requests * scale)), load.rate))
    records, stats = simulation.records, simulation.engine.scheduler.stats
    is_good = [r.ttft_s <= device.slo_ttft_s and r.tpot_s <= device.slo_tpot_s for r in records]
    cold = [r.ttft_s for r in records if r.call.is_cold]
    ends = [job.ended_s - job.started_s for job in simulation.jobs]
    num, seconds = len(records), simulation.now_s
    return {
        "trace": trace,
        "policy": policy,
        "requests": num,
        "req/s": num / seconds,
        "tokens/s": stats.num_generated_tokens / seconds,
        "ttft p50 ms": _percentile_ms((r.ttft_s for r in records), 50),
        "ttft p99 ms": _percentile_ms((r.ttft_s for r in records), 99),
        "tpot p50 ms": _percentile_ms((r.tpot_s for r in records), 50),
        "tpot p99 ms": _percentile_ms((r.tpot_s for r in records), 99),
        "goodput req/s": sum(is_good) / seconds,
        "hit rate": stats.num_cached_tokens / stats.num_prompt_tokens,
        "optimum": simulation.num_optimal_tokens / stats.num_prompt_tokens,
        "recomputed": simulation.num_optimal_tokens - stats.num_cached_tokens,
        "total s": seconds,
        "program mean s": sum(ends) / len(ends),
        "program max s": max(ends),
        "preempted %": 100 * stats.num_preemptions / num,
        "cold ttft p99 ms": _percentile_ms(cold, 99) if cold else None,
        "host us/req": simulation.host_s * 1e6 / num,
        "host us/step": simulation.host_s * 1e6 / stats.num_steps,
    }


def chunking_rows(device: Device) -> list[dict[str, object]]:
    """A prompt of 4,096 tokens arrives among 16 decoding requests, for several token budgets."""
    device = replace(device, num_tokens=65_536)
    alone = _inter_token_s(device, 2048, with_prompt=False)[0]
    rows = []
    for budget in CHUNK_BUDGETS:
        latencies, while_computed, ttft_s = _inter_token_s(device, budget, with_prompt=True)
        p99, p99_alone = _percentile_ms(latencies, 99), _percentile_ms(alone, 99)
        p99_while = _percentile_ms(while_computed, 99)
        rows.append(
            {
                "device": device.name,
                "chunking": "off" if budget == UNLIMITED else f"{budget} tokens",
                "itl p99 ms": p99,
                "itl max ms": _percentile_ms(latencies, 100),
                "itl p99 while the prompt runs, ms": p99_while,
                "itl p99 without the prompt, ms": p99_alone,
                "ratio": p99 / p99_alone,
                "ratio while it runs": p99_while / p99_alone,
                "prompt's ttft ms": ttft_s * 1000,
            }
        )
    return rows


def _inter_token_s(
    device: Device, budget: int, *, with_prompt: bool
) -> tuple[list[float], list[float], float]:
    """Seconds between decoders' tokens, those that end while the prompt runs, the prompt's TTFT."""
    simulation = Simulation(device, token_budget=budget)
    decoders = [Call(array("i", [n] * 64), DECODER_TOKENS, DECODER_TOKENS, "") for n in range(16)]
    starts = [Start(0.0, single(call)) for call in decoders]
    if with_prompt:
        prompt = array("i", range(PROMPT_TOKENS))
        starts.append(Start(1.0, single(Call(prompt, 1, 1, ""))))
    simulation.run(starts)
    chunked = [r for r in simulation.records if len(r.call.prompt) == PROMPT_TOKENS]
    begin = min((r.arrived_s for r in chunked), default=0.0)
    end = max((r.token_times_s[0] for r in chunked), default=0.0)
    pairs = [pair for r in simulation.records if r not in chunked for pair in _gaps(r)]
    latencies = [after - before for before, after in pairs]
    during = [after - before for before, after in pairs if begin < after <= end]
    return latencies, during, end - begin


def _gaps(record: CallRecord) -> Iterable[tuple[float, float]]:
    return pairwise(record.token_times_s)


def _percentile_ms(seconds: Iterable[float], percent: int) -> float:
    return 1000 * percentile(sorted(seconds), percent)
