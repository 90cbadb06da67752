"""How each of several models of `stemma serve` is prepared: located, and planned in the memory that
they share."""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from ..cluster.settings import ClusterSettings
from ..errors import InvalidRequest, ModelLoadError
from ..flags import from_flags
from ..frontend.client.engine_process import EngineProcess
from ..frontend.client.progress import byte_progress
from ..planning.encoder_shape import EncoderShape, encoder_step_bytes
from ..planning.formats import DTYPE_BYTES, AdapterRoom, stored_quantization
from ..planning.model_shape import ModelShape
from ..planning.model_share import Lengths, ModelShare, SharedMemory, share_of, share_with
from ..planning.served_model import ServedModel
from ..runtime.checkpoint.config.embedding_config import EmbeddingConfig
from ..runtime.checkpoint.config.encoder_config import EncoderConfig
from ..runtime.checkpoint.config.model_config import ModelConfig
from ..runtime.checkpoint.formats import require_quantization, stored_method
from ..runtime.config import (
    DEFAULT_MAX_LORA_RANK,
    REMOTE_SCHEMES,
    EngineConfig,
    engine_config,
    located,
    options_of,
)
from ..runtime.memory.sizing import available_memory_bytes, step_bytes
from ..runtime.models.encoders.registry import read_encoder
from ..runtime.models.model_config import read_model_config
from ..runtime.programs.embedded_text import report_of
from ..server.models.model_slot import ModelSpec, Prepared
from ..server.protocol.caller import digest_of
from ..server.settings import ServerSettings
from .named_models import NamedModel

DEFAULT_MEMORY_SHARE = 0.9  # of what is available; the rest is for this process and others (guess)
_MEM_GET_INFO = "import torch; print(torch.cuda.mem_get_info({device!r})[0])"


def model_specs(
    args: argparse.Namespace,
    models: Sequence[NamedModel],
    settings: ServerSettings,
    endpoints: Sequence[str],
) -> tuple[list[ModelSpec], int]:
    """How each is prepared, and the bytes of memory that they share. Raises InvalidRequest for
    flags that are not for several models."""
    _require_no_others(args)
    memory = SharedMemory(
        _memory_bytes(args, settings),
        min(settings.models_max or len(models), len(models)),
        args.device != "cpu",
        is_given=settings.models_memory_gb is not None,
        kv_fraction=args.mem_fraction,
    )
    clients = {name: getattr(args, name) for name in ("server_key", "client_keys", "grace_s")}
    specs = []
    for model, endpoint in zip(models, endpoints):
        config = _config(args, model)
        prepare = partial(_prepare, config, endpoint, memory, clients)
        specs.append(ModelSpec(model.name, endpoint, prepare))
    return specs, memory.num_bytes


def endpoints_beside(first: str, num: int) -> list[str]:
    """The first model's address and one for each of the others. Raises InvalidRequest."""
    return [first, *(_nth(first, number) for number in range(2, num + 1))]


def _nth(endpoint: str, number: int) -> str:
    if endpoint.startswith("ipc://"):
        stem, dot, suffix = endpoint.rpartition(".")
        return f"{stem}-{number}.{suffix}" if dot and "/" not in suffix else f"{endpoint}-{number}"
    host, _, port = endpoint.rpartition(":")
    if not port.isdecimal() or int(port) == 0 or int(port) + number > 1 << 16:
        allowed = "ipc://PATH or tcp://HOST:PORT; each further model has the next port"
        raise InvalidRequest.of("endpoint", endpoint, allowed)
    return f"{host}:{int(port) + number - 1}"


def _require_no_others(args: argparse.Namespace) -> None:
    if from_flags(ClusterSettings, args).is_many:
        raise InvalidRequest(
            "replicas: several models have one engine each; for more, serve each model by its own "
            "`stemma serve --replicas N`",
            "replicas",
        )
    remedies = {
        "served_model_name": "NAME=MODEL names each",
        "revision": "NAME/MODEL@REVISION has each one's",
        "lora_paths": "adapters belong to one model; --enable-lora, and load them while it runs",
    }
    for field, remedy in remedies.items():
        if value := getattr(args, field):
            raise InvalidRequest.of(field, value, f"nothing with several models: {remedy}")


def _config(args: argparse.Namespace, model: NamedModel) -> EngineConfig:
    own = {"model": model.source, "served_model_name": model.name}
    if args.kv_store is not None and not str(args.kv_store).startswith(REMOTE_SCHEMES):
        # One process writes to a folder: each model's has its own.
        own["kv_store"] = str(Path(args.kv_store) / digest_of(model.name))
    return engine_config(argparse.Namespace(**{**vars(args), **own}))


def _memory_bytes(args: argparse.Namespace, settings: ServerSettings) -> int:
    if settings.models_memory_gb is not None:
        return int(settings.models_memory_gb * 1e9)
    free = available_memory_bytes() if args.device == "cpu" else _free_gpu_bytes(args.device)
    return int(DEFAULT_MEMORY_SHARE * free)


