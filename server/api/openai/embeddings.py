"""`/v1/embeddings`."""

from __future__ import annotations

import asyncio
import base64
import math
import sys
from array import array
from collections.abc import Sequence
from typing import Annotated, Any, Literal

import orjson
from fastapi import APIRouter, Request
from fastapi.responses import Response
from pydantic import BaseModel, ConfigDict, Field
from starlette.exceptions import HTTPException

from ....errors import MAX_MODEL_NAME_CHARS, InvalidRequest
from ....frontend.protocol import ir
from ....frontend.protocol.call_ops import embed_ops
from ...generation.service import Service
from ...generation.values import usage_of_values, values_of
from ...protocol.fixed_fields import only, refuse_others
from ...protocol.json_route import beside_loop, json_routes
from ...protocol.known_fields import Items
from ...protocol.task import MAX_PROMPTS, require_together

MAX_CUT = 2**31 - 1


Truncation = Annotated[int, Field(ge=-1, le=MAX_CUT)]
"""vLLM's `truncate_prompt_tokens`: no more tokens count; -1: those that the model takes."""


class TruncationFields(BaseModel):
    """Mixed into bodies: how long texts may be, in the words of vLLM, of NVIDIA and Hugging Face
    (`truncate`) and of Voyage (`truncation`)."""

    truncate_prompt_tokens: Truncation | None = None
    truncate: bool | Literal["NONE", "END"] | None = None  # "START" would keep the end
    truncation: bool | None = None
    truncation_side: Any = only((None, "right"), '"right"')

    @property
    def asked_cut(self) -> int | None:
        """As `truncate_prompt_tokens`, which counts where it is given."""
        if self.truncate_prompt_tokens is not None:
            return self.truncate_prompt_tokens
        return -1 if self.truncate in (True, "END") or self.truncation else None


def cut_of(truncation: int | None) -> int | None:
    """Of a `Truncation` in the engine's words; None: a longer text is an error. Raises
    InvalidRequest for no tokens at all."""
    if truncation == 0:
        allowed = "at least 1, or -1: as many as the model takes"
        raise InvalidRequest.of("truncate_prompt_tokens", 0, allowed)
    return MAX_CUT if truncation == -1 else truncation


def router(service: Service) -> APIRouter:
    """The routes."""
    routes = json_routes()

    @routes.post("/embeddings", include_in_schema=False)
    @routes.post("/v1/embeddings")
    async def embeddings(body: EmbeddingRequest, request: Request) -> Response:
        """OpenAI's embeddings."""
        served = service.served(body.model, body.lora_path)
        info = service.info["embedding"]
        vocab_size = service.info["vocab_size"]

        def build() -> list[list[ir.Op]]:
            body.require_ids(vocab_size)
            return body.programs(info)

        programs = await beside_loop(request, build)
        answers = await values_of(service, request, programs, body.cache_salt, served.lora_path)
        answer = await asyncio.to_thread(_answer, served.name, body, answers)
        return Response(answer, media_type="application/json")

    return routes


class OtherEmbeddingFields(BaseModel):
    """Fields of other servers' bodies, mixed into ours: of no effect, or refused with what would
    have changed the vectors."""

    user: str | None = None
    request_id: Any = None
    rid: Any = None
    metadata: Any = None
    mm_processor_kwargs: Any = None
    additional_data: Any = None
    priority: Any = only((None, 0), "0: keys have shares")
    prompt: Any = only((None, ""), "left out: put it before each text; see prompt_name")
    instruction: Any = only((None, ""), "left out: put it before each text; see prompt_name")
    task: Any = only((None,), "left out; see prompt_name")
    late_chunking: Any = only((None, False), "false: each text is by itself")
    return_multivector: Any = only((None, False), "false: a text has one vector")
    normalized: Any = only((None, True), "true; see normalize")
    add_special_tokens: Any = only((None, True), "true; token ids are taken as they are")
    output_dimension: Any = only((None,), "left out; see dimensions")
    output_dtype: Any = only((None, "float"), '"float"; see encoding_format')
    embed_dtype: Any = only((None, "float32"), '"float32"')
    endianness: Any = only((None, "native", "little"), '"little"')
    embedding_type: Any = only((None, "float", ["float"]), '"float"; see encoding_format')
    embedding_types: Any = only((None, ["float"]), '["float"]; see encoding_format')


