"""An image to a model that reads text is refused by the path that the client's own API gives it."""

from __future__ import annotations

from typing import Any

import pytest

from stemma.server.api.anthropic.schema import MessagesRequest
from stemma.server.api.ollama.schema import ChatBody, GenerateBody
from stemma.server.api.openai.chat import ChatRequest
from stemma.server.api.responses.schema import ResponsesRequest

TEXT = {"type": "text", "text": "a"}
SOURCE = {"type": "base64", "media_type": "image/png", "data": "AA=="}
BLOCK = {"type": "image", "source": SOURCE}
RESULT = {"type": "tool_result", "tool_use_id": "t", "content": [TEXT, BLOCK]}
URL = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}
INPUT = {"type": "input_image", "image_url": "data:image/png;base64,AA=="}
OUTPUT = {"type": "function_call_output", "call_id": "c", "output": [INPUT]}


@pytest.mark.parametrize(
    ("kind", "body", "expected"),
    [
        (ChatRequest, {"messages": [{"role": "user", "content": "a"},
                                    {"role": "user", "content": [TEXT, URL]}]},
         [("messages.1.content.1.type", "image_url")]),
        (MessagesRequest, {"max_tokens": 1, "messages": [
            {"role": "user", "content": "a"}, {"role": "user", "content": [RESULT, BLOCK]}]},
         [("messages.1.content.0.content.1.type", "image"),
          ("messages.1.content.1.type", "image")]),
        (ResponsesRequest, {"input": [{"role": "user", "content": [INPUT]}, OUTPUT]},
         [("input.0.content.0.type", "input_image"), ("input.1.output.0.type", "input_image")]),
        (ResponsesRequest, {"input": "a"}, []),
        (ChatBody, {"messages": [{"role": "user", "content": "a"},
                                 {"role": "user", "content": "a", "images": ["AA==", "AA=="]}]},
         [("messages.1.images", "2 of them")]),
        (GenerateBody, {"prompt": "a", "images": ["AA=="]}, [("images", "1 of them")]),
    ],
)  # fmt: skip
def test_images_are_named_as_the_client_has_them(
    kind: Any, body: dict[str, Any], expected: list[tuple[str, str]]
) -> None:
    assert list(kind.model_validate(body).image_fields()) == expected
