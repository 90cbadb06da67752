"""Engines for benchmarks of simulated fleets: a model on a GPU known by its data sheet."""

from __future__ import annotations

import json
from pathlib import Path
from tempfile import TemporaryDirectory

from ...planning.devices import GPUS
from ...planning.roofline import CostModel
from ...planning.roofline_device import RooflineDevice
from ...planning.served_model import ServedModel
from ...planning.simulated_engine import SimulatedEngine
from ...runtime.models.model_config import read_model_config
from .model import Shape, checkpoint_config

LLAMA_8B = Shape(4096, 32, 32, 8, 128, 14336, 128_256, 131_072)  # Llama-3.1-8B
MAX_RUNNING = 256


def device_of(model: str | Path | None, gpu: str) -> RooflineDevice:
    """`model`: a folder with config.json; None: the shape of Llama-3.1-8B."""
    with TemporaryDirectory(prefix="stemma-bench-") as folder:
        (Path(folder) / "config.json").write_text(json.dumps(checkpoint_config(LLAMA_8B)))
        config = read_model_config(Path(model or folder))
    costs = CostModel(ServedModel.of(config, "bfloat16"), GPUS[gpu])
    fit = costs.model.fit(costs.device.memory_bytes, is_gpu=True, max_running_requests=MAX_RUNNING)
    return RooflineDevice(costs, fit.kv_tokens, MAX_RUNNING)


def engine_of(model: str | Path | None, gpu: str) -> SimulatedEngine:
    """An engine of one GPU."""
    return SimulatedEngine(device_of(model, gpu))
