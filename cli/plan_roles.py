"""How `stemma plan --engines N` divides engines: which of them compute prompts for the others.

The load's calls arrive at random (planning/roles.py) instead of one a client at a time.
"""

from __future__ import annotations

import argparse
from typing import Any

from ..errors import InvalidRequest
from ..planning.devices import GPUS, links_of
from ..planning.mixes import workload
from ..planning.roles import (
    Fleet,
    Layout,
    Limits,
    RoughTimes,
    Search,
    layouts,
)
from ..planning.roofline import CostModel
from ..planning.roofline_device import RooflineDevice

_MAX_ENGINES = 16
# A run, at least, in times of a call alone, and of the limit: until a queue that grows exceeds it.
_TIMES_LONG = 6.0
_NUM_CALLS = 240  # of a run, about


def add_roles_flags(parser: argparse.ArgumentParser) -> None:
    """The flags that ask for it."""
    add = parser.add_argument
    add(
        "--engines",
        type=int,
        default=1,
        metavar="N",
        help="so many of these behind a router: also find how many should compute prompts for the "
        "others, by the largest rate of calls within the two limits (default: %(default)s)",
    )
    add(
        "--ttft-ms",
        type=float,
        default=1000.0,
        metavar="MS",
        help="with --engines: limit of a call's time to first token (default: %(default)g)",
    )
    add(
        "--tpot-ms",
        type=float,
        default=30.0,
        metavar="MS",
        help="with --engines: limit of its mean time per further token (default: %(default)g)",
    )
    add(
        "--good-share",
        type=float,
        default=0.9,
        metavar="SHARE",
        help="with --engines or --fleet: of calls, that are to be good (default: %(default)g)",
    )


def check_roles(args: argparse.Namespace) -> None:
    """Raises InvalidRequest."""
    if not 1 <= args.engines <= _MAX_ENGINES:
        raise InvalidRequest.of("engines", args.engines, f"an integer in [1, {_MAX_ENGINES}]")
    for name in ("ttft_ms", "tpot_ms"):
        if not getattr(args, name) > 0:
            raise InvalidRequest.of(name, getattr(args, name), "a number > 0")
    if not 0 < args.good_share <= 1:
        raise InvalidRequest.of("good_share", args.good_share, "a number in (0, 1]")


def plan_roles(args: argparse.Namespace, costs: CostModel) -> list[dict[str, Any]]:
    """A row for each way to use the engines. Recurrent states are not sent, so that models with
    any have no roles."""
    if args.engines == 1 or costs.model.state_bytes:
        return []
    is_gpu = args.device in GPUS
    memory_bytes = costs.device.memory_bytes // (1 if is_gpu else args.engines)
    fit = costs.model.fit(
        memory_bytes, is_gpu=is_gpu, max_running_requests=args.max_running_requests
    )
    enough = 4 * args.max_running_requests * (args.prompt_tokens + args.output_tokens)
    kv_tokens = min(fit.kv_tokens, enough)  # more would change nothing but the time to plan
    device = RooflineDevice(costs, kv_tokens, args.max_running_requests)
    fleet = Fleet(device, args.engines, next(iter(links_of(costs.device).values())))
    limits = Limits(args.ttft_ms / 1e3, args.tpot_ms / 1e3)
    return [_row(args, fleet, layout, limits) for layout in layouts(args.engines)]


def _row(args: argparse.Namespace, fleet: Fleet, layout: Layout, limits: Limits) -> dict[str, Any]:
    rough = RoughTimes.of(fleet.device, args.prompt_tokens - args.shared_tokens, args.output_tokens)
    search = Search(
        fleet,
        layout,
        workload(args.prompt_tokens, args.shared_tokens, args.output_tokens),
        first_rate=0.5 * fleet.num_engines / rough.share_s,
        duration_s=_TIMES_LONG * max(rough.alone_s, limits.ttft_s),
        num_calls=_NUM_CALLS,
    )
    flags = [f"--replicas {args.engines}", *layout.chunking.flags()]
    if layout.num_prefill:
        flags.insert(1, f"--prefill-replicas {layout.num_prefill}")
    return {
        "engines": layout.name,
        "calls/s": round(search.goodput(limits, args.good_share).rate, 3),
        "flags": " ".join(flags),
    }
