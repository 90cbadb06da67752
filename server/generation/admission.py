"""Whether a task may go to the engine: what this server, the caller's key and the queue allow."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

from fastapi import Request

from ...errors import InvalidRequest, PromptTooLong
from ...frontend.protocol.chat_message import Message
from ...frontend.protocol.ir import MAX_MESSAGES, GenParams
from ..access.load import Capacity, Ticket
from ..access.middleware import TICKET
from ..protocol.failures import Refusal
from ..protocol.task import UNBOUNDED, Task
from .service import Service

TIMEOUT_HEADER = "x-request-timeout-s"
MAX_SAMPLES_OF_TASK = 2048  # n, or hypotheses, times prompts (guess)


def admitted(service: Service, request: Request, task: Task) -> Task:
    """The task as it may run. Raises InvalidRequest and Refusal."""
    require_generation(service)
    ticket = ticket_of(request)
    capacity = _capacity(service)
    most = min(MAX_SAMPLES_OF_TASK, capacity.most_of_one)
    if task.num_rows > most:
        allowed = f"at most {most} samples, or hypotheses, of all prompts together"
        raise InvalidRequest.of("n" if task.n > 1 else "prompt", task.num_rows, allowed)
    max_model_len = int(service.info["max_model_len"])
    for prompt in task.prompts:
        if prompt and isinstance(prompt[0], Message):
            _require_few(len(prompt), max_model_len)
    max_priority = None if ticket.usage is None else ticket.usage.key.max_priority
    timeout_s = header_timeout_s(request)

    def limited(params: GenParams) -> GenParams:
        _require_integers(params)
        return replace(
            params,
            max_tokens=_max_tokens(params.max_tokens, service.settings.max_tokens_limit),
            priority=_priority(params.priority, max_priority),
            deadline_s=_sooner_s(params.deadline_s, timeout_s),
        )

    each = tuple(limited(params) for params in task.each_params)
    task = replace(task, params=limited(task.params), each_params=each)
    ticket.take(task.num_rows, capacity)
    return task


def require_generation(service: Service) -> None:
    """Raises InvalidRequest where the model generates nothing."""
    if service.info.get("generates", True):
        return
    does = "scores texts and pairs (/rerank, /score, /classify)"
    does = does if service.info["scores"] else "embeds texts (/v1/embeddings, /rerank, /score)"
    raise InvalidRequest(f"model: {service.model} {does} and generates nothing", "model")


def _require_few(num_messages: int, max_model_len: int) -> None:
    """Raises InvalidRequest for a chat of too many messages, each of which has a token at least."""
    if num_messages >= max_model_len:
        size = f"at least {num_messages} tokens"
        raise PromptTooLong.than(size, max_model_len - 1, max_model_len, "messages")
    if num_messages > MAX_MESSAGES:
        raise InvalidRequest.of("messages", f"{num_messages} messages", f"at most {MAX_MESSAGES}")


def admit_values(service: Service, request: Request, num_values: int) -> None:
    """Room for values that are not generated, each counted like a sample. Raises InvalidRequest for
    more than there ever is room for, else Refusal."""
    capacity = _capacity(service)
    if num_values > (most := capacity.most_of_one):
        raise InvalidRequest(f"{num_values} values are asked for; at most {most} fit here")
    ticket_of(request).take(num_values, capacity)


def _capacity(service: Service) -> Capacity:
    return Capacity(service.max_running, service.settings.max_queued_requests)


def ticket_of(request: Request) -> Ticket:
    """What the gate counts the request by."""
    ticket = request.scope[TICKET]
    assert isinstance(ticket, Ticket)
    return ticket


def _require_integers(params: GenParams) -> None:
    """Those that cannot travel are refused by their names."""
    for name, value in params.given().items():
        for number in _integers_in(value):
            if not -(2**63) <= number < 2**63:
                raise InvalidRequest.of(name, number, "integers of 64 bits")


def _integers_in(value: object) -> Iterator[int]:
    if isinstance(value, tuple):
        for item in value:
            yield from _integers_in(item)
    elif type(value) is int:
        yield value


def _max_tokens(asked: int | None, limit: int | None) -> int | None:
    """What nobody has asked for is cut to the limit, what somebody has is refused."""
    if limit is None or (asked is not None and asked <= limit):
        return asked
    if asked is None or asked == UNBOUNDED:
        return limit
    raise InvalidRequest.of("max_tokens", asked, f"an integer in [0, {limit}] on this server")


def _priority(asked: int | None, most: int | None) -> int | None:
    if most is not None and (asked or 0) > most:
        if asked is None:
            return most
        raise Refusal(
            403, f"priority={asked}: this key may ask for {most} at most", field="priority"
        )
    return asked


def header_timeout_s(request: Request) -> float | None:
    """How long the client waits for the whole, as a header says. Raises InvalidRequest."""
    given = request.headers.get(TIMEOUT_HEADER)
    if given is None:
        return None
    try:
        seconds = float(given)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds < math.inf:
        raise InvalidRequest.of(TIMEOUT_HEADER, given[:40], "a number of seconds above 0")
    return seconds


def _sooner_s(one: float | None, other: float | None) -> float | None:
    return min((each for each in (one, other) if each is not None), default=None)
