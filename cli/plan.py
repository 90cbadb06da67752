"""`stemma plan`: how fast a model will be on a device under a load, without loading it.

Step times come from a roofline model (docs/serve/planning.md), times to first token and a token
from the real scheduler over such steps. A CPU is measured for a second, GPUs are known by name.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..bench.harness.report import print_table
from ..errors import InvalidRequest
from ..kernels.kv_cache_dtype import KV_CACHE_DTYPES, kv_cache_dtypes_of_gpu
from ..planning.closed_loop import Load
from ..planning.devices import GPUS
from ..planning.formats import DTYPE_BYTES, AdapterRoom, stored_quantization
from ..planning.model_shape import ModelShape
from ..planning.pipeline import decode_s, prompt_s
from ..planning.prediction import LoadFigures, NamedStep, predict_load, predict_step, usual_steps
from ..planning.rank_shape import num_sums, parts_of, require_divisible_tokens
from ..planning.roofline import CostModel, StepTime
from ..planning.served_model import Fit, ServedModel
from ..runtime.checkpoint.config.encoder_config import EncoderConfig
from ..runtime.checkpoint.formats import require_kv_cache_dtype, require_quantization, stored_method
from ..runtime.config import (
    DEFAULT_MAX_LORA_RANK,
    DTYPES,
    QUANTIZATIONS,
    EngineConfig,
)
from ..runtime.execute.dtype_name import dtype_name
from ..runtime.execute.threads import configure_threads, default_num_threads
from ..runtime.models.encoders.registry import read_encoder
from ..runtime.models.model_config import read_model_config
from ..runtime.schedule.queue.prompt_limits import share_of_stage
from .connect import Commands, add_model_argument, described_model
from .encoder_report import examine_encoder, print_encoder
from .plan_fleet import add_fleet_flags, run_fleet
from .plan_roles import add_roles_flags, check_roles, plan_roles

# That an engine has too, with the same limits.
_ENGINE_FLAGS = (
    "chunked_prefill_size",
    "max_running_requests",
    "max_loras_per_batch",
    "max_lora_rank",
    "num_threads",
    "tp_size",
    "pp_size",
    "cp_size",
)


_STAGES_NEED = {"engines": 1, "enable_lora": False}
_SHARES_NEED = {"engines": 1}
_FLEETS_NEED = {"engines": 1, "tp_size": 1, "pp_size": 1, "cp_size": 1, "enable_lora": False}


def add_parser(commands: Commands) -> None:
    """Register the command."""
    parser = commands.add_parser(
        "plan",
        help="predict the speed of a model on a device under a load",
        description="Predict step time, time to first token (TTFT), time per output token (TPOT) "
        "and throughput, without loading the model: of a GPU from its data sheet, of this "
        "machine's CPU from a second of measuring.",
    )
    add = parser.add_argument
    add_model_argument(
        parser,
        "folder, of which config.json is enough, hub id or .gguf file (default: the embedded "
        "model)",
    )
    add(
        "--device",
        choices=("cpu", *GPUS),
        default="cpu",
        help="this machine's CPU, or a GPU by name (default: %(default)s)",
    )
    _add_number(parser, "--tp-size", 1, "GPUs of one machine that hold each layer together")
    _add_number(parser, "--pp-size", 1, "GPUs, or groups of these, one behind the other")
    _add_number(parser, "--cp-size", 1, "GPUs, or groups of these, that divide tokens and KV")
    add("--dtype", choices=DTYPES, default="auto", help="arithmetic (default: %(default)s)")
    add(
        "--quantization",
        choices=QUANTIZATIONS,
        help="of the weights (default: as they are stored)",
    )
    add(
        "--kv-cache-dtype",
        choices=KV_CACHE_DTYPES,
        default="auto",
        help="of the KV (default: %(default)s)",
    )
    _add_load_flags(parser)
    add_roles_flags(parser)
    add_fleet_flags(parser)
    _add_adapter_flags(parser)
    _add_number(parser, "--chunked-prefill-size", 2048, "token budget of a step")
    _add_number(parser, "--max-running-requests", 128, "requests in a batch")
    add("--num-threads", type=int, metavar="N", help="of a CPU (default: as the engine has)")
    add("--json", action="store_true", help="print it as data")
    parser.set_defaults(run=run)


def _add_load_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--clients",
        type=int,
        nargs="+",
        default=[1, 8, 64],
        metavar="N",
        help="clients, each with one request at a time (default: 1 8 64)",
    )
    _add_number(parser, "--prompt-tokens", 512, "tokens of a prompt")
    _add_number(parser, "--shared-tokens", 0, "of them, at the start, common to all prompts")
    _add_number(parser, "--output-tokens", 128, "tokens of an answer")


def _add_adapter_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--enable-lora",
        action="store_true",
        help="every request has a LoRA adapter, one after the other of as many as fit a batch",
    )
    _add_number(parser, "--max-loras-per-batch", 8, "adapters on the device")
    _add_number(parser, "--max-lora-rank", DEFAULT_MAX_LORA_RANK, "largest rank of an adapter")


def _add_number(parser: argparse.ArgumentParser, flag: str, default: int, text: str) -> None:
    parser.add_argument(
        flag, type=int, default=default, metavar="N", help=f"{text} (default: %(default)s)"
    )


def run(args: argparse.Namespace) -> int:
    """Predict and print."""
    _check(args)
    with described_model(args) as folder:
        encoder = read_encoder(folder)
        if args.fleet is not None:
            if encoder is not None:
                raise InvalidRequest.of("fleet", args.fleet, "none for an encoder")
            return run_fleet(args, folder)
        if encoder is not None:
            return _tell_encoder(args, folder, encoder)
        stages, kv_tokens = _stages(args, folder)
    costs = max(stages, key=lambda each: each.model.weight_bytes)
    context = args.prompt_tokens + args.output_tokens // 2
    steps = usual_steps(args.clients, args.prompt_tokens, context)
    is_staged = len(stages) > 1
    report = {
        "model": str(args.model or "the embedded model"),
        "architecture": costs.model.config.architecture,
        "parameters": costs.model.shape.num_parameters,  # of the largest process, as all below
        "device": costs.device.name,
        "tp_size": args.tp_size,
        "pp_size": args.pp_size,
        "cp_size": args.cp_size,
        "dtype": costs.model.format.dtype,
        "quantization": costs.model.format.name,
        "kv_cache_dtype": args.kv_cache_dtype,
        "weight_bytes": costs.model.weight_bytes,
        "adapter_bytes": costs.model.adapter_bytes,
        "kv_tokens": kv_tokens,
        "state_bytes": costs.model.state_bytes,
        "steps": [
            _staged_row(args, step, stages)
            if is_staged
            else _step_row(step, predict_step(costs, step))
            for step in steps
        ],
        "loads": [
            _load_row(clients, _load(args, stages, clients, kv_tokens)) for clients in args.clients
        ],
        "roles": [] if is_staged else plan_roles(args, costs),
    }
    if args.json:
        print(json.dumps(report))
    else:
        _print(report)
    return 0


def _tell_encoder(args: argparse.Namespace, folder: Path, encoder: EncoderConfig) -> int:
    """What it needs; how fast steps of whole texts are is not predicted."""
    dtype = args.dtype
    if dtype == "auto":
        dtype = "bfloat16" if args.device in GPUS else "float32"
    report = examine_encoder(
        str(args.model),
        folder,
        encoder,
        dtype,
        token_budget=args.chunked_prefill_size,
        quantization=args.quantization or "none",
        memory_bytes=GPUS[args.device].memory_bytes if args.device in GPUS else None,
    )
    if args.json:
        print(json.dumps(report))
    else:
        print_encoder(report)
    return 0


def _check(args: argparse.Namespace) -> None:
    EngineConfig(**{name: getattr(args, name) for name in _ENGINE_FLAGS})
    check_roles(args)
    for name in ("tp_size", "pp_size", "cp_size"):
        if getattr(args, name) > 1 and args.device not in GPUS:
            allowed = "1 with --device cpu, which is measured for one process"
            raise InvalidRequest.of(name, getattr(args, name), allowed)
    for size, needs in {"pp_size": _STAGES_NEED, "cp_size": _SHARES_NEED}.items():
        for name, only in needs.items() if getattr(args, size) > 1 else ():
            if getattr(args, name) != only:
                raise InvalidRequest.of(name, getattr(args, name), f"{only} with {size} > 1")
    for name, only in _FLEETS_NEED.items() if args.fleet is not None else ():
        if getattr(args, name) != only:
            allowed = f"{only} with fleet, which finds groups and roles itself, without adapters"
            raise InvalidRequest.of(name, getattr(args, name), allowed)
    for name in ("prompt_tokens", "output_tokens"):
        if getattr(args, name) < 1:
            raise InvalidRequest.of(name, getattr(args, name), "an integer >= 1")
    if not 0 <= args.shared_tokens < args.prompt_tokens:
        raise InvalidRequest.of("shared_tokens", args.shared_tokens, "below prompt_tokens")
    for clients in args.clients:
        if not 1 <= clients <= 10_000:
            raise InvalidRequest.of("clients", clients, "integers in [1, 10000]")


def _stages(args: argparse.Namespace, folder: Path) -> tuple[list[CostModel], int]:
    """The cost model of each stage, one where there is one, and how many tokens of KV there will
    be. Raises InvalidRequest where the model does not fit."""
    stages = _gpus(args, folder) if args.device in GPUS else [_cpu(args, folder)]
    fit, costs = min(
        ((_fit(args, each), each) for each in stages), key=lambda each: each[0].kv_tokens
    )
    request_tokens = args.prompt_tokens + args.output_tokens
    context_length = costs.model.config.context_length
    if request_tokens > context_length:
        allowed = f"at most {context_length:,} with output_tokens, the model's context length"
        raise InvalidRequest.of("prompt_tokens", args.prompt_tokens, allowed)
    kv_tokens = fit.kv_tokens * args.cp_size
    if kv_tokens < request_tokens:
        raise InvalidRequest.of(
            "device",
            args.device,
            f"one with more memory: of {costs.device.memory_bytes:,} bytes weights take "
            f"{fit.weight_bytes:,}, rotary tables {costs.model.rotary_bytes:,} and adapters "
            f"{costs.model.adapter_bytes:,}, which leaves KV for {kv_tokens:,} tokens",
        )
    return stages, min(kv_tokens, max(args.clients) * 4 * request_tokens)


def _fit(args: argparse.Namespace, costs: CostModel) -> Fit:
    return costs.model.fit(
        costs.device.memory_bytes,
        is_gpu=args.device in GPUS,
        max_running_requests=args.max_running_requests,
    )


def _gpus(args: argparse.Namespace, folder: Path) -> list[CostModel]:
    """Raises InvalidRequest for what such a GPU does not serve, or its data sheet does not say."""
    device = GPUS[args.device]
    dtype = "bfloat16" if args.dtype == "auto" else args.dtype
    if DTYPE_BYTES[dtype] != 2:
        allowed = f"auto, bfloat16 or float16 with {args.device}, whose rates are known for these"
        raise InvalidRequest.of("dtype", dtype, allowed)
    assert device.capability is not None, "it is a GPU"
    known = kv_cache_dtypes_of_gpu(DTYPE_BYTES[dtype], device.capability)
    require_kv_cache_dtype(args.kv_cache_dtype, known, dtype, args.device)
    models, whole = _models(args, folder, dtype), read_model_config(folder)
    require_divisible_tokens(whole, args.cp_size)
    return [
        CostModel(
            model,
            device,
            args.tp_size,
            num_sums(whole, args.tp_size, None if len(models) == 1 else model.config.num_layers),
            args.cp_size,
        )
        for model in models
    ]


def _cpu(args: argparse.Namespace, folder: Path) -> CostModel:
    configure_threads(args.num_threads or default_num_threads(folder), None)
    from ..planning.probe import cost_model
    from ..runtime.execute.model_runner import resolve_dtype

    dtype = dtype_name(resolve_dtype(args.dtype))
    (model,) = _models(args, folder, dtype)
    return cost_model(model)


def _models(args: argparse.Namespace, folder: Path, dtype: str) -> list[ServedModel]:
    """Of each stage. Raises InvalidRequest for what loading it would refuse."""
    parts = parts_of(read_model_config(folder), args.tp_size, args.pp_size)
    asked = args.quantization or "none"
    require_quantization(asked, folder, stored_method(folder))
    if asked == "none":
        asked = stored_quantization(folder, ModelShape.of(parts[0][0]))
    adapters = AdapterRoom(args.max_loras_per_batch, args.max_lora_rank)
    room = adapters if args.enable_lora else None
    return [
        ServedModel.of(part, dtype, asked, args.kv_cache_dtype, room, stage)
        for part, stage in parts
    ]


def _load(
    args: argparse.Namespace, stages: Sequence[CostModel], clients: int, kv_tokens: int
) -> LoadFigures:
    return predict_load(
        stages,
        Load(
            clients,
            args.prompt_tokens,
            args.shared_tokens,
            args.output_tokens,
            num_adapters=args.max_loras_per_batch if args.enable_lora else 0,
        ),
        kv_tokens=kv_tokens,
        token_budget=args.chunked_prefill_size,
        max_running_requests=args.max_running_requests,
    )


def _step_row(step: NamedStep, time: StepTime) -> dict[str, Any]:
    return {"step": step.name, "ms": round(time.total_s * 1e3, 3), "bound by": time.bound_by}


def _staged_row(
    args: argparse.Namespace, step: NamedStep, stages: Sequence[CostModel]
) -> dict[str, Any]:
    """All stages together, with as many steps on the way as there are, or a prompt's chunks."""
    num_tokens, _ = step.rows[0]
    if num_tokens == 1:
        time_s, lost = decode_s(stages, step.rows)
    else:
        budget = args.chunked_prefill_size
        chunk = share_of_stage(budget, len(stages), args.max_running_requests)
        time_s, lost = prompt_s(stages, num_tokens, chunk)
    return {"step": step.name, "ms": round(time_s * 1e3, 3), "stages wait": round(lost, 3)}


