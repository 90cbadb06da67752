"""What `stemma doctor MODEL` says of a model before it is loaded."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..bench.harness.report import print_table
from ..kernels.kv_cache_dtype import INT4_STEP, KVCacheDtype
from ..planning.draft_room import DraftRoom
from ..planning.formats import stored_quantization
from ..planning.rank_shape import parts_of
from ..planning.resident_memory import resident_memory
from ..planning.served_model import ServedModel
from ..planning.stored_weights import stored_weights
from ..runtime.checkpoint.config.model_config import ModelConfig
from ..runtime.checkpoint.formats import stored_method
from ..runtime.config import QUANTIZATIONS
from ..runtime.models.drafts import read_draft, require_same_tokens
from ..runtime.models.model_config import read_model_config
from ..runtime.tokenizer.tokenizer import Tokenizer

REQUEST_TOKENS = 4096


def examine_model(
    model: str,
    folder: Path,
    dtype: str,
    memory_bytes: int,
    *,
    is_gpu: bool,
    tp_size: int = 1,
    pp_size: int = 1,
    cp_size: int = 1,
    draft_flags: Sequence[Any] = (),
) -> dict[str, Any]:
    """As plain data; `model` as it was asked for, dtype a resolved one, `memory_bytes` of the host
    or of each GPU, `draft_flags` what `read_draft` takes behind the model. Where several processes
    hold the model, what is needed is of the largest one, which on a host has its part of the
    memory; how many tokens fit is of all together. Raises ModelLoadError for what cannot be served,
    InvalidRequest for what cannot be divided so, or be guessed for."""
    config = read_model_config(folder)
    parts = parts_of(config, tp_size, pp_size)
    draft = read_draft(config, *draft_flags)
    if draft is not None:
        require_same_tokens(draft, Tokenizer(folder, config.vocab_size), model)
    plain = ServedModel.of(config, dtype)
    memory_bytes = memory_bytes if is_gpu else memory_bytes // (tp_size * pp_size * cp_size)
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
        "pp_size": pp_size,
        "cp_size": cp_size,
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
            name: max(
                1000
                * ServedModel.of(part, dtype, "none", name, draft=draft).kv_bytes_per_token
                // cp_size
                for part, _ in parts
            )
            for name in _kv_dtypes(config, is_alone=draft is None, is_gpu=is_gpu)
        },
        "draft_bytes": None if draft is None else DraftRoom.of(draft, config, dtype).weight_bytes,
        "state_bytes": max(ServedModel.of(part, dtype).state_bytes for part, _ in parts),
        "memory_bytes": memory_bytes,
        "request_tokens": request_tokens,
        "fits": [
            _fit(
                [
                    ServedModel.of(part, dtype, name, stage=stage, draft=draft)
                    for part, stage in parts
                ],
                memory_bytes,
                request_tokens,
                is_gpu=is_gpu,
                cp_size=cp_size,
            )
            for name in (QUANTIZATIONS if stored_method(folder) is None else (own,))
        ],
    }


def _kv_dtypes(config: ModelConfig, *, is_alone: bool, is_gpu: bool) -> tuple[KVCacheDtype, ...]:
    """Latents are kept as they are; 4 bits are a CPU's, and told of without a draft's heads."""
    if config.latent is not None:
        return ("auto",)
    takes_4_bits = (
        is_alone
        and not is_gpu
        and all(head_dim % INT4_STEP == 0 for _, head_dim in config.kv_shapes)
    )
    return ("auto", "int8", "int4") if takes_4_bits else ("auto", "int8")


def _fit(
    stages: Sequence[ServedModel],
    memory_bytes: int,
    request_tokens: int,
    *,
    is_gpu: bool,
    cp_size: int,
) -> dict[str, Any]:
    """`process_bytes`: what the largest process takes of the host's memory with one such request;
    None on a GPU, whose memory is another."""
    fits = [model.fit(memory_bytes, is_gpu=is_gpu) for model in stages]
    own_tokens = min(fit.kv_tokens for fit in fits)
    held = -(-request_tokens // cp_size)
    resident = [resident_memory(model, held, own_tokens).peak_bytes for model in stages]
    return {
        "quantization": stages[0].format.name,
        "weight_bytes": max(fit.weight_bytes for fit in fits),
        "process_bytes": None if is_gpu else max(resident),
        "kv_tokens": cp_size * own_tokens,
        "requests": cp_size * own_tokens // request_tokens,
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
    if report["draft_bytes"]:
        print(f"draft    {_size(report['draft_bytes'])}; it is in what follows, too")
    kv = [f"{n / 1e6:.1f} MB ({name})" for name, n in report["kv_bytes_per_1k_tokens"].items()]
    print(f"KV       {', '.join(kv)} for 1,000 tokens")
    if report["state_bytes"]:
        print(f"states   {_size(report['state_bytes'])} for each sequence, and each kept prefix")
    num_processes = report["tp_size"] * report["pp_size"] * report["cp_size"]
    part = ""
    if num_processes > 1:
        part = f" for each of {num_processes} processes; KV, weights and process are the largest's"
    print(f"memory   {report['memory_bytes'] / 1e9:.1f} GB to be had{part}")
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
