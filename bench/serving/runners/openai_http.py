"""Any server with OpenAI's /v1/completions that takes token ids and returns them.

Returning them is `return_token_ids`, an extension of vLLM's that Stemma has too: the next turn's
prompt needs the ids themselves.
"""

from __future__ import annotations

import argparse
import sys
from typing import Any

from ....errors import EngineError
from ...harness.workloads import PromptBook, WorkItem, Workload
from .http_client import HttpClient, run_forest
from .protocol import main


class OpenAIHttp:
    """Connects to a server that already runs."""

    mode = "http"
    version = ""

    def __init__(self, url: str) -> None:
        self.engine = url
        self._client = HttpClient(url.rstrip("/").removesuffix("/v1"))
        self._model = self._client.get("/v1/models")["data"][0]["id"]

    def run(self, workload: Workload) -> PromptBook:
        return run_forest(workload, self._complete)

    def _complete(self, workload: Workload, item: WorkItem, prompt: list[int]) -> list[int]:
        body: dict[str, Any] = {
            "model": self._model,
            "prompt": prompt,
            "max_tokens": item.max_tokens,
            "temperature": 0,
            "ignore_eos": workload.ignore_eos,
            "return_token_ids": True,
        }
        if workload.json_schema is not None:
            schema = {"name": "document", "schema": workload.json_schema, "strict": True}
            body["response_format"] = {"type": "json_schema", "json_schema": schema}
        choice = self._client.post("/v1/completions", body)["choices"][0]
        if choice.get("token_ids") is None:
            raise EngineError(f"{self.engine} does not know return_token_ids")
        return list(choice["token_ids"])

    def close(self) -> None:
        """The server belongs to others: it is left running."""


def _start(args: argparse.Namespace) -> OpenAIHttp:
    return OpenAIHttp(args.url)


if __name__ == "__main__":
    sys.exit(main(_start))
