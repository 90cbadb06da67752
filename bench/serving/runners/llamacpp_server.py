"""llama.cpp's `llama-server`, through its native POST /completion with token ids.

16 slots share the KV's capacity evenly, which is the server's own way. Its cache of prompts in RAM
is off: it costs more than it brings on these workloads (22% on the tree).
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys

from ...harness.workloads import PromptBook, WorkItem, Workload
from .http_client import HttpClient, run_forest, stop, wait_until_healthy
from .ports import free_port
from .protocol import main

NUM_SLOTS = 16


class LlamaCppServer:
    """Owns the server's process."""

    engine = "llama.cpp"
    mode = "http"

    def __init__(self, args: argparse.Namespace) -> None:
        port, threads = free_port(), str(args.threads or len(os.sched_getaffinity(0)))
        command = [args.program, "-m", args.model, "--host", "127.0.0.1", "--port", str(port)]
        command += ["-t", threads, "-tb", threads, "-np", str(NUM_SLOTS)]
        command += ["-c", str(args.kv_tokens), "--cache-ram", "0", "--no-warmup"]
        if args.speculate is not None:
            command += ["--spec-type", args.speculate]
        if args.draft_model is not None:
            command += ["-md", args.draft_model, "-td", threads, "-tbd", threads]
        self._server = subprocess.Popen(command)
        self._client = HttpClient(f"http://127.0.0.1:{port}")
        try:
            wait_until_healthy(self._client, self._server)
            self.version = str(self._client.get("/props").get("build_info", ""))
        except BaseException:
            self.close()
            raise

    def run(self, workload: Workload) -> PromptBook:
        return run_forest(workload, self._complete)

    def _complete(self, workload: Workload, item: WorkItem, prompt: list[int]) -> list[int]:
        body = {
            "prompt": prompt,
            "n_predict": item.max_tokens,
            "temperature": 0,
            "samplers": ["temperature"],
            "ignore_eos": workload.ignore_eos,
            "cache_prompt": True,
            "return_tokens": True,
        }
        if workload.json_schema is not None:
            body["json_schema"] = workload.json_schema
        return list(self._client.post("/completion", body)["tokens"])

    def close(self) -> None:
        stop(self._server)


if __name__ == "__main__":
    sys.exit(main(LlamaCppServer))
