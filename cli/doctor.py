"""`stemma doctor`: what is installed, which device, which kernels, whether torch sees all cores."""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import sys
from typing import Any

from .. import __version__
from ..runtime.config import EMBEDDED_MODEL
from ..runtime.threads import configure_threads
from .connect import Commands

PACKAGES = (
    "torch", "tokenizers", "safetensors", "pyzmq", "orjson", "jinja2", "fastapi", "llguidance",
    "jsonschema", "triton",
)  # fmt: skip


def add_parser(commands: Commands) -> None:
    """Register the command."""
    parser = commands.add_parser("doctor", help="what is installed and what the engine would use")
    parser.add_argument("--json", action="store_true", help="print it as data")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print the report; 1 when something that is needed does not work."""
    report = examine()
    if args.json:
        print(json.dumps(report))
    else:
        _print(report)
    return 1 if report["problems"] else 0


def examine() -> dict[str, Any]:
    """The report as plain data."""
    was_chosen = "OMP_NUM_THREADS" in os.environ
    configure_threads(len(os.sched_getaffinity(0)), None)
    import torch

    from ..constrained.native.bindings import why_not_native
    from ..kernels.registry import select_kernels
    from ..runtime.execute.model_runner import resolve_dtype

    cores, threads = len(os.sched_getaffinity(0)), torch.get_num_threads()
    dtype = resolve_dtype("auto")
    problems = []
    if threads != cores and not was_chosen:
        problems.append(f"torch uses {threads} threads but {cores} cores are usable")
    if not (EMBEDDED_MODEL / "model.safetensors").is_file():
        problems.append(f"the embedded model is missing from {EMBEDDED_MODEL}")
    return {
        "stemma": __version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "packages": {name: _version(name) for name in PACKAGES},
        "cpu": {
            "capability": torch.backends.cpu.get_cpu_capability(),
            "cores": cores,
            "torch_threads": threads,
            "omp_wait_policy": os.environ.get("OMP_WAIT_POLICY"),
            "gomp_spincount": os.environ.get("GOMP_SPINCOUNT"),
        },
        "gpu": torch.cuda.get_device_name(0) if torch.cuda.is_available() else None,
        "device": "cpu",
        "dtype": str(dtype).removeprefix("torch."),
        "kernels": [
            {"op": c.op, "implementation": c.implementation, "reason": c.reason}
            for c in select_kernels(dtype).describe()
        ],
        "grammars": why_not_native() or "compiled for this CPU",
        "embedded_model": str(EMBEDDED_MODEL),
        "problems": problems,
    }


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _print(report: dict[str, Any]) -> None:
    cpu = report["cpu"]
    print(f"stemma {report['stemma']}, Python {report['python']}, {report['platform']}")
    for name, version in report["packages"].items():
        print(f"  {name:<12} {version or 'not installed'}")
    print(
        f"cpu      {cpu['capability']}, {cpu['cores']} cores, torch uses {cpu['torch_threads']} "
        f"(wait policy {cpu['omp_wait_policy']}, spin count {cpu['gomp_spincount']})"
    )
    print(f"gpu      {report['gpu'] or 'none'}")
    print(f"device   {report['device']}, dtype {report['dtype']}")
    print("kernels")
    for row in report["kernels"]:
        print(f"  {row['op']:<16} {row['implementation']:<10} {row['reason']}")
    print(f"grammars {report['grammars']}")
    print(f"model    {report['embedded_model']}")
    for problem in report["problems"]:
        print(f"PROBLEM  {problem}", file=sys.stderr)
    if not report["problems"]:
        print("everything the engine needs is here")
