"""Many clients that stream at a time: errors, time to first event, the API process's CPU a token.

A real `stemma serve` on the embedded model, and clients in a process of their own. `--latency` asks
instead what HTTP and ZeroMQ add to one small request, `--hostile` what bodies that are as costly as
they may be do to others. CPU is of each process by itself; the three
share the machine's cores, so tokens a second say little of a server whose clients are elsewhere.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from ...errors import EngineError
from ...flags import count
from ..harness.report import write_report
from .http_load.server import MeasuredServer, UseMeter
from .http_load.stream_clients import Findings, Plan

TARGET_CPU_US = 150.0  # of the API process, a token
ROUTES = ("completions", "chat")


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Flags: how many clients, and their requests."""
    add = parser.add_argument
    add("--clients", type=count, default=1000, metavar="N", help="at a time (default: %(default)s)")
    add("--requests", type=count, default=2000, metavar="N", help="of all (default: %(default)s)")
    add("--tokens", type=count, default=64, metavar="N", help="a stream (default: %(default)s)")
    add("--routes", nargs="+", choices=ROUTES, default=ROUTES, help="default: all of them")
    add("--stuck-s", type=float, default=60.0, metavar="S", help="silence that counts as stuck")
    add("--latency", action="store_true", help="what HTTP and ZeroMQ add to one request")
    add("--hostile", action="store_true", help="how late the event loop is under large bodies")
    add(
        "--repeats",
        type=count,
        default=200,
        metavar="N",
        help="with --latency or --hostile: requests of each",
    )
    add("--serve-flags", nargs=argparse.REMAINDER, default=[], help="the rest goes to the server")


def run(args: argparse.Namespace) -> int:
    """Measure and report."""
    if args.latency:
        from .http_load.overhead import measure

        with MeasuredServer(args.serve_flags) as server:
            write_report("load-latency", measure(server, args.repeats), args)
        return 0
    if args.hostile:
        from .http_load.hostile_bodies import measure as measure_hostile

        with MeasuredServer(args.serve_flags) as server:
            write_report("load-hostile", measure_hostile(server, args.repeats), args)
        return 0
    rows = [_measured(route, args) for route in args.routes]
    write_report("load", rows, args, shown=_shown(rows))
    for row in rows:
        for error in row["errors"]:
            print(f"{row['route']}: {error}", file=sys.stderr)
    return 1 if any(row["num_errors"] or row["num_stuck"] for row in rows) else 0


def _measured(route: str, args: argparse.Namespace) -> dict[str, Any]:
    """One route on its own server, after a few requests that trigger one-time loading."""
    with MeasuredServer(args.serve_flags) as server:
        path = "/v1/completions" if route == "completions" else "/v1/chat/completions"
        bodies = [_body(route, number, args.tokens) for number in range(256)]
        plan = Plan("127.0.0.1", server.port, path, bodies, 8, 16, args.stuck_s)
        _clients(plan)
        plan = Plan(plan.host, plan.port, path, bodies, args.clients, args.requests, args.stuck_s)
        with UseMeter(server) as use:
            found = _clients(plan)
        tokens = max(1, found.num_tokens)
        cpu_us = use.api_cpu_s / tokens * 1e6
        return {
            "route": route,
            "clients": args.clients,
            **asdict(found),
            "tokens_per_s": found.num_tokens / found.wall_s,
            "api_cpu_us": cpu_us,
            "target_cpu_us": TARGET_CPU_US,
            "share_of_target": cpu_us / TARGET_CPU_US,
            "engine_cpu_us": use.engine_cpu_s / tokens * 1e6,
            "client_cpu_us": found.client_cpu_s / tokens * 1e6,
            "api_peak_rss_mb": use.peak_rss_mb,
            "api_max_descriptors": use.max_descriptors,
        }


def _shown(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The table: a row per figure, a column per route."""
    return [
        {"figure": shown, **{row["route"]: row[name] for row in rows}}
        for name, shown in _FIGURES.items()
    ]


_FIGURES = {
    "num_ended": "streams that ended well",
    "num_errors": "errors",
    "num_stuck": "stuck",
    "num_tokens": "tokens",
    "num_events": "events",
    "tokens_per_s": "tokens/s",
    "first_event_p50_ms": "first event p50, ms",
    "first_event_p99_ms": "first event p99, ms",
    "gap_p50_ms": "gap p50, ms",
    "gap_p99_ms": "gap p99, ms",
    "gap_max_ms": "gap max, ms",
    "api_cpu_us": "API CPU, us/token",
    "share_of_target": "share of target",
    "engine_cpu_us": "engine CPU, us/token",
    "client_cpu_us": "client CPU, us/token",
    "api_peak_rss_mb": "API peak RSS, MB",
    "api_max_descriptors": "API descriptors, most",
}


def _body(route: str, number: int, num_tokens: int) -> str:
    """Prompts differ, so that prefill is real; outputs run to max_tokens."""
    text = f"Story {number}: Once upon a time there was a house by the sea."
    asked: dict[str, Any] = (
        {"prompt": text}
        if route == "completions"
        else {"messages": [{"role": "user", "content": text}]}
    )
    options = {"max_tokens": num_tokens, "ignore_eos": True, "temperature": 1.0, "stream": True}
    return json.dumps({**asked, **options, "stream_options": {"include_usage": True}})


def _clients(plan: Plan) -> Findings:
    """Raises EngineError where the clients' process fails."""
    command = [sys.executable, "-P", "-m", "stemma.bench.serving.http_load.stream_clients"]
    ran = subprocess.run(
        command, input=json.dumps(asdict(plan)), stdout=subprocess.PIPE, text=True, check=False
    )
    if ran.returncode:
        raise EngineError(f"the clients' process ended with status {ran.returncode}")
    return Findings(**json.loads(ran.stdout))
