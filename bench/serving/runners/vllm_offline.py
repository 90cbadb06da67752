"""vLLM's offline `LLM` class, in one process. Runs under the Python of vLLM's own environment.

`LLM.generate` takes whole batches, so a workload goes stage by stage. Prefix caching is on, as it
is by default. Schemas go through xgrammar, without whitespace between JSON's tokens.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path

from ...harness.workloads import PromptBook, WorkItem, Workload
from .protocol import main

BYTES_PER_VALUE = {"bfloat16": 2, "float32": 4}
NUM_OF_MODEL = 2  # which a draft model guesses: what pays for a 1B on two cores
NUM_DRAFTS = 8  # of a sequence in a step; its own choice for suffix drafts


class VllmOffline:
    """Owns the engine, which lives in this process."""

    engine = "vllm"
    mode = "offline"

    def __init__(self, args: argparse.Namespace) -> None:
        _set_environment(args.threads or len(os.sched_getaffinity(0)))
        import vllm

        self.version = str(vllm.__version__)
        dtype = args.dtype or "bfloat16"
        kv_bytes = _kv_values_per_token(Path(args.model)) * BYTES_PER_VALUE[dtype]
        self._llm = vllm.LLM(
            args.model,
            dtype=dtype,
            max_num_seqs=128,
            kv_cache_memory_bytes=args.kv_tokens * kv_bytes,
            enable_prefix_caching=True,
            structured_outputs_config={"backend": "xgrammar", "disable_any_whitespace": True},
            disable_log_stats=True,
            seed=0,
            speculative_config=_drafts(args.speculate, args.draft_model),
        )

    def run(self, workload: Workload) -> PromptBook:
        book = PromptBook()
        for stage in workload.stages():
            prompts = [{"prompt_token_ids": book.prompt(item)} for item in stage]
            params = [_params(item, workload) for item in stage]
            answers = self._llm.generate(prompts, params, use_tqdm=False)
            for item, answer in zip(stage, answers, strict=True):
                book.outputs[item.id] = list(answer.outputs[0].token_ids)
        return book

    def close(self) -> None:
        """It ends with this process."""


def _params(item: WorkItem, workload: Workload) -> object:
    from vllm.sampling_params import SamplingParams, StructuredOutputsParams

    schema = workload.json_schema
    return SamplingParams(
        temperature=0.0,
        max_tokens=item.max_tokens,
        ignore_eos=workload.ignore_eos,
        detokenize=False,
        structured_outputs=None if schema is None else StructuredOutputsParams(json=schema),
    )


def _drafts(method: str | None, draft_model: str | None) -> dict[str, object] | None:
    if draft_model is not None:
        chosen = {"method": "draft_model", "model": draft_model}
        return {**chosen, "num_speculative_tokens": NUM_OF_MODEL}
    if method == "suffix":
        return {"method": method}
    if method == "ngram":
        lookup = {"prompt_lookup_min": 1, "prompt_lookup_max": 4}
        return {"method": method, "num_speculative_tokens": NUM_DRAFTS, **lookup}
    if method is not None:
        raise ValueError(f"drafts: {method!r} is not ngram or suffix")
    return None


def _kv_values_per_token(folder: Path) -> int:
    config = json.loads((folder / "config.json").read_text())
    heads = config["num_attention_heads"]
    head_dim = config.get("head_dim") or config["hidden_size"] // heads
    kv_heads = config.get("num_key_value_heads") or heads
    return int(2 * config["num_hidden_layers"] * kv_heads * head_dim)


def _set_environment(threads: int) -> None:
    """Variables that vLLM reads on import. By default it reserves a core for its front end, half of
    a small machine; in one process it has no front end."""
    os.environ.update(
        HF_HUB_OFFLINE="1",
        OMP_NUM_THREADS=str(threads),
        VLLM_CPU_NUM_OF_RESERVED_CPU="0",
        VLLM_ENABLE_V1_MULTIPROCESSING="0",
        VLLM_LOGGING_LEVEL="WARNING",
        VLLM_NO_USAGE_STATS="1",
    )


if __name__ == "__main__":
    sys.exit(main(VllmOffline))
