"""Serving workloads on Stemma and, side by side in one run, on other engines.

Every engine is a process of its own, kept alive for the whole run. After a warm-up each repeat of a
workload runs on all engines in turn, over ids that no earlier repeat has had, so a repeat gives one
pair of times a peer. A ratio is the peer's wall time through Stemma's: above 1, Stemma is faster.
Repeats in which others used more than 0.1 cores are left out of medians, unless all are such.
docs/measure/serving.md says how to read the columns, docs/measure/peers.md how to install peers.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from ...errors import EngineError, InvalidRequest
from ...flags import count
from ...runtime.checkpoint.location import EMBEDDED_MODEL
from ..constrained.documents import DocumentJudge
from ..harness.limits import Limits, model_costs
from ..harness.process_meter import QUIET_CORES, ProcessMeter, wait_until_idle
from ..harness.report import print_table, write_report
from ..harness.workloads import DEFINITIONS, Workload, make_workload, names_of
from .comparison import STARTUP_TARGET_S, STARTUP_TARGETS, shown, shown_documents, summary
from .engines import PEER_FORMS, EngineSpec, Measurement, RunningEngine, peer_spec, stemma_specs
from .floor import floor_s, limits_of

WARMUP_REPEAT = 97
DEFAULT_KV_TOKENS = 65_536


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Flags of `stemma bench serving`."""
    add = parser.add_argument
    add("--model", type=Path, default=EMBEDDED_MODEL, metavar="FOLDER",
        help="checkpoint (default: the embedded model)")  # fmt: skip
    add("--work", help="comma-separated: W1 or fanout, W2 or chat, ... (default: all that fit)")
    add("--repeats", type=count, default=7, help="measured pairs (default: %(default)s)")
    add("--peer", action="append", default=[], metavar="KIND=WHERE", help=PEER_FORMS)
    add("--http", action="store_true", help="Stemma over HTTP too")
    add("--startup", action="store_true",
        help="instead: seconds from process start to first token")  # fmt: skip
    add("--wait-idle", type=float, default=0.0, metavar="S",
        help="before each repeat wait up to S seconds for an idle machine")  # fmt: skip
    add("--scale", type=float, default=1.0, help="multiplies the number of requests")
    add("--threads", type=count, help="of every engine (default: all cores; Stemma's own choice)")
    add("--kv-tokens", type=count, default=DEFAULT_KV_TOKENS,
        help="KV capacity of every engine started here (default: %(default)s)")  # fmt: skip


def run(args: argparse.Namespace) -> int:
    """Measure and report."""
    if not (args.model / "config.json").is_file():
        raise InvalidRequest.of("model", str(args.model), "a folder with a config.json")
    specs = stemma_specs(args.model, has_http=args.http)
    specs += [peer_spec(given, args.model) for given in args.peer]
    if args.startup:
        _report_startup(specs, args)
    else:
        _report_serving(specs, args)
    return 0


# --- serving -------------------------------------------------------------------------------------


def _report_serving(specs: Sequence[EngineSpec], args: argparse.Namespace) -> None:
    works = _workloads(args)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="stemma-bench-")))
        engines = [stack.enter_context(_start(spec, args)) for spec in specs]
        limits = _measure_limits(args)
        described = [{**engine.welcome, "name": engine.spec.name} for engine in engines]
        costs = limits_of(args.model, limits)
        found: dict[str, list[Measurement]] = {}
        floors: dict[tuple[str, str], float] = {}
        try:
            for work in works:
                path = folder / f"{work.name}.json"
                path.write_text(work.to_json())
                found[work.name] = _measure(work, path, engines, args)
                for engine in engines:
                    if costs is not None and (steps := _steps(engine, path, args.repeats)):
                        floors[work.name, engine.spec.name] = floor_s(steps, costs)
            for engine, entry in zip(engines, described, strict=True):
                entry["idle_cores"] = _idle_cores(engine)
        except KeyboardInterrupt:
            if not found:
                raise
            _say(f"interrupted: {', '.join(found)} were finished")
    shares = _shares(limits, args.model)
    rows = [
        summary(work, spec, measured, shares.get(work), floors.get((work, spec.name)))
        for work, measured in found.items()
        for spec in specs
    ]
    documents = [shown_documents(row) for row in rows if row["documents"]]
    write_report(
        "serving",
        rows,
        args,
        shown=[shown(row) for row in rows],
        model=args.model.resolve().name,
        kv_tokens=args.kv_tokens,
        limits=asdict(limits),
        engines=described,
        repeats=[asdict(one) for measured in found.values() for one in measured],
    )
    if not args.json:
        print_table("documents under a schema", documents)


def _workloads(args: argparse.Namespace) -> list[Workload]:
    """Requested workloads that this model and Stemma support; prints the others and why."""
    config = json.loads((args.model / "config.json").read_text())
    names = names_of(args.work, [known.name for known in DEFINITIONS])
    works = []
    for name in names:
        work = make_workload(name, vocab=config["vocab_size"], scale=args.scale)
        reason = _reason_against(work, config["max_position_embeddings"])
        if reason is None:
            works.append(work)
        else:
            _say(f"{work.name} is left out: {reason}")
    if not works:
        raise InvalidRequest.of("work", args.work, "at least one workload that can be run")
    return works


