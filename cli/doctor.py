"""`stemma doctor`: what is installed, which devices, which kernels, whether torch sees all cores;
with a model, what that needs and whether it fits.

Exit status 1 where something is missing that the engine needs, or that `--device` asks for: a GPU
that nobody asked for may be missing.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .. import __version__
from ..errors import InvalidRequest
from ..runtime.checkpoint.config.encoder_config import EncoderConfig
from ..runtime.checkpoint.location import EMBEDDED_MODEL, MTP, locate_model
from ..runtime.config import QUANTIZATIONS, EngineConfig
from ..runtime.execute.dtype_name import dtype_name
from ..runtime.execute.threads import configure_threads
from ..runtime.models.encoders.registry import read_encoder
from .connect import Commands, add_model_argument, described_model

if TYPE_CHECKING:
    import torch

PACKAGES = (
    "torch", "tokenizers", "safetensors", "pyzmq", "orjson", "jinja2", "fastapi", "llguidance",
    "jsonschema", "triton",
)  # fmt: skip
# What several processes divide between them, by the flag that says how many.
_DIVIDED = {
    "tp_size": "each layer",
    "pp_size": "the layers",
    "cp_size": "tokens and KV",
}


def add_parser(commands: Commands) -> None:
    """Register the command."""
    parser = commands.add_parser("doctor", help="what is installed and what the engine would use")
    add_model_argument(
        parser,
        "folder, hub id or .gguf file: say what the model needs and what fits, without loading it "
        "(of a hub id, with or without a .gguf file, only its description is fetched)",
    )
    parser.add_argument("--json", action="store_true", help="print it as data")
    parser.add_argument(
        "--device",
        choices=("cpu", "cuda"),
        default="cpu",
        help="what the engine is to compute on (default: %(default)s)",
    )
    for name, divided in _DIVIDED.items():
        parser.add_argument(
            "--" + name.replace("_", "-"),
            type=int,
            default=1,
            metavar="N",
            help=f"with a model: of N processes that divide {divided} (default: %(default)s)",
        )
    add = parser.add_argument
    add("--draft-model", metavar="PATH", help="with a model: what guesses for it, as of `serve`")
    add("--draft-quantization", choices=QUANTIZATIONS, default="none")
    add("--draft-layers", type=int, default=0, metavar="N")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print the report; 1 when something that is needed does not work."""
    if args.model is not None:
        return _run_model(args)
    report = examine(args.device)
    if args.json:
        print(json.dumps(report))
    else:
        _print(report)
    return 1 if report["problems"] else 0


def _run_model(args: argparse.Namespace) -> int:
    """1 where the model does not fit in any format."""
    division = {name: getattr(args, name) for name in _DIVIDED}
    names = ("draft_model", "draft_layers", "draft_quantization")
    draft_flags = {name: getattr(args, name) for name in names}
    EngineConfig(**division, **draft_flags)  # the same limits
    if args.draft_model not in (None, MTP):
        draft_flags["draft_model"] = str(locate_model(args.draft_model))
    configure_threads(len(os.sched_getaffinity(0)), None)
    from ..runtime.execute.model_runner import resolve_dtype
    from .model_report import examine_model, print_model

    with described_model(args) as folder:
        encoder = read_encoder(folder)
        if encoder is not None:
            if args.draft_model is not None or args.draft_layers:
                raise InvalidRequest("an encoder has no draft: leave --draft-model out")
            for name, num_processes in division.items():
                if num_processes > 1:
                    allowed = "1: an encoder is one process's"
                    raise InvalidRequest.of(name, num_processes, allowed)
            return _tell_encoder(args, folder, encoder)
        report = examine_model(
            args.model,
            folder,
            dtype_name(resolve_dtype("auto", args.device)),
            _memory_bytes(args.device),
            is_gpu=args.device != "cpu",
            **division,
            draft_flags=tuple(draft_flags.values()),
        )
    if args.json:
        print(json.dumps(report))
    else:
        print_model(report)
    return 0 if any(fit["requests"] for fit in report["fits"]) else 1


def _tell_encoder(args: argparse.Namespace, folder: Path, encoder: EncoderConfig) -> int:
    """1 where it does not fit."""
    from ..runtime.execute.encoder_runner import encoder_dtype
    from .encoder_report import examine_encoder, print_encoder

    report = examine_encoder(
        args.model,
        folder,
        encoder,
        dtype_name(encoder_dtype("auto", args.device)),
        token_budget=EngineConfig().chunked_prefill_size,
        memory_bytes=_memory_bytes(args.device),
    )
    if args.json:
        print(json.dumps(report))
    else:
        print_encoder(report)
    return 0 if report["fits"] else 1


