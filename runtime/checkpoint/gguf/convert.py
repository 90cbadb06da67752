"""Converts a GGUF model to a folder: writes its metadata as the files of a checkpoint, once.

    ~/.cache/stemma/gguf/<name>-<key>/    config.json  generation_config.json  tokenizer.json
                                          tokenizer_config.json  model.gguf -> the file

Each part of a split model has its link, model-00001-of-00003.gguf and so on. The key depends on the
files' sizes, times and headers, and on `_LAYOUT`, so that another file, or a version of Stemma that
writes different contents, uses another folder. Torch-free.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import shutil
from contextlib import closing
from hashlib import blake2b
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as HfTokenizer

from ....errors import ModelLoadError
from .config import generation_config, model_config
from .hyperparameters import Hyperparameters
from .shards import GgufModel, model_stem, shard_name, shard_names
from .tokenizer import tokenizer_files
from .vocabulary import Vocabulary

_NAME = "model"
_LAYOUT = 2  # version of the written contents; increase it by hand with every change


def convert_gguf(file: Path, root: Path | None = None) -> Path:
    """The folder of a GGUF file or of any part of one, made on first use, in `root` or else in the
    cache.

    Raises:
        ModelLoadError: a malformed file, an unsupported model or tokenizer, or a folder that
            cannot be written.
    """
    with closing(GgufModel(file)) as opened:
        folder = (root or _cache_root()) / _folder_name(opened)
        try:
            if not (folder / "config.json").exists():
                _write(opened, folder)
            _link(opened, folder)
        except OSError as error:
            raise ModelLoadError(
                f"{file}: its folder {folder} cannot be written: {error}"
            ) from None
    return folder


def weights_files(folder: Path) -> list[Path]:
    """The GGUF files in a folder made by `convert_gguf`, the first part first; none in any other
    folder."""
    single = folder / f"{_NAME}.gguf"
    if single.exists():
        return [single]
    for first in folder.glob(f"{_NAME}-00001-of-*.gguf"):
        if first.exists():
            return [folder / name for name in shard_names(first.name)]
    return []


def only_model_of(folder: Path) -> Path | None:
    """The GGUF file of a folder whose weights are in GGUF, whatever other files describe them. None
    if there are safetensors or no GGUF file, or if `convert_gguf` made the folder.

    Raises ModelLoadError if there are several models to choose from.
    """
    files = sorted(folder.glob("*.gguf"))
    is_unfolded = (folder / "config.json").exists() and weights_files(folder)
    if not files or is_unfolded or any(folder.glob("*.safetensors")):
        return None
    firsts = sorted({shard_names(file.name)[0] for file in files})
    if len(firsts) > 1:
        shown = ", ".join(firsts[:5]) + (", ..." if len(firsts) > 5 else "")
        raise ModelLoadError(
            f"{folder} holds several GGUF files: {shown}; give the one that is meant, as in "
            f"{folder / firsts[0]}"
        )
    return files[0]


def _cache_root() -> Path:
    base = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(base) if base else Path.home() / ".cache") / "stemma" / "gguf"


def _folder_name(model: GgufModel) -> str:
    state = blake2b(digest_size=8)
    for file in model.files:
        about = file.path.stat()
        state.update(f"{_LAYOUT} {about.st_size} {about.st_mtime_ns} {file.header_digest}".encode())
    name = re.sub(r"[^\w.-]", "-", model_stem(model.path.name))[:80]
    return f"{name}-{state.hexdigest()}"


def _write(file: GgufModel, folder: Path) -> None:
    """Written beside the folder, then renamed to it: concurrent readers find it complete."""
    model, vocabulary = Hyperparameters(file), Vocabulary(file)
    config = model_config(model)
    tokenizer = tokenizer_files(vocabulary)
    _require_loadable(file, tokenizer.tokenizer)
    contents = {
        "config.json": config,
        "generation_config.json": generation_config(model, tokenizer.stop_ids),
        "tokenizer.json": tokenizer.tokenizer,
        "tokenizer_config.json": tokenizer.config,
    }
    draft = folder.with_name(f".{folder.name}-{secrets.token_hex(4)}")
    draft.mkdir(parents=True)
    try:
        for name, values in contents.items():
            (draft / name).write_text(_as_json(name, values), encoding="utf-8")
        try:
            draft.rename(folder)
        except OSError:
            if not (folder / "config.json").exists():
                raise
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def _as_json(name: str, values: dict[str, Any]) -> str:
    indent = None if name == "tokenizer.json" else 2
    return json.dumps(values, indent=indent, ensure_ascii=False)


def _link(model: GgufModel, folder: Path) -> None:
    """Link the files anew: they may have moved, or be copies of the linked ones."""
    count = len(model.files)
    for number, file in enumerate(model.files, 1):
        name = f"{_NAME}.gguf" if count == 1 else shard_name(_NAME, number, count)
        link, target = folder / name, file.path.resolve()
        if link.is_symlink() and link.readlink() == target:
            continue
        draft = folder / f".{name}-{secrets.token_hex(4)}"
        draft.symlink_to(target)
        draft.replace(link)


def _require_loadable(file: GgufModel, tokenizer: dict[str, Any]) -> None:
    try:
        HfTokenizer.from_str(json.dumps(tokenizer))
    except Exception as error:  # the library raises bare Exception
        raise ModelLoadError(f"{file.path}: its tokenizer cannot be used: {error}") from error
