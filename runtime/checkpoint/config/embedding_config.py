"""How to compute a checkpoint's embeddings, from its sentence-transformers files, if it has them:
modules.json, the configurations of the modules that it names, the prompts to put before texts, and
how long a text may be. Torch-free.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, get_args

from ....frontend.protocol.ir import Pooling

_PREFIX = "pooling_mode_"
_MODES: dict[str, Pooling] = {
    "cls_token": "cls",
    "mean_tokens": "mean",
    "lasttoken": "last",
    "max_tokens": "max",
    "mean_sqrt_len_tokens": "mean_sqrt",
    "weightedmean_tokens": "weighted_mean",
}
ENCODER_POOLINGS: tuple[Pooling, ...] = get_args(Pooling)
# Of a model that generates: it computes a text in chunks, of which only sums are kept.
DECODER_POOLINGS: tuple[Pooling, ...] = ("last", "mean")
_MODULES = ("Transformer", "Pooling", "Normalize")
_DENSE = "Dense"
_ACTIVATIONS = {"Identity": False, "Tanh": True}
MAX_PROMPTS = 1024
MAX_PROMPT_CHARS = 64 * 1024


@dataclass(frozen=True, slots=True)
class DenseModule:
    """A layer behind the pooling; its weights are in `path` below the checkpoint's folder."""

    path: str
    in_features: int
    out_features: int
    has_bias: bool = True
    has_tanh: bool = True


@dataclass(frozen=True, slots=True)
class EmbeddingConfig:
    """A model that generates and has no such files pools its last token: the only one that attends
    to the whole text. An encoder without them pools the mean, as sentence-transformers does."""

    pooling: Pooling = "last"
    refusal: str | None = None  # why this runtime cannot make this model's embeddings
    is_declared: bool = False  # there are such files: the model was trained for embeddings
    dense: tuple[DenseModule, ...] = ()
    prompts: Mapping[str, str] = field(default_factory=dict)  # what to put before a text, by name
    default_prompt: str | None = None  # the name of the one that a text has unless told otherwise
    max_tokens: int | None = None  # of a text, as in training; None: as many as the model can take
    is_lowered: bool = False  # texts are lowered before they are tokenized

    @classmethod
    def from_folder(cls, folder: Path, *, is_encoder: bool = False) -> EmbeddingConfig:
        """Read a checkpoint folder; an unreadable or unsupported file only disables embeddings."""
        plain = cls("mean" if is_encoder else "last")
        try:
            found = replace(plain, **_of_transformer(folder))
            if not (folder / "modules.json").is_file():
                return found
            modules = _modules(folder)
            if not any(kind == "Pooling" for kind, _ in modules):
                return found  # a cross-encoder's: they say nothing of embeddings
            poolings = ENCODER_POOLINGS if is_encoder else DECODER_POOLINGS
            return replace(
                found,
                is_declared=True,
                pooling=_pooling(folder, modules, poolings),
                dense=_dense(folder, modules) if is_encoder else (),
                **_prompts(folder),
            )
        except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            refusal = f"its sentence-transformers files: {error}"
            return replace(plain, refusal=refusal, is_declared=True)

    def size(self, hidden_size: int) -> int:
        """The length of its vectors."""
        return self.dense[-1].out_features if self.dense else hidden_size


def _read(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))


def _modules(folder: Path) -> list[tuple[str, str]]:
    """The kind and the folder of each, in order."""
    return [
        (str(module["type"]).rpartition(".")[2], str(module["path"]))
        for module in _read(folder / "modules.json")
    ]


def _pooling(
    folder: Path, modules: Sequence[tuple[str, str]], poolings: Sequence[Pooling]
) -> Pooling:
    """Raises ValueError for what is not supported, and other errors for malformed files."""
    can_have_dense = len(poolings) > len(DECODER_POOLINGS)
    known = (*_MODULES, _DENSE) if can_have_dense else _MODULES
    unknown = sorted({kind for kind, _ in modules}.difference(known))
    if unknown:
        raise ValueError(f"modules {unknown} are not supported, only {list(known)}")
    config: Mapping[str, Any] = _read(folder / _inside(dict(modules)["Pooling"]) / "config.json")
    modes = [name.removeprefix(_PREFIX) for name, is_on in config.items()
             if name.startswith(_PREFIX) and is_on]  # fmt: skip
    allowed = [mode for mode, pooling in _MODES.items() if pooling in poolings]
    named = config.get("pooling_mode")  # sentence-transformers' newer form
    for pooling in () if modes else poolings:
        if pooling == named:
            return pooling
    if len(modes) != 1 or modes[0] not in allowed:
        raise ValueError(f"pooling {modes} is not supported, only one of {allowed}")
    if config.get("include_prompt") is False and _prompts(folder)["prompts"]:
        raise ValueError("include_prompt=false is not supported, only true: prompts are pooled")
    return _MODES[modes[0]]


def _dense(folder: Path, modules: Sequence[tuple[str, str]]) -> tuple[DenseModule, ...]:
    paths = [_inside(path) for kind, path in modules if kind == _DENSE]
    return tuple([_dense_module(folder, path) for path in paths])


def _dense_module(folder: Path, path: str) -> DenseModule:
    config = _read(folder / path / "config.json")
    activation = str(config.get("activation_function", "Tanh")).rpartition(".")[2]
    if activation not in _ACTIVATIONS:
        raise ValueError(f"activation_function {activation} is not supported: {[*_ACTIVATIONS]}")
    sizes = int(config["in_features"]), int(config["out_features"])
    return DenseModule(path, *sizes, bool(config.get("bias", True)), _ACTIVATIONS[activation])


def _inside(path: str) -> str:
    """A folder within the checkpoint's. Raises ValueError for another one."""
    if Path(path).is_absolute() or ".." in Path(path).parts:
        raise ValueError(f"a module's path {path!r} is not within the checkpoint")
    return path


def _of_transformer(folder: Path) -> dict[str, Any]:
    """What sentence_bert_config.json says of texts."""
    path = folder / "sentence_bert_config.json"
    if not path.is_file():
        return {}
    config = _read(path)
    longest = config.get("max_seq_length")
    if longest is not None and not (isinstance(longest, int) and longest >= 2):
        raise ValueError(f"max_seq_length {longest!r}: expected an integer >= 2")
    return {"max_tokens": longest, "is_lowered": config.get("do_lower_case") is True}


def _prompts(folder: Path) -> dict[str, Any]:
    """What config_sentence_transformers.json has to put before texts."""
    path = folder / "config_sentence_transformers.json"
    config = _read(path) if path.is_file() else {}
    prompts = config.get("prompts") or {}
    are_texts = all(isinstance(text, str) and len(text) <= MAX_PROMPT_CHARS
                    for text in prompts.values())  # fmt: skip
    if len(prompts) > MAX_PROMPTS or not are_texts:
        raise ValueError(f"prompts: at most {MAX_PROMPTS} texts of {MAX_PROMPT_CHARS} characters")
    default = config.get("default_prompt_name")
    if default is not None and default not in prompts:
        raise ValueError(f"default_prompt_name {default!r}: there is no such prompt")
    return {"prompts": dict(prompts), "default_prompt": default}
