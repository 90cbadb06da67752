"""Resolves a user's model argument to a folder in Hugging Face layout; other code takes folders.

FOLDER                     as it is; without safetensors, the one GGUF model in it
FILE.gguf                  converted once to a folder of the cache (gguf/convert.py); of a model
                           in parts any part
NAME/MODEL[@REVISION]      a model of the Hugging Face hub (see hub)
NAME/MODEL/FILE.gguf       a GGUF file of it
stemma-tiny                the embedded model, if no folder here has this name
stemma-tiny-draft          a draft that was trained for it, likewise
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from ...errors import InvalidRequest, ModelLoadError
from ...frontend.client.progress import ByteProgress
from .gguf.convert import convert_gguf, only_model_of
from .gguf.reader import copy_header
from .gguf.shards import shard_names
from .hub import fetch_file, fetch_snapshot, read_file
from .model_files import PICKLED_SUFFIXES, why_not_pickled

EMBEDDED_MODEL = Path(__file__).parent / "assets" / "stemma-tiny"
EMBEDDED_DRAFT = EMBEDDED_MODEL.with_name("stemma-tiny-draft")
MTP = "mtp"  # as a draft model's: the layer that the model has for multi-token prediction


_PART = r"[A-Za-z0-9][\w.-]*"
_HUB_ID = re.compile(rf"(?P<repo>{_PART}(/{_PART})?)(@(?P<revision>[\w./-]+))?")
_HUB_FILE = re.compile(
    rf"(?P<repo>{_PART}/{_PART})/(?P<file>[\w./-]+\.gguf)(@(?P<revision>[\w./-]+))?"
)


def locate_model(
    model: str | Path,
    *,
    revision: str | None = None,
    on_progress: ByteProgress | None = None,
    describe_in: Path | None = None,
) -> Path:
    """The model's folder. `revision`: of a model of the hub, a branch, a tag or a commit;
    `on_progress` receives download progress. With `describe_in`, a folder of the caller's, a model
    of the hub is only described, and its weights are not fetched: a copy of a GGUF file's header is
    written to that folder, and the model's folder is in it, too.

    Raises:
        InvalidRequest: a revision where none applies, or two revisions.
        ModelLoadError: a model that cannot be found, fetched or loaded, with the reason.
    """
    text = str(model)
    for embedded in (EMBEDDED_MODEL, EMBEDDED_DRAFT):
        if text == embedded.name and not os.path.exists(text):
            text = str(embedded)
    if os.path.exists(os.path.expanduser(text)):  # False, not an error, if a name is too long
        path = Path(text).expanduser()
        if revision is not None:
            raise InvalidRequest.of("revision", revision, f"none with {text}, which is no hub id")
        return _checkpoint_of(path) if path.is_dir() else _folder_of_file(path)
    match = _HUB_FILE.fullmatch(text) or (None if _is_path(text) else _HUB_ID.fullmatch(text))
    if match is None:
        raise ModelLoadError(
            f"model {text} does not exist; give a folder, a .gguf file or a hub id, as in "
            "NAME/MODEL or NAME/MODEL@REVISION"
        )
    asked = match["revision"]
    if asked and revision not in (None, asked):
        raise InvalidRequest.of("revision", revision, f"{asked!r}, as in {text}, or none")
    file = match.groupdict().get("file")
    if file is None:
        return fetch_snapshot(
            match["repo"], asked or revision, on_progress, has_weights=describe_in is None
        )
    names = shard_names(file)
    if describe_in is not None:
        return _described(match["repo"], names, asked or revision, describe_in)
    files = [fetch_file(match["repo"], name, asked or revision, on_progress) for name in names]
    return convert_gguf(files[0])


def _described(repo: str, names: Sequence[str], revision: str | None, root: Path) -> Path:
    """The folder of GGUF files of the hub, made from their headers alone."""
    copies = [root / Path(name).name for name in names]
    for name, copy in zip(names, copies, strict=True):
        read_file(repo, name, partial(copy_header, name=f"{repo}/{name}", copy=copy), revision)
    return convert_gguf(copies[0], root)


def _is_path(text: str) -> bool:
    """Whether a nonexistent name was meant as a path."""
    return text.startswith((".", "/", "~")) or text.endswith((".gguf", *PICKLED_SUFFIXES))


def _checkpoint_of(folder: Path) -> Path:
    """The folder itself, unless all its weights are in GGUF."""
    file = only_model_of(folder)
    return folder if file is None else convert_gguf(file)


def _folder_of_file(file: Path) -> Path:
    if file.suffix == ".gguf":
        return convert_gguf(file)
    if file.suffix in PICKLED_SUFFIXES:
        raise ModelLoadError(why_not_pickled(str(file.parent), [file.name]))
    if file.suffix == ".safetensors":
        raise ModelLoadError(f"{file} is one file of a model: give its folder, {file.parent}")
    raise ModelLoadError(f"{file} is neither a folder nor a .gguf file")
