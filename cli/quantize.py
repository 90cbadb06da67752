"""`stemma quantize`: a model's weights in 3, 4 or 8 bits, as a checkpoint of its own."""

from __future__ import annotations

import argparse
import json
import os
import shlex
import sys
import time
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any, Literal

from .. import __version__
from ..errors import InvalidRequest
from ..flags import count
from ..frontend.client.progress import byte_progress
from ..runtime.checkpoint.gguf.convert import weights_files
from ..runtime.checkpoint.location import EMBEDDED_MODEL, locate_model
from ..runtime.checkpoint.new_folder import require_new
from ..runtime.config import EngineConfig
from ..runtime.execute.threads import configure_threads
from ..runtime.models.model_config import read_model_config
from .connect import Commands
from .program_work import require_work, work_of

if TYPE_CHECKING:
    from ..runtime.checkpoint.config.model_config import ModelConfig
    from ..runtime.checkpoint.quantized.quantized_copy import CopyReport
    from ..training.texts import Text

METHODS = ("rtn", "gptq", "awq", "smoothquant")
GROUP_SIZES = (32, 64, 128)


def add_parser(commands: Commands) -> None:
    """Register the command."""
    parser = commands.add_parser(
        "quantize", help="write a model's weights in 3, 4 or 8 bits to a folder of their own"
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
    add(
        "--method",
        choices=METHODS,
        default=METHODS[0],
        help="how numbers are chosen; all but the first need --calibrate (default: %(default)s)",
    )
    add(
        "--bits",
        type=int,
        choices=(8, 4, 3),
        help="default: 4; of smoothquant 8, whose inputs have 8 bits, too",
    )
    add(
        "--group-size",
        type=int,
        default=GROUP_SIZES[-1],
        metavar="N",
        help="inputs of a row that share a scale, with 3 or 4 bits, where N divides a row; of 8 "
        "bits a row has one (default: %(default)s)",
    )
    add(
        "--format",
        choices=("awq", "gptq"),
        help="layout of weights alone, whatever the method; vLLM reads that of awq, which has 4 "
        "bits (default: awq for 4 bits, gptq for 8 and 3)",
    )
    add(
        "--calibrate",
        type=Path,
        metavar="FILE",
        help="what the model is to be good at: a Python file whose main block runs programs, or "
        "JSON lines of chats, prompts or texts",
    )
    add(
        "--tokens",
        type=count,
        default=32768,
        metavar="N",
        help="of these, to calibrate by at most (default: %(default)s)",
    )
    add(
        "--held-out",
        type=float,
        default=0.1,
        metavar="SHARE",
        help="of the programs, to measure by (default: %(default)s)",
    )
    add(
        "--strength",
        type=float,
        metavar="X",
        help="of smoothquant, from 0 to 1: how much of the inputs' peaks weights take over "
        "(default: what is best for each linear)",
    )
    add("--seed", type=int, default=0, metavar="N", help="fixes all draws (default: %(default)s)")
    add("--revision", metavar="NAME", help="of a hub id: branch, tag or commit")
    add("--json", action="store_true", help="print sizes and errors as JSON")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Write the copy and say how large it is and how far its weights are from the model's."""
    _require_flags(args)
    if args.model.partition("@")[0].endswith(".gguf"):  # before it is fetched
        raise _no_gguf(args.model)
    with byte_progress(sys.stderr, f"fetching {args.model}") as on_progress:
        folder = locate_model(args.model, revision=args.revision, on_progress=on_progress)
    if weights_files(folder):
        raise _no_gguf(args.model)
    config = read_model_config(folder)
    if "torch" not in sys.modules:  # which reads what this sets when it is imported
        configure_threads(len(os.sched_getaffinity(0)), None)
    if args.calibrate is not None:
        summary = _by_texts(args, folder, config)
    else:
        summary = _alone(args, folder, config)
    print(json.dumps(summary) if args.json else _text(summary))
    return 0


def _require_flags(args: argparse.Namespace) -> None:
    """Raises InvalidRequest; gives `bits` and `format` their defaults."""
    of = InvalidRequest.of
    if args.group_size not in GROUP_SIZES:
        raise of("group_size", args.group_size, f"one of {GROUP_SIZES}")
    if args.bits is None:
        args.bits = 8 if args.method == "smoothquant" else 4
    if args.method == "smoothquant" and args.bits != 8:
        raise of("bits", args.bits, "8 of smoothquant, or --method gptq or awq for fewer")
    if args.method == "rtn" and args.bits == 3:
        raise of("bits", args.bits, "4 or 8 of rtn, or --method gptq or awq for 3")
    if args.format == "awq" and args.bits != 4:
        raise of("format", args.format, f"gptq with {args.bits} bits: awq has 4")
    if args.format is None:
        args.format = "awq" if args.bits == 4 else "gptq"
    if args.strength is not None and not 0.0 <= args.strength <= 1.0:
        raise of("strength", args.strength, "a number from 0 to 1")
    if args.calibrate is not None:
        require_new(args.out)
        require_work(args.calibrate, "calibrate")
        if not 0.0 < args.held_out < 1.0:
            raise of("held_out", args.held_out, "a number between 0 and 1")
    elif args.method != "rtn":
        allowed = "with --calibrate FILE, by whose programs or texts it works; without: rtn"
        raise of("method", args.method, allowed)


def _alone(args: argparse.Namespace, folder: Path, config: ModelConfig) -> dict[str, Any]:
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
            form=args.format,
            version=__version__,
            on_progress=on_progress,
        )
    return _summary(args, folder, report, time.perf_counter() - start)


