"""`/tokenize` and `/detokenize`, with the engine's tokenizer. Accepts the field names of SGLang,
vLLM and llama.cpp."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from typing import Any

import orjson
from fastapi import APIRouter
from fastapi.responses import Response
from pydantic import BaseModel, ConfigDict

from ....errors import InvalidRequest
from ....frontend.chat_format.call_grammar import tools_text
from ....frontend.protocol.chat_message import Message
from ...generation.model_text import ModelText
from ...generation.service import Service
from ...protocol.json_route import json_routes
from ...protocol.known_fields import FewItems, Items
from ...protocol.task import MAX_PROMPTS
from ..openai.chat_messages import ChatMessage
from ..openai.content_parts import ImageField, image_fields, refuse_images

SLICE_TOKENS = 16_384  # 0.3 ms
_INPUTS = ("text", "prompt", "content", "messages")


def router(service: Service) -> APIRouter:
    """The routes."""
    routes = json_routes()
    texts = service.text

    @routes.post("/tokenize")
    @routes.post("/v1/tokenize")
    async def tokenize(body: TokenizeRequest) -> Response:
        """Ids of a text, of several, or of a chat."""
        await service.require_model(body.model)
        if not service.info.get("reads_images"):
            refuse_images(body.image_fields(), service.info.get("images_refusal"))
        chat = await texts.in_thread(body.chat)
        chat = await service.images.with_bytes(chat)
        max_model_len = service.info["max_model_len"]
        return await texts.in_thread(lambda: _json(body.answer(texts, chat, max_model_len)))

    @routes.post("/detokenize")
    @routes.post("/v1/detokenize")
    async def detokenize(body: DetokenizeRequest) -> Response:
        """The text of ids, or the texts of several lists of them."""
        await service.require_model(body.model)
        return await texts.in_thread(lambda: _json(body.answer(texts)))

    return routes


class TokenizeRequest(BaseModel):
    """Body of /tokenize: exactly one of `text`, `prompt`, `content` and `messages`.
    `add_special_tokens`: BOS before a text, where the model has one; before llama.cpp's `content`
    only with `add_special`."""

    model_config = ConfigDict(extra="ignore", strict=True)

    model: str | None = None
    text: str | Items[str] | None = None
    prompt: str | Items[str] | None = None
    content: str | None = None
    messages: Items[ChatMessage] | None = None
    tools: FewItems[dict[str, Any]] | None = None
    add_generation_prompt: bool = True
    add_special_tokens: bool = True
    return_token_strs: bool = False
    add_special: bool = False
    with_pieces: bool = False  # llama.cpp's: tokens as objects of `id` and `piece`

    def image_fields(self) -> Iterator[ImageField]:
        """Of all messages."""
        for index, message in enumerate(self.messages or ()):
            yield from image_fields(message.content, f"messages.{index}.content")

    def chat(self) -> list[Message]:
        """Its messages, if it has any. Raises InvalidRequest."""
        return [message.plain(index) for index, message in enumerate(self.messages or ())]

    def answer(
        self, texts: ModelText, chat: Sequence[Message], max_model_len: int
    ) -> dict[str, Any]:
        """The response body. `chat`: with the bytes of its images. Raises InvalidRequest,
        ModelLoadError."""
        ids = self._ids(texts, chat)
        body: dict[str, Any] = {
            "tokens": ids,
            "count": [len(each) for each in ids] if isinstance(ids, list) else len(ids),
            "max_model_len": max_model_len,
        }
        if self.return_token_strs:
            each_text = texts.token_texts
            body["token_strs"] = (
                [each_text(each) for each in ids] if isinstance(ids, list) else each_text(ids)
            )
        if self.with_pieces and isinstance(ids, array):
            pieces = zip(ids, texts.token_texts(ids), strict=True)
            body["tokens"] = [{"id": token_id, "piece": piece} for token_id, piece in pieces]
        return body

    def _ids(self, texts: ModelText, chat: Sequence[Message]) -> array[int] | list[array[int]]:
        given = [name for name in _INPUTS if getattr(self, name) is not None]
        if len(given) != 1:
            raise InvalidRequest(f"one of {', '.join(_INPUTS)} is needed, not {given}", "text")
        if self.messages is not None:
            opens_turn = self.add_generation_prompt
            tools = self.tools or ()
            tools_text(tools)
            return texts.encode_chat(chat, opens_turn=opens_turn, tools=tools)
        if self.content is not None:
            return texts.encode(self.content, has_bos=self.add_special)
        text = self.text if self.prompt is None else self.prompt
        has_bos = self.add_special_tokens
        if isinstance(text, list):
            _require_count(given[0], text)
            return [texts.encode(each, has_bos=has_bos) for each in text]
        assert text is not None
        return texts.encode(text, has_bos=has_bos)


class DetokenizeRequest(BaseModel):
    """Body of /detokenize: `tokens`, or `input_ids`."""

    model_config = ConfigDict(extra="ignore", strict=True)

    model: str | None = None
    tokens: Items[int] | Items[Items[int]] | None = None
    input_ids: Items[int] | Items[Items[int]] | None = None
    skip_special_tokens: bool = True

    def answer(self, texts: ModelText) -> dict[str, Any]:
        """The response body: `text` is SGLang's name, `prompt` vLLM's, `content` llama.cpp's.
        Raises InvalidRequest, ModelLoadError."""
        if (self.tokens is None) == (self.input_ids is None):
            raise InvalidRequest("one of tokens and input_ids is needed", "tokens")
        ids: list[Any] = self.tokens or self.input_ids or []
        skip = self.skip_special_tokens
        if ids and isinstance(ids[0], list):
            _require_count("tokens", ids)
            text: str | list[str] = [texts.decode(each, skip_special=skip) for each in ids]
        else:
            text = texts.decode(ids, skip_special=skip)
        return {"text": text, "prompt": text, "content": text}


def _json(answer: dict[str, Any]) -> Response:
    return Response(orjson.dumps(answer, default=_list_of), media_type="application/json")


def _list_of(ids: object) -> orjson.Fragment:
    """By slices: others wait while a list of a million ids is made, and while it is freed."""
    assert isinstance(ids, array)
    slices = (ids[i : i + SLICE_TOKENS].tolist() for i in range(0, len(ids), SLICE_TOKENS))
    return orjson.Fragment(b"[%b]" % b",".join(orjson.dumps(each)[1:-1] for each in slices))


def _require_count(field: str, items: Sequence[object]) -> None:
    if not 1 <= len(items) <= MAX_PROMPTS:
        raise InvalidRequest.of(field, f"{len(items)} of them", f"1 to {MAX_PROMPTS}")
