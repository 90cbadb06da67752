"""The size to which an image is resized before it is cut into patches (Qwen2-VL's smart resize)."""

from __future__ import annotations

import math

from ...errors import InvalidRequest
from .processor_config import ProcessorConfig

MAX_ASPECT = 200  # of the longer side to the shorter one, as in Qwen2-VL


def resized(height: int, width: int, config: ProcessorConfig) -> tuple[int, int]:
    """Height and width in pixels. Raises InvalidRequest for an image that is too long."""
    if max(height, width) > MAX_ASPECT * min(height, width):
        allowed = f"at most {MAX_ASPECT} times as long as wide"
        raise InvalidRequest.of("image", f"{width} x {height} pixels", allowed)
    factor = config.factor
    rows, columns = round(height / factor) * factor, round(width / factor) * factor
    if rows * columns > config.max_pixels:
        shrink = math.sqrt(height * width / config.max_pixels)
        rows = max(factor, math.floor(height / shrink / factor) * factor)
        columns = max(factor, math.floor(width / shrink / factor) * factor)
    elif rows * columns < config.min_pixels:
        stretch = math.sqrt(config.min_pixels / (height * width))
        rows = math.ceil(height * stretch / factor) * factor
        columns = math.ceil(width * stretch / factor) * factor
    return rows, columns
