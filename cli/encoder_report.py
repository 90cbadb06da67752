"""What `stemma doctor MODEL` and `stemma plan MODEL` say of an encoder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ..planning.encoder_shape import EncoderShape, encoder_resident_memory, encoder_step_bytes
from ..runtime.checkpoint.config.embedding_config import EmbeddingConfig
from ..runtime.checkpoint.config.encoder_config import EncoderConfig


def examine_encoder(
    model: str,
    folder: Path,
    config: EncoderConfig,
    dtype: str,
    *,
    token_budget: int,
    quantization: str = "none",
    memory_bytes: int | None = None,
) -> dict[str, Any]:
    """As plain data; `model` as it was asked for, dtype a resolved one; `token_budget`: of a step.
    `memory_bytes`: that can be had; None: not known."""
    shape, embedding = EncoderShape.of(config), EmbeddingConfig.from_folder(folder, is_encoder=True)
    longest = min(config.context_length, embedding.max_tokens or config.context_length)
    weights = shape.weight_bytes(dtype, quantization)
    num_tokens = max(token_budget, longest)
    step = encoder_step_bytes(config, dtype, num_tokens)
    resident = encoder_resident_memory(config, dtype, quantization, num_tokens)
    return {
        "model": model,
        "architecture": config.architecture,
        "task": "embed" if config.head is None else "score",
        "parameters": shape.num_parameters,
        "dtype": dtype,
        "quantization": quantization,
        "context_length": longest,
        "labels": None if config.head is None else list(config.head.labels.names),
        "pooling": None if config.head is not None else embedding.pooling,
        "embedding_size": None if config.head is not None else embedding.size(config.hidden_size),
        "refusal": None if config.head is not None else embedding.refusal,
        "weight_bytes": weights,
        "step_bytes": step,
        "process_bytes": resident.peak_bytes,
        "flops_per_token": 2 * shape.linear_parameters,
        "memory_bytes": memory_bytes,
        "fits": memory_bytes is None or weights + step <= memory_bytes,
    }


def print_encoder(report: dict[str, Any]) -> None:
    """In a few lines."""
    print(
        f"{report['model']}: {report['architecture']}, {report['parameters'] / 1e6:,.1f} million "
        f"parameters; encodes texts of up to {report['context_length']:,} tokens, generates nothing"
    )
    if report["labels"] is not None:
        print(f"gives {len(report['labels'])} scores: {', '.join(report['labels'][:8])}")
    elif report["refusal"] is not None:
        print(f"gives no embeddings: {report['refusal']}")
    else:
        print(f"vectors of {report['embedding_size']:,} numbers, pooling {report['pooling']}")
    print(
        f"weights {report['weight_bytes'] / 1e9:.2f} GB in {report['dtype']}, a step "
        f"{report['step_bytes'] / 1e9:.2f} GB, no KV; {report['flops_per_token'] / 1e9:.2f} GFLOP "
        f"a token, and attention; on a CPU a process of {report['process_bytes'] / 1e9:.2f} GB"
    )
    if not report["fits"]:
        print(f"too large: {report['memory_bytes'] / 1e9:.2f} GB are there")
