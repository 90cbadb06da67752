"""A simulated fleet held against real replicas of this machine: throughput and times.

One replica and two, a core each, behind the real router, under loads of `stemma bench replicas`;
and the same programs, of as many tokens, which come when the real ones came, on simulated replicas
whose steps take what steps were measured to take in this run, on as many cores at once. `simulated
/ real` of the output tokens a second and of the median time to first token, as engines count it:
from a call's arrival. Repeats take turns with one another; medians of each figure.

With `--against steps` what is real are the steps alone: each is computed when an engine's scheduler
plans it, and moves the fleet's clock by the CPU time that it took, so that other work on the
machine does not count. Processes, sockets and the engines' own planning are then in neither.
"""

from __future__ import annotations

import argparse
import contextlib
import random
import statistics
import time
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from ...cluster.placement.policies import policy_of
from ...flags import count
from ...frontend.client.backend import Backend
from ...frontend.dsl.state import ProgramState
from ...planning.calibration import Calibration
from ...planning.devices import DeviceModel, Rates
from ...planning.fleet_simulation import FleetSimulation, Routing
from ...planning.roofline import CostModel
from ...planning.roofline_device import RooflineDevice
from ...planning.served_model import ServedModel
from ...planning.simulated_engine import FleetDevice, SimulatedEngine
from ...planning.traces import Call, Job, Start
from ...runtime.checkpoint.location import EMBEDDED_MODEL
from ...runtime.execute.threads import configure_threads
from ...runtime.models.model_config import read_model_config
from ..harness.report import write_report
from .measured_device import MeasuredDevice, measured_side_by_side
from .replicas import LOADS, Conversation, converse, served_with

