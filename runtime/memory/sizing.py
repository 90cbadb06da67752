"""How many KV pages fit: from an explicit token count, or from a share of the free memory.

Torch-free. On a GPU the caller passes the memory that is free after the weights are loaded and the
memory of a step (`step_bytes`) is set aside. On a CPU with Linux it is the smaller of
/proc/meminfo's MemAvailable and what the control group leaves; elsewhere os.sysconf gives it.
"""

from __future__ import annotations

import os
from pathlib import Path

from ...errors import InvalidRequest
from ..checkpoint.config.model_config import Mamba2Config, ModelConfig, ShortConvConfig
from .kv_layout import KVLayout
from .state_layout import StateLayout

# On a laptop other programs need most of it (a guess); the cap below is usually far smaller anyway.
DEFAULT_CPU_MEM_FRACTION = 0.3
# The engine has a GPU to itself; the rest is for what the estimate of a step leaves out.
DEFAULT_GPU_MEM_FRACTION = 0.9
# cuBLAS's workspaces (32 MB a stream on Hopper), compiled kernels, and the nodes of some fifty
# graphs of several hundred launches each (a guess, to be measured).
_GPU_OVERHEAD_BYTES = 1 << 30
# Checkpoints of recurrent states, unless told: at least some, at most what can be of use.
_MIN_CHECKPOINTS, _MAX_CHECKPOINTS = 16, 4096
_CHUNK_TOKENS = 64  # of a recurrent layer's scan
_CGROUP_ROOT = Path("/sys/fs/cgroup")
_MEMINFO = Path("/proc/meminfo")


def step_bytes(config: ModelConfig, *, dtype_bytes: int, num_tokens: int, num_rows: int) -> int:
    """Peak memory of the tensors of a step of this many tokens; an estimate for a GPU.
    `num_rows`: rows of logits.

    One layer's tensors are alive at a time: residual, norm, block output; those of attention; those
    of the feed-forward block. Partial results of attention are float32, some eight a token and
    8,192 for a few long rows; recurrent layers have float32 results and what the tokens of a chunk
    are to each other. Logits exist as the product's output, as float32 in a graph and
    outside it, and sampling sorts keys of 8 bytes at worst.
    """
    width = 4 * config.hidden_size + _attention_width(config) + _feed_forward_width(config)
    head_dim = config.head_dim if config.latent is None else config.latent.latent_dim
    partials = (8 * num_tokens + 8192) * config.num_heads * (head_dim + 1) * 4
    logits = num_rows * config.vocab_size * (dtype_bytes + 4 + 4 + 8)
    recurrent = num_tokens * _recurrent_bytes(config, dtype_bytes)
    return num_tokens * width * dtype_bytes + partials + recurrent + logits + _GPU_OVERHEAD_BYTES


def _recurrent_bytes(config: ModelConfig, dtype_bytes: int) -> int:
    """A token's: what is projected and convolved, results, and in float32 gated results, decays and
    its rows of a chunk's matrices, of which three times as many may be as are full."""
    if config.recurrent is None:
        return 0
    mixer = config.recurrent.mixer
    if isinstance(mixer, ShortConvConfig):
        return 6 * config.hidden_size * dtype_bytes
    if isinstance(mixer, Mamba2Config):
        size, num_heads, num_matrices = mixer.inner_size, mixer.num_heads, 1
    else:
        num_heads, num_matrices = mixer.num_value_heads, 2
        size = num_heads * mixer.value_dim
    wide = 3 * size + 3 * num_matrices * _CHUNK_TOKENS * num_heads
    return (2 * mixer.num_channels + 2 * size) * dtype_bytes + 4 * wide


def cpu_step_bytes(config: ModelConfig, *, dtype_bytes: int, num_tokens: int) -> int:
    """The same on a CPU, where it is 1 to 1.9 times a layer's tensors (`stemma bench memory`) and
    taken for 1.5 times: nothing is partial, and what a layer leaves is not freed at once."""
    width = 4 * config.hidden_size + _attention_width(config) + _feed_forward_width(config)
    experts = config.experts
    if experts is not None:  # each chosen one's input, gate and up, too
        own = config.hidden_size + 2 * experts.intermediate_size
        width += experts.routing.num_chosen * own
    return num_tokens * width * dtype_bytes * 3 // 2 + config.vocab_size * (dtype_bytes + 16)


def _attention_width(config: ModelConfig) -> int:
    """Numbers a token: queries, keys, values and attended heads; in latent attention queries before
    and after W_UK, attended latents and their values, rotated parts before and after; where keys
    are selected, queries and attended latents once more, and the index's queries."""
    latent = config.latent
    if latent is None:
        return (2 * config.num_heads + 2 * config.num_kv_heads) * config.head_dim
    of_head = latent.nope_dim + 2 * latent.latent_dim + 2 * latent.value_dim + 3 * latent.rope_dim
    row, index = 2 * (latent.latent_dim + latent.rope_dim), 0
    if latent.indexer is not None:
        of_head += 2 * latent.latent_dim + latent.rope_dim
        index = 2 * latent.indexer.num_heads * latent.indexer.head_dim
    return config.num_heads * of_head + row + index


def _feed_forward_width(config: ModelConfig) -> int:
    """Numbers a token: gates, ups and their product; each chosen expert's product and result."""
    experts = config.experts
    if experts is None:
        return 3 * config.intermediate_size
    chosen = experts.routing.num_chosen * (experts.intermediate_size + config.hidden_size)
    dense = 0 if len(experts.layers) == config.num_layers else config.intermediate_size
    return max(3 * dense, chosen + 3 * experts.shared_intermediate_size)


