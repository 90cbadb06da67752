"""Stemma as `stemma serve` offers it: OpenAI's /v1/completions with token ids."""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile

from .... import __version__
from ...harness.workloads import PromptBook, Workload
from .http_client import HttpClient, stop, wait_until_healthy
from .openai_http import OpenAIHttp
from .ports import free_port
from .protocol import main


class StemmaHttp:
    """Owns the server's process."""

    engine = "stemma-http"
    version = __version__
    mode = "http"

    def __init__(self, args: argparse.Namespace) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="stemma-bench-")
        port = free_port()
        command = [sys.executable, "-P", "-m", "stemma", "serve", "--port", str(port)]
        command += ["--endpoint", f"ipc://{self._folder.name}/serve.ipc"]
        for flag, value in (
            ("--model", args.model),
            ("--num-threads", args.threads),
            ("--max-total-tokens", args.kv_tokens),
        ):
            command += [flag, str(value)] if value is not None else []
        self._server = subprocess.Popen(command)
        url = f"http://127.0.0.1:{port}"
        try:
            wait_until_healthy(HttpClient(url), self._server)
            self._requests = OpenAIHttp(url)
        except BaseException:
            self.close()
            raise

    def run(self, workload: Workload) -> PromptBook:
        return self._requests.run(workload)

    def close(self) -> None:
        stop(self._server)
        self._folder.cleanup()


if __name__ == "__main__":
    sys.exit(main(StemmaHttp))
