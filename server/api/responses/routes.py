"""`/v1/responses`: create, continue, retrieve and delete responses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import Response
from starlette.exceptions import HTTPException

from ....errors import InvalidRequest
from ...generation.answer import answer
from ...generation.response_store import ResponseStore, StoredResponse
from ...generation.service import Service
from ...protocol.caller import Caller, caller_of
from ...protocol.json_route import beside_loop, json_routes
from ...protocol.task import Task
from ..openai.chat import chat_task
from ..openai.message_reader import MessageReader
from .reply import ResponsesReply
from .schema import ResponsesRequest


def router(service: Service) -> APIRouter:
    """The routes."""
    routes = json_routes()
    store = service.responses

    @routes.post("/responses", include_in_schema=False)
    @routes.post("/v1/responses")
    async def create_response(body: ResponsesRequest, request: Request) -> Response:
        """OpenAI's Responses; `previous_response_id` continues what this server still keeps."""
        served = service.served(body.model)
        caller = caller_of(request)
        before = _before(store, caller, body.previous_response_id)

        def build() -> tuple[list[dict[str, Any]], Task, Callable[[], MessageReader]]:
            messages = [*before, *body.messages()]
            return messages, *chat_task(service, body.chat(messages), served, body.image_fields())

        messages, task, new_reader = await beside_loop(request, build)

        def keep(made: dict[str, Any], message: dict[str, Any]) -> None:
            if body.store:
                given = body.model_dump(include={"input"}, exclude_none=True)["input"]
                items = given if isinstance(given, list) else [_user_item(given)]
                store.put(_owner(caller), made, items, [*messages, message])

        num = (body.top_logprobs or 0) if body.has_logprobs else None
        reply = ResponsesReply(served.name, new_reader(), body.echo(), keep, num_logprobs=num)
        return await answer(service, request, task, reply)

    @routes.get("/responses/{response_id}", include_in_schema=False)
    @routes.get("/v1/responses/{response_id}")
    async def get_response(response_id: str, request: Request) -> dict[str, Any]:
        """A response that is still kept."""
        return _kept(store, caller_of(request), response_id).body

    @routes.get("/responses/{response_id}/input_items", include_in_schema=False)
    @routes.get("/v1/responses/{response_id}/input_items")
    async def get_input_items(response_id: str, request: Request) -> dict[str, Any]:
        """What it was asked with."""
        items = _kept(store, caller_of(request), response_id).input_items
        return {"object": "list", "data": items, "has_more": False}

    @routes.delete("/responses/{response_id}", include_in_schema=False)
    @routes.delete("/v1/responses/{response_id}")
    async def delete_response(response_id: str, request: Request) -> dict[str, Any]:
        """Forget it; what continues it already is not touched."""
        if not store.remove(_owner(caller_of(request)), response_id):
            raise _missing(response_id)
        return {"id": response_id, "object": "response", "deleted": True}

    return routes


def _owner(caller: Caller) -> tuple[str | None, str]:
    return caller.tenant, caller.namespace


def _before(store: ResponseStore, caller: Caller, response_id: str | None) -> list[dict[str, Any]]:
    """The chat up to and including a response. Raises InvalidRequest."""
    if response_id is None:
        return []
    kept = store.get(_owner(caller), response_id)
    if kept is None:
        raise InvalidRequest.of(
            "previous_response_id", response_id, "a response that is still kept (send the input)"
        )
    return kept.messages


def _kept(store: ResponseStore, caller: Caller, response_id: str) -> StoredResponse:
    kept = store.get(_owner(caller), response_id)
    if kept is None:
        raise _missing(response_id)
    return kept


def _missing(response_id: str) -> HTTPException:
    return HTTPException(404, f"response {response_id[:80]!r} is not kept here (any more)")


def _user_item(text: str) -> dict[str, Any]:
    part = {"type": "input_text", "text": text}
    return {"type": "message", "role": "user", "content": [part]}