def num_pages_for(
    layout: KVLayout,
    *,
    page_size: int,
    max_running_requests: int,
    max_model_len: int,
    max_total_tokens: int | None = None,
    mem_fraction: float | None = None,
    available_bytes: int | None = None,
    is_gpu: bool = False,
    states: StateLayout | None = None,
    num_shares: int = 1,
) -> int:
    """The number of pages of the pool.

    `max_total_tokens` takes precedence. Otherwise `mem_fraction` of the memory that is available
    now, but never more than all running requests at full length could use. `states`: of a model
    with recurrent layers; their share is that of all running requests, and half of the rest for
    checkpoints. `num_shares`: processes that have a share of the pages each, and as much memory.

    Raises:
        InvalidRequest: a value out of range, or a pool too small for one sequence of
            `max_model_len` tokens.
    """
    if page_size < 1:
        raise InvalidRequest.of("page_size", page_size, "an integer >= 1")
    if max_total_tokens is not None:
        return _pages_of_tokens(max_total_tokens, page_size)
    default = DEFAULT_GPU_MEM_FRACTION if is_gpu else DEFAULT_CPU_MEM_FRACTION
    fraction = default if mem_fraction is None else mem_fraction
    if not 0 < fraction <= 1:
        raise InvalidRequest.of("mem_fraction", fraction, "a number in (0, 1]")
    available = available_memory_bytes() if available_bytes is None else available_bytes
    bytes_per_token = layout.bytes_per_token
    budget = int(available * fraction)
    if states is not None:
        budget = max(0, budget - max_running_requests * states.num_bytes) // 2
    affordable = budget // (bytes_per_token * page_size) * num_shares
    pages_per_request = -(-max_model_len // page_size)
    if affordable < pages_per_request:
        needed = -(-pages_per_request // num_shares) * page_size * bytes_per_token
        raise InvalidRequest(
            f"the KV pool does not fit: one sequence of max_model_len={max_model_len} tokens needs "
            f"{_mib(needed)}, mem_fraction={fraction:g} of {_mib(available)} available is "
            f"{_mib(int(available * fraction))}{_states_share(states, max_running_requests)}; "
            "lower max_model_len or raise mem_fraction",
            "mem_fraction",
        )
    return min(affordable, pages_per_request * max_running_requests)


def num_state_slots(
    states: StateLayout, *, max_running_requests: int, num_checkpoints: int | None, kv_bytes: int
) -> int:
    """Slots of the state pool: one for each running request, and `num_checkpoints`, or so many as
    take the memory of the KV."""
    if num_checkpoints is None:
        affordable = kv_bytes // states.num_bytes
        num_checkpoints = min(_MAX_CHECKPOINTS, max(_MIN_CHECKPOINTS, affordable))
    return max_running_requests + num_checkpoints


def num_host_state_slots(states: StateLayout, host_kv_bytes: int) -> int:
    """Slots for states in host memory: as many as take the memory of the KV there, at least one."""
    if not host_kv_bytes:
        return 0
    return min(_MAX_CHECKPOINTS, max(1, host_kv_bytes // states.num_bytes))


def _states_share(states: StateLayout | None, max_running_requests: int) -> str:
    if states is None:
        return ""
    size = _mib(max_running_requests * states.num_bytes)
    return f", of which recurrent states of max_running_requests={max_running_requests} take {size}"


def available_memory_bytes() -> int:
    """Memory that this process may still allocate, in bytes."""
    candidates = [_meminfo_available(), _cgroup_available()]
    known = [value for value in candidates if value is not None]
    return min(known) if known else _sysconf_memory()


def _pages_of_tokens(max_total_tokens: int, page_size: int) -> int:
    num_pages = max_total_tokens // page_size
    if num_pages < 1:
        raise InvalidRequest.of(
            "max_total_tokens", max_total_tokens, f"at least one page of {page_size} tokens"
        )
    return num_pages


def _meminfo_available() -> int | None:
    try:
        lines = _MEMINFO.read_text().splitlines()
    except OSError:
        return None
    for line in lines:
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return None


def _cgroup_available() -> int | None:
    """The tightest limit from this process's group (version 2, else 1) up to the root."""
    pairs = [("memory.max", "memory.current")]
    groups = [_CGROUP_ROOT / path for path in _cgroup_paths()] + [_CGROUP_ROOT]
    if (_CGROUP_ROOT / "memory").is_dir():
        pairs = [("memory.limit_in_bytes", "memory.usage_in_bytes")]
        groups = [_CGROUP_ROOT / "memory"]
    left = [_read_int(g / limit, g / used) for g in groups for limit, used in pairs]
    known = [value for value in left if value is not None]
    return min(known) if known else None


def _cgroup_paths() -> list[Path]:
    """This process's version 2 group and its parents, relative to the root."""
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return []
    own = [Path(line[3:].lstrip("/")) for line in lines if line.startswith("0::")]
    return [path for start in own for path in (start, *start.parents)]


def _read_int(limit_file: Path, used_file: Path) -> int | None:
    """Limit minus use, or None where there is no limit ("max") or no such file."""
    try:
        limit, used = int(limit_file.read_text()), int(used_file.read_text())
    except (OSError, ValueError):
        return None
    return max(0, limit - used)


def _sysconf_memory() -> int:
    """Physical memory (macOS has no portable "available"); half of it counts as free."""
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
    except (ValueError, OSError, AttributeError):
        return 4 << 30


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / 2**20:,.0f} MiB"
