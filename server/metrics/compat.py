"""The same figures under the metric names of SGLang's and vLLM's dashboards.

Only figures with the same meaning; docs/serve/metrics.md lists what those engines count otherwise.
"""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import Metric

from .samples import (
    Figure,
    Info,
    ended_family,
    figure_families,
    histogram_family,
    hit_rate,
    kv_usage,
    of,
    stat,
)

SGLANG = (
    Figure("sglang:num_running_reqs", "Running requests.", of("num_running")),
    Figure("sglang:num_queue_reqs", "Waiting requests.", of("num_waiting")),
    Figure("sglang:num_used_tokens", "KV tokens held by requests.",
           lambda i: i["total_tokens"] - i["free_tokens"] - i["evictable_tokens"]),
    Figure("sglang:max_total_num_tokens", "Room for KV tokens.", of("total_tokens")),
    Figure("sglang:token_usage", "Share of KV tokens held by requests.", kv_usage),
    Figure("sglang:cache_hit_rate", "Share of prompt tokens from the cache.", hit_rate),
    Figure("sglang:gen_throughput", "Output tokens a second.", of("output_tokens_per_s")),
    Figure("sglang:prompt_tokens", "Prompt tokens.", stat("num_prompt_tokens"), "counter"),
    Figure("sglang:generation_tokens", "Output tokens.", stat("num_generated_tokens"), "counter"),
    Figure("sglang:cached_tokens", "Cached prompt tokens.", stat("num_cached_tokens"), "counter"),
    Figure("sglang:num_requests", "Requests that have ended.", stat("num_finished"), "counter"),
    Figure("sglang:num_aborted_requests", "Aborted requests.",
           of("requests", "num_ended", "abort"), "counter"),
    Figure("sglang:num_retracted_requests", "Preempted requests.",
           stat("num_preemptions"), "counter"),
)  # fmt: skip

VLLM = (
    Figure("vllm:num_requests_running", "Running requests.", of("num_running")),
    Figure("vllm:num_requests_waiting", "Waiting requests.", of("num_waiting")),
    Figure("vllm:num_requests_swapped", "There is no such state here.", lambda i: 0.0),
    Figure("vllm:kv_cache_usage_perc", "Share of KV tokens held by requests.", kv_usage),
    Figure("vllm:gpu_cache_usage_perc", "Its older name.", kv_usage),
    Figure("vllm:prompt_tokens", "Prompt tokens.", stat("num_prompt_tokens"), "counter"),
    Figure("vllm:generation_tokens", "Output tokens.", stat("num_generated_tokens"), "counter"),
    Figure("vllm:prefix_cache_queries", "Prompt tokens looked up in the cache.",
           stat("num_prompt_tokens"), "counter"),
    Figure("vllm:prefix_cache_hits", "Of these: found.", stat("num_cached_tokens"), "counter"),
    Figure("vllm:prompt_tokens_cached", "Cached prompt tokens.",
           stat("num_cached_tokens"), "counter"),
    Figure("vllm:spec_decode_num_drafts", "Drafts.", stat("num_drafts"), "counter"),
    Figure("vllm:spec_decode_num_draft_tokens", "Tokens in them.",
           stat("num_draft_tokens"), "counter"),
    Figure("vllm:spec_decode_num_accepted_tokens", "Of these: accepted.",
           stat("num_accepted_tokens"), "counter"),
    Figure("vllm:num_preemptions", "Preempted requests.", stat("num_preemptions"), "counter"),
)  # fmt: skip

SGLANG_HISTOGRAMS = {
    "time_to_first_token": ("sglang:time_to_first_token_seconds",),
    "inter_token": (
        "sglang:inter_token_latency_seconds",
        "sglang:time_per_output_token_seconds",
    ),
    "latency": ("sglang:e2e_request_latency_seconds",),
    "queue": ("sglang:queue_time_seconds",),
    "prompt_tokens": ("sglang:prompt_tokens_histogram",),
    "output_tokens": ("sglang:generation_tokens_histogram",),
}

VLLM_HISTOGRAMS = {
    "time_to_first_token": ("vllm:time_to_first_token_seconds",),
    "inter_token": ("vllm:inter_token_latency_seconds", "vllm:time_per_output_token_seconds"),
    "latency": ("vllm:e2e_request_latency_seconds",),
    "queue": ("vllm:request_queue_time_seconds",),
    "prefill": ("vllm:request_prefill_time_seconds",),
    "decode": ("vllm:request_decode_time_seconds",),
    "prompt_tokens": ("vllm:request_prompt_tokens",),
    "output_tokens": ("vllm:request_generation_tokens", "vllm:request_max_num_generation_tokens"),
}


def compat_families(info: Info) -> Iterator[Metric]:
    """The figures under both engines' names."""
    labels = {"model_name": str(info["model"])}
    yield from figure_families(SGLANG, info, labels)
    yield from _histograms(SGLANG_HISTOGRAMS, info, labels)
    vllm_labels = {**labels, "engine": "0"}
    yield from figure_families(VLLM, info, vllm_labels)
    yield from _histograms(VLLM_HISTOGRAMS, info, vllm_labels)
    text = "Requests that have ended."
    yield ended_family("vllm:request_success", text, "finished_reason", info, vllm_labels)


def _histograms(
    names: dict[str, tuple[str, ...]], info: Info, labels: dict[str, str]
) -> Iterator[Metric]:
    for key, aliases in names.items():
        for name in aliases:
            text = f"{key.replace('_', ' ')} of requests."
            yield histogram_family(name, text, info["requests"]["histograms"][key], labels)
