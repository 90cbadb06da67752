"""The jinja2 environment in which chat templates run: what `transformers` gives them, sandboxed.

A template is a program of its checkpoint's author. It reaches nothing but what it is given, and
cannot change that.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import datetime
from typing import Any, NoReturn

import jinja2
from jinja2.ext import Extension
from jinja2.nodes import Node
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment


def template_sandbox(to_json: Callable[..., str]) -> ImmutableSandboxedEnvironment:
    """A new environment; `to_json`: its filter `tojson`."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=["jinja2.ext.loopcontrols", GenerationTag],
    )
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda layout: datetime.now().strftime(layout)
    environment.filters["tojson"] = to_json
    return environment


class GenerationTag(Extension):
    """`{% generation %}...{% endgeneration %}` around what the assistant wrote, for training. A
    scope like `with`: what is set within it is not set behind it."""

    tags = {"generation"}  # noqa: RUF012, as jinja2 declares it

    def parse(self, parser: Parser) -> Node:
        """The statements between the two tags."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.Scope(body).set_lineno(line)


def to_json(value: object, **options: Any) -> str:
    """JSON as templates write it: no HTML escapes, and letters as they are."""
    options.setdefault("ensure_ascii", False)
    return json.dumps(value, **options)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)