_LOADS = ("agents", "chats", "documents")
_MAX_RUNNING = 128
# Any rates do: steps are corrected by what was measured. These are about a core's.
_CORE = DeviceModel(
    name="a core", memory_bytes=1 << 30, rates={"none": Rates(1e10, 5e10)}, kv_bytes_s=1e10,
    attention_flop_s=5e10, step_s=150e-6, layer_s=10e-6, row_s=40e-6, adapter_s=0.0,
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Outcome:
    """Of a load's run."""

    tokens_s: float
    ttft_s: float  # median
    hit_rate: float
    came_s: Sequence[float] = ()  # each conversation, behind the run's begin


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Flags of `stemma bench simulated`."""
    add = parser.add_argument
    add("--model", type=Path, default=EMBEDDED_MODEL, help="checkpoint folder")
    add("--replicas", type=count, nargs="+", default=[1, 2], metavar="N")
    add("--load", choices=_LOADS, action="append", help="default: all")
    add("--conversations", type=count, default=24, metavar="N", help="a load (%(default)s)")
    add("--tokens", type=count, default=8192, help="KV of each replica (default: %(default)s)")
    add("--repeats", type=count, default=3)
    add("--against", choices=("replicas", "steps"), default="replicas")


def run(args: argparse.Namespace) -> int:
    """Measure, simulate and report."""
    if args.against == "steps":
        return _run_steps(args)
    tokenizer = Tokenizer.from_file(str(args.model / "tokenizer.json"))
    rows: list[dict[str, Any]] = []
    for number in args.replicas:
        found: dict[str, list[tuple[Outcome, Outcome]]] = {}
        steps = measured_side_by_side(args.model, args.tokens, _MAX_RUNNING, number)
        device = _modelled(args, steps)
        with _replicas(args, number) as backend:
            for repeat in range(args.repeats + 1):
                for load in args.load or _LOADS:
                    said = LOADS[load](random.Random(repeat), args.conversations)
                    real = _measured(said, backend)
                    simulated = _simulated(said, tokenizer, [device] * number, real.came_s)
                    if repeat:  # the first one warms up
                        found.setdefault(load, []).append((real, simulated))
        rows += [row for load, pairs in found.items() for row in _rows(load, number, pairs)]
    write_report("simulated", rows, args)
    return 0


def _run_steps(args: argparse.Namespace) -> int:
    configure_threads(1, None)
    tokenizer = Tokenizer.from_file(str(args.model / "tokenizer.json"))
    devices = [
        MeasuredDevice(args.model, args.tokens, _MAX_RUNNING) for _ in range(max(args.replicas))
    ]
    model = _modelled(args, devices[0].measured())
    rows: list[dict[str, Any]] = []
    for number in args.replicas:
        for load in args.load or _LOADS:
            pairs = []
            for repeat in range(args.repeats + 1):
                said = LOADS[load](random.Random(repeat), args.conversations)
                real = _simulated(said, tokenizer, devices[:number])
                simulated = _simulated(said, tokenizer, [model] * number)
                if repeat:  # the first one warms up
                    pairs.append((real, simulated))
            rows += _rows(load, number, pairs)
    write_report("simulated", rows, args)
    return 0


@contextlib.contextmanager
def _replicas(args: argparse.Namespace, number: int) -> Iterator[Backend]:
    """Real ones, a core each, behind the router."""
    options: dict[str, object] = {
        "replicas": number, "max_total_tokens": args.tokens, "num_threads": 1,
        "max_running_requests": _MAX_RUNNING, "speculate": "off",
    }  # fmt: skip
    with served_with(str(args.model), options) as backend:
        yield backend


def _modelled(
    args: argparse.Namespace, measured: Mapping[tuple[int, int, int], float]
) -> RooflineDevice:
    """A core, by the steps that it was measured to make."""
    costs = CostModel(ServedModel.of(read_model_config(args.model), "bfloat16"), _CORE)
    return RooflineDevice(costs, args.tokens, _MAX_RUNNING, Calibration.of(measured, costs))


def _measured(said: Sequence[Conversation], backend: Backend) -> Outcome:
    """All conversations at once, from an empty cache."""
    backend.flush_cache()
    began_s = time.perf_counter()
    with ThreadPoolExecutor(len(said)) as users:
        held = list(users.map(partial(_held, backend), said))
    wall_s = time.perf_counter() - began_s
    all_metas = [
        [state.get_meta_info(f"t{turn}") for turn in range(len(each.texts))]
        for (state, _), each in zip(held, said, strict=True)
    ]
    metas = [meta for of_one in all_metas for meta in of_one]
    prompt = sum(int(meta["prompt_tokens"]) for meta in metas)
    return Outcome(
        sum(int(meta["completion_tokens"]) for meta in metas) / wall_s,
        statistics.median(float(meta["time_to_first_token_s"]) for meta in metas),
        sum(int(meta["cached_tokens"]) for meta in metas) / prompt,
        [
            max(0.0, ended_s - began_s - _since_arrival_s(of_one))
            for (_, ended_s), of_one in zip(held, all_metas, strict=True)
        ],
    )


def _held(backend: Backend, said: Conversation) -> tuple[ProgramState, float]:
    """What came of a conversation, and when it ended."""
    state = converse.run(said=said, backend=backend)
    return state, time.perf_counter()


def _since_arrival_s(metas: Sequence[Mapping[str, Any]]) -> float:
    """From the arrival of a program's first call at the engine to the end of its last one."""
    first, last = metas[0], metas[-1]
    return float(last["start_s"]) + float(last["latency_s"]) - float(first["start_s"])


def _simulated(
    said: Sequence[Conversation],
    tokenizer: Tokenizer,
    devices: Sequence[FleetDevice],
    came_s: Sequence[float] = (),
) -> Outcome:
    """The same on simulated replicas, one on each device; `came_s`: when each conversation comes;
    none: all at once."""
    engines = [SimulatedEngine(device) for device in devices]
    fleet = FleetSimulation(engines, Routing(lambda: policy_of("program")))
    fleet.run(
        [
            Start(at_s, _job(each, tokenizer))
            for at_s, each in zip(came_s or [0.0] * len(said), said, strict=True)
        ]
    )
    ttft_s = statistics.median(each.ttft_s for each in fleet.times)
    return Outcome(fleet.num_output_tokens / fleet.now_s, ttft_s, fleet.hit_rate)


def _job(said: Conversation, tokenizer: Tokenizer) -> Job:
    """A conversation as the simulation runs it: its texts' own tokens, and some for its answers."""
    prompt = array("i")
    for turn, text in enumerate(said.texts):
        prompt = prompt + array("i", tokenizer.encode(text, add_special_tokens=not turn).ids)
        pause_s = said.pauses_s[turn - 1] if turn else 0.0
        (output,) = yield [Call(prompt, said.max_tokens, said.max_tokens, "user", delay_s=pause_s)]
        prompt = prompt + output


def _rows(load: str, number: int, pairs: Sequence[tuple[Outcome, Outcome]]) -> list[dict[str, Any]]:
    figures: dict[str, Callable[[Outcome], float]] = {
        "output tokens/s": lambda each: each.tokens_s,
        "TTFT p50, ms": lambda each: 1e3 * each.ttft_s,
        "hit rate": lambda each: each.hit_rate,
    }
    rows = []
    for name, figure in figures.items():
        real = statistics.median(figure(pair[0]) for pair in pairs)
        simulated = statistics.median(figure(pair[1]) for pair in pairs)
        row = {"load": load, "replicas": number, "figure": name, "real": real}
        rows.append({**row, "simulated": simulated, "simulated / real": simulated / real})
    return rows
