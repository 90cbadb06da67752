"""`cascade`: a backend whose gens are answered by the smallest model that will do."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Any

from ...errors import EngineError, InvalidProgram, InvalidRequest
from ..backend import Runtime
from ..client.backend import Backend
from ..client.client import Connection
from ..openai.client_session import ClientSession
from ..openai.client_transcript import ClientTranscript
from ..openai.http_client import Endpoint
from ..openai.local_channel import LocalChannel
from ..protocol.interpreter import Emit
from .acceptance import Accept, Answer, rule_of
from .caller import CascadeCaller, CascadeSession
from .cascade import Cascade, Member


class CascadeBackend(Backend):
    """What `cascade` returns. Programs run in this process; their calls are on its models'
    engines."""

    channel: CascadeChannel

    @property
    def counts(self) -> dict[str, dict[str, int]]:
        """Of each model, by its name: how many gens it was asked for, how many of its answers were
        taken or escalated, and its tokens; see `MemberCounts`."""
        return self.channel.cascade.counters()

    def get_server_info(self) -> dict[str, Any]:
        """The models' names and the counts."""
        return {**self.channel.info, "models": self.counts}


def cascade(
    *models: Backend | str,
    accept: Accept | Callable[[Answer], Any],
    base_url: str | None = None,
) -> CascadeBackend:
    """A backend of several models, the smallest first: it answers each gen, and the next larger one
    is asked where `accept` does not take its answer.

    Args:
        models: two or more engines or runtimes over ZeroMQ, or names of loaded models of the server
            at `base_url`. They stay open when the cascade is shut down.
        accept: `mean_logprob(bar)`, `agree(bar)`, a plain or an async function of an `Answer` that
            returns a bool, or these combined by `|` and `&`.
        base_url: "http://HOST:PORT" of a `stemma serve` of several models.

    Raises InvalidRequest for arguments that are not allowed, EngineError where no server responds.
    """
    rule = rule_of(accept)
    if len(models) < 2:
        raise InvalidProgram.of("models", models, "two or more, the smallest first")
    addresses = _addresses(base_url) if base_url is not None else None
    backends = [_backend_of(model, addresses) for model in models]
    names = [_name_of(model, backend) for model, backend in zip(models, backends, strict=True)]
    members = [
        Member(_unique(names, place), partial(_connection, backend))
        for place, backend in enumerate(backends)
    ]
    opened = [b for b, model in zip(backends, models, strict=True) if isinstance(model, str)]
    facts = {**_shared_facts(backends), "revisions": _revisions(backends, rule)}
    return CascadeBackend(CascadeChannel(Cascade(members, rule), opened, facts))


class CascadeChannel(LocalChannel):
    """Thread-safe; lives until `close`, which also closes what was opened for it."""

    def __init__(self, cascade: Cascade, opened: list[Backend], facts: dict[str, Any]) -> None:
        """`facts`: those that hold for all of its models, and what tells its results from those of
        other cascades."""
        self.cascade = cascade
        self._opened = opened
        self._caller = CascadeCaller(cascade)
        own = {"model": cascade.name, "images_refusal": "a cascade's models are given text"}
        super().__init__({**facts, **own}, "stemma-cascade")

    def _session(self, emit: Emit, create: dict[str, object]) -> ClientSession:
        for name in ("lora_path", "tools"):
            if create.get(name) is not None:
                raise InvalidProgram.of(name, create[name], "left out for a cascade")
        session = CascadeSession(
            self._caller,
            ClientTranscript(has_text=True, has_chat=True),
            emit,
            seed=int(create["seed"]),  # type: ignore[call-overload]
            instance=int(create["instance"]),  # type: ignore[call-overload]
            is_streaming=bool(create.get("stream")),
        )
        session.calls_alike = "chat_format" in self.info
        return session

    async def _close(self) -> None:
        for backend in self._opened:
            await asyncio.to_thread(backend.shutdown)


def _backend_of(model: object, addresses: dict[str, str] | None) -> Backend:
    if isinstance(model, str):
        if addresses is None:
            allowed = "an st.Engine or an st.Runtime; names together with base_url, a server's"
            raise InvalidProgram.of("models", model, allowed)
        if model not in addresses:
            raise InvalidProgram.of("models", model, f"one of {sorted(addresses)} at base_url")
        return Runtime(addresses[model])
    if not isinstance(model, Backend) or not isinstance(model.channel, Connection):
        allowed = "engines or runtimes over ZeroMQ, which score and go on from tokens"
        raise InvalidProgram.of("models", model, allowed)
    return model


def _shared_facts(backends: list[Backend]) -> dict[str, Any]:
    """How the models write tool calls, where all write them alike."""
    infos = [backend.channel.info for backend in backends]
    first = {name: infos[0].get(name) for name in ("chat_format", "template_knows_tools")}
    same = all(info.get(name) == value for info in infos for name, value in first.items())
    return first if same else {}


def _revisions(backends: list[Backend], rule: Accept) -> list[str]:
    """What results that are kept on disk depend on, beside the names of the models."""
    own = [each for backend in backends for each in backend.channel.info.get("revisions") or ()]
    return [*map(str, own), repr(rule)]


def _addresses(base_url: str) -> dict[str, str]:
    """Where programs connect to each of a server's models. Raises EngineError."""
    from ..openai.channel import models_of  # httpx is slow to import

    if not isinstance(base_url, str) or not base_url.startswith(("http://", "https://")):
        raise InvalidRequest.of("base_url", base_url, 'an address "http://..." or "https://..."')
    models = models_of(Endpoint(f"{base_url.rstrip('/').removesuffix('/v1')}/v1"))
    found = {model["id"]: model["endpoint"] for model in models if "endpoint" in model}
    if not found:
        raise EngineError(f"{base_url} is no `stemma serve` of several models")
    return found


async def _connection(backend: Backend) -> Connection:
    if not backend.is_open:
        await asyncio.to_thread(backend.reopen)
    return backend.connection


def _name_of(model: Backend | str, backend: Backend) -> str:
    return model if isinstance(model, str) else str(backend.channel.info.get("model", "model"))


def _unique(names: list[str], place: int) -> str:
    """Two engines of one model are told apart by their places."""
    name = names[place]
    return name if names.count(name) == 1 else f"{name}#{place + 1}"
