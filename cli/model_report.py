"""What `stemma doctor MODEL` says of a model before it is loaded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ..bench.harness.report import print_table
from ..kernels.kv_cache_dtype import KVCacheDtype
from ..planning.formats import stored_quantization
from ..planning.rank_shape import config_of_rank
from ..planning.resident_memory import resident_memory
from ..planning.served_model import ServedModel
from ..planning.stored_weights import stored_weights
from ..runtime.checkpoint.config.model_config import ModelConfig
from ..runtime.checkpoint.formats import stored_method
from ..runtime.config import QUANTIZATIONS
from ..runtime.models.model_config import read_model_config

REQUEST_TOKENS = 4096


def examine_model(
    model: str, folder: Path, dtype: str, memory_bytes: int, *, is_gpu: bool, tp_size: int = 1
) -> dict[str, Any]:
    """As plain data; `model` as it was asked for, dtype a resolved one, `memory_bytes` of the host
    or of each GPU. With `tp_size` ranks what is needed and fits is of the largest one, which on a
    host has its part of the memory. Raises ModelLoadError for what cannot be served."""
    whole = read_model_config(folder)
    config = config_of_rank(whole, tp_size) if tp_size > 1 else whole
    plain = ServedModel.of(whole, dtype)
    memory_bytes = memory_bytes if is_gpu else memory_bytes // tp_size
    stored = stored_weights(folder)
    own = stored_quantization(folder, plain.shape)
    request_tokens = min(REQUEST_TOKENS, config.context_length)
    return {
        "model": model,
        "architecture": config.architecture,
        "parameters": plain.shape.num_parameters,
        "active_parameters": plain.shape.num_active_parameters,
        "context_length": config.context_length,
        "tp_size": tp_size,
        "dtype": dtype,
        "stored_quantization": own,
        "stored": None
        if stored is None
        else {
            "files": stored.num_files,
            "tensors": stored.num_tensors,
            "bytes": stored.num_bytes,
            "formats": list(stored.formats),
        },
        "kv_bytes_per_1k_tokens": {
            name: 1000 * ServedModel.of(config, dtype, "none", name).kv_bytes_per_token
            for name in _kv_dtypes(config)
        },
        "state_bytes": ServedModel.of(config, dtype).state_bytes,
        "memory_bytes": memory_bytes,
        "request_tokens": request_tokens,
        "fits": [
            _fit(ServedModel.of(config, dtype, name), memory_bytes, request_tokens, is_gpu=is_gpu)
            for name in (QUANTIZATIONS if stored_method(folder) is None else (own,))
        ],
    }


def _kv_dtypes(config: ModelConfig) -> tuple[KVCacheDtype, ...]:
    """Latents are kept as they are."""
    return ("auto", "int8") if config.latent is None else ("auto",)


def _fit(
    model: ServedModel, memory_bytes: int, request_tokens: int, *, is_gpu: bool
) -> dict[str, Any]:
    """`process_bytes`: what an engine's process takes of the host's memory with one such request;
    None on a GPU, whose memory is another."""
    fit = model.fit(memory_bytes, is_gpu=is_gpu)
    resident = None if is_gpu else resident_memory(model, request_tokens, fit.kv_tokens)
    return {
        "quantization": model.format.name,
        "weight_bytes": fit.weight_bytes,
        "process_bytes": None if resident is None else resident.peak_bytes,
        "kv_tokens": fit.kv_tokens,
        "requests": fit.num_requests(request_tokens),
    }


def print_model(report: dict[str, Any]) -> None:
    """For people."""
    active = report["active_parameters"]
    used = "" if active == report["parameters"] else f", {active / 1e6:,.1f} active a token"
    print(
        f"{report['model']}: {report['architecture']}, {report['parameters'] / 1e6:,.1f} million "
        f"parameters{used}, context of {report['context_length']:,} tokens"
    )
    stored = report["stored"]
    if stored is not None:
        files = "1 file" if stored["files"] == 1 else f"{stored['files']} files"
        print(
            f"stored   {_size(stored['bytes'])}, {stored['tensors']} tensors in {files}, "
            f"{', '.join(stored['formats'])}"
        )
    kv = [f"{n / 1e6:.1f} MB ({name})" for name, n in report["kv_bytes_per_1k_tokens"].items()]
    print(f"KV       {', '.join(kv)} for 1,000 tokens")
    if report["state_bytes"]:
        print(f"states   {_size(report['state_bytes'])} for each sequence, and each kept prefix")
    num_ranks = report["tp_size"]
    rank = "" if num_ranks == 1 else f"; KV and all below are of each of {num_ranks} ranks"
    print(f"memory   {report['memory_bytes'] / 1e9:.1f} GB to be had{rank}")
    is_floating = report["stored_quantization"] == "none"
    print_table(
        f"in {report['dtype']}, {'by --quantization' if is_floating else 'quantized as stored'}",
        [
            {
                "quantization": fit["quantization"],
                "weights": _size(fit["weight_bytes"]),
                **(
                    {"process, one request": _size(fit["process_bytes"])}
                    if fit["process_bytes"] is not None
                    else {}
                ),
                "tokens of KV": f"{fit['kv_tokens']:,}",
                f"requests of {report['request_tokens']:,} tokens": f"{fit['requests']:,}",
                "fits": "yes" if fit["requests"] else "no",
            }
            for fit in report["fits"]
        ],
    )


def _size(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:,.2f} GB" if num_bytes >= 1e8 else f"{num_bytes / 1e6:,.2f} MB"