def _by_texts(args: argparse.Namespace, folder: Path, config: ModelConfig) -> dict[str, Any]:
    from ..quantize.card import write_card
    from ..quantize.making import Recipe, quantize_by_texts, require_quantizable, sampled
    from ..runtime.checkpoint.quantized.layouts import Layout
    from ..runtime.models.model_tensors import model_tensors
    from ..training.texts import split

    activations: Literal["exact", "int8"] = "int8" if args.method == "smoothquant" else "exact"
    layout = Layout(args.bits, args.group_size, activations, args.format)
    recipe = Recipe(args.method, layout, args.strength)
    require_quantizable(config, recipe)
    texts, held = split(_programs(args, folder, config), args.held_out, args.seed)
    report = quantize_by_texts(
        folder,
        args.out,
        config,
        model_tensors(config),
        sampled([text.token_ids for text in texts], args.tokens, args.seed),
        sampled([text.token_ids for text in held], args.tokens, args.seed),
        recipe,
        version=__version__,
        on_layer=lambda done, total: print(f"layer {done} of {total}", file=sys.stderr, flush=True),
    )
    write_card(args.out, args.model, shlex.join(["stemma", *sys.argv[1:]]), recipe, report)
    return {
        **_summary(args, folder, report.copy, report.seconds),
        "num_tokens": report.num_tokens,
        "num_held_tokens": report.divergence.num_tokens,
        "kl": report.divergence.kl,
        "same_best": report.divergence.same_best,
    }


def _programs(args: argparse.Namespace, folder: Path, config: ModelConfig) -> list[list[Text]]:
    """What the file's programs and the model write, or its texts."""
    from ..quantize.texts import read_texts
    from ..training.texts import Text

    texts = read_texts(args.calibrate)
    if texts is None:
        from ..runtime.loaded_model import LoadedModel
        from ..training.making import record

        work = work_of(args.calibrate, "calibrate")
        loaded = LoadedModel(EngineConfig(model=str(folder), speculate="off"))
        return record(loaded, work, str(args.calibrate), "calibrate")
    from ..runtime.tokenizer.tokenizer import Tokenizer

    tokenizer = Tokenizer(folder, config.vocab_size)
    ids = [tuple(tokenizer.encode(text)) for text in texts]
    programs = [[Text(each, (False,) * len(each))] for each in ids if each]
    if len(programs) < 2:
        raise InvalidRequest.of("calibrate", str(args.calibrate), "at least two texts")
    return programs


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
        "format": "compressed-tensors" if args.method == "smoothquant" else args.format,
        "method": args.method,
        "bits": args.bits,
        "group_size": -1 if args.bits == 8 else args.group_size,
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
    if "kl" in summary:
        lines.append(
            f"  KL     {summary['kl']:.4f} nats a token to the original, the same best token for "
            f"{summary['same_best']:.1%} of {summary['num_held_tokens']} tokens held out; "
            f"calibrated by {summary['num_tokens']}, {summary['seconds']:.0f} s"
        )
    return "\n".join(lines)