def _reason_against(work: Workload, max_model_len: int) -> str | None:
    if work.num_tokens() > max_model_len:
        return f"needs a context of {work.num_tokens()} tokens, the model has {max_model_len}"
    return None


def _start(spec: EngineSpec, args: argparse.Namespace) -> RunningEngine:
    _say(f"starting {spec.name}")
    return RunningEngine(spec, threads=args.threads, kv_tokens=args.kv_tokens)


def _measure(
    work: Workload, path: Path, engines: Sequence[RunningEngine], args: argparse.Namespace
) -> list[Measurement]:
    for engine in engines:
        engine.load(path, WARMUP_REPEAT)
        engine.run()
    judge = DocumentJudge(args.model, work.json_schema) if work.json_schema else None
    found = []
    for repeat in range(args.repeats):
        for engine in engines:
            engine.load(path, repeat)
            if args.wait_idle:
                wait_until_idle(engine.pid, args.wait_idle)
            one = engine.measure(work.name, repeat, judge)
            noted = "" if one.others_cores <= QUIET_CORES else ", disturbed"
            _say(
                f"{work.name} {repeat + 1}/{args.repeats} {one.engine}: {one.wall_s:.2f} s "
                f"(CPU {one.cpu_s:.2f} s, others {one.others_cores:.2f} cores{noted})"
            )
            found.append(one)
    return found


def _steps(engine: RunningEngine, path: Path, repeat: int) -> list[dict[str, Any]]:
    """Of one more run; none where it cannot be had, which costs no figure but the floor."""
    engine.load(path, repeat)
    try:
        return engine.log()
    except EngineError as error:
        _say(f"no floor: {error}")
        return []


def _idle_cores(engine: RunningEngine) -> float:
    """Cores that an idle engine uses: it would take them from its neighbours."""
    with ProcessMeter(engine.pid) as meter:
        time.sleep(1.0)
    return meter.cpu_s


# --- limits --------------------------------------------------------------------------------------


def _measure_limits(args: argparse.Namespace) -> Limits:
    """Measure in a separate process, so that its threads do not stay behind."""
    if args.wait_idle:
        wait_until_idle(0, args.wait_idle)
    with tempfile.TemporaryDirectory(prefix="stemma-bench-") as folder:
        command = [sys.executable, "-m", "stemma", "bench", "limits", "--json", "--out", folder]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise EngineError(f"limits could not be measured:\n{done.stderr.strip()}")
    limits = Limits(**{row["limit"]: row["value"] for row in json.loads(done.stdout)})
    _say(f"limits: {limits.read_gb_s:.1f} GB/s read, {limits.matmul_gflop_s:.0f} GFLOP/s")
    return limits


def _shares(limits: Limits, model: Path) -> dict[str, float]:
    """The fewest seconds that the limits allow for D1 (weights read once per token) and P1."""
    costs = model_costs(model)
    decode, prefill = make_workload("D1"), make_workload("P1")
    num_steps, num_prompt = decode.requests[0].max_tokens, len(prefill.requests[0].tokens)
    return {
        "D1": costs.bytes_per_step * num_steps / (limits.read_gb_s * 1e9),
        "P1": costs.prefill_flop(num_prompt) / (limits.matmul_gflop_s * 1e9),
    }


# --- start-up ------------------------------------------------------------------------------------


def _report_startup(specs: Sequence[EngineSpec], args: argparse.Namespace) -> None:
    found: dict[str, list[float]] = {spec.name: [] for spec in specs if spec.has_process}
    with tempfile.TemporaryDirectory(prefix="stemma-bench-") as folder:
        path = Path(folder) / "first.json"
        path.write_text(_one_token(args.model).to_json())
        for repeat in range(args.repeats):
            for spec in specs:
                if spec.has_process:
                    seconds = _startup_s(spec, path, args)
                    _say(f"{repeat + 1}/{args.repeats} {spec.name}: {seconds:.2f} s")
                    found[spec.name].append(seconds)
    base = statistics.median(found["stemma"])
    rows = [
        {
            "engine": name,
            "start_s": (median := statistics.median(seconds)),
            "start_min_s": min(seconds),
            "start_max_s": max(seconds),
            "ratio": None if name == "stemma" else median / base,
            "target": STARTUP_TARGET_S if name == "stemma" else STARTUP_TARGETS.get(name),
        }
        for name, seconds in found.items()
    ]
    write_report("serving_startup", rows, args, model=args.model.resolve().name)


def _one_token(model: Path) -> Workload:
    config = json.loads((model / "config.json").read_text())
    probe = make_workload("D1", vocab=config["vocab_size"])
    return replace(probe, requests=(replace(probe.requests[0], max_tokens=1),))


def _startup_s(spec: EngineSpec, path: Path, args: argparse.Namespace) -> float:
    """Seconds from process start to the first token."""
    if args.wait_idle:
        wait_until_idle(0, args.wait_idle)
    started = time.perf_counter()
    with RunningEngine(spec, threads=args.threads, kv_tokens=args.kv_tokens) as engine:
        engine.load(path, 0)
        engine.run()
        return time.perf_counter() - started


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
