"""What rank 0 tells the other ranks, which decide nothing: frames on their standard input.

The first frame is a `Start`; each one after it names a method of `ModelRunner`, with its arguments.
Ranks carry orders out one after the other. They answer through the communicator alone.
"""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...piped_process import framed
from ..checkpoint.config.model_config import ModelConfig
from .meeting import Meeting

Order = tuple[Any, ...]
"""A method's name, then its arguments."""


@dataclass(frozen=True, slots=True)
class Start:
    """What a rank is told first."""

    rank: int
    meeting: Meeting
    model_folder: Path
    model_config: ModelConfig
    options: Mapping[str, Any]  # of `ModelRunner`


def frame(message: Start | Order) -> bytes:
    """As it is written to a rank, which is a process of this package: pickled."""
    return framed(pickle.dumps(message, pickle.HIGHEST_PROTOCOL))


def message_of(payload: bytes) -> Any:
    """What `frame` was given."""
    return pickle.loads(payload)
