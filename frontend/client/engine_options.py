"""The options of `st.Engine` by name, and what those of other engines are called here.

They are the flags of the engine's process, which this floor does not import; a test holds them
equal. Their values are checked by that process.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any, TypedDict

from ...errors import InvalidRequest


class EngineOptions(TypedDict, total=False):
    """What `st.Engine` takes beside the model: the flags of `stemma serve` for an engine."""

    revision: str | None
    served_model_name: str | None
    load_format: str
    quantization: str
    dtype: str
    max_model_len: int | None
    chat_template: str | None
    device: str
    tp_size: int
    ep_size: int
    ep_loads: str | Path | None
    ep_extra_experts: int
    pp_size: int
    cp_size: int
    kernels: str
    prefill_attention: str
    cuda_graph_max_tokens: int
    deterministic: bool
    disable_overlap: bool
    num_threads: int | None
    spin_us: int | None
    kv_cache_dtype: str
    kv_policy: str | None
    page_size: int | None
    mem_fraction: float | None
    max_total_tokens: int | None
    disable_leases: bool
    pin_share: float
    state_checkpoints: int | None
    state_interval: int | None
    host_kv_tokens: int
    kv_store: str | Path | None
    kv_store_gb: float
    max_running_requests: int
    chunked_prefill_size: int
    schedule_policy: str
    tenant_weights: str
    decode_slowdown: float
    role: str
    prefill_endpoint: str | None
    prefill_engines: Sequence[str]
    kv_transport: str
    speculate: str
    speculative_num_tokens: int
    draft_model: str | Path | None
    draft_quantization: str
    draft_layers: int
    draft_candidates: int
    disable_ahead: bool
    disable_jump_forward: bool
    grammar_backend: str
    grammar_cache: str | Path | None
    grammar_timeout: float
    enable_lora: bool
    lora_paths: Mapping[str, str | Path] | Sequence[str | Path | tuple[str, str | Path]]
    max_images: int
    max_image_pixels: int
    image_cache_mb: int
    lora_root: str | Path | None
    max_loras_per_batch: int
    max_loaded_loras: int | None
    max_lora_rank: int | None
    server_key: str | Path | None
    client_keys: str | Path | None
    grace_s: float
    log_level: str


# Names that SGLang, vLLM, llama.cpp and Transformers have for the same.
_SAME: Mapping[str, str] = {
    "model_name_or_path": "model",
    "model_id": "model",
    "model_name": "model",
    "checkpoint": "model",
    "context_length": "max_model_len",
    "max_seq_len": "max_model_len",
    "n_ctx": "max_model_len",
    "torch_dtype": "dtype",
    "mem_fraction_static": "mem_fraction",
    "gpu_memory_utilization": "mem_fraction",
    "max_num_seqs": "max_running_requests",
    "max_batch_size": "max_running_requests",
    "max_num_batched_tokens": "chunked_prefill_size",
    "max_prefill_tokens": "chunked_prefill_size",
    "block_size": "page_size",
    "scheduling_policy": "schedule_policy",
    "lora_modules": "lora_paths",
    "max_loras": "max_loras_per_batch",
    "max_cpu_loras": "max_loaded_loras",
    "cpu_offload_gb": "host_kv_tokens",
    "swap_space": "host_kv_tokens",
    "hicache_size": "host_kv_tokens",
    "n_threads": "num_threads",
    "threads": "num_threads",
    "cuda_graph_max_bs": "cuda_graph_max_tokens",
    "disable_overlap_schedule": "disable_overlap",
    "enable_deterministic_inference": "deterministic",
    "speculative_algorithm": "speculate",
    "num_speculative_tokens": "speculative_num_tokens",
    "speculative_num_draft_tokens": "speculative_num_tokens",
    "speculative_model": "draft_model",
    "speculative_draft_model_path": "draft_model",
    "speculative_eagle_topk": "draft_candidates",
    "tp": "tp_size",
    "ep": "ep_size",
    "pp": "pp_size",
    "cp": "cp_size",
    "context_parallel_size": "cp_size",
    "tensor_parallel_size": "tp_size",
    "pipeline_parallel_size": "pp_size",
    "endpoint": "listen",
}
_REPLICAS = "an engine is one replica; `stemma serve --replicas` starts several behind one address"
_ALWAYS = "KV is always shared; leave it out"
_COPIES = "ep_extra_experts copies in each group of ranks, placed by the counts in ep_loads"
_SERVER = "an option of `stemma serve`, which has an HTTP server; an engine has none"
# Names of theirs for what is different here, and how.
_OTHERWISE: Mapping[str, str] = {
    "dp_size": _REPLICAS,
    "data_parallel_size": _REPLICAS,
    "ep_num_redundant_experts": _COPIES,
    "num_redundant_experts": _COPIES,
    "enable_eplb": _COPIES,
    "init_expert_location": _COPIES,
    "enforce_eager": "cuda_graph_max_tokens=0 is how it is said here",
    "disable_cuda_graph": "cuda_graph_max_tokens=0 is how it is said here",
    "enable_prefix_caching": _ALWAYS,
    "disable_radix_cache": _ALWAYS,
    "enable_chunked_prefill": "it is always on; chunked_prefill_size is its size",
    "speculative_config": "draft_model and speculate are how it is said here",
    "trust_remote_code": "no code of a checkpoint is ever run; leave it out",
    "seed": "a run has one, as in program.run(seed=7)",
    "random_seed": "a run has one, as in program.run(seed=7)",
    "tokenizer_path": "the tokenizer is read from the model's folder",
    "tokenizer": "the tokenizer is read from the model's folder",
    "api_key": _SERVER,
    "host": _SERVER,
    "port": _SERVER,
}


# Values of theirs for what is always so here.
_HARMLESS: Mapping[str, object] = {
    "tp": 1,
    "tensor_parallel_size": 1,
    "dp_size": 1,
    "data_parallel_size": 1,
    "pp_size": 1,
    "pipeline_parallel_size": 1,
    "enable_prefix_caching": True,
    "disable_radix_cache": False,
    "enable_chunked_prefill": True,
    "trust_remote_code": False,
}


def options_of(given: Mapping[str, Any]) -> dict[str, Any]:
    """Without other engines' names for what holds anyhow. Raises InvalidRequest for a name that is
    no option, with the nearest that is."""
    options: dict[str, Any] = {}
    for name, value in given.items():
        if name in EngineOptions.__annotations__:
            options[name] = value
        elif name not in _HARMLESS or value != _HARMLESS[name]:
            raise InvalidRequest(f"Engine has no option {name!r}: {_instead(name)}", name)
    return options


def _instead(name: str) -> str:
    if name in _OTHERWISE:
        return _OTHERWISE[name]
    names = ["model", "listen", *EngineOptions.__annotations__]
    near = [_SAME[name]] if name in _SAME else get_close_matches(name, names, 1)
    if near:
        return f"did you mean {near[0]!r}?"
    return "see docs/serve/flags.md for all; these are flags with underscores"
