"""A checkpoint folder's config.json and generation_config.json, read and checked.

Torch-free, so that the host half (tokenizer, scheduler, planning) can read them too. Every problem
raises a `ModelLoadError` that names the file, the field, what was expected and what was found.
"""

from __future__ import annotations

from dataclasses import fields, replace
from pathlib import Path

from ...errors import ModelLoadError
from ..checkpoint.config.fields import Fields, is_finite
from ..checkpoint.config.model_config import ModelConfig
from .families.registry import read_family


def read_model_config(path: str | Path) -> ModelConfig:
    """Read the folder's config.json and, where present, generation_config.json.

    Raises:
        ModelLoadError: a missing or malformed file or field, or an unsupported model.
    """
    folder = Path(path)
    if not folder.is_dir():
        raise ModelLoadError(f"model folder {folder} does not exist or is not a folder")
    config = Fields.read(folder / "config.json")
    generation_file = folder / "generation_config.json"
    generation = Fields.read(generation_file) if generation_file.exists() else None
    return _parse(config, generation or Fields(generation_file, {}))


def read_head_config(folder: Path) -> ModelConfig:
    """The layer of an EAGLE-3 head, which is Llama's; speculators have its config within their own.

    Raises:
        ModelLoadError: see `read_model_config`.
    """
    config = Fields.read(folder / "config.json")
    layer = config.nested("transformer_layer_config") or config
    layer.restrict("model_type", "llama")
    layer = Fields(config.file, {**layer.values, "architectures": ["LlamaForCausalLM"]})
    return _parse(layer, Fields(config.file, {}))


def _parse(config: Fields, generation: Fields) -> ModelConfig:
    decoder = read_family(config)
    decoder = replace(
        decoder, eos_token_ids=generation.token_ids("eos_token_id") or decoder.eos_token_ids
    )
    return ModelConfig(
        **{field.name: getattr(decoder, field.name) for field in fields(decoder)},
        default_temperature=_default_temperature(generation),
        default_top_p=_default_top_p(generation),
        default_top_k=_default_top_k(generation),
        default_min_p=_default_min_p(generation),
        default_repetition_penalty=_default_repetition_penalty(generation),
    )


def _default_temperature(generation: Fields) -> float | None:
    if generation.get("do_sample") is False:
        return 0.0
    value = generation.get("temperature")
    if value is None:
        return None
    if not is_finite(value) or value < 0:
        raise generation.fail("temperature", "a number >= 0")
    return float(value)


def _default_top_p(generation: Fields) -> float | None:
    value = generation.get("top_p")
    if value is None:
        return None
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value <= 1:
        raise generation.fail("top_p", "a number in (0, 1]")
    return float(value)


def _default_top_k(generation: Fields) -> int | None:
    """Hugging Face writes 0 for "off"."""
    value = generation.get("top_k")
    if value is None or value == 0:
        return None
    return generation.integer("top_k")


def _default_min_p(generation: Fields) -> float | None:
    value = generation.get("min_p")
    if value is None:
        return None
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 <= value <= 1:
        raise generation.fail("min_p", "a number in [0, 1]")
    return float(value)


def _default_repetition_penalty(generation: Fields) -> float | None:
    value = generation.get("repetition_penalty")
    if value is None:
        return None
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value <= 10:
        raise generation.fail("repetition_penalty", "a number in (0, 10]")
    return float(value)