def _free_gpu_bytes(device: str) -> int:
    """As another process sees it: this one is to have no context on the GPU."""
    command = [sys.executable, "-P", "-c", _MEM_GET_INFO.format(device=device)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        last = done.stderr.strip().splitlines()[-1:] or [""]
        reason = f"a device whose memory can be asked ({last[0]}), or --models-memory-gb"
        raise InvalidRequest.of("device", device, reason)
    return int(done.stdout)


def _prepare(
    config: EngineConfig, endpoint: str, memory: SharedMemory, clients: Mapping[str, Any]
) -> Prepared:
    with byte_progress(sys.stderr, f"fetching {config.model_name}") as on_progress:
        config = located(config, on_progress)
    folder = Path(config.model)
    encoder = read_encoder(folder)
    if encoder is not None:
        return _prepare_encoder(config, folder, encoder, endpoint, memory, clients)
    model_config = read_model_config(folder)
    if config.max_model_len is not None:  # of the one that has less
        most = min(config.max_model_len, model_config.context_length)
        config = replace(config, max_model_len=most)
    share = _share(config, folder, model_config, memory)
    if memory.is_given and share.num_bytes > memory.num_bytes:
        raise ModelLoadError(
            f"it takes {share.num_bytes / 1e9:.3g} GB with the KV of a few sequences; "
            f"models_memory_gb={memory.num_bytes / 1e9:g}, raise it or lower max_model_len"
        )
    if config.max_total_tokens is None:
        config = replace(config, max_total_tokens=share.kv_tokens)
    options = {**options_of(config), **clients}
    model = options.pop("model", None)
    return Prepared(
        partial(_launch, model, endpoint, options),
        share.num_bytes,
        _description(config, folder, model_config),
    )


def _prepare_encoder(
    config: EngineConfig,
    folder: Path,
    encoder: EncoderConfig,
    endpoint: str,
    memory: SharedMemory,
    clients: Mapping[str, Any],
) -> Prepared:
    """It has no KV: its weights, and a step."""
    embedding = EmbeddingConfig.from_folder(folder, is_encoder=True)
    if config.max_model_len is not None:
        most = min(config.max_model_len, encoder.context_length)
        config = replace(config, max_model_len=most)
    length = config.max_model_len or min(
        encoder.context_length, embedding.max_tokens or encoder.context_length
    )
    dtype, tokens = _dtype(config), max(config.chunked_prefill_size, length)
    num_bytes = EncoderShape.of(encoder).weight_bytes(dtype, config.quantization)
    num_bytes += encoder_step_bytes(encoder, dtype, tokens)
    if memory.is_given and num_bytes > memory.num_bytes:
        raise ModelLoadError(
            f"it takes {num_bytes / 1e9:.3g} GB; models_memory_gb={memory.num_bytes / 1e9:g}"
        )
    options = {**options_of(config), **clients}
    model = options.pop("model", None)
    description = {
        **_described(config, folder, encoder.architecture, encoder.vocab_size, length),
        **report_of(
            encoder.architecture,
            embedding,
            encoder.hidden_size,
            None if encoder.head is None else encoder.head.labels,
            generates=False,
        ),
    }
    return Prepared(partial(_launch, model, endpoint, options), num_bytes, description)


def _launch(model: Path | None, endpoint: str, options: dict[str, object]) -> EngineProcess:
    return EngineProcess(model, listen=(endpoint,), options=options, has_log=False, is_quoted=True)


def _share(
    config: EngineConfig, folder: Path, model_config: ModelConfig, memory: SharedMemory
) -> ModelShare:
    """Raises InvalidRequest or ModelLoadError for what loading it would refuse."""
    config = config.for_model(has_states=model_config.recurrent is not None)
    dtype = _dtype(config)
    model = _served(config, folder, model_config, dtype)
    own_bytes = 0
    if memory.is_gpu:
        own_bytes = step_bytes(
            model_config,
            dtype_bytes=DTYPE_BYTES[dtype],
            num_tokens=config.chunked_prefill_size,
            num_rows=config.max_running_requests,
        )
    else:
        own_bytes = model.host_bytes(config.host_kv_tokens)
    lengths = Lengths(
        config.max_model_len or model_config.context_length,
        config.max_running_requests,
        config.tokens_a_page,
        config.state_checkpoints,
    )
    if config.max_total_tokens is not None:
        return share_with(model, config.max_total_tokens, lengths, own_bytes)
    return share_of(model, memory, lengths, own_bytes)


def _served(
    config: EngineConfig, folder: Path, model_config: ModelConfig, dtype: str
) -> ServedModel:
    quantization: str = config.quantization
    require_quantization(quantization, folder, stored_method(folder))
    if quantization == "none":
        quantization = stored_quantization(folder, ModelShape.of(model_config))
    rank = config.max_lora_rank or DEFAULT_MAX_LORA_RANK
    adapters = AdapterRoom(config.max_loras_per_batch, rank) if config.has_lora else None
    return ServedModel.of(model_config, dtype, quantization, config.kv_cache_dtype, adapters)


def _dtype(config: EngineConfig) -> str:
    """The arithmetic; on a CPU, of which only torch knows whether it has bfloat16, the larger."""
    if config.dtype != "auto":
        return config.dtype
    return "float32" if config.device == "cpu" else "bfloat16"


def _description(config: EngineConfig, folder: Path, model_config: ModelConfig) -> dict[str, Any]:
    """In the words of an engine's own, for lists."""
    length = config.max_model_len or model_config.context_length
    return {
        **_described(config, folder, model_config.architecture, model_config.vocab_size, length),
        **report_of(
            model_config.architecture,
            EmbeddingConfig.from_folder(folder),
            model_config.hidden_size,
            model_config.labels,
            generates=not model_config.is_bare,
        ),
        "reads_images": model_config.vision is not None and config.device == "cpu",
    }


def _described(
    config: EngineConfig, folder: Path, architecture: str, vocab_size: int, length: int
) -> dict[str, Any]:
    return {
        "model_path": str(folder.resolve()),
        "chat_template": config.chat_template,
        "architecture": architecture,
        "dtype": config.dtype,
        "quantization": config.quantization,
        "device": config.device,
        "vocab_size": vocab_size,
        "max_model_len": length,
        "has_lora": config.has_lora,
    }
