"""Scripts call by call against `vllm serve`: a client's loop over OpenAI's /v1/completions.

Prompts are token ids and outputs come back as ids (`return_token_ids`), so that nothing is
tokenized twice and the work is the same as Stemma's. Prefix caching is on, in blocks of 32 tokens:
the least that vLLM's CPU kernels take, and the default of 128 would cost it part of each hit.
"""

from __future__ import annotations

import os
import subprocess
import tempfile
import time
import urllib.request
from array import array
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

from ....errors import EngineError
from ...serving.runners.http_client import HttpClient, stop, wait_until_healthy
from ...serving.runners.ports import free_port
from .record import CallRecord, Counters
from .scripts import Script
from .variants import VLLM

BLOCK_TOKENS = 32
MAX_LOG_LINES = 5
_PREEMPTIONS = "vllm:num_preemptions_total"


class CompletionsClient:
    """Sends each call of a script as a separate request to the server at `url`."""

    name = VLLM

    def __init__(self, url: str) -> None:
        self._url = url
        self._client = HttpClient(url)

    def play(self, script: Script, origin_s: float) -> list[CallRecord]:
        calls: list[CallRecord] = []
        history = array("i")
        for turn in script.turns:
            time.sleep(turn.pause_s)
            call = partial(self._call, num_output=turn.num_output, origin_s=origin_s)
            with ThreadPoolExecutor(len(turn.parts)) as pool:
                made = list(pool.map(call, (history + array("i", part) for part in turn.parts)))
            calls += made
            if len(made) == 1:
                history = made[0].prompt + made[0].output
        return calls

    def _call(self, prompt: array[int], num_output: int, origin_s: float) -> CallRecord:
        sent_s = time.perf_counter() - origin_s
        answer = self._client.post(
            "/v1/completions",
            {
                "model": "model",
                "prompt": prompt.tolist(),
                "max_tokens": num_output,
                "temperature": 0,
                "ignore_eos": True,
                "return_token_ids": True,
            },
        )
        ended_s = time.perf_counter() - origin_s
        details = answer["usage"].get("prompt_tokens_details") or {}
        output = array("i", answer["choices"][0]["token_ids"])
        return CallRecord(prompt, output, details.get("cached_tokens") or 0, sent_s, ended_s)

    def counters(self) -> Counters:
        with urllib.request.urlopen(f"{self._url}/metrics") as answer:
            lines = answer.read().decode().splitlines()
        found = [line for line in lines if line.startswith(_PREEMPTIONS)]
        preemptions = sum(int(float(line.rpartition(" ")[2])) for line in found)
        return Counters(num_preemptions=preemptions if found else None)

    def close(self) -> None:
        """The server belongs to others: it is left running."""


class VllmServer(CompletionsClient):
    """Owns the server's process, started with `python` of vLLM's own environment."""

    def __init__(self, python: str, model: Path, *, kv_tokens: int) -> None:
        port = free_port()
        super().__init__(f"http://127.0.0.1:{port}")
        blocks = kv_tokens // BLOCK_TOKENS + 1  # one of them is vLLM's null block
        command = [
            python, "-m", "vllm.entrypoints.cli.main", "serve", str(model.resolve()),
            "--served-model-name", "model", "--host", "127.0.0.1", "--port", str(port),
            "--dtype", "bfloat16", "--max-num-seqs", "128", "--enable-prefix-caching",
            "--block-size", str(BLOCK_TOKENS), "--num-gpu-blocks-override", str(blocks),
            "--enable-prompt-tokens-details", "--uvicorn-log-level", "warning",
        ]  # fmt: skip
        self._folder = tempfile.TemporaryDirectory(prefix="stemma-bench-")
        log = Path(self._folder.name) / "log"
        with log.open("wb") as out:
            self._server = subprocess.Popen(command, env=_environment(), stdout=out, stderr=out)
        try:
            wait_until_healthy(self._client, self._server)
        except EngineError as error:
            lines = [s for s in log.read_text(errors="replace").splitlines() if "Error" in s]
            self.close()
            told = [f"vLLM: {error}", *lines[:MAX_LOG_LINES]]
            raise EngineError("\n  ".join(told)) from None
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        stop(self._server)
        self._folder.cleanup()


def _environment() -> dict[str, str]:
    """By default vLLM reserves a core for its front end, half of a small machine."""
    return {
        **os.environ,
        "HF_HUB_OFFLINE": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",  # GB; required although the number of blocks is given
        "VLLM_CPU_NUM_OF_RESERVED_CPU": "0",
        "VLLM_LOGGING_LEVEL": "WARNING",
        "VLLM_NO_USAGE_STATS": "1",
    }
