"""`stemma plan --fleet`: a whole plan for a small fleet, and what it refuses."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
import yaml

from stemma.__main__ import main
from stemma.bench.harness.fleet_device import LLAMA_8B
from stemma.bench.harness.model import checkpoint_config
from stemma.cli.serve import add_parser
from stemma.cluster.settings import MAX_REPLICAS, ClusterSettings
from stemma.flags import Parser, from_flags
from stemma.planning.kuberay import DeployedPool, manifest
from stemma.runtime.config import engine_config


@pytest.fixture
def model(tmp_path: Path) -> str:
    """The shape of Llama-3.1-8B: calls take a second on an L4."""
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(checkpoint_config(LLAMA_8B)))
    return str(folder)


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """Agents that start at random, two a second."""
    rng = random.Random(0)
    lines, at_s = [], 0.0
    for _ in range(40):
        at_s += rng.expovariate(2.0)
        turn = {"new_tokens": 48, "output_tokens": 3, "pause_s": 0.1}
        first = {"new_tokens": 64, "output_tokens": 3}
        prefix = {"name": "tools", "tokens": 96}
        lines.append(json.dumps({"at_s": at_s, "prefix": prefix, "calls": [first, turn]}))
    path = tmp_path / "agents.jsonl"
    path.write_text("\n".join(lines))
    return path


def deployed(command: str) -> ClusterSettings:
    """What a command of a manifest asks of a cluster; its engines' flags are allowed, too."""
    program, *argv = command.split()
    assert program == "stemma"
    parser = Parser()
    add_parser(parser.add_subparsers())
    args = parser.parse_args(argv)
    args.model = args.model[-1]
    engine_config(args)
    return from_flags(ClusterSettings, args)


def test_a_trace_is_served_by_one_gpu_that_can(
    model: str, trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "plan"
    flags = ["--trace", str(trace), "--slo", "ttft=1,tpot=0.2", "--jobs", "1"]
    fleet = ["--fleet", "l4=1", "--price", "l4=0.1", "--host-gb", "0"]
    assert main(["plan", model, *flags, *fleet, "--out", str(out), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    (pool,) = report["pools"]
    assert (pool["GPU"], pool["replicas"], pool["tp"]) == ("l4", 1, 1)
    assert report["fleet"]["within the limits"] >= 0.9 and report["fleet"]["is enough"]
    assert report["exactly"]["within the limits"] >= 0.9
    assert report["fleet"]["$ an hour"] == pytest.approx(0.1)
    tokens_s = report["fleet"]["output tokens/s"]
    per_million = 0.1 / 3600 / tokens_s * 1e6
    assert report["fleet"]["$ a million output tokens"] == pytest.approx(per_million, rel=1e-3)
    assert {row["engines"] for row in report["options"]} >= {"together", "together, steps of 512"}
    assert json.loads((out / "plan.json").read_text()) == report
    assert "<svg" in (out / "plan.html").read_text()
    job, service = yaml.safe_load_all((out / "kuberay.yaml").read_text())
    assert job["spec"]["entrypoint"] == report["commands"][0]
    assert deployed(job["spec"]["entrypoint"]).replicas == 1
    assert service["metadata"]["name"] == job["metadata"]["name"]


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (["--fleet", "l4=0"], "fleet='l4=0'"),
        (["--fleet", "tpu=1"], "fleet='tpu=1'"),
        (["--fleet", "l4=1,l4=2"], "fleet='l4=2'"),
        (["--fleet", "l4=1", "--slo", "ttft=1"], "slo='ttft=1'"),
        (["--fleet", "l4=1", "--slo", "ttft=1,tpot=0"], "slo="),
        (["--fleet", "l4=1", "--price", "l4=-1"], "price="),
        (["--fleet", "l4=1", "--acceptance", "1"], "acceptance=1.0"),
        (["--fleet", "l4=1", "--load", "0"], "load=0.0"),
        (["--fleet", "l4=4", "--engines", "4"], "engines=4"),
        (["--fleet", "l4=4", "--tp-size", "2", "--device", "l4"], "tp_size=2"),
        (["--fleet", "rtx3090=1", "--calibration", "rtx3090=/nowhere"], "calibration="),
    ],
)
def test_what_is_no_fleet_is_refused_by_name(
    trace: Path, flags: list[str], named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", "--trace", str(trace), "--jobs", "1", *flags]) == 1
    assert named in capsys.readouterr().err


def test_a_pool_that_is_too_large_for_a_router_is_several_jobs() -> None:
    flags = ("--tp-size", "2", "--host-kv-tokens", "1000", "--speculate", "off")
    pool = DeployedPool("h200", 2 * MAX_REPLICAS + 1, 2, flags)
    documents = list(yaml.safe_load_all(manifest([pool], "/models/model")))
    jobs, services = documents[::2], documents[1::2]
    assert len(jobs) == len(services) == 3
    settings = [deployed(job["spec"]["entrypoint"]) for job in jobs]
    assert sum(each.replicas for each in settings) == 2 * MAX_REPLICAS + 1
    assert all((each.ray, each.ray_gpus) == ("auto", 2.0) for each in settings)
    for job, service, each in zip(jobs, services, settings, strict=True):
        cluster = job["spec"]["rayClusterSpec"]
        (workers,) = cluster["workerGroupSpecs"]
        assert workers["replicas"] == each.replicas
        (worker,) = workers["template"]["spec"]["containers"]
        assert worker["resources"]["limits"]["nvidia.com/gpu"] == each.ray_gpus
        head = cluster["headGroupSpec"]["template"]
        assert service["spec"]["selector"].items() <= head["metadata"]["labels"].items()


def test_each_kind_is_a_job_on_its_own_nodes() -> None:
    pools = [
        DeployedPool("h200", 7, 1, ("--speculate", "off")),
        DeployedPool("l4", 2, 4, ("--tp-size", "4", "--speculate", "off")),
    ]
    jobs = list(yaml.safe_load_all(manifest(pools, "/models/model")))[::2]
    settings = [deployed(job["spec"]["entrypoint"]) for job in jobs]
    assert [(each.replicas, each.ray_gpus) for each in settings] == [(7, 1.0), (2, 4.0)]
    for pool, job in zip(pools, jobs, strict=True):
        (workers,) = job["spec"]["rayClusterSpec"]["workerGroupSpecs"]
        assert workers["template"]["spec"]["nodeSelector"]["stemma.example/gpu"] == pool.name
