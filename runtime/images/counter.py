"""How many tokens images become, for whoever counts a prompt without computing it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ..checkpoint.config.vision_config import VisionConfig
from .pixels import upright_size
from .processor_config import ProcessorConfig
from .registry import bytes_of
from .sizes import resized


@dataclass(frozen=True, slots=True)
class ImageCounter:
    """Of a checkpoint that reads images."""

    token_id: int  # the template's stand-in for one of an image's tokens
    processor: ProcessorConfig

    @classmethod
    def of(cls, folder: Path, vision: VisionConfig) -> ImageCounter:
        """Raises ModelLoadError."""
        return cls(vision.image_token_id, ProcessorConfig.from_folder(folder, vision))

    def num_tokens(self, url: str) -> int:
        """Of the image of a data URL, of which only the head is read: the rest may be damaged.
        Raises InvalidRequest."""
        height, width = resized(*upright_size(bytes_of(url)), self.processor)
        return height * width // self.processor.factor**2
