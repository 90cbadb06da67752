"""What an engine's process takes of a CPU's memory: as `stemma doctor` predicts it, and measured.

One engine after the other, each with one request of `--tokens`; the process's peak (VmHWM) once it
is loaded and once the request is done.
"""

from __future__ import annotations

import argparse
import random
from pathlib import Path
from typing import Any

from ...flags import count
from ...frontend.backend import Engine
from ...planning.encoder_shape import encoder_resident_memory
from ...planning.resident_memory import ResidentMemory, resident_memory
from ...planning.served_model import ServedModel
from ...runtime.checkpoint.config.encoder_config import EncoderConfig
from ...runtime.checkpoint.location import EMBEDDED_MODEL
from ...runtime.config import QUANTIZATIONS
from ...runtime.models.encoders.registry import read_encoder
from ...runtime.models.model_config import read_model_config
from ..harness.process_meter import peak_rss_bytes_of
from ..harness.prompts import plain_ids, random_prompt
from ..harness.report import write_report

_OUTPUT_TOKENS = 4


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Flags of `stemma bench memory`."""
    add = parser.add_argument
    add("--models", type=Path, nargs="+", default=[EMBEDDED_MODEL], help="checkpoint folders")
    add("--quantization", choices=QUANTIZATIONS, nargs="+", default=["none"])
    add("--tokens", type=count, default=2048, metavar="N", help="of the request (%(default)s)")


def run(args: argparse.Namespace) -> int:
    """Predict, measure and report."""
    rows = [
        _row(folder, quantization, args.tokens)
        for folder in args.models
        for quantization in args.quantization
    ]
    write_report("memory", rows, args)
    return 0


def _row(folder: Path, quantization: str, tokens: int) -> dict[str, Any]:
    encoder = read_encoder(folder)
    config = encoder or read_model_config(folder)
    tokens = min(tokens, config.context_length)
    ids = random_prompt(random.Random(0), tokens - _OUTPUT_TOKENS, plain_ids(config.vocab_size))
    with Engine(str(folder), quantization=quantization) as engine:
        dtype = engine.get_server_info()["dtype"]
        start = peak_rss_bytes_of(engine.pid)
        if encoder is not None:
            engine.encode(input_ids=ids.tolist())
        else:
            sampling = {"max_new_tokens": _OUTPUT_TOKENS, "temperature": 0, "ignore_eos": True}
            engine.generate(input_ids=ids.tolist(), sampling_params=sampling)
        peak = peak_rss_bytes_of(engine.pid)
    predicted = _predicted(folder, encoder, dtype, quantization, tokens)
    return {
        "model": folder.resolve().name,
        "dtype": dtype,
        "quantization": quantization,
        "start, MB": start / 1e6,
        "predicted / start": predicted.start_bytes / start,
        "peak, MB": peak / 1e6,
        "predicted / peak": predicted.peak_bytes / peak,
    }


def _predicted(
    folder: Path, encoder: EncoderConfig | None, dtype: str, quantization: str, tokens: int
) -> ResidentMemory:
    if encoder is not None:
        return encoder_resident_memory(encoder, dtype, quantization, tokens)
    config = read_model_config(folder)
    model = ServedModel.of(config, dtype, quantization)
    return resident_memory(model, tokens, 128 * config.context_length)