class EmbeddingRequest(TruncationFields, OtherEmbeddingFields):
    """Body of /v1/embeddings. `pooling` and `normalize` are ours: the model's own pooling unless
    given, and vectors of length 1 as OpenAI's unless told otherwise. `prompt_name` is that of
    sentence-transformers, `input_type` the same as others call it."""

    model_config = ConfigDict(extra="ignore", strict=True)

    model: str | None = None
    input: str | Items[str] | Items[int] | Items[Items[int]]
    encoding_format: Literal["float", "base64"] | None = None  # floats unless it is given
    dimensions: int | None = Field(default=None, ge=1)
    pooling: ir.Pooling | None = None
    normalize: bool = True
    prompt_name: str | None = Field(default=None, max_length=1024)
    input_type: str | None = Field(default=None, max_length=1024)
    cache_salt: str | None = Field(default=None, max_length=1024)
    lora_path: str | None = Field(default=None, max_length=MAX_MODEL_NAME_CHARS)

    def require_ids(self, vocab_size: int) -> None:
        """Raises InvalidRequest for token ids that the model does not have."""
        for item in self._inputs():
            wrong = None if isinstance(item, str) else _out_of(item, vocab_size)
            if wrong is not None:
                raise InvalidRequest.of(
                    "input",
                    wrong,
                    f"texts, or ids of this model's own tokenizer, in [0, {vocab_size - 1}]; "
                    "langchain's OpenAIEmbeddings sends ids of OpenAI's tokenizer unless it has "
                    "check_embedding_ctx_length=False",
                )

    def programs(self, model: dict[str, Any]) -> list[list[ir.Op]]:
        """One program per input; `model`: the engine's report on its embeddings. Raises
        HTTPException where it computes none, InvalidRequest for fields at fault."""
        refuse_others(self)
        if model["refusal"] is not None:
            raise HTTPException(400, f"this model gives no embeddings: {model['refusal']}")
        if self.dimensions is not None and self.dimensions > model["size"]:
            allowed = f"at most {model['size']}, the model's"
            raise InvalidRequest.of("dimensions", self.dimensions, allowed)
        pooling, prompt = self.pooling or model["pooling"], self._prompt(model)
        require_together("input", len(prompt), len(self._inputs()))
        return [self._program(item, pooling, prompt) for item in self._inputs()]

    def _prompt(self, model: dict[str, Any]) -> str:
        """What is put before each text."""
        prompts: dict[str, str] = model["prompts"]
        field, name = self._named_prompt
        name = name or model["default_prompt"]
        if name is None:
            return ""
        if name not in prompts:
            allowed = f"one of {sorted(prompts)}" if prompts else "left out: the model has none"
            raise InvalidRequest.of(field, name, allowed)
        return prompts[name]

    @property
    def _named_prompt(self) -> tuple[str, str | None]:
        """The field that names a prompt, and the name."""
        if self.prompt_name is None and self.input_type is not None:
            return "input_type", self.input_type
        return "prompt_name", self.prompt_name

    def _inputs(self) -> Sequence[str | list[int]]:
        given = self.input
        if isinstance(given, str) or (given and isinstance(given[0], int)):
            given = [given]  # type: ignore[assignment]
        if not 1 <= len(given) <= MAX_PROMPTS or not all(given):
            allowed = f"1 to {MAX_PROMPTS} inputs, none of them empty"
            raise InvalidRequest.of("input", f"{len(given)} inputs", allowed)
        return given  # type: ignore[return-value]

    def _program(self, item: str | list[int], pooling: str, prompt: str) -> list[ir.Op]:
        normalize = self.normalize and self.dimensions is None
        if isinstance(item, str):
            item = prompt + item
        elif self._named_prompt[1] is not None:
            raise InvalidRequest.of(*self._named_prompt, "left out with token ids")
        cut_to = cut_of(self.asked_cut)
        return embed_ops(item, pooling=pooling, normalize=normalize, cut_to=cut_to)


def _out_of(ids: Sequence[int], vocab_size: int) -> int | None:
    largest, smallest = max(ids), min(ids)
    if largest >= vocab_size:
        return largest
    return smallest if smallest < 0 else None


def _answer(model: str, body: EmbeddingRequest, answers: Sequence[dict[str, Any]]) -> bytes:
    data = [
        {"object": "embedding", "index": index, "embedding": vector_of(body, answer["value"])}
        for index, answer in enumerate(answers)
    ]
    usage = usage_of_values(answers)
    return orjson.dumps({"object": "list", "data": data, "model": model, "usage": usage})


def vector_of(body: EmbeddingRequest, values: list[float]) -> list[float] | str:
    """In the requested form: perhaps only its first values, scaled to length 1 again."""
    if body.dimensions is not None:
        values = values[: body.dimensions]
        if body.normalize:
            length = math.hypot(*values) or 1.0
            values = [value / length for value in values]
    if body.encoding_format != "base64":
        return values
    floats = array("f", values)
    if sys.byteorder == "big":
        floats.byteswap()
    return base64.b64encode(floats.tobytes()).decode()
