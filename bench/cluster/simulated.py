"""A simulated fleet held against real replicas of this machine: throughput and times.

One replica and two, a core each, behind the real router, under loads of `stemma bench replicas`
that begin within `--spread-s` seconds; and the same programs, of as many tokens, begun at the same
times, on simulated replicas. Their steps take what the engines' own logs say of the real ones of
that run, by numbers of tokens: what the cores of a machine share (memory, caches, the clients'
and the router's work) is in them, and is not guessed. So what is compared is all but the steps:
which there are, when, of what, and what is cached. `simulated / real` of the output tokens a second
and of the median time to first token, from where a client asks. Medians of the repeats.

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
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from ...cluster.placement.policies import policy_of
from ...flags import count
from ...frontend.client.backend import Backend
from ...frontend.dsl.function import function
from ...frontend.dsl.generation import gen
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
from .measured_device import MeasuredDevice
from .replicas import GREEDY, LOADS, Conversation, served_with
from .step_record import StepRecord

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


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Flags of `stemma bench simulated`."""
    add = parser.add_argument
    add("--model", type=Path, default=EMBEDDED_MODEL, help="checkpoint folder")
    add("--replicas", type=count, nargs="+", default=[1, 2], metavar="N")
    add("--load", choices=_LOADS, action="append", help="default: all")
    add("--conversations", type=count, default=24, metavar="N", help="a load (%(default)s)")
    add("--spread-s", type=float, default=8.0, metavar="S",
        help="within which all begin, divided by the replicas (default: %(default)s)")  # fmt: skip
    add("--tokens", type=count, default=8192, help="KV of each replica (default: %(default)s)")
    add("--repeats", type=count, default=3)
    add("--against", choices=("replicas", "steps"), default="replicas")


def run(args: argparse.Namespace) -> int:
    """Measure, simulate and report."""
    if args.against == "steps":
        return _run_steps(args)
    tokenizer = Tokenizer.from_file(str(args.model / "tokenizer.json"))
    costs = _costs(args.model)
    rows: list[dict[str, Any]] = []
    for number in args.replicas:
        found: dict[str, list[tuple[Outcome, Outcome]]] = {}
        with _replicas(args, number) as backend:
            for repeat in range(args.repeats + 1):
                for load in args.load or _LOADS:
                    rng = random.Random(repeat)
                    said = LOADS[load](rng, args.conversations)
                    begins_s = [rng.uniform(0.0, args.spread_s / number) for _ in said]
                    with StepRecord(backend, number) as record:
                        real = _measured(said, begins_s, backend)
                    device = _modelled(args, costs, record.calibration(costs))
                    simulated = _simulated(said, tokenizer, [device] * number, begins_s)
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
    costs = _costs(args.model)
    model = _modelled(args, costs, Calibration.of(devices[0].measured(), costs))
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


def _costs(model: Path) -> CostModel:
    return CostModel(ServedModel.of(read_model_config(model), "bfloat16"), _CORE)


def _modelled(
    args: argparse.Namespace, costs: CostModel, calibration: Calibration
) -> RooflineDevice:
    """A core, by the steps that it was measured to make."""
    return RooflineDevice(costs, args.tokens, _MAX_RUNNING, calibration)


@function
def _converse(
    s: ProgramState, said: Conversation, times: list[tuple[float, float]], begin_s: float
) -> None:
    """As in `replicas`, from then on; `times`: when each answer was asked for, and was there."""
    time.sleep(max(0.0, begin_s - time.perf_counter()))
    asked_s = time.perf_counter()
    for turn, text in enumerate(said.texts):
        if turn:
            with s.pause(expected_s=said.pauses_s[turn - 1], label="tool"):
                s[f"t{turn - 1}"]
                times.append((asked_s, time.perf_counter()))
                time.sleep(said.pauses_s[turn - 1])
            asked_s = time.perf_counter()
        s += text + gen(f"t{turn}", max_tokens=said.max_tokens, **GREEDY)
    s[f"t{len(said.texts) - 1}"]
    times.append((asked_s, time.perf_counter()))


def _measured(said: Sequence[Conversation], begins_s: Sequence[float], backend: Backend) -> Outcome:
    """From an empty cache."""
    backend.flush_cache()
    began_s = time.perf_counter()

    def held(each: Conversation, begin_s: float) -> list[tuple[float, dict[str, Any]]]:
        times: list[tuple[float, float]] = []
        state = _converse.run(said=each, times=times, begin_s=began_s + begin_s, backend=backend)
        metas = [state.get_meta_info(f"t{turn}") for turn in range(len(each.texts))]
        return [(end_s - ask_s, meta) for (ask_s, end_s), meta in zip(times, metas, strict=True)]

    with ThreadPoolExecutor(len(said)) as users:
        calls = [call for of_one in users.map(held, said, begins_s) for call in of_one]
    wall_s = time.perf_counter() - began_s
    # An engine counts from where it has read a call, which is behind the step that was on its way.
    ttfts_s = [
        took_s - float(meta["latency_s"]) + float(meta["time_to_first_token_s"])
        for took_s, meta in calls
    ]
    prompt = sum(int(meta["prompt_tokens"]) for _, meta in calls)
    return Outcome(
        sum(int(meta["completion_tokens"]) for _, meta in calls) / wall_s,
        statistics.median(ttfts_s),
        sum(int(meta["cached_tokens"]) for _, meta in calls) / prompt,
    )


def _simulated(
    said: Sequence[Conversation],
    tokenizer: Tokenizer,
    devices: Sequence[FleetDevice],
    begins_s: Sequence[float] = (),
) -> Outcome:
    """The same on simulated replicas, one on each device; `begins_s`: of each conversation; none:
    all at once."""
    engines = [SimulatedEngine(device) for device in devices]
    fleet = FleetSimulation(engines, Routing(lambda: policy_of("program")))
    fleet.run(
        [
            Start(at_s, _job(each, tokenizer))
            for at_s, each in zip(begins_s or [0.0] * len(said), said, strict=True)
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
