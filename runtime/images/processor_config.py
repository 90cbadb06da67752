"""How a checkpoint's image processor prepares images, read from preprocessor_config.json."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ..checkpoint.config.fields import Fields, is_finite
from ..checkpoint.config.vision_config import VisionConfig

FILE = "preprocessor_config.json"
_NESTED_FILE = "processor_config.json"  # where newer checkpoints have it
_MAX_PIXELS = 1 << 28  # of a resized image, far above any model's
_MEAN = (0.48145466, 0.4578275, 0.40821073)  # CLIP's, Qwen2-VL's default
_STD = (0.26862954, 0.26130258, 0.27577711)
_LEAST, _MOST = 56 * 56, 28 * 28 * 1280  # pixels; Qwen2-VL's defaults
_BICUBIC = 3


@dataclass(frozen=True, slots=True)
class ProcessorConfig:
    """Images are resized to multiples of `patch_size * merge_size`, of `min_pixels` to `max_pixels`
    in all, with their shape kept; then scaled to [0, 1] and normed by channel."""

    patch_size: int
    temporal_patch_size: int
    merge_size: int
    min_pixels: int
    max_pixels: int
    mean: tuple[float, ...]
    std: tuple[float, ...]

    @property
    def factor(self) -> int:
        """Pixels of a token, as high as wide."""
        return self.patch_size * self.merge_size

    @classmethod
    def from_folder(cls, folder: Path, vision: VisionConfig) -> ProcessorConfig:
        """Raises ModelLoadError for a file that says what is not implemented, or what does not fit
        the vision tower."""
        config = _read(folder).with_defaults({"size": {}})
        for flag in ("do_resize", "do_rescale", "do_normalize", "do_convert_rgb"):
            config.restrict(flag, True)
        config.restrict("resample", _BICUBIC)
        config.restrict("rescale_factor", 1 / 255)
        for name, own in (
            ("patch_size", vision.patch_size),
            ("temporal_patch_size", vision.temporal_patch_size),
            ("merge_size", vision.merge_size),
        ):
            config.restrict(name, own)
        size = config.nested("size") or Fields(config.file, {})
        least = config.integer(
            "min_pixels", size.integer("shortest_edge", _LEAST), most=_MAX_PIXELS
        )
        most = config.integer("max_pixels", size.integer("longest_edge", _MOST), most=_MAX_PIXELS)
        if most < max(least, (vision.patch_size * vision.merge_size) ** 2):
            raise config.fail("max_pixels", "at least min_pixels, and a token's pixels")
        return cls(
            vision.patch_size,
            vision.temporal_patch_size,
            vision.merge_size,
            least,
            most,
            _channels(config, "image_mean", _MEAN),
            _channels(config, "image_std", _STD),
        )


def _read(folder: Path) -> Fields:
    if (folder / FILE).exists():
        return Fields.read(folder / FILE)
    if (folder / _NESTED_FILE).exists():
        nested = Fields.read(folder / _NESTED_FILE).nested("image_processor")
        if nested is not None:
            return nested
    return Fields(folder / FILE, {})


def _channels(config: Fields, field: str, default: tuple[float, ...]) -> tuple[float, ...]:
    value = config.get(field)
    if value is None:
        return default
    is_list = isinstance(value, list) and len(value) == 3 and all(map(is_finite, value))
    if not is_list or (field == "image_std" and not all(value)):
        raise config.fail(field, "a number for each of three channels")
    return tuple(float(each) for each in value)
