"""What the engine says of a constraint, in the words of the request that asked for it.

The engine names places in the constraint as it was given that. Clients give schemas, and those of
several functions, or one behind reasoning, become parts of a whole that no client has seen.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from ...errors import LENIENT
from ...frontend.protocol.constraint import Constraint

Schemas = Sequence[tuple[str, object]]

_KIND = re.compile(r"(?:json_schema|structural_tag): (?=/)")  # before a place in either
_STEP = re.compile(r"/(\w+)")  # in what surrounds the client's schemas
_LENIENT = re.compile(re.escape(LENIENT) + "(?: and validates the finished document)?")


@dataclass(eq=False)
class ConstraintWords:
    """Rewords messages about one constraint.

    `schemas`: the client's, each with its name, "" where the request's field says enough;
    `lenient`: how the client may have schemas enforced as far as can be, "" where it cannot, None
    where that is a field `lenient`.
    """

    constraint: Constraint
    schemas: Callable[[], Schemas]
    lenient: str | None = None
    _names: dict[str, str | None] = field(default_factory=dict)  # by pointer; None: no schema

    def beside(self, others: ConstraintWords) -> ConstraintWords:
        """The same, with schemas of others within the constraint."""
        return ConstraintWords(
            self.constraint, lambda: [*self.schemas(), *others.schemas()], self.lenient
        )

    def reworded(self, message: str) -> str:
        """A refusal or a warning of the engine's."""
        if self.lenient is not None:
            instead = f"{self.lenient}, which drops the keyword" if self.lenient else "leave it out"
            message = _LENIENT.sub(lambda _: instead, message)
        message = _KIND.sub("", message, count=1)
        if self.constraint.kind not in ("json_schema", "structural_tag"):
            return message
        return self._located(message)

    def _located(self, message: str) -> str:
        """The message with the place at its beginning counted from the client's own schema."""
        node, end = self._whole, 0
        while message.startswith("/"):
            name = self._name(message[:end], node)
            if name is not None:
                place = message[end:] if message[end:].startswith("/") else f"/{message[end:]}"
                return f"{name}: {place}" if name else place
            step = _STEP.match(message, end)
            if step is None:
                break
            if isinstance(node, dict) and step[1] in node:
                node = node[step[1]]
            elif isinstance(node, list) and step[1].isdecimal() and int(step[1]) < len(node):
                node = node[int(step[1])]
            else:
                break
            end = step.end()
        return message

    def _name(self, pointer: str, node: object) -> str | None:
        if pointer not in self._names:
            named = (name for name, schema in self._own if node == schema)
            self._names[pointer] = next(named, None)
        return self._names[pointer]

    @cached_property
    def _whole(self) -> object:
        return json.loads(self.constraint.source)

    @cached_property
    def _own(self) -> Schemas:
        return self.schemas()
