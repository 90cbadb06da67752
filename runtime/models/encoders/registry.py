"""Encoder architectures by name. Torch-free: the planner and the host half read configs too."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from ....errors import ModelLoadError
from ...checkpoint.config.encoder_config import EncoderConfig
from ...checkpoint.config.fields import Fields
from .bert import read_bert, read_roberta
from .distilbert import read_distilbert
from .jina import read_jina_v3
from .modernbert import read_modernbert
from .mpnet import read_mpnet

Reader = Callable[[Fields, str], EncoderConfig]
"""(config.json, the architecture's name) -> the encoder; raises ModelLoadError."""

_TASKS = ("Model", "ForMaskedLM", "ForSequenceClassification")
_FAMILIES: dict[str, Reader] = {
    "Bert": read_bert,
    "Roberta": read_roberta,
    "XLMRoberta": read_roberta,
    "Camembert": read_roberta,
    "ModernBert": read_modernbert,
    "JinaEmbeddingsV3": read_jina_v3,
    "DistilBert": read_distilbert,
    "MPNet": read_mpnet,
}
ENCODERS: dict[str, Reader] = {
    f"{family}{task}": read for family, read in _FAMILIES.items() for task in _TASKS
}
# Encoders that other servers know, of which transformers has no code or which are not here yet.
_ABROAD = {
    "JinaBertModel": "jina-embeddings-v2 needs the code that comes with it",
    "JinaBertForMaskedLM": "jina-embeddings-v2 needs the code that comes with it",
    "JinaBertForSequenceClassification": "jina-reranker-v1 needs the code that comes with it",
    "JinaForRanking": "jina-reranker-v3 needs the code that comes with it",
    "NewModel": "gte v1.5 needs the code that comes with it",
    "NomicBertModel": "of its layouts, one needs the code that comes with it, none is implemented",
}


def encoder_name(config: Fields) -> str | None:
    """The first architecture that is an encoder's; None: the folder holds another model. Raises
    ModelLoadError for an encoder that cannot be had."""
    names = config.get("architectures")
    for name in names if isinstance(names, list) else ():
        if name in _ABROAD:
            raise ModelLoadError(
                f"{config.file}: architecture {name!r} is not supported: {_ABROAD[name]}, which is "
                f"never run; encoders: {', '.join(sorted(ENCODERS))}"
            )
        if name in ENCODERS:
            return str(name)
    return None


def read_encoder(folder: Path) -> EncoderConfig | None:
    """The folder's encoder; None: it holds a model that generates. Raises ModelLoadError."""
    if not (folder / "config.json").is_file():
        return None  # whoever reads it as a decoder says why
    config = Fields.read(folder / "config.json")
    name = encoder_name(config)
    if name is None:
        return None
    _require_own_layout(config, name)
    return ENCODERS[name](config, name)


def _require_own_layout(config: Fields, name: str) -> None:
    """Raises ModelLoadError for a checkpoint that has the name of a known architecture, and code
    that computes another one, as jina-embeddings-v3 and jina-reranker-v2 of 2024 do."""
    code = config.get("auto_map")
    if code and (config.get("use_flash_attn") is not None or config.get("lora_adaptations")):
        raise ModelLoadError(
            f"{config.file}: {name} with code of its own (auto_map: Jina's layout of 2024), which "
            "is never run; of jina-embeddings-v3 there is jina-embeddings-v3-hf, in transformers' "
            "own layout"
        )
