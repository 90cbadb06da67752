"""`stemma_*`: the engine's figures under Stemma's own names (docs/serve/metrics.md lists them)."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from .samples import (
    Figure,
    Info,
    ended_family,
    figure_families,
    histogram_family,
    kv_states,
    kv_usage,
    of,
    stat,
)

FIGURES = (
    Figure("stemma_requests_running", "Requests in the running batch.", of("num_running")),
    Figure("stemma_requests_waiting", "Requests in the queue.", of("num_waiting")),
    Figure("stemma_programs_running", "Programs that have not ended.", of("num_programs")),
    Figure("stemma_clients", "Clients over ZeroMQ; this server is one.", of("num_clients")),
    Figure("stemma_kv_usage_ratio", "Share of KV tokens held by requests.", kv_usage),
    Figure("stemma_kv_leased_tokens", "Under a lease or pin.", of("leases", "leased_tokens")),
    Figure("stemma_engine_uptime_seconds", "Since the engine started.", of("uptime_s")),
    Figure("stemma_engine_peak_rss_bytes", "Memory at its peak.", of("peak_rss_bytes")),
    Figure("stemma_prompt_tokens", "Prompt tokens.", stat("num_prompt_tokens"), "counter"),
    Figure("stemma_cached_prompt_tokens", "Of these: not computed, as their KV was there.",
           stat("num_cached_tokens"), "counter"),
    Figure("stemma_generated_tokens", "Output tokens.", stat("num_generated_tokens"), "counter"),
    Figure("stemma_forced_tokens", "Of these: forced by a grammar, not sampled.",
           stat("num_jumped_tokens"), "counter"),
    Figure("stemma_drafts", "Runs of tokens that were proposed for an output.",
           stat("num_drafts"), "counter"),
    Figure("stemma_draft_tokens", "Tokens in them.", stat("num_draft_tokens"), "counter"),
    Figure("stemma_accepted_tokens", "Of these: equal to what was drawn.",
           stat("num_accepted_tokens"), "counter"),
    Figure("stemma_computed_tokens", "Tokens that went through the model.",
           stat("num_computed_tokens"), "counter"),
    Figure("stemma_shared_kv_tokens", "KV reads saved where rows shared a prefix.",
           stat("num_shared_tokens"), "counter"),
    Figure("stemma_steps", "Steps of the engine.", stat("num_steps"), "counter"),
    Figure("stemma_preemptions", "Requests that had to give their KV back.",
           stat("num_preemptions"), "counter"),
    Figure("stemma_missed_deadlines", "Requests refused or ended for their deadline.",
           stat("num_missed_deadlines"), "counter"),
    Figure("stemma_broken_leases", "Leases given up for requests that needed the room.",
           of("leases", "num_broken"), "counter"),
)  # fmt: skip

HISTOGRAMS = {
    "time_to_first_token": (
        "stemma_time_to_first_token_seconds",
        "Arrival to first token.",
    ),
    "inter_token": ("stemma_inter_token_seconds", "Between tokens."),
    "latency": ("stemma_request_latency_seconds", "From arrival to the last token."),
    "queue": ("stemma_request_queue_seconds", "From arrival to the first admission."),
    "prefill": ("stemma_request_prefill_seconds", "From admission to the first token."),
    "decode": ("stemma_request_decode_seconds", "From the first to the last token."),
    "prompt_tokens": ("stemma_request_prompt_tokens", "Prompt tokens of a request."),
    "output_tokens": ("stemma_request_output_tokens", "Output tokens of a request."),
}

GRAMMARS = (
    Figure("stemma_grammars_cached", "Grammars ready for use.", of("grammars", "num_cached")),
    Figure("stemma_grammar_hits", "Asked for and there.", of("grammars", "num_hits"), "counter"),
    Figure("stemma_grammar_compilations", "Compiled.",
           of("grammars", "num_compiled"), "counter"),
    Figure("stemma_grammar_automata", "Of these, matched by an automaton.",
           of("grammars", "num_fsm"), "counter"),
    Figure("stemma_grammar_lazy_automata", "Of these, by one that is made on the way.",
           of("grammars", "num_lazy"), "counter"),
    Figure("stemma_grammar_parsers", "Of these, matched by a parser.",
           of("grammars", "num_pushdown"), "counter"),
    Figure("stemma_grammar_llguidance", "Of these, as --grammar-backend llguidance does.",
           of("grammars", "num_llguidance"), "counter"),
    Figure("stemma_grammar_outlines", "Of these, as --grammar-backend outlines does.",
           of("grammars", "num_outlines"), "counter"),
    Figure("stemma_grammar_refusals", "Refused.", of("grammars", "num_refused"), "counter"),
    Figure("stemma_grammar_compile_seconds", "Waited for compilations.",
           of("grammars", "compile_s"), "counter"),
)  # fmt: skip

HOST_TIER = (
    Figure("stemma_host_kv_cached_tokens", "KV on the host tier.", of("host", "cached_tokens")),
    Figure("stemma_host_kv_total_tokens", "Room on the host tier.", of("host", "total_tokens")),
    Figure("stemma_host_kv_stored_tokens", "Copied to the host.",
           of("host", "stored_tokens"), "counter"),
    Figure("stemma_host_kv_loaded_tokens", "Copied back.",
           of("host", "loaded_tokens"), "counter"),
)  # fmt: skip

COMING = (
    Figure("stemma_coming_prompts", "Prompts that others compute now.", of("coming", "num_coming")),
    Figure("stemma_coming_prompts_asked", "Asked for.", of("coming", "num_streams"), "counter"),
    Figure("stemma_coming_prompts_failed", "Of these: the rest was computed here.",
           of("coming", "num_failed"), "counter"),
    Figure("stemma_coming_tokens", "Prompt tokens that others have computed.",
           of("coming", "num_restored_tokens"), "counter"),
    Figure("stemma_coming_bytes", "KV that has come.", of("coming", "num_bytes"), "counter"),
)  # fmt: skip

PREFILLS = (
    Figure("stemma_prefill_requests_running", "Prompts that others wait for.",
           of("prefills", "num_requests")),
    Figure("stemma_prefill_tokens", "Prompt tokens for others, cached ones among them.",
           of("prefills", "num_tokens"), "counter"),
    Figure("stemma_prefill_sent_bytes", "KV that was sent.",
           of("prefills", "num_sent_bytes"), "counter"),
)  # fmt: skip

AHEAD = (
    Figure("stemma_ahead_tokens", "Computed before a program had asked for them.",
           of("ahead", "num_tokens"), "counter"),
    Figure("stemma_ahead_used_tokens", "Of these: with which its prompt did go on.",
           of("ahead", "num_used_tokens"), "counter"),
    Figure("stemma_ahead_seconds", "Of the device's time, for all of these.",
           of("ahead", "spent_s"), "counter"),
    Figure("stemma_ahead_used_seconds", "Of these: for those that were used.",
           of("ahead", "used_s"), "counter"),
)  # fmt: skip

FORETOLD = (
    Figure("stemma_foretold_outputs", "Told as likely before they were there.",
           of("foretold", "num_told"), "counter"),
    Figure("stemma_foretold_right", "Outputs of which what was told last came true.",
           of("foretold", "num_right"), "counter"),
    Figure("stemma_foretold_wrong", "And those of which it did not.",
           of("foretold", "num_wrong"), "counter"),
)  # fmt: skip

LORA = (
    Figure("stemma_lora_adapters_on_device", "Adapters in slots.", of("lora", "num_on_device")),
    Figure("stemma_lora_adapters_in_use", "Of these: by running requests.",
           of("lora", "num_in_use")),
    Figure("stemma_lora_slots", "Room for adapters.", of("lora", "num_slots")),
    Figure("stemma_lora_loads", "Adapters read into a slot.", of("lora", "num_loads"), "counter"),
    Figure("stemma_lora_evictions", "Adapters that gave their slot to another.",
           of("lora", "num_evictions"), "counter"),
)  # fmt: skip


def engine_families(info: Info) -> Iterator[Metric]:
    """All figures that the engine reports."""
    labels = {"model": str(info["model"])}
    yield from figure_families(FIGURES, info, labels)
    yield _kv_tokens(info, labels)
    if info["grammars"]:
        yield from figure_families(GRAMMARS, info, labels)
    if info["lora"]:
        yield from figure_families(LORA, info, labels)
    if info["experts"]:
        yield from _expert_imbalance(info, labels)
    if info["ranks"]:
        yield _rank_memory(info, labels)
    if info["host"]:
        yield from figure_families(HOST_TIER, info, labels)
    if info["coming"]:
        yield from figure_families(COMING, info, labels)
    if info["prefills"]:
        yield from figure_families(PREFILLS, info, labels)
    if info.get("ahead"):
        yield from figure_families(AHEAD, info, labels)
    if info.get("foretold"):
        yield from figure_families(FORETOLD, info, labels)
    if info["speculation"].get("sources"):
        yield from _by_source(info, labels)
    text = "Requests that have ended."
    yield ended_family("stemma_requests", text, "finish_reason", info, labels)
    for key, (name, meaning) in HISTOGRAMS.items():
        yield histogram_family(name, meaning, info["requests"]["histograms"][key], labels)


def _by_source(info: Info, labels: dict[str, str]) -> Iterator[Metric]:
    """Drafted and accepted tokens, by whose guesses they were."""
    for key, text in (("drafted_tokens", "Guessed"), ("accepted_tokens", "Guessed rightly")):
        name = f"stemma_source_{key}"
        metric = CounterMetricFamily(name, f"{text}, by source.", labels=[*labels, "source"])
        for source, counts in info["speculation"]["sources"].items():
            metric.add_metric([*labels.values(), source], float(counts[key]))
        yield metric


def _expert_imbalance(info: Info, labels: dict[str, str]) -> Iterator[Metric]:
    """Since the start, by layer."""
    for key, name, text in (
        ("imbalance", "stemma_expert_imbalance", "Tokens of the busiest expert over the mean."),
        ("group_imbalance", "stemma_expert_group_imbalance", "The same of groups of ranks."),
    ):
        metric = GaugeMetricFamily(name, text, labels=[*labels, "layer"])
        for layer, value in info["experts"][key].items():
            metric.add_metric([*labels.values(), layer], value)
        yield metric


def _rank_memory(info: Info, labels: dict[str, str]) -> Metric:
    """Of the processes beside the engine's that hold the model."""
    name = "stemma_rank_peak_rss_bytes"
    metric = GaugeMetricFamily(name, "A rank's memory at its peak.", labels=[*labels, "rank"])
    for rank in info["ranks"]:
        if rank["peak_rss_bytes"] is not None:
            metric.add_metric([*labels.values(), rank["name"]], rank["peak_rss_bytes"])
    return metric


def _kv_tokens(info: Info, labels: dict[str, str]) -> Metric:
    """The pool by state; the states add up to the pool."""
    metric = GaugeMetricFamily(
        "stemma_kv_tokens", "Room for KV, in tokens, by state.", labels=[*labels, "state"]
    )
    for state, value in kv_states(info).items():
        metric.add_metric([*labels.values(), state], value)
    return metric