def _load_row(clients: int, figures: LoadFigures) -> dict[str, Any]:
    return {
        "clients": clients,
        "TTFT p50, ms": round(figures.ttft_s * 1e3, 1),
        "TTFT p99, ms": round(figures.ttft_p99_s * 1e3, 1),
        "TPOT p50, ms": round(figures.tpot_s * 1e3, 3),
        "output tokens/s": round(figures.output_tokens_s, 1),
    }


def _print(report: dict[str, Any]) -> None:
    num_gpus = report["tp_size"] * report["pp_size"] * report["cp_size"]
    print(
        f"{report['model']}: {report['architecture']}, {report['parameters'] / 1e6:,.1f} million "
        f"parameters, {report['weight_bytes'] / 1e9:.2f} GB in {report['dtype']}"
        f"{'' if num_gpus == 1 else f', of the largest part on {num_gpus} GPUs'}"
    )
    if report["adapter_bytes"]:
        print(f"room for adapters: {report['adapter_bytes'] / 1e9:.2f} GB")
    print(
        f"on {report['device']}; loads have KV of {report['kv_tokens']:,} tokens: of four requests "
        "a client, or what fits"
    )
    if report["state_bytes"]:
        print(f"recurrent state of a sequence: {report['state_bytes'] / 1e6:.1f} MB")
    print_table("steps", report["steps"])
    print_table("loads", report["loads"])
    print_table("roles", report["roles"])
    if report["roles"]:
        best = max(report["roles"], key=lambda row: row["calls/s"])
        print(f"the most calls within the limits: {best['flags']}")
