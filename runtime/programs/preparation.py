"""What comes before an op can be carried out: its branch's text, and its own, as token ids.

Everything here is a function of a transcript and of an op, so that long texts can be prepared on
another thread (text_threads.py) while the engine goes on.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate

from ...errors import InvalidProgram, InvalidRequest, PromptTooLong
from ...frontend.protocol import ir
from ...frontend.protocol.chat_message import Message
from ..images.image import Image
from ..images.registry import ImageRegistry
from ..tokenizer.tokenizer import MAX_TEXT_CHARS, UNLOCKED_CHARS
from ..tokenizer.transcript import TextChange, Transcript
from .client_leases import AskedHint
from .context import ProgramContext
from .embedded_text import EmbeddedText, embedded_pair, embedded_text
from .engine_branch import Prepared

TOKEN_CHARS = 4  # to decode a token costs as much as to encode about so many characters
TURN_CHARS = 16  # to render a message, likewise


@dataclass(frozen=True, slots=True)
class Preparation:
    """Of one op. `pending`: the text before it, not in `transcript` yet; `asked`: hints on parts
    of that text, which are told their numbers of tokens."""

    context: ProgramContext
    namespace: str
    transcript: Transcript
    pending: Sequence[ir.Text]
    asked: Sequence[AskedHint]
    op: ir.Op

    @property
    def num_chars(self) -> int:
        """How much there is to tokenize, or what takes as long."""
        num_chars = sum(len(text.text) for text in self.pending)
        if self._unmeasured():
            num_chars *= 2  # see `_tokens_before`
        match self.op:
            case ir.Tokens():
                return num_chars + TOKEN_CHARS * len(self.op.token_ids)
            case ir.Image():
                return num_chars + UNLOCKED_CHARS  # to decode takes long, whatever its length
            case ir.Select():
                num_ids = sum(map(len, self.op.choice_ids or ()))
                return num_chars + sum(map(len, self.op.choices)) + TOKEN_CHARS * num_ids
            case ir.RoleBegin():
                return num_chars + len(self.op.fields or "") + self.transcript.num_unwritten_chars
            case ir.RoleEnd():
                return num_chars + len(self.op.fields or "")
            case ir.Tools():
                return num_chars + len(self.op.tools)
            case ir.Chat():
                num_chars = self.op.num_chars + TURN_CHARS * len(self.op.messages)
                num_chars += UNLOCKED_CHARS * any(m.images for m in self.op.messages)
                return num_chars + self.transcript.num_unwritten_chars
            case ir.Gen() | ir.Embed():
                op = self.op
                more = op.params.prediction if isinstance(op, ir.Gen) else op.pair
                num_turns = self.transcript.num_guessed_turns
                return num_chars + len(more or "") + TURN_CHARS * num_turns
        return num_chars

    def apart(self) -> Preparation:
        """The same on a copy of the transcript, for another thread."""
        return Preparation(
            self.context,
            self.namespace,
            self.transcript.copy(),
            tuple(self.pending),
            tuple(self.asked),
            self.op,
        )

    def run(self) -> Prepared:
        """Changes the transcript. Raises InvalidRequest for the text before the op."""
        self._append_text()
        try:
            return self._prepare_op()
        except InvalidRequest as error:  # the text stays: a branch may go on behind it
            return Prepared(self.transcript, failure=error)

    def _prepare_op(self) -> Prepared:
        transcript, op = self.transcript, self.op
        match op:
            case ir.Tokens():
                return Prepared(transcript, self._append_tokens(op))
            case ir.RoleBegin():
                return Prepared(transcript, transcript.begin_role(op.role, op.fields))
            case ir.RoleEnd():
                if op.fields is not None:
                    return Prepared(transcript, transcript.end_role_as(op.fields))
                return Prepared(transcript, transcript.end_role())
            case ir.Tools():
                return Prepared(transcript, transcript.use_tools(op.tools))
            case ir.Chat():
                return self._begin_with_chat(op)
            case ir.Image():
                return self._append_image(op)
            case ir.Gen():  # what was before is final now
                change = transcript.settle()
                return Prepared(transcript, change, prediction=self._predicted(op.params))
            case ir.Embed():
                change = transcript.settle()
                return Prepared(transcript, change, embedded=self._embedded(op))
            case ir.Select():
                return Prepared(transcript, transcript.settle(), self._choices(op))
        return Prepared(transcript)

    def _append_text(self) -> None:
        """A text segment is all text between two ops that are none, however it was cut."""
        if not self.pending:
            return
        text = "".join(op.text for op in self.pending)
        tokenizer, most = self.context.tokenizer, self.context.max_prompt_tokens
        if isinstance(self.op, ir.Embed):
            most = sys.maxsize  # with the model's marks; the engine counts them, too
        if not isinstance(self.op, ir.Embed) or self.op.cut_to is None:
            self._require_fits(len(text), "text")
        if self.context.encoder is not None and self.context.encoder.is_lowered:
            text = text.lower()
        if self.transcript.open_role is None or not self.transcript.ids:
            ids = tokenizer.encode_array(text, most)
        else:  # it goes on what the template has written before
            ids = tokenizer.encode_inner(text, most)
        asked = self._unmeasured()
        counts = self._tokens_before(asked, text, len(ids))
        start = len(self.transcript.ids)
        self.transcript.append_ids(ids, text)
        start = max(start, len(self.transcript.ids) - len(ids))  # behind a BOS, where it has one
        for hint, num_before in zip(asked, counts, strict=True):
            hint.num_tokens = start + num_before

    def _require_fits(self, num_chars: int, field: str) -> None:
        if num_chars > self.context.max_text_chars:
            longest = self.context.tokenizer.longest_token_chars
            max_model_len = self.context.max_text_chars // longest
            size = f"at least {-(-num_chars // longest)} tokens"
            raise PromptTooLong.than(size, max_model_len - 1, max_model_len, field)

    def _unmeasured(self) -> list[AskedHint]:
        return [hint for hint in self.asked if hint.num_tokens is None]

    def _tokens_before(
        self, asked: Sequence[AskedHint], text: str, num_tokens: int
    ) -> Sequence[int]:
        """How many of the text's tokens are before each of the hints."""
        places = list(accumulate((len(op.text) for op in self.pending), initial=0))
        ends = [places[hint.num_texts] for hint in asked]
        if all(end == len(text) for end in ends):
            return [num_tokens] * len(ends)
        return self.context.tokenizer.tokens_before(text, ends)  # which encodes it once more

    def _begin_with_chat(self, op: ir.Chat) -> Prepared:
        self._require_fits(sum(len(message.content) for message in op.messages), "messages")
        find_turn = partial(self.context.assistant_turns.find, self.namespace)
        messages, images = self._with_images(op.messages)
        change = self.transcript.begin_with_chat(messages, find_turn)
        return Prepared(self.transcript, change, images=images)

    def _with_images(
        self, messages: Sequence[Message]
    ) -> tuple[Sequence[Message], tuple[Image, ...]]:
        """The messages with what stands for their images in place of URLs."""
        num_images = sum(len(message.images) for message in messages)
        if not num_images:
            return messages, ()
        registry, images = self._registry(), list[Image]()
        most = registry.limits.max_images
        if num_images > most:
            allowed = f"at most {most} in a prompt (max_images)"
            raise InvalidRequest.of("image", f"{num_images} images", allowed)
        placed = []
        for message in messages:
            found = [(at, registry.image(url, self.namespace)) for at, url in message.images]
            images += [image for _, image in found]
            slots = tuple((at, self._place(image)) for at, image in found)
            placed.append(message._replace(images=slots))
        return placed, tuple(images)

    def _append_image(self, op: ir.Image) -> Prepared:
        image = self._registry().image(op.url, self.namespace)
        template, transcript = self.context.template, self.transcript
        text = template.image_text(image.token_id, image.num_tokens)
        transcript.append_ids(
            template.encode(text, goes_on=bool(transcript.ids)), template.shown(text)
        )
        return Prepared(transcript, images=(image,))

    def _place(self, image: Image) -> str:
        return self.context.template.place(image.token_id, image.num_tokens)

    def _registry(self) -> ImageRegistry:
        if self.context.images is None:
            raise InvalidProgram("image: the model reads only text", "image")
        return self.context.images

    def _append_tokens(self, op: ir.Tokens) -> TextChange:
        largest, vocab_size = max(op.token_ids, default=0), self.context.vocab_size
        if largest >= vocab_size:
            raise InvalidProgram.of("token_ids", largest, f"an integer in [0, {vocab_size - 1}]")
        text = self.context.tokenizer.decode(op.token_ids)
        self.transcript.append_ids(op.token_ids, text, has_bos=True)
        return TextChange(text)

    def _predicted(self, params: ir.GenParams) -> array[int]:
        text = params.prediction
        if not text:
            return array("i")
        most = min(self.context.max_text_chars, MAX_TEXT_CHARS)
        if len(text) > most:
            allowed = f"at most {most} characters: no longer text fits the model's context"
            raise InvalidRequest.of("prediction", f"{len(text)} characters", allowed)
        return self.context.tokenizer.encode_output(text)

    def _embedded(self, op: ir.Embed) -> EmbeddedText:
        """What the op sees of the branch, and of its second text."""
        tokenizer, ids = self.context.tokenizer, self.transcript.ids
        most = op.cut_to
        if most is not None:
            most = min(most, self.context.max_prompt_tokens)
        if op.pair is None:
            return embedded_text(tokenizer, ids, is_text=op.is_text, cut_to=most)
        if not tokenizer.pair_marks[0]:
            raise InvalidRequest("pair: this model's tokenizer sees no pairs of texts", "pair")
        is_lowered = self.context.encoder is not None and self.context.encoder.is_lowered
        pair = op.pair.lower() if is_lowered else op.pair
        if most is None:
            self._require_fits(len(pair), "pair")
        return embedded_pair(tokenizer, ids, tokenizer.encode_array(pair), most)

    def _choices(self, op: ir.Select) -> list[tuple[str, list[int]]]:
        tokenizer = self.context.tokenizer
        if op.choice_ids:
            largest, vocab_size = max(map(max, op.choice_ids)), self.context.vocab_size
            if op.choices or largest >= vocab_size:
                allowed = f"ids below {vocab_size}, without texts beside them"
                raise InvalidProgram.of("choice_ids", largest, allowed)
            return [(tokenizer.decode(ids), list(ids)) for ids in op.choice_ids]
        if not op.choices:
            raise InvalidProgram.of("choices", [], "at least one text")
        choice_ids = [tokenizer.encode(choice) for choice in op.choices]
        if not all(choice_ids):
            silent = op.choices[choice_ids.index([])]
            raise InvalidProgram.of("choices", silent, "texts that have at least one token")
        return list(zip(op.choices, choice_ids, strict=True))
