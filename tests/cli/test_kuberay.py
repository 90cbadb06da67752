"""The manifest in the docs: its form, and that its command's flags are ours."""

from __future__ import annotations

from pathlib import Path

import yaml

from stemma.cli.serve import add_parser
from stemma.cluster.settings import ClusterSettings
from stemma.flags import Parser, from_flags

MANIFEST = Path(__file__).parents[2] / "docs" / "serve" / "kuberay.yaml"


def test_its_command_is_one_and_its_bounds_agree_with_its_workers() -> None:
    job, service = yaml.safe_load_all(MANIFEST.read_text())
    assert (job["apiVersion"], job["kind"]) == ("ray.io/v1", "RayJob")
    program, *argv = job["spec"]["entrypoint"].split()
    parser = Parser()
    add_parser(parser.add_subparsers())
    args = parser.parse_args(argv)
    settings = from_flags(ClusterSettings, args)
    assert program == "stemma" and settings.ray == "auto"
    cluster = job["spec"]["rayClusterSpec"]
    (workers,) = cluster["workerGroupSpecs"]
    assert (settings.replicas, settings.most) == (workers["minReplicas"], workers["maxReplicas"])
    (worker,) = workers["template"]["spec"]["containers"]
    assert settings.ray_cpus == float(worker["resources"]["requests"]["cpu"])
    head = cluster["headGroupSpec"]["template"]
    assert service["spec"]["selector"].items() <= head["metadata"]["labels"].items()
    (port,), (container,) = service["spec"]["ports"], head["spec"]["containers"]
    assert port["targetPort"] == args.port == container["ports"][0]["containerPort"]
