"""The committed set of realistic schemas and regexes, each with instances of its language."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .matchers.protocol import GrammarRequest
from .matchers.spelling import spelled

FLAT = "flat"  # objects of scalars, all of them required
_FILE = Path(__file__).parent / "data" / "grammars.json"


@dataclass(frozen=True, slots=True)
class GrammarCase:
    """A language; `instances` are JSON values, or texts where it is a regex."""

    name: str
    group: str
    instances: tuple[Any, ...]
    schema: Any = None
    regex: str | None = None

    @property
    def request(self) -> GrammarRequest:
        """The request to an engine."""
        if self.regex is not None:
            return GrammarRequest("regex", self.regex)
        return GrammarRequest("json_schema", json.dumps(self.schema))

    @property
    def texts(self) -> list[str]:
        """The instances as outputs: compact JSON, or the texts themselves."""
        if self.regex is not None:
            return list(self.instances)
        return [spelled(instance) for instance in self.instances]


def grammar_cases() -> list[GrammarCase]:
    """All of them."""
    entries = json.loads(_FILE.read_text("utf-8"))
    return [GrammarCase(**{**entry, "instances": tuple(entry["instances"])}) for entry in entries]
