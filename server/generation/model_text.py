"""The served model's tokenizer and chat template in this process, so that texts of HTTP requests
cost the engine nothing. Loaded on first use."""

from __future__ import annotations

import asyncio
import threading
from array import array
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from ...errors import InvalidRequest, ModelLoadError
from ...frontend.protocol.chat_message import Message
from ...frontend.protocol.ir import MAX_MESSAGES
from .infill import InfillText, InfillTokens

if TYPE_CHECKING:
    from ...runtime.images.counter import ImageCounter
    from ...runtime.tokenizer.chat_template import ChatTemplate
    from ...runtime.tokenizer.tokenizer import Tokenizer

MAX_TOKEN_IDS = 1 << 16  # to decode at once, or a context's: 0.2 us each without a break
NUM_THREADS = 2  # more would only wait for the GIL

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class TemplateText:
    """What a model's files say of its prompts: the chat template in jinja2, BOS and EOS as text
    ("" where there is none), and whether it can fill in text before a suffix."""

    source: str
    bos_token: str
    eos_token: str
    can_infill: bool


class ModelText:
    """Thread-safe; its methods may be slow: call them `in_thread`. Lifetime: the application's.

    Raises InvalidRequest for texts and ids out of bounds, ModelLoadError where the model's folder
    is not on this host.
    """

    def __init__(self, info: Callable[[], dict[str, Any]]) -> None:
        """`info`: the engine's description of itself."""
        self._info = info
        self._lock = threading.Lock()
        self._template_lock = threading.Lock()
        self._threads = ThreadPoolExecutor(NUM_THREADS, "model-text")
        self._loaded: tuple[str, Tokenizer, ChatTemplate] | None = None
        self._images: ImageCounter | None = None  # where the model reads any

    async def in_thread(self, work: Callable[[], _T]) -> _T:
        """The result of `work`, run on a thread of its own pool: a server that cannot answer health
        checks while it reads long texts would be taken for dead."""
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)

    def encode(self, text: str, *, has_bos: bool = True) -> array[int]:
        """Ids of a prompt, preceded by BOS where the model has one."""
        tokenizer, _ = self._load()
        bos = array("i", tokenizer.bos_ids if has_bos else ())
        return bos + tokenizer.encode_array(text)

    def encode_chat(
        self,
        messages: Sequence[Message],
        *,
        opens_turn: bool = True,
        tools: Sequence[Any] = (),
        variables: Mapping[str, Any] | None = None,
    ) -> array[int]:
        """Ids of a chat's messages, whose images are data URLs, under the model's template;
        `opens_turn` adds the generation prompt, and leaves a final assistant message open. `tools`
        and `variables` go to the template. An image's are the template's stand-in again and
        again."""
        from ...runtime.tokenizer.chat_template import TemplateArgs
        from ...runtime.tokenizer.whole_chat import chat_prompt

        if not 1 <= len(messages) <= MAX_MESSAGES:
            allowed = f"1 to {MAX_MESSAGES} messages"
            raise InvalidRequest.of("messages", len(messages), allowed)
        _, template = self._load()
        args = TemplateArgs.of(tools, variables)
        placed = [self._placed(message) for message in messages]
        with self._template_lock:  # the template's state belongs to one thread at a time
            ids = chat_prompt(template, placed, args, opens_turn=opens_turn).ids
        if self._images is not None:
            image_id = self._images.token_id
            ids = array("i", [image_id if token_id < 0 else token_id for token_id in ids])
        return ids

    def _placed(self, message: Message) -> Message:
        """With as many tokens in place of each image as the engine makes of it."""
        if not message.images:
            return message
        if self._images is None:
            raise InvalidRequest("messages: the model reads only text", "messages")
        _, template = self._load()
        count = self._images.num_tokens
        places = [(at, template.place(-1, count(url))) for at, url in message.images]
        return message._replace(images=tuple(places))

    def decode(
        self, ids: Sequence[int], *, skip_special: bool = True, field: str = "tokens"
    ) -> str:
        """Text of ids; `field`: the client's name for them."""
        tokenizer, _ = self._load()
        most = max(MAX_TOKEN_IDS, int(self._info()["max_model_len"]))
        if len(ids) > most:
            raise InvalidRequest.of(field, f"{len(ids)} ids", f"at most {most}")
        self._require_ids(ids, field)
        return tokenizer.decode(ids, skip_special=skip_special)

    def token_texts(self, ids: Sequence[int]) -> list[str]:
        """Each token as text."""
        tokenizer, _ = self._load()
        self._require_ids(ids)
        return [tokenizer.token_text(token_id) for token_id in ids]

    def apply_template(
        self,
        messages: Sequence[Message],
        tools: Sequence[Any] = (),
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """The text of a chat up to where the assistant begins, without BOS."""
        tokenizer, _ = self._load()
        ids = self.encode_chat(messages, tools=tools, variables=variables).tolist()
        num_bos = len(tokenizer.bos_ids)
        if ids[:num_bos] == tokenizer.bos_ids:
            ids = ids[num_bos:]
        return tokenizer.decode(ids, skip_special=False)

    def infill(self, text: InfillText, field: str = "suffix") -> tuple[list[int], tuple[int, ...]]:
        """A prompt that asks for what is between two texts, and the tokens that end its output;
        `field`: the client's name for the second text. Raises InvalidRequest where the model has no
        tokens for it."""
        tokenizer, _ = self._load()
        tokens = InfillTokens.of(tokenizer.token_id)
        if tokens is None:
            raise InvalidRequest(
                f"{field}: this model's tokenizer has no tokens to fill in text before a suffix",
                field,
            )
        return [*tokenizer.bos_ids, *tokens.prompt(text, tokenizer.encode)], tokens.ends

    @property
    def template(self) -> TemplateText:
        """The chat template and the tokens that it writes."""
        tokenizer, template = self._load()
        can_infill = InfillTokens.of(tokenizer.token_id) is not None
        names = tokenizer.named_tokens
        return TemplateText(template.source, names["bos_token"], names["eos_token"], can_infill)

    @property
    def chat_description(self) -> dict[str, Any]:
        """What an engine would say of the template."""
        _, template = self._load()
        return {"chat_format": template.describe(), "template_knows_tools": template.knows_tools}

    def _require_ids(self, ids: Sequence[int], field: str = "tokens") -> None:
        vocab_size = self._info()["vocab_size"]
        wrong = next((token_id for token_id in ids if not 0 <= token_id < vocab_size), None)
        if wrong is not None:
            raise InvalidRequest.of(field, wrong, f"ids in [0, {vocab_size - 1}]")

    def _load(self) -> tuple[Tokenizer, ChatTemplate]:
        from ...runtime.tokenizer.chat_template import ChatTemplate
        from ...runtime.tokenizer.tokenizer import Tokenizer

        info = self._info()
        path = str(info["model_path"])
        with self._lock:
            if self._loaded is None or self._loaded[0] != path:
                if not path:
                    known = f"the files of model {info['model']!r} could not be read"
                    raise ModelLoadError(f"{known}; a request that needs it loaded is told why")
                if not Path(path).is_dir():
                    raise ModelLoadError(f"{path}: the model's folder is not on this host")
                tokenizer = Tokenizer(Path(path), info["vocab_size"])
                images = _image_counter(Path(path)) if info.get("reads_images") else None
                template = ChatTemplate(
                    Path(path),
                    tokenizer,
                    info.get("chat_template"),
                    image_token=None if images is None else tokenizer.token_text(images.token_id),
                )
                self._images = images
                self._loaded = (path, tokenizer, template)
            return self._loaded[1:]


def _image_counter(folder: Path) -> ImageCounter | None:
    """Raises ModelLoadError."""
    from ...runtime.images.counter import ImageCounter
    from ...runtime.models.model_config import read_model_config

    vision = read_model_config(folder).vision
    return None if vision is None else ImageCounter.of(folder, vision)