def _memory_bytes(device: str) -> int:
    """That can be had now."""
    import torch

    from ..kernels.triton.availability import why_no_cuda
    from ..runtime.memory.sizing import available_memory_bytes

    if device == "cpu":
        return available_memory_bytes()
    if (refusal := why_no_cuda()) is not None:
        raise InvalidRequest.of("device", device, f"a GPU that is here: {refusal}")
    return int(torch.cuda.mem_get_info()[0])


def examine(device: str = "cpu") -> dict[str, Any]:
    """The report as plain data, for an engine on `device`."""
    was_chosen = "OMP_NUM_THREADS" in os.environ
    configure_threads(len(os.sched_getaffinity(0)), None)
    import torch

    from ..constrained.native.bindings import LIBRARY, why_not_native
    from ..kernels.triton.availability import is_interpreted, why_no_cuda, why_not_triton
    from ..runtime.execute.model_runner import resolve_dtype, why_slow

    cores, threads = len(os.sched_getaffinity(0)), torch.get_num_threads()
    no_cuda = why_no_cuda()
    dtypes = {"cpu": resolve_dtype("auto")}
    if no_cuda is None or is_interpreted():
        dtypes["cuda"] = resolve_dtype("auto", "cuda")
    no_triton = why_not_triton("cuda", torch.bfloat16)
    problems = []
    if threads != cores and not was_chosen:
        problems.append(f"torch uses {threads} threads but {cores} cores are usable")
    if not (EMBEDDED_MODEL / "model.safetensors").is_file():
        problems.append(f"the embedded model is missing from {EMBEDDED_MODEL}")
    if device == "cuda" and no_triton is not None:
        problems.append(f"no kernels for a GPU: {no_triton}")
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
        "gpus": _gpus() if no_cuda is None else [],
        "torch_cuda": torch.version.cuda,
        "missing_for_gpu": [reason for reason in dict.fromkeys((no_cuda, no_triton)) if reason],
        "device": device,
        "dtype": dtype_name(dtypes[device]) if device in dtypes else None,
        "kernels": _kernels(dtypes[device], device) if device in dtypes else [],
        "kernels_by_device": {
            each: {"dtype": dtype_name(dtype), "kernels": _kernels(dtype, each)}
            for each, dtype in dtypes.items()
        },
        "slow_path": why_slow("auto", device, "auto"),
        "grammars": why_not_native() or LIBRARY.origin(),
        "embedded_model": str(EMBEDDED_MODEL),
        "problems": problems,
    }


def _gpus() -> list[dict[str, Any]]:
    import torch

    found = []
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        found.append(
            {
                "name": properties.name,
                "capability": f"{properties.major}.{properties.minor}",
                "memory_bytes": properties.total_memory,
                "multiprocessors": properties.multi_processor_count,
            }
        )
    return found


def _kernels(dtype: torch.dtype, device: str) -> list[dict[str, str]]:
    from ..kernels.registry import select_kernels

    return [
        {"op": c.op, "implementation": c.implementation, "reason": c.reason}
        for c in select_kernels(dtype, device).describe()
    ]


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
    _print_gpus(report)
    for device, chosen in report["kernels_by_device"].items():
        print(f"kernels on {device}, {chosen['dtype']}")
        for row in chosen["kernels"]:
            print(f"  {row['op']:<16} {row['implementation']:<10} {row['reason']}")
    if report["slow_path"] is not None:
        print(f"slow     {report['slow_path']}")
    print(f"grammars {report['grammars']}")
    print(f"model    {report['embedded_model']}")
    for problem in report["problems"]:
        print(f"PROBLEM  {problem}", file=sys.stderr)
    if not report["problems"]:
        print("everything the engine needs is here")


def _print_gpus(report: dict[str, Any]) -> None:
    for gpu in report["gpus"]:
        print(
            f"gpu      {gpu['name']}, capability {gpu['capability']}, "
            f"{gpu['memory_bytes'] / 1e9:.0f} GB, {gpu['multiprocessors']} multiprocessors, "
            f"torch's CUDA {report['torch_cuda']}"
        )
    if not report["gpus"]:
        print("gpu      none")
    for reason in report["missing_for_gpu"]:
        print(f"         {reason}")
