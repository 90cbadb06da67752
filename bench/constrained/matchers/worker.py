"""An engine's process: one JSON object a line in, one out.

    {"op": "measure", "request", "texts"}      -> the fields of `Figures`
    {"op": "compile", "request"}               -> {"path"}
    {"op": "judge", "instances", "names"}      -> {"verdicts"}: on what was compiled last
    {"op": "follow", "request", "valid", "invalid"}  -> the fields of `Following`

The first line out is {"version"}, once the engine is ready and has compiled a small schema: what it
computes once a vocabulary is no part of any figure. Failures are {"error": text}.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import resource
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from .follow import follow
from .judge import judge
from .measure import measure
from .protocol import BoundGrammar, GrammarRequest, MaskEngine
from .tokenizer_file import TokenizerFile

MAX_BYTES = 12 * 2**30  # of address space
MAX_ERROR_CHARS = 500
WARM_UP = GrammarRequest(
    "json_schema",
    '{"type":"object","properties":{"warm":{"type":"string"},"up":{"type":"number"}},'
    '"required":["warm"],"additionalProperties":false}',
)
WARM_UP_TEXT = '{"warm":"up","up":1.5}'


def main(engine_class: str, tokenizer: str) -> int:
    """`engine_class` is "module:name", the module relative to this package or absolute."""
    resource.setrlimit(resource.RLIMIT_AS, (MAX_BYTES, MAX_BYTES))
    replies = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # where an engine prints
    worker = Worker(engine_class, TokenizerFile(Path(tokenizer)))
    _print(replies, {"version": worker.engine.version})
    for line in sys.stdin:
        try:
            reply = worker.answer(json.loads(line))
        except Exception as error:  # an engine's own, of any kind
            reply = {"error": f"{type(error).__name__}: {error}"[:MAX_ERROR_CHARS]}
        _print(replies, reply)
    return 0


class Worker:
    """Owns the engine and the grammar compiled last."""

    def __init__(self, engine_class: str, file: TokenizerFile) -> None:
        module, name = engine_class.split(":")
        self._file = file
        self.engine: MaskEngine = getattr(importlib.import_module(module, __package__), name)(file)
        self._grammar: BoundGrammar | None = None
        with contextlib.suppress(Exception):  # failures are reported by the requests that meet them
            measure(self.engine, file, WARM_UP, [WARM_UP_TEXT])

    def answer(self, message: dict[str, Any]) -> dict[str, Any]:
        """Handle one message."""
        if message["op"] == "judge":
            assert self._grammar is not None, "judge before compile"
            return {
                "verdicts": [
                    asdict(judge(self._grammar, self._file, instance, message["names"]))
                    for instance in message["instances"]
                ]
            }
        request = GrammarRequest(**message["request"])
        if message["op"] == "follow":
            found = follow(self.engine, self._file, request, message["valid"], message["invalid"])
            return asdict(found)
        if message["op"] == "measure":
            return asdict(measure(self.engine, self._file, request, message["texts"]))
        self._grammar = self.engine.compile(request)
        return {"path": self._grammar.path}


def _print(replies: Any, fields: dict[str, Any]) -> None:
    print(json.dumps(fields), file=replies, flush=True)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
