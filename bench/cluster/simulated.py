"""A simulated fleet held against real replicas of this machine: throughput and times.

One replica and two, a core each, behind the real router, under loads of `stemma bench replicas`;
and the same programs, of as many tokens, on simulated replicas whose steps take what a replica's
were measured to take in this run (`stemma bench step`, a core alone). `simulated / real` of the
output tokens a second and of the median time to first token, as engines count it: from a call's
arrival. Repeats take turns with one another; medians of each figure.

With `--against steps` what is real are the steps alone: each is computed when an engine's scheduler
plans it, and moves the fleet's clock by the CPU time that it took, so that other work on the
machine does not count. Processes, sockets and the engines' own planning are then in neither.
"""

from __future__ import annotations

import argparse
import contextlib
import random
import statistics
import subprocess
import sys
import time
from array import array
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from tokenizers import Tokenizer

from ...cluster.placement.policies import policy_of
from ...flags import count
from ...frontend.client.backend import Backend
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
    device = _device(args)
    tokenizer = Tokenizer.from_file(str(args.model / "tokenizer.json"))
    rows: list[dict[str, Any]] = []
    for number in args.replicas:
        found: dict[str, list[tuple[Outcome, Outcome]]] = {}
        with _replicas(args, number) as backend:
            for repeat in range(args.repeats + 1):
                for load in args.load or _LOADS:
                    said = LOADS[load](random.Random(repeat), args.conversations)
                    real = _measured(said, backend)
                    simulated = _simulated(said, tokenizer, [device] * number)
                    if repeat:  # the first one warms up
                        found.setdefault(load, []).append((real, simulated))
        rows += [row for load, pairs in found.items() for row in _rows(load, number, pairs)]
    write_report("simulated", rows, args)
    return 0


def _run_steps(args: argparse.Namespace) -> int:
    from .measured_device import MeasuredDevice

    configure_threads(1, None)
    tokenizer = Tokenizer.from_file(str(args.model / "tokenizer.json"))
    devices = [
        MeasuredDevice(args.model, args.tokens, _MAX_RUNNING) for _ in range(max(args.replicas))
    ]
    model = _modelled(args, devices[0].calibration)
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


def _device(args: argparse.Namespace) -> RooflineDevice:
    """A core, by the steps that it was measured to make."""
    with TemporaryDirectory(prefix="stemma-bench-") as folder:
        command = [
            sys.executable, "-P", "-m", "stemma", "bench", "step", "--model", str(args.model),
            "--batches", "1", "4", "16", "--steps", "24", "--num-threads", "1", "--json",
            "--out", folder,
        ]  # fmt: skip
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        report = Path(folder) / "step.json"
        return _modelled(args, partial(Calibration.read, report))


def _modelled(
    args: argparse.Namespace, calibration: Callable[[CostModel], Calibration]
) -> RooflineDevice:
    costs = CostModel(ServedModel.of(read_model_config(args.model), "bfloat16"), _CORE)
    return RooflineDevice(costs, args.tokens, _MAX_RUNNING, calibration(costs))


def _measured(said: Sequence[Conversation], backend: Backend) -> Outcome:
    """All conversations at once, from an empty cache."""
    backend.flush_cache()
    began_s = time.perf_counter()
    with ThreadPoolExecutor(len(said)) as users:
        states = list(users.map(lambda each: converse.run(said=each, backend=backend), said))
    wall_s = time.perf_counter() - began_s
    metas = [
        state.get_meta_info(f"t{turn}")
        for state, each in zip(states, said, strict=True)
        for turn in range(len(each.texts))
    ]
    prompt = sum(int(meta["prompt_tokens"]) for meta in metas)
    return Outcome(
        sum(int(meta["completion_tokens"]) for meta in metas) / wall_s,
        statistics.median(float(meta["time_to_first_token_s"]) for meta in metas),
        sum(int(meta["cached_tokens"]) for meta in metas) / prompt,
    )


def _simulated(
    said: Sequence[Conversation], tokenizer: Tokenizer, devices: Sequence[FleetDevice]
) -> Outcome:
    """The same on simulated replicas, one on each device."""
    engines = [SimulatedEngine(device) for device in devices]
    fleet = FleetSimulation(engines, Routing(lambda: policy_of("program")))
    fleet.run([Start(0.0, _job(each, tokenizer)) for each in said])
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
