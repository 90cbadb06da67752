"""The tokens of what is embedded or scored: a text or a pair, with the model's marks around them,
cut to a length where that is asked for."""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ...errors import InvalidProgram, InvalidRequest
from ..checkpoint.config.embedding_config import EmbeddingConfig
from ..checkpoint.config.score_fields import ScoreLabels
from ..tokenizer.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class Encoder:
    """A model that makes vectors or scores of texts, and generates none."""

    architecture: str
    has_scores: bool = False  # it scores texts and pairs; else it makes vectors of texts
    is_causal: bool = False  # a decoder without an output projection, which computes in chunks
    score_head: npt.NDArray[np.float64] | None = None  # [labels, size] of such a one
    is_lowered: bool = False  # texts are lowered first

    def require_generation(self) -> None:
        """Raises InvalidRequest: there is none."""
        does = "scores texts and pairs (/rerank, /score, /classify)"
        does = does if self.has_scores else "embeds texts (/v1/embeddings, /rerank, /score)"
        raise InvalidRequest(f"model: {self.architecture} {does} and generates nothing", "model")


@dataclass(frozen=True, slots=True)
class EmbeddedText:
    """`num_first`: of a pair whose tokens have types, those of its first text, marks included."""

    ids: array[int]
    num_first: int | None = None


def embedded_text(
    tokenizer: Tokenizer, ids: array[int], *, is_text: bool, cut_to: int | None
) -> EmbeddedText:
    """Of a branch's tokens; `is_text`: the model's marks follow. Raises InvalidProgram for nothing
    at all, InvalidRequest for a cut that leaves nothing of the text."""
    suffix = array("i", tokenizer.suffix_ids if is_text else ())
    if cut_to is not None and len(ids) + len(suffix) > cut_to:
        ids = ids[: _room(cut_to, len(suffix), len(tokenizer.bos_ids) if is_text else 0)]
    if not ids and not suffix:
        raise InvalidProgram("nothing to embed: the text is empty")
    return EmbeddedText(ids + suffix)


def embedded_pair(
    tokenizer: Tokenizer, ids: array[int], second: array[int], cut_to: int | None
) -> EmbeddedText:
    """`ids`: of the first text, behind the model's first mark. Raises as `embedded_text`."""
    between, suffix = (array("i", marks) for marks in tokenizer.pair_marks)
    begin = len(tokenizer.bos_ids)
    num_marks = begin + len(between) + len(suffix)
    if cut_to is not None and len(ids) - begin + len(second) + num_marks > cut_to:
        room = _room(cut_to, num_marks - begin, begin) - begin
        first_room, second_room = _shares(len(ids) - begin, len(second), room)
        ids, second = ids[: begin + first_room], second[:second_room]
    num_first = len(ids) + 1 if tokenizer.has_pair_types else None
    return EmbeddedText(ids + between + second + suffix, num_first)


def _room(cut_to: int, num_suffix: int, num_before: int) -> int:
    """For a text with the mark before it."""
    if cut_to <= num_suffix + num_before:
        allowed = f"above {num_suffix + num_before}, the model's own marks"
        raise InvalidRequest.of("truncate_prompt_tokens", cut_to, allowed)
    return cut_to - num_suffix


def _shares(num_first: int, num_second: int, room: int) -> tuple[int, int]:
    """The longer text is cut first, as in Hugging Face's tokenizers (`longest_first`)."""
    short, long = sorted((num_first, num_second))
    if short <= room // 2:
        long = room - short
    else:
        short, long = room // 2, room - room // 2
    return (short, long) if num_first <= num_second else (long, short)


def report_of(
    architecture: str,
    embedding: EmbeddingConfig,
    hidden_size: int,
    labels: ScoreLabels | None,
    *,
    generates: bool,
    sees_pairs: bool = False,
) -> dict[str, Any]:
    """What clients are told of vectors and scores."""
    refusal = embedding.refusal
    if labels is not None:
        refusal = f"{architecture} scores texts and pairs (/rerank, /score, /classify)"
    return {
        "embedding": {
            "size": embedding.size(hidden_size),
            "pooling": embedding.pooling,
            "refusal": refusal,
            # An encoder embeds whatever its files say; a model that generates may be asked instead.
            "is_declared": embedding.is_declared or not generates,
            "prompts": dict(embedding.prompts),
            "default_prompt": embedding.default_prompt,
        },
        "scores": None
        if labels is None
        else {
            "labels": list(labels.names),
            "activation": labels.activation,
            "sees_pairs": sees_pairs,
        },
        "generates": generates,
    }
