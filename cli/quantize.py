"""`stemma quantize`: a model's weights in 4 or 8 bits, as a checkpoint of its own."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

from .. import __version__
from ..errors import InvalidRequest
from ..frontend.client.progress import byte_progress
from ..runtime.checkpoint.gguf.convert import weights_files
from ..runtime.checkpoint.location import EMBEDDED_MODEL, locate_model
from ..runtime.execute.threads import configure_threads
from ..runtime.models.model_config import read_model_config
from .connect import Commands

if TYPE_CHECKING:
    from ..runtime.checkpoint.quantized.quantized_copy import CopyReport

GROUP_SIZES = (32, 64, 128)


def add_parser(commands: Commands) -> None:
    """Register the command."""
    parser = commands.add_parser(
        "quantize", help="write a model's weights in 4 or 8 bits to a folder of their own"
    )
    add = parser.add_argument
    add(
        "model",
        nargs="?",
        default=str(EMBEDDED_MODEL),
        metavar="MODEL",
        help="folder in Hugging Face layout, or hub id as in NAME/MODEL[@REVISION] "
        "(default: the embedded model)",
    )
    add("--out", type=Path, required=True, metavar="DIR", help="folder to be made")
    add("--bits", type=int, choices=(4, 8), default=4, help="default: %(default)s")
    add(
        "--group-size",
        type=int,
        default=GROUP_SIZES[-1],
        metavar="N",
        help="inputs of a row that share a scale, with 4 bits, where N divides a row; of 8 bits "
        "a row has one (default: %(default)s)",
    )
    add("--format", choices=("gptq",), default="gptq", help="layout (default: %(default)s)")
    add("--revision", metavar="NAME", help="of a hub id: branch, tag or commit")
    add("--json", action="store_true", help="print sizes and errors as JSON")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Write the copy and say how large it is and how far its weights are from the model's."""
    if args.group_size not in GROUP_SIZES:
        raise InvalidRequest.of("group_size", args.group_size, f"one of {GROUP_SIZES}")
    if args.model.partition("@")[0].endswith(".gguf"):  # before it is fetched
        raise _no_gguf(args.model)
    with byte_progress(sys.stderr, f"fetching {args.model}") as on_progress:
        folder = locate_model(args.model, revision=args.revision, on_progress=on_progress)
    if weights_files(folder):
        raise _no_gguf(args.model)
    config = read_model_config(folder)
    if "torch" not in sys.modules:  # which reads what this sets when it is imported
        configure_threads(len(os.sched_getaffinity(0)), None)
    from ..runtime.checkpoint.quantized.quantized_copy import write_quantized_copy
    from ..runtime.models.model_tensors import model_tensors

    start = time.perf_counter()
    with byte_progress(sys.stderr, f"quantizing {args.model}") as on_progress:
        report = write_quantized_copy(
            folder,
            args.out,
            model_tensors(config),
            bits=args.bits,
            group_size=args.group_size,
            version=__version__,
            on_progress=on_progress,
        )
    summary = _summary(args, folder, report, time.perf_counter() - start)
    print(json.dumps(summary) if args.json else _text(summary))
    return 0


def _no_gguf(model: str) -> InvalidRequest:
    return InvalidRequest.of(
        "model",
        model,
        "a checkpoint in safetensors, as the one that this GGUF model was made from; a GGUF model "
        "is served as it is (a floating one rounded by --quantization)",
    )


def _summary(
    args: argparse.Namespace, folder: Path, report: CopyReport, seconds: float
) -> dict[str, Any]:
    errors = report.errors
    worst = max(errors, key=errors.__getitem__, default=None)
    return {
        "model": str(folder),
        "out": str(args.out),
        "format": args.format,
        "bits": args.bits,
        "group_size": args.group_size if args.bits == 4 else -1,
        "num_quantized": len(errors),
        "num_kept": report.num_kept,
        "bytes_before": report.bytes_before,
        "bytes_after": report.bytes_after,
        "error_mean": fmean(errors.values()) if errors else None,
        "error_max": None if worst is None else errors[worst],
        "error_max_module": worst,
        "errors": errors,
        "seconds": seconds,
    }


def _text(summary: dict[str, Any]) -> str:
    before, after = summary["bytes_before"], summary["bytes_after"]
    lines = [
        f"{summary['out']}: {summary['num_quantized']} linears in {summary['bits']} bits, "
        f"{summary['num_kept']} tensors as they were",
        f"  size   {before / 1e6:.1f} MB -> {after / 1e6:.1f} MB ({after / max(1, before):.0%})",
    ]
    if summary["error_max"] is not None:
        lines.append(
            f"  error  {summary['error_mean']:.2%} of a weight's norm at the mean, "
            f"{summary['error_max']:.2%} at most ({summary['error_max_module']})"
        )
    return "\n".join(lines)
